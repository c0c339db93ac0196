// Columns of sixteen rows of a weight as a tile of codes. Compiled for each instruction set. Layouts are those of ggml-common.h.
#include <bit>
#include <cstring>

#include "platform/cpu/block_vectors.h"
#include "platform/cpu/blocks.h"

namespace asyncengine {
namespace {

// Scales and offsets of the groups of a tile's columns, of each row side by side. Types with blocks of 32 columns have them in
// floats. Types with blocks of 256 have them in integers, two groups side by side, and floats of the block. Offsets of a block are
// negative, as they are subtracted.
struct TileNumbers {
  union {
    alignas(64) float floats[2][8][kTileRows];  // scales, then offsets
    alignas(64) int16_t pairs[2][8][kTileRows][2];
  };
  alignas(64) float scales[kTileRows], offsets[kTileRows];
};

// Columns of kTileRows rows of a weight: as they are decoded, and then interleaved.
struct Tile {
  union RowNumbers {
    float floats[2][8];
    int16_t ints[2][16];
  };
  alignas(64) uint8_t row_codes[kTileRows][kTileColumns];
  alignas(64) RowNumbers row_numbers[kTileRows];
  alignas(64) uint8_t codes[kTileRows * kTileColumns];  // [columns / 4][kTileRows][4]
  TileNumbers numbers;
};

// A row that is decoded to memory. Rows of other kinds have the same members but for `codes`, and do as they like with 32 codes
// that are put to their column of the tile; scales are there by then.
struct TileRow {
  uint8_t* codes;
  Tile::RowNumbers& numbers;
  float &scale, &offset;

  void put(int64_t column, Bytes own) { store_bytes(codes + column, own); }
};

inline float from_half(const uint8_t* bytes) {
  uint16_t half = 0;
  std::memcpy(&half, bytes, 2);
#if defined(__F16C__)
  return _cvtsh_ss(half);
#else
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16, magnitude = half & 0x7fffu;
  if (magnitude >= 0x7c00) return std::bit_cast<float>(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  if (magnitude >= 0x400) return std::bit_cast<float>(sign | ((magnitude << 13) + (112u << 23)));
  const float value = static_cast<float>(magnitude) * 0x1p-24f;  // subnormal
  return sign != 0 ? -value : value;
#endif
}

// Bytes of a word, less a number.
inline void widened(uint64_t bytes, int less, int16_t* to) {
  uint8_t numbers[8];  // a word that is stored in parts would be waited for
  std::memcpy(numbers, &bytes, sizeof(numbers));
  for (int i = 0; i < 8; ++i) to[i] = static_cast<int16_t>(numbers[i] - less);
}

inline uint64_t word_of(uint32_t low, uint32_t high) { return low | static_cast<uint64_t>(high) << 32; }

constexpr uint8_t kNumbersOfFourBits[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};  // plus 128

// A block of 32 columns: a half, perhaps an offset, perhaps fifth bits, and codes.
template <BlockType kType>
inline Bytes codes_of_32(const uint8_t* block) {
  constexpr bool kFive = kType == BlockType::kQ5_0 || kType == BlockType::kQ5_1;
  constexpr int64_t kBits = block_form(kType).offsets ? 4 : 2, kCodes = kBits + (kFive ? 4 : 0);
  if constexpr (kType == BlockType::kQ8_0) return flipped(load_bytes(block + kCodes), 0x80);
  const Bytes low = halves_of_16(block + kCodes);
  if constexpr (kFive) return with_bits(low, bits_of_4(block + kBits), 4);
  if constexpr (kType == BlockType::kIQ4_NL) return look_up(low, kNumbersOfFourBits);
  return low;
}

// Q4_K and Q5_K: scales and offsets of 6 bits in twelve bytes, four at a time.
template <bool kFive, class Row>
inline void decode_q45_k(const uint8_t* block, Row& to) {
#if defined(__AVX2__)
  // Lower halves of both in words 0 and 2, upper halves in 1 and 3, whose lower bits are in the third word of the twelve bytes.
  const __m128i header = _mm_loadu_si128(reinterpret_cast<const __m128i*>(block));
  const __m128i own = _mm_srlv_epi32(_mm_shuffle_epi32(header, 0xa5), _mm_set_epi32(2, 0, 2, 0));
  const __m128i rest = _mm_srlv_epi32(_mm_shuffle_epi32(header, 0xff), _mm_set_epi32(4, 0, 0, 0));
  const __m128i bytes = _mm_or_si128(_mm_and_si128(own, _mm_set_epi32(0x30303030, 0x3f3f3f3f, 0x30303030, 0x3f3f3f3f)),
                                     _mm_and_si128(rest, _mm_set_epi32(0x0f0f0f0f, 0, 0x0f0f0f0f, 0)));
  const __m256i numbers = _mm256_cvtepu8_epi16(bytes);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to.numbers.ints[0]), _mm256_castsi256_si128(numbers));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to.numbers.ints[1]), _mm256_extracti128_si256(numbers, 1));
