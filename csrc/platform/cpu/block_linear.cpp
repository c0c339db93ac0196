// Products of the CPU executor with weights in blocks of GGUF's types.
#include <algorithm>
#include <bit>
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

void store_element(float* p, float value) { *p = value; }

void store_element(BFloat16* p, float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value), even = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  p->bits = static_cast<uint16_t>(value == value ? even : bits >> 16 | 0x40u);
}

// Sums [tiles][rows, kTileRows] and the bias [count], to columns of y. With tiles of AMX this is a fair part of the time.
template <class Element>
void write_rows(const float* sums, const float* bias, int64_t rows, int64_t count, Element* y, int64_t stride) {
  for (int64_t n = 0; n < count; n += kTileRows) {
    for (int64_t m = 0; m < rows; ++m, sums += kTileRows) {
      Element* to = y + m * stride + n;
      if (count - n >= kTileRows) {  // a constant count becomes vectors
        for (int64_t i = 0; i < kTileRows; ++i) store_element(to + i, sums[i] + bias[n + i]);
      } else {
        for (int64_t i = 0; i < count - n; ++i) store_element(to + i, sums[i] + bias[n + i]);
      }
    }
  }
}

}  // namespace

const BlockKernels& select_block_kernels(const CpuIsa& isa) {
#if defined(__x86_64__)
  const std::string_view name = isa.name;
  __builtin_cpu_init();
  const bool wide = name == "amx" || name == "avx512";
  if (wide && block_kernels_vnni() != nullptr && __builtin_cpu_supports("avx512vnni")) {
    const bool tiles = name == "amx" && block_kernels_amx() != nullptr && has_int8_tiles();
    return tiles ? *block_kernels_amx() : *block_kernels_vnni();
  }
  if ((wide || name == "avx2") && block_kernels_avx2() != nullptr) return *block_kernels_avx2();
#endif
  (void)isa;
  return block_kernels_portable();
}

void CpuKernels::multiply_blocks(const CpuLinear& weights, const void* x, int64_t x_stride, int64_t rows, void* y, Dtype y_dtype,
                                 std::optional<Activation> activation) {
  const int64_t k = weights.k, floats = rounded_row_floats(k), stride = weights.total_rows();
  float* rounded = packed_x_.reserve(round_up(rows, rows_of_part(rows)) * floats);
  for_row_chunks(rows, k, [&](int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; ++m) {
      const char* row = static_cast<const char*>(x) + m * x_stride * dtype_size(weights.dtype);
      block_kernels_.round_row(weights.dtype, row, k, rounded + m * floats);
    }
  });
  int64_t tiles = 0;
  for (const CpuLinear::Matrix& matrix : weights.matrices) tiles += ceil_div(matrix.rows, kTileRows);
  const int64_t share = ceil_div(tiles, kItemsPerThread * pool_.num_threads());
  reserve_scratch(std::min(share, block_kernels_.tiles) * (rows + 1) * kTileRows);  // sums, and a bias
  pool_.parallel_for(ceil_div(tiles, share), [&](int64_t item, int thread) {
    const CpuLinear::Matrix* matrix = weights.matrices.data();
    float* sums = scratch(thread);
    int64_t tile = item * share, first_column = 0, together = 0;
    for (int64_t left = std::min(share, tiles - tile); left > 0; left -= together, tile += together) {
      for (; tile >= ceil_div(matrix->rows, kTileRows); ++matrix) {
        tile -= ceil_div(matrix->rows, kTileRows);
        first_column += matrix->rows;
      }
      together = std::min({left, block_kernels_.tiles, ceil_div(matrix->rows, kTileRows) - tile});
      const int64_t n = tile * kTileRows, count = std::min(together * kTileRows, matrix->rows - n);
      const BlockForm form = block_form(*matrix->block_type);
      block_kernels_.multiply({.type = *matrix->block_type,
                               .weight = static_cast<const uint8_t*>(matrix->weight) + n * (k / form.columns * form.bytes),
                               .weight_rows = count,
                               .k = k,
                               .x = rounded,
                               .rows = rows,
                               .y = sums});
      char* to = static_cast<char*>(y) + (first_column + n) * dtype_size(y_dtype);
      float* bias = sums + together * rows * kTileRows;
      for (int64_t i = 0; i < count; ++i) {
        bias[i] = matrix->bias == nullptr ? 0.f : load_element(matrix->bias, n + i, weights.dtype);
      }
      if (y_dtype == Dtype::kFloat32) {
        write_rows(sums, bias, rows, count, reinterpret_cast<float*>(to), stride);
      } else {
        write_rows(sums, bias, rows, count, reinterpret_cast<BFloat16*>(to), stride);
      }
      for (int64_t m = 0; activation && m < rows; ++m, to += stride * dtype_size(y_dtype)) {
        isa_.activation(y_dtype, *activation, to, to, count, 0, 1);
      }
    }
  });
}

}  // namespace asyncengine
