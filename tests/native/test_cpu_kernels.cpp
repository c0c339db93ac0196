// Small tests of the CPU's kernels for runs under sanitizers: buffers here have exactly the size that the kernels may
// touch. The Python tests check the same in depth.
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "platform/cpu/kernels.h"

using namespace asyncengine;

namespace {

std::vector<float> random_floats(int64_t count, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = normal(generator);
  return values;
}

// Storage of one dtype, of exactly `count` elements.
struct Array {
  Array(Dtype type, const std::vector<float>& values) : dtype(type), bytes(values.size() * size()) {
    for (size_t i = 0; i < values.size(); ++i) {
      uint32_t bits;
      std::memcpy(&bits, &values[i], 4);
      const uint16_t high = static_cast<uint16_t>(bits >> 16);
      std::memcpy(&bytes[i * size()], dtype == Dtype::kFloat32 ? static_cast<void*>(&bits) : const_cast<uint16_t*>(&high), size());
    }
  }
  Array(Dtype type, int64_t count) : Array(type, std::vector<float>(static_cast<size_t>(count))) {}

  size_t size() const { return static_cast<size_t>(dtype_size(dtype)); }
  void* at(int64_t element) { return bytes.data() + static_cast<size_t>(element) * size(); }
  float value(int64_t element) const {
    uint32_t bits = 0;
    const char* p = bytes.data() + static_cast<size_t>(element) * size();
    std::memcpy(reinterpret_cast<char*>(&bits) + (4 - size()), p, size());
    float result;
    std::memcpy(&result, &bits, 4);
    return result;
  }
  bool same(int64_t element, const Array& other, int64_t other_element, int64_t count) const {
    return std::memcmp(bytes.data() + static_cast<size_t>(element) * size(),
                       other.bytes.data() + static_cast<size_t>(other_element) * size(), static_cast<size_t>(count) * size()) == 0;
  }

  Dtype dtype;
  std::vector<char> bytes;
};

template <class Body>
void for_each_isa(Body&& body) {
  for (const std::string& isa : available_cpu_isas()) {
    for (const Dtype dtype : {Dtype::kFloat32, Dtype::kBFloat16}) {
      CpuKernels one(1, isa), three(3, isa);
      body(one, three, dtype);
    }
  }
}

float tolerance(Dtype dtype) { return dtype == Dtype::kFloat32 ? 1e-5f : 1e-2f; }

// Tokens [begin, end) of one row, whose blocks are those of the table.
StepBatch one_row(const std::vector<int32_t>& table, int64_t block_size, int64_t begin, int64_t end) {
  StepBatch batch;
  batch.num_tokens = static_cast<int32_t>(end - begin);
  batch.num_rows = 1;
  for (int64_t p = begin; p < end; ++p) {
    batch.slot_mapping.push_back(table[static_cast<size_t>(p / block_size)] * block_size + p % block_size);
  }
  batch.query_start = {0, static_cast<int32_t>(end - begin)};
  batch.context_len = {static_cast<int32_t>(begin)};
  batch.block_tables = {table.data()};
  return batch;
}

}  // namespace

TEST(cpu_linear_is_right_and_batch_invariant) {
  for_each_isa([](CpuKernels& one, CpuKernels& three, Dtype dtype) {
    const int64_t n = 50, rows = 41;
    for (const int64_t k : {1, 31, 200, 1700}) {
      Array w(dtype, random_floats(n * k, 1)), bias(dtype, random_floats(n, 2)), x(dtype, random_floats(rows * k, 3));
      const CpuLinear linear{{{w.at(0), bias.at(0), n}, {w.at(0), nullptr, 3}}, k, dtype, false};
      Array all(dtype, rows * (n + 3)), single(dtype, n + 3);
      three.linear(linear, x.at(0), k, rows, all.at(0), false);
      for (int64_t m = 0; m < rows; ++m) {
        one.linear(linear, x.at(m * k), k, 1, single.at(0), false);
        CHECK(single.same(0, all, m * (n + 3), n + 3));
      }
      for (int64_t column = 0; column < n; column += 7) {
        double expected = static_cast<double>(bias.value(column)), size = 1.;
        for (int64_t i = 0; i < k; ++i) {
          const double term = static_cast<double>(x.value(i)) * static_cast<double>(w.value(column * k + i));
          expected += term;
          size += std::abs(term);
        }
        CHECK(std::abs(static_cast<double>(all.value(column)) - expected) <= static_cast<double>(tolerance(dtype)) * size);
      }
    }
  });
}