#else
  uint32_t words[3];
  std::memcpy(words, block + 4, sizeof(words));
  const auto [first, second, third] = words;
  widened(word_of(first & 0x3f3f3f3fu, (third & 0x0f0f0f0fu) | (first >> 2 & 0x30303030u)), 0, to.numbers.ints[0]);
  widened(word_of(second & 0x3f3f3f3fu, (third >> 4 & 0x0f0f0f0fu) | (second >> 2 & 0x30303030u)), 0, to.numbers.ints[1]);
#endif
  to.scale = from_half(block);
  to.offset = -from_half(block + 2);
  const Bytes fifth = load_bytes(block + 16);  // a bit for each group
  for (int q = 0; q < 4; ++q) {
    const Bytes both = load_bytes(block + (kFive ? 48 : 16) + 32 * q);
    const Bytes low = field(both, 0, 15), high = field(both, 4, 15);
    to.put(64 * q, kFive ? with_bits(low, field(fifth, 2 * q, 1), 4) : low);
    to.put(64 * q + 32, kFive ? with_bits(high, field(fifth, 2 * q + 1, 1), 4) : high);
  }
}

template <class Row>
inline void decode_q6_k(const uint8_t* block, Row& to) {
  int8_t scales[16];
  std::memcpy(scales, block + 192, sizeof(scales));
  for (int i = 0; i < 16; ++i) to.numbers.ints[0][i] = scales[i];
  to.scale = from_half(block + 208);
  for (int half = 0; half < 2; ++half) {
    const Bytes low = load_bytes(block + 64 * half), more = load_bytes(block + 64 * half + 32);
    const Bytes high = load_bytes(block + 128 + 32 * half);
    const int64_t column = 128 * half;
    to.put(column, with_bits(field(low, 0, 15), field(high, 0, 3), 4));
    to.put(column + 32, with_bits(field(more, 0, 15), field(high, 2, 3), 4));
    to.put(column + 64, with_bits(field(low, 4, 15), field(high, 4, 3), 4));
    to.put(column + 96, with_bits(field(more, 4, 15), field(high, 6, 3), 4));
  }
}

template <class Row>
inline void decode_q2_k(const uint8_t* block, Row& to) {
  uint8_t both[16];
  std::memcpy(both, block, sizeof(both));
  for (int i = 0; i < 16; ++i) to.numbers.ints[0][i] = both[i] & 15;
  for (int i = 0; i < 16; ++i) to.numbers.ints[1][i] = both[i] >> 4;
  to.scale = from_half(block + 80);
  to.offset = -from_half(block + 82);
  for (int g = 0; g < 8; ++g) to.put(32 * g, field(load_bytes(block + 16 + g / 4 * 32), g % 4 * 2, 3));
}

template <class Row>
inline void decode_q3_k(const uint8_t* block, Row& to) {
  uint32_t words[3];  // four low bits of scales in two of them, two high bits in the third
  std::memcpy(words, block + 96, sizeof(words));
  auto four = [&](int word, int shift, int high_shift) {
    return (words[word] >> shift & 0x0f0f0f0fu) | (words[2] >> high_shift & 0x03030303u) << 4;
  };
  widened(word_of(four(0, 0, 0), four(1, 0, 2)), 32, to.numbers.ints[0]);
  widened(word_of(four(0, 4, 4), four(1, 4, 6)), 32, to.numbers.ints[0] + 8);
  to.scale = from_half(block + 108);
  const Bytes third = load_bytes(block);  // a bit for each group of 32
  for (int g = 0; g < 8; ++g) {
    const Bytes low = field(load_bytes(block + 32 + g / 4 * 32), g % 4 * 2, 3);
    to.put(32 * g, with_bits(low, field(third, g, 1), 2));
  }
}

