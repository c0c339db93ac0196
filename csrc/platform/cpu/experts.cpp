#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "platform/cpu/kernels.h"
#include "platform/cpu/tiling.h"

namespace asyncengine {
namespace {

// Floats of a cache line.
constexpr int64_t kLine = 16;

// To nearest, ties to even.
uint16_t to_bfloat16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if (std::isnan(value)) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

}  // namespace

// The pairs of a row and an expert in the order of their experts, those of one expert in the order of the rows.
void CpuKernels::sort_pairs(const CpuExperts& experts, const int64_t* ids, int64_t pairs) {
  const int64_t count = static_cast<int64_t>(experts.up.size());
  std::vector<int64_t>& first = first_pairs_;
  first.assign(static_cast<size_t>(count) + 1, 0);
  for (int64_t p = 0; p < pairs; ++p) {
    if (ids[p] < 0 || ids[p] >= count) throw std::invalid_argument("an index of an expert is out of range");
    ++first[static_cast<size_t>(ids[p]) + 1];
  }
  hit_.clear();
  for (int64_t e = 0; e < count; ++e) {
    const auto at = static_cast<size_t>(e);
    if (first[at + 1] > 0) hit_.push_back({&experts.up[at], &experts.down[at], first[at], first[at + 1], 0});
    first[at + 1] += first[at];
  }
  places_.resize(static_cast<size_t>(pairs));
  pair_at_.resize(static_cast<size_t>(pairs));
  for (int64_t p = 0; p < pairs; ++p) {
    const int64_t place = first[static_cast<size_t>(ids[p])]++;
    places_[static_cast<size_t>(p)] = place;
    pair_at_[static_cast<size_t>(place)] = p;
  }
}

// y [pairs, N] = x [pairs, k] · Wᵀ + bias by the weights of each hit expert. prepare(begin, end) is called for the pairs of
// a tile before the tile of x is packed.
template <class Prepare>
void CpuKernels::multiply_experts(bool up, void* x, void* y, bool y_float32, Prepare&& prepare) {
  const CpuLinear& shape = up ? *hit_[0].up : *hit_[0].down;
  const Dtype dtype = shape.dtype, y_dtype = y_float32 ? Dtype::kFloat32 : dtype;
  const LinearKernels& kernels = isa_.linear(dtype);
  const int64_t k = shape.k, y_stride = shape.total_rows(), num_hit = static_cast<int64_t>(hit_.size());
  int64_t floats = 0;
  for (HitExpert& hit : hit_) {
    hit.packed = floats;
    floats += round_up(kernels.packed_x_floats(hit.rows, k), kLine);
  }
  float* packed = packed_x_.reserve(floats);
  reserve_scratch(k);
  pool_.parallel_for(num_hit, [&](int64_t item, int thread) {
    const HitExpert& hit = hit_[static_cast<size_t>(item)];
    const CpuLinear& weights = up ? *hit.up : *hit.down;
    prepare(hit.first, hit.first + hit.rows);
    char* rows = static_cast<char*>(x) + hit.first * k * dtype_size(dtype);
    for (int64_t row = 0; weights.order != nullptr && row < hit.rows; ++row) {
      const auto bytes = static_cast<size_t>(k * dtype_size(dtype));
      std::memcpy(scratch(thread), rows + row * k * dtype_size(dtype), bytes);
      weights.arrange(scratch(thread), rows + row * k * dtype_size(dtype));
    }
    kernels.pack_x({rows, k, hit.rows, k, shape.panels}, 0, ceil_div(hit.rows, kernels.tile_rows(hit.rows)), packed + hit.packed);
  });

  const int64_t wanted = kItemsPerThread * pool_.num_threads();
  const int64_t share = round_up(ceil_div(y_stride * num_hit, wanted), kernels.panel_columns);
  products_.clear();
  int64_t scratch_floats = 0;
  for (const HitExpert& hit : hit_) {
    const CpuLinear& weights = up ? *hit.up : *hit.down;
    const bool few = hit.rows <= kernels.few_rows;
    const int64_t tile_rows = kernels.tile_rows(hit.rows);
    const int64_t block_rows = few ? hit.rows : round_up(std::min(hit.rows, kBlockRows), tile_rows);
    const int64_t columns = few ? share : std::min(share, kBlockColumns);
    scratch_floats = std::max(scratch_floats, kernels.scratch_floats(hit.rows, block_rows, columns));
    int64_t column = 0;
    for (const CpuLinear::Matrix& matrix : weights.matrices) {
      char* to = static_cast<char*>(y) + (hit.first * y_stride + column) * dtype_size(y_dtype);
      for (int64_t n = 0; n < matrix.rows; n += columns) {
        for (int64_t m = 0; m < hit.rows; m += block_rows) {
          products_.push_back({.packed_x = packed + hit.packed,
                               .rows = hit.rows,
                               .tile_rows = tile_rows,
                               .k = k,
                               .weight = matrix.weight,
                               .panels = weights.panels,
                               .codes = matrix.codes_or_null(),
                               .bias = matrix.bias,
                               .y = to,
                               .y_stride = y_stride,
                               .y_float32 = y_float32,
                               .m_begin = m,
                               .m_end = std::min(hit.rows, m + block_rows),
                               .n_begin = n,
                               .n_end = std::min(matrix.rows, n + columns),
                               .scratch = nullptr});
        }
      }
      column += matrix.rows;
    }
  }
  reserve_scratch(scratch_floats);
  pool_.parallel_for(static_cast<int64_t>(products_.size()), [&](int64_t item, int thread) {
    LinearTask task = products_[static_cast<size_t>(item)];
    task.scratch = scratch(thread);
    kernels.run(task);
  });
}

void CpuKernels::experts(const CpuExperts& experts, const void* x, int64_t x_stride, int64_t rows, const int64_t* ids,
                         const float* weights, int64_t top_k, void* y) {
  const int64_t pairs = rows * top_k;
  if (pairs == 0) return;
  sort_pairs(experts, ids, pairs);
  const CpuLinear &up = experts.up[0], &down = experts.down[0];
  const Dtype dtype = up.dtype;
  const int64_t size = dtype_size(dtype), wide = up.total_rows(), inner = down.k, hidden = down.total_rows();
  // Floats hold rows of any dtype; every part begins at a cache line.
  const int64_t gathered_floats = round_up(ceil_div(pairs * up.k * size, 4), kLine);
  const int64_t wide_floats = round_up(ceil_div(pairs * wide * size, 4), kLine);
  const int64_t inner_floats = round_up(ceil_div(pairs * inner * size, 4), kLine);
  float* memory = expert_rows_.reserve(gathered_floats + wide_floats + inner_floats + pairs * hidden);
  char* gathered = reinterpret_cast<char*>(memory);
  float *activated = memory + gathered_floats + wide_floats, *results = activated + inner_floats;
  void* product = memory + gathered_floats;

  multiply_experts(true, gathered, product, false, [&](int64_t begin, int64_t end) {
    for (int64_t place = begin; place < end; ++place) {
      const int64_t row = pair_at_[static_cast<size_t>(place)] / top_k;
      std::memcpy(gathered + place * up.k * size, static_cast<const char*>(x) + row * x_stride * size,
                  static_cast<size_t>(up.k * size));
    }
  });
  multiply_experts(false, activated, results, true, [&](int64_t begin, int64_t end) {
    isa_.activation(dtype, experts.activation, product, activated, inner, begin, end);
  });
  const int64_t chunk = std::max<int64_t>(1, std::min(ceil_div(rows, kItemsPerThread * pool_.num_threads()), rows));
  pool_.parallel_for(ceil_div(rows, chunk), [&](int64_t item, int) {
    for (int64_t row = item * chunk; row < std::min(rows, (item + 1) * chunk); ++row) {
      sum_results(results, weights + row * top_k, row * top_k, top_k, hidden, dtype, static_cast<char*>(y) + row * hidden * size);
    }
  });
}

// Adds up a row's results in the order of its experts.
void CpuKernels::sum_results(const float* results, const float* weights, int64_t first_pair, int64_t top_k, int64_t width,
                             Dtype dtype, void* y) const {
  float sums[256];
  for (int64_t begin = 0; begin < width; begin += 256) {
    const int64_t count = std::min<int64_t>(256, width - begin);
    std::fill(sums, sums + count, 0.f);
    for (int64_t i = 0; i < top_k; ++i) {
      const float* result = results + places_[static_cast<size_t>(first_pair + i)] * width + begin;
      for (int64_t c = 0; c < count; ++c) sums[c] += weights[i] * result[c];
    }
    if (dtype == Dtype::kFloat32) {
      std::copy(sums, sums + count, static_cast<float*>(y) + begin);
    } else {
      std::transform(sums, sums + count, static_cast<uint16_t*>(y) + begin, to_bfloat16);
    }
  }
}

}  // namespace asyncengine