TEST(cpu_linear_reads_panels) {
  for_each_isa([](CpuKernels& one, CpuKernels& three, Dtype dtype) {
    const int64_t n = 50, rows = 41, width = one.vector_width(), parts = 4 / dtype_size(dtype);
    for (const int64_t k : {1, 45, 200}) {
      Array w(dtype, random_floats(n * k, 1)), bias(dtype, random_floats(n, 2)), x(dtype, random_floats(rows * k, 3));
      const int64_t steps = one.panel_steps(dtype), stored_k = (k + steps - 1) / steps * steps;
      const int64_t stored_n = (n + 2 * width - 1) / (2 * width) * 2 * width;
      Array panels(dtype, stored_n * stored_k);
      for (int64_t column = 0; column < n; ++column) {
        for (int64_t i = 0; i < k; ++i) {
          const int64_t word = (column / width * (stored_k / parts) + i / parts) * width + column % width;
          std::memcpy(panels.at(word * parts + i % parts), w.at(column * k + i), w.size());
        }
      }
      const CpuLinear plain{{{w.at(0), bias.at(0), n}}, k, dtype, false};
      const CpuLinear stored{{{panels.at(0), bias.at(0), n}}, k, dtype, true};
      for (const int64_t count : {int64_t{1}, int64_t{16}, int64_t{20}, rows}) {
        Array from_panels(dtype, count * n), from_rows(dtype, count * n);
        three.linear(stored, x.at(0), k, count, from_panels.at(0), false);
        one.linear(plain, x.at(0), k, count, from_rows.at(0), false);
        CHECK(from_panels.same(0, from_rows, 0, count * n));
      }
    }
  });
}

TEST(cpu_linear_norms_its_input_and_activates) {
  for_each_isa([](CpuKernels& one, CpuKernels& three, Dtype dtype) {
    const int64_t n = 50, k = 77;
    Array w(dtype, random_floats(n * k, 1)), scale(dtype, random_floats(k, 2)), shift(dtype, random_floats(k, 3));
    const CpuLinear linear{{{w.at(0), nullptr, n}}, k, dtype, false};
    for (const int64_t rows : {1, 16, 41}) {
      const Array start(dtype, random_floats(rows * k, 4));
      Array x(dtype, random_floats(rows * k, 5)), residual = start, normed(dtype, rows * k);
      Array product(dtype, rows * n), activated(dtype, rows * n), both(dtype, rows * n);
      for (const bool adds : {false, true}) {
        const CpuNorm norm{scale.at(0), adds ? shift.at(0) : nullptr, 1e-5f};
        const NormTask task{.x = x.at(0),
                            .residual = adds ? residual.at(0) : nullptr,
                            .weight = norm.weight,
                            .bias = norm.bias,
                            .y = normed.at(0),
                            .x_stride = k,
                            .y_stride = k,
                            .heads = 1,
                            .width = k,
                            .eps = norm.eps};
        one.norm(dtype, task, rows);
        one.linear(linear, normed.at(0), k, rows, product.at(0), false);
        one.activation(dtype, {ActivationFunction::kGelu, false}, product.at(0), activated.at(0), rows, n);
        Array stream = start;
        three.norm_linear(norm, linear, x.at(0), adds ? stream.at(0) : nullptr, rows, both.at(0), false);
        CHECK(both.same(0, product, 0, rows * n) && stream.same(0, residual, 0, rows * k));
        stream = start;
        three.norm_linear(norm, linear, x.at(0), adds ? stream.at(0) : nullptr, rows, both.at(0), false,
                          Activation{ActivationFunction::kGelu, false});
        CHECK(both.same(0, activated, 0, rows * n));
      }
    }
  });
}