template <class Row>
inline void decode_iq4_xs(const uint8_t* block, Row& to) {
  uint32_t low = 0;  // four bits of each scale, and two
  uint16_t high = 0;
  std::memcpy(&low, block + 4, sizeof(low));
  std::memcpy(&high, block + 2, sizeof(high));
  // Half of the bits that are side by side go up, until each scale has a byte.
  uint64_t lows = low, highs = high;
  lows = (lows | lows << 16) & 0x0000ffff0000ffffull;
  lows = (lows | lows << 8) & 0x00ff00ff00ff00ffull;
  lows = (lows | lows << 4) & 0x0f0f0f0f0f0f0f0full;
  highs = (highs | highs << 24) & 0x000000ff000000ffull;
  highs = (highs | highs << 12) & 0x000f000f000f000full;
  highs = (highs | highs << 6) & 0x0303030303030303ull;
  widened(lows | highs << 4, 32, to.numbers.ints[0]);
  to.scale = from_half(block);
  for (int g = 0; g < 8; ++g) to.put(32 * g, look_up(halves_of_16(block + 8 + 16 * g), kNumbersOfFourBits));
}

// Up to kTileColumns columns of a row.
template <BlockType kType, class Row>
inline void decode_row(const uint8_t* block, int64_t columns, Row& to) {
  if constexpr (!kIntegerScales<kType>) {
    for (int64_t g = 0; g < columns / 32; ++g, block += block_form(kType).bytes) {
      to.numbers.floats[0][g] = from_half(block);
      if constexpr (block_form(kType).offsets) to.numbers.floats[1][g] = from_half(block + 2);
      to.put(32 * g, codes_of_32<kType>(block));
    }
  } else if constexpr (kType == BlockType::kQ2_K) {
    decode_q2_k(block, to);
  } else if constexpr (kType == BlockType::kQ3_K) {
    decode_q3_k(block, to);
  } else if constexpr (kType == BlockType::kQ6_K) {
    decode_q6_k(block, to);
  } else if constexpr (kType == BlockType::kIQ4_XS) {
    decode_iq4_xs(block, to);
  } else {
    decode_q45_k<kType == BlockType::kQ5_K>(block, to);
  }
}

// 32 columns of a rounded row of x from `column` on.
struct RowColumns {
  const float* row;
  int64_t k, column;

  float scale() const { return row[k / 4 + column / 32]; }
  float sum() const { return row[k / 4 + k / 32 + column / 32]; }
};

// total + a group's products with a row of x. `g` counts groups of the tile. Zeros that were taken off the codes before leave the
// same part: both are integers below 2^24.
template <BlockType kType, bool kNoZero>
inline Floats add_group(Floats total, Ints products, const TileNumbers& numbers, int64_t g, const RowColumns& x) {
  constexpr BlockForm kForm = block_form(kType);
  const Floats scale = load_floats(numbers.floats[0][g]);
  Floats part = to_floats(products);
  if constexpr (kForm.offsets) {
    part = times_add(all_floats(x.sum()), load_floats(numbers.floats[1][g]), times(part, scale));
  } else {
    if constexpr (!kNoZero) part = times_add(all_floats(-static_cast<float>(kForm.zero)), all_floats(x.sum()), part);
    part = times(part, scale);
  }
  return times_add(part, all_floats(x.scale()), total);
}

// Scales of a group, in integers.
inline Ints group_scales(const TileNumbers& numbers, int64_t g) {
  const int16_t* pairs = numbers.pairs[0][g / 2][0];
  return g % 2 == 0 ? first_of_pairs(pairs) : second_of_pairs(pairs);
}

// Scales or offsets of a block's groups, times the sums of codes of rows of x.
template <BlockType kType, int kRows>
inline void multiply_sums(const int16_t (&of_groups)[8][kTileRows][2], const RoundedBlock* x, Ints (&sums)[kRows]) {
  for (int r = 0; r < kRows; ++r) sums[r] = no_ints();
  for (int64_t g = 0; g < kTileColumns / block_form(kType).group; g += 2) {
    for (int r = 0; r < kRows; ++r) {
      const int16_t* of_codes = block_form(kType).group == 32 ? x[r].sums_of_32 : x[r].sums_of_16;
      sums[r] = add_pairs(sums[r], of_groups[g / 2][0], of_codes + g);
    }
  }
}

