#include <algorithm>
#include <stdexcept>

#include "platform/cpu/blocks.h"
#include "platform/cpu/kernels.h"
#include "platform/cpu/tiling.h"

namespace asyncengine {
namespace {

// Rows of a weight that one thread takes at a time.
constexpr int64_t kRowsPerItem = 16;

// Floats of a row of codes with its scales and offsets.
int64_t row_floats(int64_t filled) { return filled / 4 + 2 * (filled / kCodeGroup); }

CodeRow row_at(float* memory, int64_t filled) {
  float* scales = memory + filled / 4;
  return {reinterpret_cast<uint8_t*>(memory), scales, scales + filled / kCodeGroup};
}

}  // namespace

int64_t block_row_bytes(int type, int64_t k) {
  struct Size {
    int type;
    int64_t columns, bytes;
  };
  constexpr Size kSizes[] = {{2, 32, 18}, {3, 32, 20},    {6, 32, 22},    {7, 32, 24},
                             {8, 32, 34}, {12, 256, 144}, {13, 256, 176}, {14, 256, 210}};
  for (const Size& size : kSizes) {
    if (size.type == type) return k % size.columns == 0 ? k / size.columns * size.bytes : 0;
  }
  return 0;
}

const BlockKernels& select_block_kernels(std::string_view isa) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if ((isa == "amx" || isa == "avx512") && block_kernels_vnni() != nullptr && __builtin_cpu_supports("avx512vnni")) {
    return *block_kernels_vnni();
  }
#endif
  (void)isa;
  return block_kernels_portable();
}

void CpuKernels::block_linear(int type, const void* weight, int64_t weight_rows, int64_t k, const float* x, int64_t rows, float* y,
                              int64_t y_stride) {
  const int64_t row_bytes = block_row_bytes(type, k), filled = round_up(k, kCodeStep), floats = row_floats(filled);
  if (row_bytes == 0) throw std::invalid_argument("no kernel reads these blocks");
  const BlockKernels& kernels = select_block_kernels(isa_.name);
  float* packed = packed_x_.reserve(rows * floats);
  std::fill(packed, packed + rows * floats, 0.f);
  pool_.parallel_for(rows, [&](int64_t m, int) { kernels.quantise(x + m * k, k, row_at(packed + m * floats, filled)); });
  reserve_scratch(floats);
  const auto* stored = static_cast<const uint8_t*>(weight);
  pool_.parallel_for(ceil_div(weight_rows, kRowsPerItem), [&](int64_t item, int thread) {
    float* memory = scratch(thread);
    std::fill(memory, memory + floats, 0.f);
    const CodeRow row = row_at(memory, filled);
    for (int64_t n = item * kRowsPerItem; n < std::min(weight_rows, (item + 1) * kRowsPerItem); ++n) {
      kernels.decode(type, stored + n * row_bytes, k, row);
      for (int64_t m = 0; m < rows; ++m) y[m * y_stride + n] = kernels.dot(row, row_at(packed + m * floats, filled), filled);
    }
  });
}

}  // namespace asyncengine