TEST(cpu_panels_are_packed_from_either_layout_and_looked_up) {
  for_each_isa([](CpuKernels& one, CpuKernels& three, Dtype dtype) {
    const int64_t n = 301, width = one.vector_width(), parts = 4 / dtype_size(dtype), tokens = 37;
    for (const int64_t k : {1, 45, 200}) {
      const int64_t steps = one.panel_steps(dtype), stored_k = (k + steps - 1) / steps * steps;
      const int64_t stored_n = (n + 2 * width - 1) / (2 * width) * 2 * width;
      Array w(dtype, random_floats(n * k, 1)), turned(dtype, n * k), positions(dtype, random_floats(5 * k, 2));
      Array expected(dtype, stored_n * stored_k);
      for (int64_t column = 0; column < n; ++column) {
        for (int64_t i = 0; i < k; ++i) {
          const int64_t word = (column / width * (stored_k / parts) + i / parts) * width + column % width;
          std::memcpy(expected.at(word * parts + i % parts), w.at(column * k + i), w.size());
          std::memcpy(turned.at(i * n + column), w.at(column * k + i), w.size());
        }
      }
      Array panels(dtype, random_floats(stored_n * stored_k, 3)), again(dtype, random_floats(stored_n * stored_k, 4));
      one.pack_panels(dtype, w.at(0), false, n, k, panels.at(0));
      three.pack_panels(dtype, turned.at(0), true, n, k, again.at(0));
      CHECK(panels.bytes == expected.bytes);
      CHECK(again.bytes == expected.bytes);

      StepBatch batch;
      batch.num_tokens = tokens;
      for (int64_t token = 0; token < tokens; ++token) {
        batch.input_ids.push_back(n - 1 - token * 8);
        batch.positions.push_back(token % 5);
      }
      const CpuLinear plain{{{w.at(0), nullptr, n}}, k, dtype, false}, stored{{{panels.at(0), nullptr, n}}, k, dtype, true};
      Array from_rows(dtype, tokens * k), from_panels(dtype, tokens * k), summed(dtype, tokens * k);
      one.embed(plain, nullptr, batch, from_rows.at(0));
      three.embed(stored, nullptr, batch, from_panels.at(0));
      three.embed(stored, positions.at(0), batch, summed.at(0));
      CHECK(from_panels.bytes == from_rows.bytes);
      for (int64_t token = 0; token < tokens; ++token) {
        CHECK(from_rows.same(token * k, w, (n - 1 - token * 8) * k, k));
        const float sum = w.value((n - 1 - token * 8) * k) + positions.value(token % 5 * k);
        CHECK(std::abs(summed.value(token * k) - sum) <= tolerance(dtype) * std::abs(sum));
      }
    }
  });
}

TEST(cpu_rows_are_right_and_batch_invariant) {
  for_each_isa([](CpuKernels& one, CpuKernels& three, Dtype dtype) {
    const int64_t rows = 37, width = 1001;
    Array x(dtype, random_floats(rows * width, 1)), weight(dtype, random_floats(width, 2));
    Array y(dtype, rows * width), single(dtype, width);
    auto task = [&](int64_t row, Array& out) {
      return NormTask{.x = x.at(row * width),
                      .residual = nullptr,
                      .weight = weight.at(0),
                      .bias = nullptr,
                      .y = out.at(0),
                      .x_stride = width,
                      .y_stride = width,
                      .heads = 1,
                      .width = width,
                      .eps = 1e-6f};
    };
    three.norm(dtype, task(0, y), rows);
    for (int64_t row = 0; row < rows; ++row) {
      one.norm(dtype, task(row, single), 1);
      CHECK(single.same(0, y, row * width, width));
    }
    double squares = 0.;
    for (int64_t i = 0; i < width; ++i) squares += std::pow(static_cast<double>(x.value(i)), 2);
    const double expected = static_cast<double>(x.value(5) * weight.value(5)) /
                            std::sqrt(squares / static_cast<double>(width) + 1e-6);
    CHECK(std::abs(static_cast<double>(y.value(5)) - expected) <= static_cast<double>(tolerance(dtype)) * (1 + std::abs(expected)));

    for (const Activation kind : {Activation{ActivationFunction::kGelu, false},
                                  {ActivationFunction::kGeluTanh, false},
                                  {ActivationFunction::kGeluTanh, true},
                                  {ActivationFunction::kSilu, true}}) {
      const int64_t out_width = kind.gated ? width / 2 : width;
      const int64_t in_width = kind.gated ? out_width * 2 : width;
      three.activation(dtype, kind, x.at(0), y.at(0), rows, out_width);
      for (int64_t row = 0; row < rows; ++row) {
        one.activation(dtype, kind, x.at(row * in_width), single.at(0), 1, out_width);
        CHECK(single.same(0, y, row * out_width, out_width));
      }
    }
  });
}