// A block's scaled products as floats: they are exact, whatever their order was. `sums` of x's codes are times the offsets of their
// groups, or times the scales for a zero that is still in the codes.
template <BlockType kType, bool kNoZero>
inline Floats block_part(Ints products, Ints sums, Floats scales, Floats offsets) {
  constexpr BlockForm kForm = block_form(kType);
  if constexpr (kForm.zero != 0 && !kNoZero) products = added(products, times(sums, all_ints(-kForm.zero)));
  const Floats part = times(to_floats(products), scales);
  if constexpr (kForm.offsets) return times_add(to_floats(sums), offsets, part);
  return part;
}

// y [kRows, kTileRows] += a block's scaled products with rows of x.
template <BlockType kType, bool kNoZero, int kRows>
inline void add_blocks(const Ints (&products)[kRows], const TileNumbers& numbers, const RoundedBlock* x, float* y) {
  constexpr bool kOffsets = block_form(kType).offsets;
  Ints sums[kRows] = {};
  if constexpr (kOffsets || !kNoZero) multiply_sums<kType>(numbers.pairs[kOffsets ? 1 : 0], x, sums);
  const Floats scales = load_floats(numbers.scales), offsets = load_floats(numbers.offsets);
  for (int r = 0; r < kRows; ++r) {
    const Floats part = block_part<kType, kNoZero>(products[r], sums[r], scales, offsets);
    store_floats(y + r * kTileRows, times_add(part, all_floats(x[r].scale), load_floats(y + r * kTileRows)));
  }
}

// Asks for memory that the next tile reads. It may lie behind the weight: nothing is read of it.
inline void fetch(const uint8_t* p, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + i, 0, 2);
}

// Columns [begin, begin + columns) of a weight's rows, of which `count` are there: the last one stands for the others.
template <BlockType kType>
inline void decode_rows(const uint8_t* weight, int64_t count, int64_t k, int64_t begin, int64_t columns, Tile& tile) {
  constexpr BlockForm kForm = block_form(kType);
  const int64_t row_bytes = k / kForm.columns * kForm.bytes;
  for (int64_t row = 0; row < kTileRows; ++row) {
    const uint8_t* block = weight + (row < count ? row : count - 1) * row_bytes + begin / kForm.columns * kForm.bytes;
    fetch(block + kTileRows * row_bytes, columns / kForm.columns * kForm.bytes);
    TileRow own{tile.row_codes[row], tile.row_numbers[row], tile.numbers.scales[row], tile.numbers.offsets[row]};
    decode_row<kType>(block, columns, own);
  }
  static_assert(sizeof(Tile::RowNumbers) == 64);
  interleave(reinterpret_cast<const uint8_t*>(tile.row_numbers), 64, reinterpret_cast<uint8_t*>(tile.numbers.floats));
}

inline void interleave_codes(Tile& tile, int64_t columns) {
  for (int64_t c = 0; c < columns; c += 64) interleave(tile.row_codes[0] + c, kTileColumns, tile.codes + kTileRows * c);
}

// body.template operator()<kType>() of a type.
template <class Body>
inline void for_block_type(BlockType type, Body&& body) {
  switch (type) {
    case BlockType::kQ4_0: return body.template operator()<BlockType::kQ4_0>();
    case BlockType::kQ4_1: return body.template operator()<BlockType::kQ4_1>();
    case BlockType::kQ5_0: return body.template operator()<BlockType::kQ5_0>();
    case BlockType::kQ5_1: return body.template operator()<BlockType::kQ5_1>();
    case BlockType::kQ8_0: return body.template operator()<BlockType::kQ8_0>();
    case BlockType::kQ2_K: return body.template operator()<BlockType::kQ2_K>();
    case BlockType::kQ3_K: return body.template operator()<BlockType::kQ3_K>();
    case BlockType::kQ4_K: return body.template operator()<BlockType::kQ4_K>();
    case BlockType::kQ5_K: return body.template operator()<BlockType::kQ5_K>();
    case BlockType::kQ6_K: return body.template operator()<BlockType::kQ6_K>();
    case BlockType::kIQ4_NL: return body.template operator()<BlockType::kIQ4_NL>();
    case BlockType::kIQ4_XS: return body.template operator()<BlockType::kIQ4_XS>();
  }
}

}  // namespace
}  // namespace asyncengine
