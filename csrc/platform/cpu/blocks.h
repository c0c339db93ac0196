// Products with weights in blocks of GGUF's types, read where the file is mapped.
//
// Rows of x are rounded to 8 bits, as many columns together as a block has, so that products are of integers. Sixteen rows of a
// weight are decoded at a time, 256 columns of them into L1, where all rows of x pass by. An element of the result is a sum over
// the blocks in their order, whatever rows come with it. With fused multiplication and addition, which all but the portable kernels
// have, the bits are the same in every instruction set.
#pragma once

#include <bit>
#include <cstdint>

#include "platform/cpu/isa.h"
#include "platform/cpu/tiling.h"

namespace asyncengine {

inline float as_float(float value) { return value; }
inline float as_float(BFloat16 value) { return std::bit_cast<float>(static_cast<uint32_t>(value.bits) << 16); }

// As numbered in files.
enum class BlockType : int {
  kQ4_0 = 2,
  kQ4_1 = 3,
  kQ5_0 = 6,
  kQ5_1 = 7,
  kQ8_0 = 8,
  kQ2_K = 10,
  kQ3_K = 11,
  kQ4_K = 12,
  kQ5_K = 13,
  kQ6_K = 14,
  kIQ4_NL = 20,
  kIQ4_XS = 23,
};

// A number is scale * (code - zero), or scale * code + offset, with a code without a sign. In blocks of 256 columns the scale and
// the offset of a group are integers times those of the block.
struct BlockForm {
  int64_t columns = 0, bytes = 0;  // of a block; 0: the type is not known
  int64_t group = 32;  // columns that share a scale
  int zero = 0;
  bool offsets = false;  // of groups
};

constexpr BlockForm block_form(BlockType type) {
  switch (type) {
    case BlockType::kQ4_0: return {32, 18, 32, 8, false};
    case BlockType::kQ4_1: return {32, 20, 32, 0, true};
    case BlockType::kQ5_0: return {32, 22, 32, 16, false};
    case BlockType::kQ5_1: return {32, 24, 32, 0, true};
    case BlockType::kQ8_0: return {32, 34, 32, 128, false};
    case BlockType::kQ2_K: return {256, 84, 16, 0, true};
    case BlockType::kQ3_K: return {256, 110, 16, 4, false};
    case BlockType::kQ4_K: return {256, 144, 32, 0, true};
    case BlockType::kQ5_K: return {256, 176, 32, 0, true};
    case BlockType::kQ6_K: return {256, 210, 16, 32, false};
    case BlockType::kIQ4_NL: return {32, 18, 32, 128, false};
    case BlockType::kIQ4_XS: return {256, 136, 32, 128, false};
  }
  return {};
}

inline constexpr int64_t kTileRows = 16;  // rows of a weight that are decoded together
inline constexpr int64_t kTileColumns = 256;  // columns that are

template <BlockType kType>
inline constexpr bool kIntegerScales = block_form(kType).columns == kTileColumns;

// Many rows of x are multiplied by tiles of AMX in parts of up to 16, all of the same size. The last part may lack rows.
inline constexpr int64_t kPartRows = 16;
inline int64_t rows_of_part(int64_t rows) { return ceil_div(rows, ceil_div(rows, kPartRows)); }

// x for blocks of 32 columns, a row after the other, in floats: k codes, then scales of 32 columns and sums of their codes. A row
// takes an odd number of cache lines, so that the same columns of rows side by side are not in the same set of a cache.
inline int64_t rounded_row_floats(int64_t k) { return (ceil_div(k / 4 + k / 32 + k / 32, 16) | 1) * 16; }

// x for blocks of 256 columns: [block][row], with rows up to whole parts.
struct alignas(64) RoundedBlock {
  int8_t codes[256];
  float scale;
  int16_t sums_of_32[8], sums_of_16[16];  // of codes
};

inline int64_t rows_of_parts(int64_t rows) { return round_up(rows, rows_of_part(rows)); }
// The size of x for blocks of so many columns.
inline int64_t rounded_floats(int64_t block_columns, int64_t rows, int64_t k) {
  constexpr int64_t kFloats = sizeof(RoundedBlock) / sizeof(float);
  return rows_of_parts(rows) * (block_columns == 32 ? rounded_row_floats(k) : k / kTileColumns * kFloats);
}

struct BlockTask {
  BlockType type;
  const uint8_t* weight;
  int64_t weight_rows;  // up to kTileRows in each tile that BlockKernels::tiles allows
  int64_t k;  // a whole number of blocks
  const float* x;  // rounded for the type's blocks, of whole parts; rows behind `rows` are not used
  int64_t rows;
  float* y;  // [tiles of the weight][rows, kTileRows]
};

// Sums of tasks, and a bias of the same columns.
struct BlockSums {
  const float *sums, *bias;  // [tiles][rows, kTileRows] and [count]
  int64_t rows, count;
  int64_t stride;  // elements from row to row of what is written
};

// Rows of a weight to the numbers that they are, times `scale`.
struct BlockRows {
  BlockType type;
  const uint8_t* weight;
  int64_t k;
  float scale;
  Dtype dtype;
};

struct BlockKernels {
  const char* name;
  int64_t tiles;  // of a weight that a task may have
  // One row of `rows`, to its place in x for blocks of so many columns.
  void (*round_row)(Dtype, const void* row, int64_t k, int64_t block_columns, int64_t at, int64_t rows, float* x);
  void (*multiply)(const BlockTask&);
  void (*write_rows)(const BlockSums&, Dtype, void* y);
  void (*unpack_row)(const BlockRows&, int64_t row, void* to);
};

// Null where the compiler's target has no such instructions. Ask for AMX only where AVX-512 has VNNI: few rows take that.
const BlockKernels* block_kernels_amx();
const BlockKernels* block_kernels_vnni();
const BlockKernels* block_kernels_avx2();
const BlockKernels& block_kernels_portable();
// The kernels for an instruction set of isa.h on this machine.
const BlockKernels& select_block_kernels(const CpuIsa& isa);

}  // namespace asyncengine
