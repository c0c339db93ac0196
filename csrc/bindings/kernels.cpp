// CPU kernels and the step batch they read.
#include "bindings/bindings.h"

#include <algorithm>
#include <array>
#include <bit>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "core/step_batch.h"
#include "platform/cpu/kernels.h"
#include "platform/cpu/sampler.h"
#include "platform/process_owned.h"

namespace asyncengine {
namespace {

using Tables = std::vector<std::vector<int32_t>>;  // one for each row

// A StepBatch made in Python: it owns what a step's own batch points to.
struct OwnedStepBatch : StepBatch {
  Tables owned_tables;
  std::vector<Tables> owned_window_tables;
  std::vector<SamplingState> owned_states;
};

std::shared_ptr<StepBatch> make_step_batch(std::vector<int64_t> input_ids, std::vector<int64_t> positions,
                                           std::vector<int64_t> slot_mapping, std::vector<int32_t> query_start,
                                           std::vector<int32_t> context_len, Tables block_tables, std::vector<int64_t> sample_index,
                                           std::vector<int64_t> sample_position, std::vector<SamplingState> sampling,
                                           std::vector<Tables> window_tables,
                                           const std::vector<std::vector<int64_t>>& window_slots) {
  const size_t tokens = input_ids.size(), rows = context_len.size();
  require(positions.size() == tokens && slot_mapping.size() == tokens,
          "input_ids, positions and slot_mapping must have one entry per token");
  require(query_start.size() == rows + 1 && block_tables.size() == rows,
          "query_start needs one entry more than context_len, block_tables as many");
  require(query_start.front() == 0 && static_cast<size_t>(query_start.back()) == tokens,
          "query_start must lead from 0 to the number of tokens");
  require(sample_position.size() == sampling.size(), "sample_position and sampling must have the same length");
  require(window_tables.size() == window_slots.size(), "window_tables and window_slots must have one entry per group");
  for (size_t group = 0; group < window_tables.size(); ++group) {
    require(window_tables[group].size() == rows && window_slots[group].size() == tokens,
            "a window group needs a table per row and a slot per token");
  }

  auto batch = std::make_shared<OwnedStepBatch>();
  batch->num_tokens = static_cast<int32_t>(tokens);
  batch->num_rows = static_cast<int32_t>(rows);
  batch->num_samples = static_cast<int32_t>(std::max(sample_index.size(), sampling.size()));
  batch->input_ids = std::move(input_ids);
  batch->positions = std::move(positions);
  batch->slot_mapping = std::move(slot_mapping);
  batch->query_start = std::move(query_start);
  batch->context_len = std::move(context_len);
  for (int32_t r = 0; r < batch->num_rows; ++r) batch->slots.push_back(r);
  batch->sample_index = std::move(sample_index);
  batch->owned_tables = std::move(block_tables);
  for (const std::vector<int32_t>& table : batch->owned_tables) batch->block_tables.push_back(table.data());
  batch->window_groups = static_cast<int32_t>(window_tables.size());
  batch->owned_window_tables = std::move(window_tables);
  for (const Tables& tables : batch->owned_window_tables) {
    for (const std::vector<int32_t>& table : tables) batch->window_tables.push_back(table.data());
  }
  for (const std::vector<int64_t>& slots : window_slots) {
    batch->window_slots.insert(batch->window_slots.end(), slots.begin(), slots.end());
  }
  batch->owned_states = std::move(sampling);
  for (size_t i = 0; i < batch->owned_states.size(); ++i) {
    const SamplingState& state = batch->owned_states[i];
    batch->samples.push_back({.position = sample_position[i], .state = &state, .records = {}, .needs = state.needs()});
  }
  return batch;
}

// A view of a member; `owner` keeps the batch alive. Valid until the batch is reused for another step.
template <class T>
auto array_property(std::vector<T> StepBatch::* member, int32_t StepBatch::* count, int extra = 0) {
  return [member, count, extra](const py::object& owner) {
    StepBatch& batch = owner.cast<StepBatch&>();
    return py::array_t<T>({static_cast<py::ssize_t>(batch.*count + extra)}, {static_cast<py::ssize_t>(sizeof(T))},
                          (batch.*member).data(), owner);
  };
}

std::shared_ptr<CpuLinear> make_linear(const std::vector<Address>& weights, const std::vector<int64_t>& rows,
                                       const std::vector<Address>& biases, int64_t k, Dtype dtype, bool panels) {
  require(!weights.empty() && weights.size() == rows.size() && weights.size() == biases.size(),
          "weights, rows and biases must have the same length, at least 1");
  require(k >= 1, "k must be at least 1");
  auto linear = std::make_shared<CpuLinear>();
  linear->k = k;
  linear->dtype = dtype;
  linear->panels = panels;
  for (size_t i = 0; i < weights.size(); ++i) {
    require(rows[i] >= 1, "a weight matrix needs at least one row");
    linear->matrices.push_back({pointer(weights[i]), pointer(biases[i]), rows[i]});
  }
  return linear;
}

// Adds codes to the matrices of a linear: codes[i] = (type, columns of a group, scales, offsets, table).
void set_codes(CpuLinear& linear, const std::vector<std::tuple<CodeType, int64_t, Address, Address, Address>>& codes,
               Address order) {
  require(codes.size() == linear.matrices.size(), "every matrix needs codes");
  require(!linear.panels, "weights in panels have no codes");
  for (size_t i = 0; i < codes.size(); ++i) {
    const auto& [type, group, scales, offsets, table] = codes[i];
    const bool power = group >= 16 && std::has_single_bit(static_cast<uint64_t>(group));
    require(group == linear.k || (power && linear.k % group == 0), "a group must be all of a row, or a power of two from 16");
    require(type != CodeType::kInt4 || (table != 0 && linear.k % 2 == 0), "codes of 4 bits need a table and an even k");
    require(scales != 0, "codes need scales");
    linear.matrices[i].codes = WeightCodes{.type = type,
                                           .group_shift = group == linear.k ? 62 : std::countr_zero(static_cast<uint64_t>(group)),
                                           .rows = linear.matrices[i].rows,
                                           .scales = pointer<const float>(scales),
                                           .offsets = pointer<const float>(offsets),
                                           .table = pointer<const float>(table)};
  }
  linear.order = pointer<const int32_t>(order);
}

// Says that the weights of a linear are rows of blocks, of a type for each matrix.
void set_blocks(CpuLinear& linear, const std::vector<int>& types) {
  require(types.size() == linear.matrices.size(), "every matrix needs a type of blocks");
  require(!linear.panels, "weights in panels have no blocks");
  for (size_t i = 0; i < types.size(); ++i) {
    const BlockForm form = block_form(static_cast<BlockType>(types[i]));
    require(form.columns != 0, "no kernel reads this type of blocks");
    require(linear.k % form.columns == 0, "rows must be whole blocks");
  }
  for (size_t i = 0; i < types.size(); ++i) linear.matrices[i].block_type = static_cast<BlockType>(types[i]);
}

std::shared_ptr<CpuExperts> make_experts(const std::vector<std::shared_ptr<CpuLinear>>& up,
                                         const std::vector<std::shared_ptr<CpuLinear>>& down, ActivationFunction function,
                                         bool gated) {
  require(!up.empty() && up.size() == down.size(), "up and down must have the same length, at least 1");
  auto experts = std::make_shared<CpuExperts>();
  experts->activation = {function, gated};
  for (size_t i = 0; i < up.size(); ++i) {
    require(up[i]->k == up[0]->k && up[i]->total_rows() == up[0]->total_rows() &&
                down[i]->k * (gated ? 2 : 1) == up[0]->total_rows() && down[i]->total_rows() == down[0]->total_rows() &&
                up[i]->dtype == up[0]->dtype && down[i]->dtype == up[0]->dtype,
            "experts must be alike");
    require(!up[i]->in_blocks() && !down[i]->in_blocks(), "experts cannot be in blocks");
    experts->up.push_back(*up[i]);
    experts->down.push_back(*down[i]);
  }
  return experts;
}

CpuMixer make_mixer(bool delta, const std::array<int64_t, 4>& shape, const std::tuple<Address, Address, int64_t>& conv,
                    const std::array<Address, 3>& heads, const std::tuple<Address, float>& norm,
                    const std::array<float, 2>& dt_range, bool norm_before_gate, bool half_states) {
  const auto [num_heads, groups, dim, size] = shape;
  const auto [conv_weight, conv_bias, conv_size] = conv;
  require(num_heads >= 1 && groups >= 1 && dim >= 1 && size >= 1, "sizes of a mixer must be at least 1");
  require(num_heads % groups == 0, "the groups must divide the heads");
  require(conv_size >= 2, "a convolution must be over at least 2 tokens");
  return {.delta = delta,
          .heads = num_heads,
          .groups = groups,
          .dim = dim,
          .size = size,
          .conv_size = conv_size,
          .conv_weight = pointer<const float>(conv_weight),
          .conv_bias = pointer<const float>(conv_bias),
          .decay = pointer<const float>(heads[0]),
          .dt_bias = pointer<const float>(heads[1]),
          .skip = pointer<const float>(heads[2]),
          .norm = pointer<const float>(std::get<0>(norm)),
          .dt_low = dt_range[0],
          .dt_high = dt_range[1],
          .eps = std::get<1>(norm),
          .norm_before_gate = norm_before_gate,
          .half_states = half_states};
}

void bind_step_batch(py::module_& m) {
  py::class_<StepBatch, std::shared_ptr<StepBatch>>(m, "StepBatch")
      .def(py::init(&make_step_batch), py::arg("input_ids"), py::arg("positions"), py::arg("slot_mapping"), py::arg("query_start"),
           py::arg("context_len"), py::arg("block_tables"), py::arg("sample_index"),
           py::arg("sample_position") = std::vector<int64_t>{}, py::arg("sampling") = std::vector<SamplingState>{},
           py::arg("window_tables") = std::vector<Tables>{}, py::arg("window_slots") = std::vector<std::vector<int64_t>>{})
      .def_readonly("num_tokens", &StepBatch::num_tokens)
      .def_readonly("num_rows", &StepBatch::num_rows)
      .def_readonly("num_samples", &StepBatch::num_samples)
      .def_property_readonly("num_groups", &StepBatch::num_groups)
      .def_readonly("num_lanes", &StepBatch::num_host_tokens)
      .def_readonly("needs", &StepBatch::needs)
      .def_property_readonly("input_ids", array_property(&StepBatch::input_ids, &StepBatch::num_tokens))
      .def_property_readonly("positions", array_property(&StepBatch::positions, &StepBatch::num_tokens))
      .def_property_readonly("slot_mapping", array_property(&StepBatch::slot_mapping, &StepBatch::num_tokens))
      .def_property_readonly("query_start", array_property(&StepBatch::query_start, &StepBatch::num_rows, 1))
      .def_property_readonly("context_len", array_property(&StepBatch::context_len, &StepBatch::num_rows))
      .def_property_readonly("slots", array_property(&StepBatch::slots, &StepBatch::num_rows))
      .def_property_readonly("adapters",
                             [](const py::object& owner) {
                               auto& batch = owner.cast<StepBatch&>();
                               return py::array_t<int32_t>(static_cast<py::ssize_t>(batch.adapters.size()), batch.adapters.data(),
                                                           owner);
                             })
      .def_property_readonly("sample_index", array_property(&StepBatch::sample_index, &StepBatch::num_samples))
      .def_property_readonly("means",
                             [](const StepBatch& batch) {
                               py::list rows;
                               for (const MeanRow& mean : batch.means) {
                                 rows.append(py::make_tuple(mean.row, mean.slot, mean.sample));
                               }
                               return rows;
                             })
      .def(
          "only_sampled", [](const StepBatch& batch) { return std::make_shared<StepBatch>(only_sampled(batch)); },
          py::keep_alive<0, 1>())
      .def(
          "block_table",
          [](const py::object& owner, int32_t row, py::ssize_t num_blocks, int32_t group) {
            const StepBatch& batch = owner.cast<const StepBatch&>();
            if (row < 0 || row >= batch.num_rows) throw py::index_error("no such row");
            return py::array_t<int32_t>(num_blocks, batch.tables_of(group)[row], owner);
          },
          py::arg("row"), py::arg("num_blocks"), py::arg("group") = 0)
      .def(
          "slots_of",
          [](const py::object& owner, int32_t group) {
            const StepBatch& batch = owner.cast<const StepBatch&>();
            return py::array_t<int64_t>(batch.num_tokens, batch.slots_of(group), owner);
          },
          py::arg("group"));
}

}  // namespace

void bind_cpu_kernels(py::module_& m) {
  bind_step_batch(m);
  m.def(
      "draw_token",
      [](const py::array_t<float, py::array::c_style>& logits, const SamplingState& state, int64_t position) {
        require(logits.ndim() == 1 && logits.size() > 0, "logits must be float32 [vocabulary]");
        const float* row = logits.data();
        const py::ssize_t count = logits.size();
        const py::gil_scoped_release no_gil;
        CpuSampler sampler(select_cpu_isa("auto"), 1);
        sampler.begin({}, count);
        return sampler.draw({.position = position, .state = &state, .records = {}, .needs = state.needs()}, row, count, 0);
      },
      py::arg("logits"), py::arg("state"), py::arg("position"));

  py::enum_<Dtype>(m, "Dtype").value("float32", Dtype::kFloat32).value("bfloat16", Dtype::kBFloat16);
  py::enum_<ActivationFunction>(m, "ActivationFunction")
      .value("silu", ActivationFunction::kSilu)
      .value("gelu_tanh", ActivationFunction::kGeluTanh)
      .value("gelu", ActivationFunction::kGelu)
      .value("clamped_silu", ActivationFunction::kClampedSilu)
      .value("relu2", ActivationFunction::kRelu2);

  py::enum_<CodeType>(m, "CodeType")
      .value("int4", CodeType::kInt4)
      .value("int8", CodeType::kInt8)
      .value("float8", CodeType::kFloat8);

  py::class_<CpuLinear, std::shared_ptr<CpuLinear>>(m, "CpuLinear")
      .def(py::init(&make_linear), py::arg("weights"), py::arg("rows"), py::arg("biases"), py::arg("k"), py::arg("dtype"),
           py::arg("panels") = false)
      .def("set_codes", &set_codes, py::arg("codes"), py::arg("order"))
      .def("set_blocks", &set_blocks, py::arg("types"));

  py::class_<CpuExperts, std::shared_ptr<CpuExperts>>(m, "CpuExperts")
      .def(py::init(&make_experts), py::arg("up"), py::arg("down"), py::arg("function"), py::arg("gated"));

  py::class_<CpuNorm>(m, "CpuNorm")
      .def(py::init([](Address weight, Address bias, float eps, bool float_weight) {
             return CpuNorm{pointer(weight), pointer(bias), eps, float_weight};
           }),
           py::arg("weight"), py::arg("bias"), py::arg("eps"), py::arg("float_weight") = false);

  py::class_<CpuMixer>(m, "CpuMixer")
      .def(py::init(&make_mixer), py::arg("delta"), py::arg("shape"), py::arg("conv"), py::arg("heads"), py::arg("norm"),
           py::arg("dt_range"), py::arg("norm_before_gate"), py::arg("half_states"));

  py::class_<PagedKV>(m, "PagedKV")
      .def(py::init(
               [](Address k, Address v, int64_t num_kv_heads, int64_t head_dim, int64_t block_size, Address scales, int32_t group) {
                 require(block_size >= 16 && block_size % 16 == 0, "block_size must be a multiple of 16");
                 require(num_kv_heads >= 1 && head_dim >= 1, "num_kv_heads and head_dim must be at least 1");
                 return PagedKV{pointer(k), pointer(v), num_kv_heads, head_dim, block_size, group, pointer<const float>(scales)};
               }),
           py::arg("k"), py::arg("v"), py::arg("num_kv_heads"), py::arg("head_dim"), py::arg("block_size"), py::arg("scales") = 0,
           py::arg("group") = 0);

  py::class_<CpuKernels, std::shared_ptr<CpuKernels>>(m, "CpuKernels")
      .def(py::init([](int num_threads, const std::string& isa) { return make_process_owned<CpuKernels>(num_threads, isa); }),
           py::arg("num_threads"), py::arg("isa") = "auto")
      .def_static("available_isas", &available_cpu_isas)
      .def_property_readonly("isa", &CpuKernels::isa_name)
      .def_property_readonly("block_kernels", &CpuKernels::block_kernels_name)
      .def_property_readonly("num_threads", &CpuKernels::num_threads)
      .def_property_readonly("vector_width", &CpuKernels::vector_width)
      .def("panel_steps", &CpuKernels::panel_steps)
      .def(
          "linear",
          [](CpuKernels& self, const CpuLinear& weights, Address x, int64_t x_stride, int64_t rows, Address y, bool y_float32) {
            self.linear(weights, pointer(x), x_stride, rows, pointer(y), y_float32);
          },
          NoGil())
      .def(
          "norm_linear",
          [](CpuKernels& self, const CpuNorm& norm, const CpuLinear& weights, Address x, Address residual, int64_t rows, Address y,
             bool y_float32, std::optional<ActivationFunction> activated) {
            std::optional<Activation> activation;
            if (activated) activation = Activation{*activated, false};
            self.norm_linear(norm, weights, pointer(x), pointer(residual), rows, pointer(y), y_float32, activation);
          },
          NoGil())
      .def(
          "experts",
          [](CpuKernels& self, const CpuExperts& experts, Address x, int64_t x_stride, int64_t rows, Address ids, Address weights,
             int64_t top_k, Address y) {
            self.experts(experts, pointer(x), x_stride, rows, pointer<const int64_t>(ids), pointer<const float>(weights), top_k,
                         pointer(y));
          },
          NoGil())
      .def(
          "pack_panels",
          [](CpuKernels& self, Dtype dtype, Address weight, bool transposed, int64_t rows, int64_t k, Address panels) {
            self.pack_panels(dtype, pointer(weight), transposed, rows, k, pointer(panels));
          },
          NoGil())
      .def(
          "embed",
          [](CpuKernels& self, const CpuLinear& table, Address position_table, const StepBatch& batch, Address y, float scale) {
            self.embed(table, pointer(position_table), batch, pointer(y), scale);
          },
          NoGil())
      .def(
          "norm",
          [](CpuKernels& self, Dtype dtype, Address x, int64_t x_stride, Address residual, Address weight, Address bias, Address y,
             int64_t y_stride, int64_t tokens, int64_t heads, int64_t width, float eps, bool float_weight) {
            self.norm(dtype,
                      {pointer(x), pointer(residual), pointer(weight), pointer(bias), pointer(y), x_stride, y_stride, heads, width,
                       eps, float_weight},
                      tokens);
          },
          NoGil())
      .def(
          "activation",
          [](CpuKernels& self, Dtype dtype, ActivationFunction function, bool gated, Address x, Address y, int64_t rows,
             int64_t width) { self.activation(dtype, {function, gated}, pointer(x), pointer(y), rows, width); },
          NoGil())
      .def(
          "rotary",
          [](CpuKernels& self, Dtype dtype, Address x, int64_t token_stride, int64_t tokens, int64_t heads, int64_t head_dim,
             Address cos_sin, Address positions) {
            self.rotary(
                dtype,
                {pointer(x), token_stride, heads, head_dim, pointer<const float>(cos_sin), pointer<const int64_t>(positions)},
                tokens);
          },
          NoGil())
      .def(
          "store_kv",
          [](CpuKernels& self, Dtype dtype, Address k, int64_t k_stride, Address v, int64_t v_stride, const PagedKV& cache,
             const StepBatch& batch) { self.store_kv(dtype, pointer(k), k_stride, pointer(v), v_stride, cache, batch); },
          NoGil())
      .def(
          "paged_attention",
          [](CpuKernels& self, Dtype dtype, Address q, int64_t q_stride, int64_t tokens, int64_t num_q_heads, Address out,
             const PagedKV& cache, const StepBatch& batch, float scale, int64_t window, float softcap, Address sinks) {
            self.paged_attention(dtype, pointer(q), q_stride, tokens, num_q_heads, pointer(out), cache, batch, scale, window,
                                 softcap, pointer<const float>(sinks));
          },
          NoGil())
      .def(
          "attention",
          [](CpuKernels& self, Dtype dtype, Address heads, int64_t tokens, int64_t num_q_heads, Address out, const PagedKV& cache,
             const StepBatch& batch, float scale, int64_t window, float softcap, Address sinks) {
            require(tokens == batch.num_tokens, "heads must be of the batch's tokens");
            self.attention(dtype, pointer(heads), num_q_heads, pointer(out), cache, batch, scale, window, softcap,
                           pointer<const float>(sinks));
          },
          NoGil())
      .def(
          "mix",
          [](CpuKernels& self, Dtype dtype, const CpuMixer& mixer, Address x, int64_t x_stride, int64_t tokens, Address out,
             Address states, int64_t slot_bytes, const StepBatch& batch) {
            require(tokens == batch.num_tokens, "x must be of the batch's tokens");
            require(slot_bytes == mixer.state_bytes(), "states must be those of the mixer");
            self.mix(dtype, mixer, pointer(x), x_stride, pointer(out), pointer<std::byte>(states), slot_bytes, batch);
          },
          NoGil())
      .def(
          "soft_cap",
          [](CpuKernels& self, Address x, int64_t rows, int64_t width, float cap) {
            self.soft_cap(pointer<float>(x), rows, width, cap);
          },
          NoGil())
      .def(
          "sample",
          [](CpuKernels& self, Address logits, int64_t vocab, const StepBatch& batch, Address tokens) {
            self.sample(pointer<const float>(logits), vocab, batch, pointer<int32_t>(tokens));
          },
          NoGil());
}

}  // namespace asyncengine