TEST(cpu_attention_over_float8_is_chunk_invariant) {
  for_each_isa([](CpuKernels& one, CpuKernels& three, Dtype dtype) {
    const int64_t length = 70, heads = 5, dim = 20, block_size = 16, blocks = 5;
    Array q(dtype, random_floats(length * heads * dim, 1)), k(dtype, random_floats(length * dim, 2)),
        v(dtype, random_floats(length * dim, 3));
    const std::vector<float> scales{0.01f, 1.f / 0.01f, 0.5f, 2.f};  // keys saturate, values are coarse
    std::vector<Float8> k_cache(blocks * dim * block_size, Float8{0x7f}), v_cache = k_cache;
    const PagedKV cache{k_cache.data(), v_cache.data(), 1, dim, block_size, 0, scales.data()};
    const std::vector<int32_t> table{3, 0, 4, 1, 2};
    auto run = [&](CpuKernels& kernels, int64_t begin, int64_t end, Array& out) {
      const StepBatch batch = one_row(table, block_size, begin, end);
      kernels.store_kv(dtype, k.at(begin * dim), dim, v.at(begin * dim), dim, cache, batch);
      kernels.paged_attention(dtype, q.at(begin * heads * dim), heads * dim, end - begin, heads, out.at(0), cache, batch, 0.25f, 0);
    };
    Array whole(dtype, length * heads * dim), part(dtype, length * heads * dim);
    run(three, 0, length, whole);
    for (const int64_t chunk : {1, 7, 23}) {
      for (int64_t begin = 0; begin < length; begin += chunk) {
        const int64_t end = std::min(length, begin + chunk);
        run(one, begin, end, part);
        CHECK(part.same(0, whole, begin * heads * dim, (end - begin) * heads * dim));
      }
    }
    CHECK(std::isfinite(static_cast<double>(whole.value(0))));
  });
}

