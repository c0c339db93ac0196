// Products with weights in blocks of GGUF's types, read where the file is mapped.
//
// A row of a weight is decoded into codes of 8 bits without a sign, with a scale and an offset for each 16 columns: a
// number is scale * code + offset. Rows of x are rounded to 8 bits in groups of 32, so that products are of integers.
#pragma once

#include <cstdint>
#include <string_view>

namespace asyncengine {

// As numbered in files.
enum class BlockType : int {
  kQ4_0 = 2,
  kQ4_1 = 3,
  kQ5_0 = 6,
  kQ5_1 = 7,
  kQ8_0 = 8,
  kQ4_K = 12,
  kQ5_K = 13,
  kQ6_K = 14,
};

inline constexpr int64_t kCodeGroup = 16;  // columns with one scale
inline constexpr int64_t kCodeStep = 64;   // columns of a row are filled up to a multiple of it

// Bytes of a row of k columns, 0 if the type is not known or k is no whole number of blocks.
int64_t block_row_bytes(int type, int64_t k);

// A row of a weight, or of x, which has the same form: codes, then scales and offsets of groups. Filled up with zeros.
struct CodeRow {
  uint8_t* codes;  // [k]; of x they are signed
  float* scales;   // [k / 16]
  float* offsets;  // [k / 16]; of x the sum of a group's codes times its scale
};

struct BlockKernels {
  // k columns of a type, which block_row_bytes knows.
  void (*decode)(int type, const uint8_t* blocks, int64_t k, const CodeRow& row);
  // Groups of 32: the largest number becomes 127.
  void (*quantise)(const float* x, int64_t k, const CodeRow& row);
  // The sum of products of two rows of `filled` columns.
  float (*dot)(const CodeRow& weight, const CodeRow& x, int64_t filled);
};

const BlockKernels* block_kernels_vnni();  // null where the compiler has no such instructions
const BlockKernels& block_kernels_portable();
// The kernels for an instruction set of isa.h.
const BlockKernels& select_block_kernels(std::string_view isa);

}  // namespace asyncengine
