// Products of blocks by vectors. Compiled for each instruction set.
#include <bit>
#include <cmath>
#include <cstring>

#include "platform/cpu/block_row.inl"

namespace asyncengine {
namespace {

template <BlockType kType>
inline constexpr bool kZeroTaken = kWideLessZero && block_form(kType).zero > 64;

// The products of a group's codes with rows of x, `stride` bytes apart.
template <BlockType kType, int kRows>
inline void group_products(const uint8_t* codes, const int8_t* x, int64_t stride, Ints (&products)[kRows]) {
  constexpr BlockForm kForm = block_form(kType);
  for (int r = 0; r < kRows; ++r) products[r] = no_ints();
  for (int64_t c = 0; c < kForm.group; c += 4) {
    for (int r = 0; r < kRows; ++r) {
      products[r] = add_products<(kForm.zero > 64)>(products[r], codes + kTileRows * c, x + r * stride + c);
    }
  }
}

// y [kRows, kTileRows] += rows of x times columns [begin, begin + columns) of a tile.
template <BlockType kType, int kRows>
inline void add_tile(const Tile& tile, const float* x, int64_t k, int64_t begin, int64_t columns, float* y) {
  const int64_t stride = rounded_row_floats(k);
  const auto* codes = reinterpret_cast<const int8_t*>(x) + begin;
  Floats total[kRows];
  for (int r = 0; r < kRows; ++r) total[r] = load_floats(y + r * kTileRows);
  for (int64_t c = 0; c < columns; c += 32) {
    Ints products[kRows];
    group_products<kType>(tile.codes + kTileRows * c, codes + c, stride * static_cast<int64_t>(sizeof(float)), products);
    for (int r = 0; r < kRows; ++r) {
      total[r] = add_group<kType, kZeroTaken<kType>>(total[r], products[r], tile.numbers, c / 32, {x + r * stride, k, begin + c});
    }
  }
  for (int r = 0; r < kRows; ++r) store_floats(y + r * kTileRows, total[r]);
}

// The same with blocks of 256 columns.
template <BlockType kType, int kRows>
inline void add_tile(const Tile& tile, const RoundedBlock* x, float* y) {
  constexpr int64_t kGroup = block_form(kType).group;
  Ints sums[kRows];
  for (int r = 0; r < kRows; ++r) sums[r] = no_ints();
  for (int64_t g = 0; g < kTileColumns / kGroup; ++g) {
    Ints products[kRows];
    group_products<kType>(tile.codes + kTileRows * kGroup * g, x->codes + kGroup * g, sizeof(RoundedBlock), products);
    const Ints scales = group_scales(tile.numbers, g);
    for (int r = 0; r < kRows; ++r) sums[r] = added(sums[r], times(products[r], scales));
  }
  add_blocks<kType, kZeroTaken<kType>>(sums, tile.numbers, x, y);
}

// One row, of codes that are not interleaved.
template <BlockType kType>
inline void add_row(const Tile& tile, const float* row, int64_t k, int64_t begin, int64_t columns, float* y) {
  const auto* codes = reinterpret_cast<const int8_t*>(row) + begin;
  Floats total = load_floats(y);
  for (int64_t c = 0; c < columns; c += 64) {
    Ints products[4];
    row_products<(block_form(kType).zero > 64)>(tile.row_codes[0] + c, kTileColumns, codes + c, products);
    for (int64_t i = 0; i < 2 && c + 32 * i < columns; ++i) {
      const Ints own = added(products[2 * i], products[2 * i + 1]);
      total = add_group<kType, kZeroTaken<kType>>(total, own, tile.numbers, c / 32 + i, {row, k, begin + c + 32 * i});
    }
  }
  store_floats(y, total);
}

template <BlockType kType>
inline void add_row(const Tile& tile, const RoundedBlock* x, float* y) {
  constexpr int64_t kGroup = block_form(kType).group, kGroups = 64 / kGroup;
  Ints sums[1] = {no_ints()};
  for (int64_t c = 0; c < kTileColumns; c += 64) {
    Ints products[4];
    row_products<(block_form(kType).zero > 64)>(tile.row_codes[0] + c, kTileColumns, x->codes + c, products);
    for (int64_t i = 0; i < kGroups; ++i) {
      const Ints own = kGroup == 16 ? products[i] : added(products[2 * i], products[2 * i + 1]);
      sums[0] = added(sums[0], times(own, group_scales(tile.numbers, c / kGroup + i)));
    }
  }
  add_blocks<kType, kZeroTaken<kType>>(sums, tile.numbers, x, y);
}

// y [rows, kTileRows] += x times columns [begin, begin + columns) of a tile that is decoded.
template <BlockType kType>
inline void add_rows(Tile& tile, const BlockTask& task, int64_t begin, int64_t columns) {
  const int64_t stride = rounded_row_floats(task.k);
  const auto* blocks = reinterpret_cast<const RoundedBlock*>(task.x) + begin / kTileColumns * rows_of_parts(task.rows);
  auto add = [&]<int kRows>(int64_t m) {
    float* y = task.y + m * kTileRows;
    if constexpr (kIntegerScales<kType>) {
      add_tile<kType, kRows>(tile, blocks + m, y);
    } else {
      add_tile<kType, kRows>(tile, task.x + m * stride, task.k, begin, columns, y);
    }
  };
  if (task.rows == 1) {
    if constexpr (kIntegerScales<kType>) return add_row<kType>(tile, blocks, task.y);
    return add_row<kType>(tile, task.x, task.k, begin, columns, task.y);
  }
  interleave_codes(tile, columns);
  int64_t m = 0;
  for (; m + kRowsTogether <= task.rows; m += kRowsTogether) add.template operator()<kRowsTogether>(m);
  for (; m < task.rows; ++m) add.template operator()<1>(m);
}

template <BlockType kType>
void multiply_tile(const BlockTask& task) {
  if constexpr (kRowIsDirect<kType>) {
    if (task.rows == 1 && task.weight_rows == kTileRows) return multiply_row<kType>(task);
  }
  Tile tile;
  if (task.k % kTileColumns != 0) std::memset(&tile, 0, sizeof(tile));  // whole vectors are interleaved
  std::memset(task.y, 0, static_cast<size_t>(task.rows * kTileRows) * sizeof(float));
  for (int64_t begin = 0; begin < task.k; begin += kTileColumns) {
    const int64_t columns = task.k - begin < kTileColumns ? task.k - begin : kTileColumns;
    decode_rows<kType>(task.weight, task.weight_rows, task.k, begin, columns, tile);
    add_rows<kType>(tile, task, begin, columns);
  }
}

void multiply(const BlockTask& task) {
  for_block_type(task.type, [&]<BlockType kType>() { multiply_tile<kType>(task); });
}

// Numbers to codes and their scale. The largest number becomes 127. Ties go to even. Sums are of each 16 codes. Compilers make
// vectors of loops that they do not unroll.
template <int kColumns, class Element>
float round_group(const Element* x, int8_t* codes, int (&sums)[kColumns / 16]) {
  float values[kColumns];
  uint32_t most = 0;  // bits of the largest number, or of NaN, which is above
#pragma GCC unroll 1
  for (int i = 0; i < kColumns; ++i) values[i] = as_float(x[i]);
#pragma GCC unroll 1
  for (float value : values) {
    const uint32_t bits = std::bit_cast<uint32_t>(value) & 0x7fffffffu;
    most = bits > most ? bits : most;
  }
  const float largest = std::bit_cast<float>(most);
  const float inverse = largest > 1e-36f ? 127.f / largest : 0.f;  // what is smaller becomes 0
  int32_t whole[kColumns];
#pragma GCC unroll 1
  for (int i = 0; i < kColumns; ++i) {
    const float code = std::nearbyint(values[i] * inverse);
    const bool fits = (code >= -127.f) & (code <= 127.f);
    whole[i] = static_cast<int32_t>(fits ? code : 127.f);  // NaN has a scale of NaN
  }
#pragma GCC unroll 1
  for (int i = 0; i < kColumns; ++i) codes[i] = static_cast<int8_t>(whole[i]);
#pragma GCC unroll 1
  for (int part = 0; part < kColumns / 16; ++part) {
    sums[part] = 0;
#pragma GCC unroll 1
    for (int i = 0; i < 16; ++i) sums[part] += whole[16 * part + i];
  }
  return largest / 127.f;
}

template <class Element>
void round_row(const Element* x, int64_t k, float* row) {
  auto* codes = reinterpret_cast<int8_t*>(row);
  float *scales = row + k / 4, *whole_sums = scales + k / 32;
  for (int64_t c = 0; c < k; c += 32) {
    int sums[2];
    *scales++ = round_group<32>(x + c, codes + c, sums);
    *whole_sums++ = static_cast<float>(sums[0] + sums[1]);
  }
}

template <class Element>
void round_row(const Element* x, int64_t k, RoundedBlock* block, int64_t stride) {
  for (int64_t c = 0; c < k; c += kTileColumns, block += stride) {
    int sums[16];
    block->scale = round_group<256>(x + c, block->codes, sums);
    for (int i = 0; i < 16; ++i) block->sums_of_16[i] = static_cast<int16_t>(sums[i]);
    for (int i = 0; i < 8; ++i) block->sums_of_32[i] = static_cast<int16_t>(sums[2 * i] + sums[2 * i + 1]);
  }
}

void round_row_of(Dtype dtype, const void* row, int64_t k, int64_t block_columns, int64_t at, int64_t rows, float* x) {
  auto round = [&](const auto* numbers) {
    if (block_columns == 32) return round_row(numbers, k, x + at * rounded_row_floats(k));
    round_row(numbers, k, reinterpret_cast<RoundedBlock*>(x) + at, rows_of_parts(rows));
  };
  if (dtype == Dtype::kFloat32) return round(static_cast<const float*>(row));
  round(static_cast<const BFloat16*>(row));
}

inline void store_element(float* p, float value) { *p = value; }

inline void store_element(BFloat16* p, float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value), even = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  p->bits = static_cast<uint16_t>(value == value ? even : bits >> 16 | 0x40u);
}

// Row by row, so that whole cache lines of y are written.
template <class Element>
void write_rows(const BlockSums& from, Element* y) {
  for (int64_t m = 0; m < from.rows; ++m, y += from.stride) {
    const float* sums = from.sums + m * kTileRows;
    for (int64_t n = 0; n < from.count; n += kTileRows, sums += from.rows * kTileRows) {
      if (from.count - n >= kTileRows) {  // a constant count becomes vectors
#pragma GCC unroll 1
        for (int64_t i = 0; i < kTileRows; ++i) store_element(y + n + i, sums[i] + from.bias[n + i]);
      } else {
        for (int64_t i = 0; i < from.count - n; ++i) store_element(y + n + i, sums[i] + from.bias[n + i]);
      }
    }
  }
}

void write_rows_of(const BlockSums& from, Dtype dtype, void* y) {
  if (dtype == Dtype::kFloat32) return write_rows(from, static_cast<float*>(y));
  write_rows(from, static_cast<BFloat16*>(y));
}

// A product with a scale is exact in float32, as a half, the scale of a group and a code have 24 bits together.
template <BlockType kType, class Element>
void unpack_row(const uint8_t* block, int64_t k, float scale, Element* to) {
  constexpr BlockForm kForm = block_form(kType);
  alignas(64) uint8_t codes[kTileColumns];
  Tile::RowNumbers numbers;
  float scale_of_block = 1, offset_of_block = 1;
  for (int64_t begin = 0; begin < k; begin += kTileColumns) {
    const int64_t columns = k - begin < kTileColumns ? k - begin : kTileColumns;
    TileRow row{codes, numbers, scale_of_block, offset_of_block};
    decode_row<kType>(block, columns, row);
    for (int64_t c = 0; c < columns; c += kForm.group) {
      float own[2] = {0, 0};  // a scale and an offset
      for (int i = 0; i < (kForm.offsets ? 2 : 1); ++i) {
        if constexpr (kIntegerScales<kType>) {
          own[i] = (i == 0 ? scale_of_block : offset_of_block) * static_cast<float>(numbers.ints[i][c / kForm.group]);
        } else {
          own[i] = numbers.floats[i][c / kForm.group];
        }
      }
#pragma GCC unroll 1
      for (int64_t i = c; i < c + kForm.group; ++i) {
        const float number = own[0] * static_cast<float>(codes[i] - kForm.zero);
        store_element(to + begin + i, (kForm.offsets ? number + own[1] : number) * scale);
      }
    }
    block += columns / kForm.columns * kForm.bytes;
  }
}

void unpack_row_of(const BlockRows& rows, int64_t row, void* to) {
  for_block_type(rows.type, [&]<BlockType kType>() {
    const uint8_t* first = rows.weight + row * (rows.k / block_form(kType).columns * block_form(kType).bytes);
    if (rows.dtype == Dtype::kFloat32) return unpack_row<kType>(first, rows.k, rows.scale, static_cast<float*>(to));
    unpack_row<kType>(first, rows.k, rows.scale, static_cast<BFloat16*>(to));
  });
}

constexpr BlockKernels kKernels{kVectors, 1, round_row_of, multiply, write_rows_of, unpack_row_of};

}  // namespace
}  // namespace asyncengine
