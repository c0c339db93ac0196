// The device side of the step loop: function table, graphs and staging. The simulated device stands in for CUDA.
#include "bindings/device.h"

#include <map>
#include <string>

namespace asyncengine {
namespace {

StagingMode staging_mode(const std::string& name) {
  static const std::map<std::string, StagingMode> modes{{"pageable", StagingMode::kPageable},
                                                        {"pinned", StagingMode::kPinned},
                                                        {"mapped", StagingMode::kMapped},
                                                        {"ahead", StagingMode::kAhead}};
  const auto found = modes.find(name);
  require(found != modes.end(), "staging must be pageable, pinned, mapped or ahead");
  return found->second;
}

const char* mode_name(const Staging& staging) {
  switch (staging.mode()) {
    case StagingMode::kPageable: return "pageable";
    case StagingMode::kPinned: return "pinned";
    case StagingMode::kMapped: return "mapped";
    case StagingMode::kAhead: return "ahead";
  }
  return "";
}

std::shared_ptr<Staging> make_staging(const CudaDevice& device, const StepLoopConfig& config, const std::string& mode) {
  return make_process_owned<Staging>(device, StepLoop::limits(config), config.steps_in_flight, staging_mode(mode));
}

Address add_simulated_graph(Simulation& simulation, py::function body) {
  return reinterpret_cast<Address>(simulation.device.add_graph(
      [&device = simulation.device, body = callback(std::move(body))] {
        py::gil_scoped_acquire gil;
        try {
          (*body)();
        } catch (py::error_already_set& error) {
          error.discard_as_unraisable("a simulated graph");
          device.fault();  // no later graph reads what this one did not write
        }
      },
      std::chrono::nanoseconds(0)));
}

int32_t pin_states(HostPool& pool, const CudaDevice& device, const std::vector<std::pair<Address, size_t>>& regions,
                   int32_t num_states) {
  require(!regions.empty() && num_states >= 1, "there is a state of a layer at least");
  std::vector<HostStates::Layer> layers;
  for (const auto& [base, bytes_per_slot] : regions) layers.push_back({pointer<std::byte>(base), bytes_per_slot});
  pool.keep_states(std::make_shared<HostStates>(device, std::move(layers), num_states));
  return pool.states()->num_states();
}

}  // namespace

CudaGraphs::~CudaGraphs() {
  for (const CudaGraphExec exec : execs_) device_.call<&CudaRuntime::graph_exec_destroy>(exec);
}

CudaGraphExec CudaGraphs::instantiate(Address graph) {
  CudaGraphExec exec = nullptr;
  device_.check<&CudaRuntime::graph_instantiate>("cudaGraphInstantiate", &exec, reinterpret_cast<CudaGraph>(graph), 0);
  execs_.push_back(exec);
  return exec;
}

void CudaGraphs::upload(Address cuda_stream) {
  for (const CudaGraphExec exec : execs_) {
    device_.check<&CudaRuntime::graph_upload>("cudaGraphUpload", exec, reinterpret_cast<CudaStream>(cuda_stream));
  }
}

void CudaGraphs::launch(size_t bucket, Needs needs, Address cuda_stream) const {
  require(bucket < buckets.size() && buckets[bucket].variants.back().serves(needs), "no such bucket, or none for these needs");
  const GraphVariant& variant = buckets[bucket].variants[buckets[bucket].variant_for(needs)];
  device_.check<&CudaRuntime::graph_launch>("cudaGraphLaunch", variant.graph, reinterpret_cast<CudaStream>(cuda_stream));
}

void CudaGraphs::add_bucket(int32_t max_rows, int32_t max_tokens, bool single_token_rows, int32_t max_context,
                            const std::vector<std::pair<Needs, Address>>& variants, int32_t lanes) {
  require(!variants.empty(), "a bucket needs a variant");
  GraphBucket bucket{max_rows, max_tokens, single_token_rows, max_context, {}, lanes};
  for (const auto& [needs, graph] : variants) {
    require(GraphVariant{variants.back().first}.serves(needs), "the last variant must serve all needs of the others");
    bucket.variants.push_back({needs, graph == 0 ? nullptr : instantiate(graph)});
  }
  buckets.push_back(std::move(bucket));
}

GraphExecutor::Graphs executor_graphs(const CudaDevice& device, std::shared_ptr<CudaGraphs> graphs, py::object eager,
                                      Address cuda_stream) {
  GraphExecutor::Graphs result;
  result.buckets = graphs->buckets;
  result.copy_blocks = graphs->copy_blocks;
  result.cuda_stream = reinterpret_cast<CudaStream>(cuda_stream);
  result.keep_alive = graphs;
  if (graphs->host_pool != nullptr) {
    result.mover = std::make_unique<GraphMover>(device, graphs->host_pool, graphs->moves);
    if (const auto& states = graphs->host_pool->states()) result.state_mover = std::make_unique<StateMover>(device, states);
  }
  if (!eager.is_none()) {
    result.eager = [launch = callback(eager.cast<py::function>())](int bucket, Needs needs, CudaStream cuda_stream) {
      py::gil_scoped_acquire gil;
      try {
        (*launch)(bucket, needs, reinterpret_cast<Address>(cuda_stream));
        return std::string();
      } catch (const py::error_already_set& error) {
        return std::string(error.what());
      }
    };
  }
  return result;
}

void bind_device(py::module_& m) {
  py::class_<Simulation, OwnedSimulation>(m, "SimulatedDevice")
      .def(py::init([](int32_t vocab_size, int32_t first_token, double step_latency_us, double token_latency_us, bool read_kv) {
             require(0 <= first_token && first_token < vocab_size, "first_token must be in [0, vocab_size)");
             const auto ns = [](double us) { return std::chrono::nanoseconds(static_cast<int64_t>(us * 1000)); };
             return OwnedSimulation(
                 new Simulation(SimulatedModelConfig{vocab_size, first_token, ns(step_latency_us), ns(token_latency_us), read_kv}));
           }),
           py::kw_only(), py::arg("vocab_size"), py::arg("first_token") = 0, py::arg("step_latency_us") = 0.0,
           py::arg("token_latency_us") = 0.0, py::arg("read_kv") = true)
      .def("add_graph", &add_simulated_graph, py::arg("body"))
      .def("refuse_pinning", [](Simulation& self) { self.device.refuse_pinning(); })
      .def(
          "fail_at", [](Simulation& self, int64_t nth_launch) { self.device.fail_at(nth_launch); }, py::arg("nth_launch"), NoGil())
      .def(
          "hang_at", [](Simulation& self, int64_t nth_launch) { self.device.hang_at(nth_launch); }, py::arg("nth_launch"), NoGil())
      .def(
          "fail_call",
          [](Simulation& self, const std::string& call, int64_t nth, int error) {
            static const std::map<std::string, SimulatedDevice::Call> calls{{"copy", SimulatedDevice::Call::kCopy},
                                                                            {"graph_launch", SimulatedDevice::Call::kGraphLaunch},
                                                                            {"event_record", SimulatedDevice::Call::kEventRecord},
                                                                            {"wait_event", SimulatedDevice::Call::kWaitEvent}};
            const auto found = calls.find(call);
            require(found != calls.end(), "call must be copy, graph_launch, event_record or wait_event");
            self.device.fail_call(found->second, nth, error);
          },
          py::arg("call"), py::arg("nth") = 0, py::arg("error") = kCudaErrorMemoryAllocation, NoGil())
      .def_static("wrong_device_calls", &SimulatedDevice::wrong_device_calls)
      .def(
          "resume", [](Simulation& self) { self.device.resume(); }, NoGil())
      .def(
          "next_token",
          [](const Simulation& self, const std::vector<int32_t>& tokens, float temperature, uint64_t seed) {
            SamplingState sampling;
            sampling.temperature = temperature;
            sampling.seed = seed;
            return SimulatedModel::next_token(self.config, tokens, sampling);
          },
          py::arg("tokens"), py::arg("temperature") = 0.f, py::arg("seed") = 0);

  py::class_<CudaDevice>(m, "CudaDevice")
      .def(py::init([](const std::string& libcudart, int index) { return CudaDevice(loaded_cuda_runtime(libcudart), index); }),
           py::arg("libcudart"), py::arg("index"))
      .def_static(
          "simulated", [](const Simulation& simulation) { return simulation.device.cuda(); }, py::arg("device"),
          py::keep_alive<0, 1>())
      .def_property_readonly("index", &CudaDevice::index);

  py::class_<Staging, std::shared_ptr<Staging>>(m, "Staging")
      .def(py::init(&make_staging), py::arg("device"), py::arg("config"), py::arg("mode"), py::keep_alive<1, 2>())
      .def_static(
          "following", [](std::shared_ptr<Staging> first) { return std::make_shared<Staging>(std::move(first)); }, py::arg("first"),
          py::keep_alive<0, 1>())
      .def_property_readonly("mode", &mode_name)
      .def_property_readonly("num_steps", &Staging::num_steps)
      .def_property_readonly("input_stride", &Staging::input_stride)
      .def_property_readonly("output_stride", &Staging::output_stride)
      .def_property_readonly("output_words", &Staging::output_words)
      .def_property_readonly("records_begin", &Staging::records_begin)
      .def_property_readonly("input", [](const Staging& s) { return reinterpret_cast<Address>(s.input(0).data()); })
      .def_property_readonly("output", [](const Staging& s) { return reinterpret_cast<Address>(s.output(0)); })
      .def_property_readonly("masks", [](const Staging& s) { return reinterpret_cast<Address>(s.masks().row(0)); })
      .def_property_readonly("released", [](const Staging& s) { return reinterpret_cast<Address>(s.released()); })
      .def_property_readonly("mask_stride", [](const Staging& s) { return MaskBoard::stride(s.masks().mask_words()); })
      .def(
          "set_device_buffers",
          [](Staging& s, Address input, Address output) {
            s.set_device_buffers({pointer<std::byte>(input), pointer<int64_t>(output)});
          },
          py::arg("input"), py::arg("output"));

  py::class_<HostPool, std::shared_ptr<HostPool>>(m, "HostPool")
      .def(py::init([](const CudaDevice& device, size_t block_bytes, int32_t num_blocks, int32_t max_moves) {
             require(max_moves >= 1 && num_blocks >= max_moves, "a pool holds one transfer at least");
             return make_process_owned<HostPool>(device, block_bytes, num_blocks, max_moves);
           }),
           py::arg("device"), py::arg("block_bytes"), py::arg("num_blocks"), py::arg("max_moves"), py::keep_alive<1, 2>(), NoGil())
      .def_property_readonly("num_blocks", &HostPool::num_blocks)
      .def_property_readonly_static("transfers", [](const py::object&) { return BlockMover::kTransfers; })
      .def_static("brings_in", &BlockMover::brings_in, py::arg("transfer"))
      .def_property_readonly("list_words", &HostPool::list_words)
      .def(
          "list", [](const HostPool& pool, int i) { return reinterpret_cast<Address>(pool.list(i)); }, py::arg("transfer"))
      .def(
          "set_gathered", [](HostPool& pool, Address memory) { pool.set_gathered(pointer<std::byte>(memory)); }, py::arg("memory"))
      .def(
          "block", [](const HostPool& pool, int32_t host) { return reinterpret_cast<Address>(pool.block(host)); }, py::arg("host"))
      .def("pin_states", &pin_states, py::arg("device"), py::arg("regions"), py::arg("num_states"), NoGil());

  py::class_<CudaGraphs, std::shared_ptr<CudaGraphs>>(m, "CudaGraphs")
      .def(py::init([](const CudaDevice& device) { return make_process_owned<CudaGraphs>(device); }), py::arg("device"),
           py::keep_alive<1, 2>())
      .def("add_bucket", &CudaGraphs::add_bucket, py::arg("max_rows"), py::arg("max_tokens"), py::arg("single_token_rows"),
           py::arg("max_context"), py::arg("variants"), py::arg("lanes") = 0)
      .def(
          "set_copy_blocks", [](CudaGraphs& self, Address graph) { self.copy_blocks = self.instantiate(graph); }, py::arg("graph"))
      .def(
          "set_host_pool",
          [](CudaGraphs& self, std::shared_ptr<HostPool> pool, const std::vector<Address>& moves) {
            require(moves.size() == (pool->block_bytes() > 0 ? self.moves.size() : 0), "a graph for each transfer");
            self.host_pool = std::move(pool);
            for (size_t i = 0; i < moves.size(); ++i) self.moves[i] = self.instantiate(moves[i]);
          },
          py::arg("pool"), py::arg("moves"))
      .def("upload", &CudaGraphs::upload, py::arg("cuda_stream"), NoGil())
      .def("launch", &CudaGraphs::launch, py::arg("bucket"), py::arg("needs"), py::arg("cuda_stream"), NoGil());
}

}  // namespace asyncengine
