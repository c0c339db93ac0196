// Columns of sixteen rows of a weight as a tile of codes. Compiled for each instruction set. Layouts are those of ggml-common.h.
#include <bit>
#include <cstring>

#include "platform/cpu/block_vectors.h"
#include "platform/cpu/blocks.h"

namespace asyncengine {
namespace {

constexpr int64_t kTileGroups = kTileColumns / 16;

// Columns of kTileRows rows of a weight: as they are decoded, and then interleaved, a number of each row side by side.
struct Tile {
  alignas(64) uint8_t row_codes[kTileRows][kTileColumns];
  alignas(64) float row_scales[kTileRows][kTileGroups];
  alignas(64) float row_offsets[kTileRows][kTileGroups];    // where the type has offsets
  alignas(64) uint8_t codes[kTileRows * kTileColumns];      // [columns / 4][kTileRows][4]
  alignas(64) float scales[kTileGroups][kTileRows];
  alignas(64) float offsets[kTileGroups][kTileRows];
};

// A row of a tile that is decoded.
struct TileRow {
  uint8_t* codes;
  float *scales, *offsets;
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

// to = scale * numbers
template <int kCount, class Number>
inline void scaled(float scale, const Number* numbers, float* to) {
  for (int i = 0; i < kCount; ++i) to[i] = scale * static_cast<float>(numbers[i]);
}

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
template <bool kFive>
inline void decode_q45_k(const uint8_t* block, const TileRow& to) {
  uint32_t first = 0, second = 0, third = 0;
  std::memcpy(&first, block + 4, 4);
  std::memcpy(&second, block + 8, 4);
  std::memcpy(&third, block + 12, 4);
  // Whole words, as bytes that are stored in parts and read together would be waited for.
  const uint64_t scales = (first & 0x3f3f3f3fu) | static_cast<uint64_t>((third & 0x0f0f0f0fu) | (first >> 2 & 0x30303030u)) << 32;
  const uint64_t offsets = (second & 0x3f3f3f3fu) | static_cast<uint64_t>((third >> 4 & 0x0f0f0f0fu) | (second >> 2 & 0x30303030u))
                                                        << 32;
  uint8_t numbers[8];
  std::memcpy(numbers, &scales, 8);
  scaled<8>(from_half(block), numbers, to.scales);
  std::memcpy(numbers, &offsets, 8);
  scaled<8>(-from_half(block + 2), numbers, to.offsets);
  const Bytes fifth = load_bytes(block + 16);  // a bit for each group
  for (int q = 0; q < 4; ++q) {
    const Bytes both = load_bytes(block + (kFive ? 48 : 16) + 32 * q);
    const Bytes low = field(both, 0, 15), high = field(both, 4, 15);
    store_bytes(to.codes + 64 * q, kFive ? with_bits(low, field(fifth, 2 * q, 1), 4) : low);
    store_bytes(to.codes + 64 * q + 32, kFive ? with_bits(high, field(fifth, 2 * q + 1, 1), 4) : high);
  }
}

inline void decode_q6_k(const uint8_t* block, const TileRow& to) {
  int8_t scales[16];
  std::memcpy(scales, block + 192, sizeof(scales));
  scaled<16>(from_half(block + 208), scales, to.scales);
  for (int half = 0; half < 2; ++half) {
    const Bytes low = load_bytes(block + 64 * half), more = load_bytes(block + 64 * half + 32);
    const Bytes high = load_bytes(block + 128 + 32 * half);
    uint8_t* out = to.codes + 128 * half;
    store_bytes(out, with_bits(field(low, 0, 15), field(high, 0, 3), 4));
    store_bytes(out + 32, with_bits(field(more, 0, 15), field(high, 2, 3), 4));
    store_bytes(out + 64, with_bits(field(low, 4, 15), field(high, 4, 3), 4));
    store_bytes(out + 96, with_bits(field(more, 4, 15), field(high, 6, 3), 4));
  }
}

inline void decode_q2_k(const uint8_t* block, const TileRow& to) {
  uint8_t scales[16], offsets[16];
  for (int g = 0; g < 16; ++g) {
    scales[g] = block[g] & 15;
    offsets[g] = block[g] >> 4;
  }
  scaled<16>(from_half(block + 80), scales, to.scales);
  scaled<16>(-from_half(block + 82), offsets, to.offsets);
  for (int g = 0; g < 8; ++g) store_bytes(to.codes + 32 * g, field(load_bytes(block + 16 + g / 4 * 32), g % 4 * 2, 3));
}

inline void decode_q3_k(const uint8_t* block, const TileRow& to) {
  const uint8_t* packed = block + 96;
  int8_t scales[16];
  for (int g = 0; g < 16; ++g) {
    const int low = g < 8 ? packed[g] & 15 : packed[g - 8] >> 4;
    scales[g] = static_cast<int8_t>((low | (packed[8 + g % 4] >> (g / 4 * 2) & 3) << 4) - 32);
  }
  scaled<16>(from_half(block + 108), scales, to.scales);
  const Bytes third = load_bytes(block);  // a bit for each group of 32
  for (int g = 0; g < 8; ++g) {
    const Bytes low = field(load_bytes(block + 32 + g / 4 * 32), g % 4 * 2, 3);
    store_bytes(to.codes + 32 * g, with_bits(low, field(third, g, 1), 2));
  }
}

inline void decode_iq4_xs(const uint8_t* block, const TileRow& to) {
  int8_t scales[8];
  for (int g = 0; g < 8; ++g) {
    const int low = block[4 + g / 2] >> (g % 2 * 4) & 15, high = block[2 + g / 4] >> (g % 4 * 2) & 3;
    scales[g] = static_cast<int8_t>((low | high << 4) - 32);
  }
  scaled<8>(from_half(block), scales, to.scales);
  for (int g = 0; g < 8; ++g) store_bytes(to.codes + 32 * g, look_up(halves_of_16(block + 8 + 16 * g), kNumbersOfFourBits));
}

// Up to kTileColumns columns of a row.
template <BlockType kType>
inline void decode_row(const uint8_t* block, int64_t columns, const TileRow& to) {
  if constexpr (block_form(kType).columns == 32) {
    for (int64_t g = 0; g < columns / 32; ++g, block += block_form(kType).bytes) {
      to.scales[g] = from_half(block);
      if constexpr (block_form(kType).offsets) to.offsets[g] = from_half(block + 2);
      store_bytes(to.codes + 32 * g, codes_of_32<kType>(block));
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

// total + a group's products with a row of x, whose codes have this sum and scale. `g` counts groups of the tile. Zeros that
// were taken off the codes before leave the same part: both are integers below 2^24.
template <BlockType kType, bool kZeroTaken>
inline Floats add_group(Floats total, Ints products, const Tile& tile, int64_t g, float sum, float scale) {
  constexpr BlockForm kForm = block_form(kType);
  Floats part = to_floats(products);
  if constexpr (kForm.offsets) {
    part = times_add(all_floats(sum), load_floats(tile.offsets[g]), times(part, load_floats(tile.scales[g])));
  } else {
    if constexpr (!kZeroTaken) part = times_add(all_floats(-static_cast<float>(kForm.zero)), all_floats(sum), part);
    part = times(part, load_floats(tile.scales[g]));
  }
  return times_add(part, all_floats(scale), total);
}

// The sums of the codes of a row of x, by the groups of a type.
template <BlockType kType>
inline const float* sums_of(const float* row, int64_t k) {
  return row + k / 4 + (block_form(kType).group == 32 ? k / 32 : k / 16);
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
    decode_row<kType>(block, columns, {tile.row_codes[row], tile.row_scales[row], tile.row_offsets[row]});
  }
  interleave(reinterpret_cast<const uint8_t*>(tile.row_scales), 64, reinterpret_cast<uint8_t*>(tile.scales));
  if constexpr (kForm.offsets) {
    interleave(reinterpret_cast<const uint8_t*>(tile.row_offsets), 64, reinterpret_cast<uint8_t*>(tile.offsets));
  }
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
