// Products of the CPU executor with weights in blocks of GGUF's types.
#include <algorithm>
#include <string_view>

#include "platform/cpu/blocks.h"
#include "platform/cpu/kernels.h"
#include "platform/cpu/tiling.h"

namespace asyncengine {
namespace {

float load_element(const void* p, int64_t i, Dtype dtype) {
  if (dtype == Dtype::kFloat32) return static_cast<const float*>(p)[i];
  return as_float(static_cast<const BFloat16*>(p)[i]);
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

CpuKernels::RoundedRows CpuKernels::round_rows(const CpuLinear& weights, const void* x, int64_t x_stride, int64_t rows) {
  const int64_t k = weights.k;
  auto floats = [&](int64_t columns) {
    const auto own = [&](const auto& matrix) { return block_form(*matrix.block_type).columns == columns; };
    return std::ranges::any_of(weights.matrices, own) ? rounded_floats(columns, rows, k) : 0;
  };
  const int64_t of_32 = floats(32), of_256 = floats(256), aligned = round_up(of_32, 16);
  float* to = packed_x_.reserve(aligned + of_256);
  auto round = [&](int64_t columns, float* rounded) {
    for_row_chunks(rows, k, [&](int64_t begin, int64_t end) {
      for (int64_t m = begin; m < end; ++m) {
        const char* row = static_cast<const char*>(x) + m * x_stride * dtype_size(weights.dtype);
        block_kernels_.round_row(weights.dtype, row, k, columns, m, rows, rounded);
      }
    });
  };
  if (of_32 > 0) round(32, to);
  if (of_256 > 0) round(256, to + aligned);
  return {to, to + aligned};
}

void CpuKernels::multiply_blocks(const CpuLinear& weights, const void* x, int64_t x_stride, int64_t rows, void* y, Dtype y_dtype,
                                 std::optional<Activation> activation) {
  const int64_t k = weights.k, stride = weights.total_rows();
  const RoundedRows rounded = round_rows(weights, x, x_stride, rows);
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
                               .x = form.columns == 32 ? rounded.of_32 : rounded.of_256,
                               .rows = rows,
                               .y = sums});
      char* to = static_cast<char*>(y) + (first_column + n) * dtype_size(y_dtype);
      float* bias = sums + together * rows * kTileRows;
      for (int64_t i = 0; i < count; ++i) {
        bias[i] = matrix->bias == nullptr ? 0.f : load_element(matrix->bias, n + i, weights.dtype);
      }
      block_kernels_.write_rows({sums, bias, rows, count, stride}, y_dtype, to);
      for (int64_t m = 0; activation && m < rows; ++m, to += stride * dtype_size(y_dtype)) {
        isa_.activation(y_dtype, *activation, to, to, count, 0, 1);
      }
    }
  });
}

void CpuKernels::embed_blocks(const CpuLinear& table, const StepBatch& batch, void* y, float scale) {
  const CpuLinear::Matrix& matrix = table.matrices.front();
  const BlockRows rows{*matrix.block_type, static_cast<const uint8_t*>(matrix.weight), table.k, scale, table.dtype};
  for_row_chunks(batch.num_tokens, table.k, [&](int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; ++m) {
      block_kernels_.unpack_row(rows, batch.input_ids[m], static_cast<char*>(y) + m * table.k * dtype_size(table.dtype));
    }
  });
}

}  // namespace asyncengine