TEST(cpu_attention_is_right_and_chunk_invariant) {
  for_each_isa([](CpuKernels& one, CpuKernels& three, Dtype dtype) {
    const int64_t length = 530, heads = 3, dim = 20, block_size = 16;
    const int64_t blocks = (length + block_size - 1) / block_size;
    const float nan = std::numeric_limits<float>::quiet_NaN();
    Array q(dtype, random_floats(length * heads * dim, 1)), k(dtype, random_floats(length * dim, 2)),
        v(dtype, random_floats(length * dim, 3));
    const std::vector<float> poison(static_cast<size_t>(blocks * dim * block_size), nan);
    Array k_cache(dtype, poison), v_cache(dtype, poison);
    const PagedKV cache{k_cache.at(0), v_cache.at(0), 1, dim, block_size};
    std::vector<int32_t> table(static_cast<size_t>(blocks));
    for (int32_t b = 0; b < blocks; ++b) table[static_cast<size_t>(b)] = static_cast<int32_t>(blocks) - 1 - b;

    auto make_batch = [&](int64_t begin, int64_t end) { return one_row(table, block_size, begin, end); };
    float softcap = 0.f;
    auto run = [&](CpuKernels& kernels, int64_t begin, int64_t end, int64_t window, Array& out) {
      const StepBatch batch = make_batch(begin, end);
      kernels.store_kv(dtype, k.at(begin * dim), dim, v.at(begin * dim), dim, cache, batch);
      kernels.paged_attention(dtype, q.at(begin * heads * dim), heads * dim, end - begin, heads, out.at(0), cache, batch, 0.25f,
                              window, softcap);
    };
    auto run_fused = [&](CpuKernels& kernels, int64_t begin, int64_t end, int64_t window, Array& out) {
      Array qkv(dtype, (end - begin) * (heads + 2) * dim);
      for (int64_t p = begin; p < end; ++p) {
        char* row = static_cast<char*>(qkv.at((p - begin) * (heads + 2) * dim));
        const size_t head = static_cast<size_t>(dim) * q.size();
        std::memcpy(row, q.at(p * heads * dim), heads * head);
        std::memcpy(row + heads * head, k.at(p * dim), head);
        std::memcpy(row + (heads + 1) * head, v.at(p * dim), head);
      }
      kernels.attention(dtype, qkv.at(0), heads, out.at(0), cache, make_batch(begin, end), 0.25f, window, softcap);
    };
    const std::pair<int64_t, float> kinds[] = {{0, 0.f}, {6, 0.f}, {515, 0.f}, {0, 1.5f}, {515, 0.4f}};
    for (const auto& [window, cap] : kinds) {
      softcap = cap;
      Array whole(dtype, length * heads * dim), part(dtype, 9 * heads * dim);
      run(three, 0, length, window, whole);
      for (int64_t begin = length - 27; begin < length; begin += 9) {
        run(one, begin, begin + 9, window, part);
        CHECK(part.same(0, whole, begin * heads * dim, 9 * heads * dim));
      }
      run(three, length - 1, length, window, part);
      CHECK(part.same(0, whole, (length - 1) * heads * dim, heads * dim));
      run_fused(three, length - 1, length, window, part);
      CHECK(part.same(0, whole, (length - 1) * heads * dim, heads * dim));
      run_fused(one, length - 9, length, window, part);
      CHECK(part.same(0, whole, (length - 9) * heads * dim, 9 * heads * dim));

      const int64_t last = length - 1, first_key = window > 0 ? last - window + 1 : 0;
      double sum = 0., value = 0.;
      for (int64_t key = first_key; key <= last; ++key) {
        double score = 0.;
        for (int64_t d = 0; d < dim; ++d) {
          score += static_cast<double>(q.value(last * heads * dim + d)) * static_cast<double>(k.value(key * dim + d));
        }
        score *= 0.25;
        if (cap > 0.f) score = static_cast<double>(cap) * std::tanh(score / static_cast<double>(cap));
        sum += std::exp(score);
        value += std::exp(score) * static_cast<double>(v.value(key * dim));
      }
      CHECK(std::abs(static_cast<double>(whole.value(last * heads * dim)) - value / sum) <= static_cast<double>(tolerance(dtype)));
    }
  });
}

TEST(cpu_rotary_turns_pairs) {
  for_each_isa([](CpuKernels&, CpuKernels& three, Dtype dtype) {
    const int64_t tokens = 9, heads = 3, dim = 10;
    Array x(dtype, random_floats(tokens * heads * dim, 1)), before = x;
    std::vector<float> table;
    std::vector<int64_t> positions;
    for (int64_t p = 0; p < tokens; ++p) {
      positions.push_back(tokens - 1 - p);
      for (int64_t i = 0; i < dim / 2; ++i) table.push_back(0.6f);
      for (int64_t i = 0; i < dim / 2; ++i) table.push_back(0.8f);
    }
    three.rotary(dtype, {x.at(0), heads * dim, heads, dim, table.data(), positions.data()}, tokens);
    for (int64_t head = 0; head < tokens * heads; ++head) {
      for (int64_t i = 0; i < dim / 2; ++i) {
        const float a = before.value(head * dim + i), b = before.value(head * dim + i + dim / 2);
        const float bound = tolerance(dtype) * (1 + std::abs(a) + std::abs(b));
        CHECK(std::abs(x.value(head * dim + i) - (0.6f * a - 0.8f * b)) <= bound);
        CHECK(std::abs(x.value(head * dim + i + dim / 2) - (0.6f * b + 0.8f * a)) <= bound);
      }
    }
  });
}

TEST(cpu_isa_names_are_checked) {
  bool threw = false;
  try {
    CpuKernels kernels(1, "mmx");
  } catch (const std::invalid_argument&) {
    threw = true;
  }
  CHECK(threw);
  CHECK_EQ(std::string(CpuKernels(1, "auto").isa_name()), available_cpu_isas().front());
}
