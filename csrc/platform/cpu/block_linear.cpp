// Products of the CPU executor with weights in blocks of GGUF's types.
#include <algorithm>
#include <bit>
#include <cmath>
#include <string_view>

#include "platform/cpu/blocks.h"
#include "platform/cpu/kernels.h"
#include "platform/cpu/tiling.h"

namespace asyncengine {
namespace {

float load_element(const void* p, int64_t i, Dtype dtype) {
  if (dtype == Dtype::kFloat32) return static_cast<const float*>(p)[i];
  return std::bit_cast<float>(static_cast<uint32_t>(static_cast<const BFloat16*>(p)[i].bits) << 16);
}

void store_element(void* p, int64_t i, Dtype dtype, float value) {
  if (dtype == Dtype::kFloat32) {
    static_cast<float*>(p)[i] = value;
    return;
  }
  const uint32_t bits = std::bit_cast<uint32_t>(value), even = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  static_cast<BFloat16*>(p)[i].bits = static_cast<uint16_t>(std::isnan(value) ? bits >> 16 | 0x40u : even);
}

}  // namespace

const BlockKernels& select_block_kernels(const CpuIsa& isa) {
#if defined(__x86_64__)
  const std::string_view name = isa.name;
  __builtin_cpu_init();
  const bool wide = name == "amx" || name == "avx512";
  if (wide && block_kernels_vnni() != nullptr && __builtin_cpu_supports("avx512vnni")) return *block_kernels_vnni();
  if ((wide || name == "avx2") && block_kernels_avx2() != nullptr) return *block_kernels_avx2();
#endif
  (void)isa;
  return block_kernels_portable();
}

void CpuKernels::multiply_blocks(const CpuLinear& weights, const void* x, int64_t x_stride, int64_t rows, void* y, Dtype y_dtype,
                                 std::optional<Activation> activation) {
  const int64_t k = weights.k, y_stride = weights.total_rows(), floats = rounded_row_floats(k);
  const Dtype dtype = weights.dtype;
  float* rounded = packed_x_.reserve(rows * floats);
  for_row_chunks(rows, k, [&](int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; ++m) {
      block_kernels_.round_row(dtype, static_cast<const char*>(x) + m * x_stride * dtype_size(dtype), k, rounded + m * floats);
    }
  });
  int64_t tiles = 0;
  for (const CpuLinear::Matrix& matrix : weights.matrices) tiles += ceil_div(matrix.rows, kTileRows);
  const int64_t share = ceil_div(tiles, kItemsPerThread * pool_.num_threads());
  reserve_scratch(rows * kTileRows);
  pool_.parallel_for(ceil_div(tiles, share), [&](int64_t item, int thread) {
    const CpuLinear::Matrix* matrix = weights.matrices.data();
    int64_t tile = item * share, first_column = 0;
    for (int64_t left = std::min(share, tiles - tile); left > 0; --left, ++tile) {
      for (; tile >= ceil_div(matrix->rows, kTileRows); ++matrix) {
        tile -= ceil_div(matrix->rows, kTileRows);
        first_column += matrix->rows;
      }
      const int64_t n = tile * kTileRows, count = std::min(kTileRows, matrix->rows - n);
      const BlockForm form = block_form(*matrix->block_type);
      const float* sums = scratch(thread);
      block_kernels_.multiply({.type = *matrix->block_type,
                               .weight = static_cast<const uint8_t*>(matrix->weight) + n * (k / form.columns * form.bytes),
                               .weight_rows = count,
                               .k = k,
                               .x = rounded,
                               .rows = rows,
                               .y = scratch(thread)});
      for (int64_t m = 0; m < rows; ++m) {
        const int64_t at = m * y_stride + first_column + n;
        for (int64_t i = 0; i < count; ++i) {
          const float bias = matrix->bias == nullptr ? 0.f : load_element(matrix->bias, n + i, dtype);
          store_element(y, at + i, y_dtype, sums[m * kTileRows + i] + bias);
        }
        void* part = static_cast<char*>(y) + at * dtype_size(y_dtype);
        if (activation) isa_.activation(y_dtype, *activation, part, part, count, 0, 1);
      }
    }
  });
}

}  // namespace asyncengine
