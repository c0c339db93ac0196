// Products of blocks of 256 columns with many rows of x, by tiles (block_tiles.inl says which).
//
// A code times the integer scale of its group is low + high * 2^n, two digits that fit bytes. So tiles multiply digits, and sums
// leave them after a whole block. Each digit has a tile of sums, in each of two parts of x: all four that there are. Vectors
// scale and add the sums before while tiles multiply, a quarter of the rows after each 64 columns.
#include <cstring>
#include <utility>

#include "platform/cpu/block_tile.inl"

namespace asyncengine {
namespace {

constexpr int64_t kWeightTiles = 4;  // of a weight in a task, whose results lie side by side
constexpr int64_t kTilesTogether = 2;  // that meet the same parts of x, and stay in L1 with them
constexpr int64_t kSums = kPartRows * kTileRows;
constexpr int64_t kDigitBytes = kTileRows * kTileColumns;

template <BlockType kType>
inline void take_zero(Tile& tile, int64_t columns) {
  constexpr int kZero = block_form(kType).zero;
  if constexpr (kZero != 0) {
    for (int64_t i = 0; i < kTileRows * columns; i += 32) {
      store_bytes(tile.codes + i, less(load_bytes(tile.codes + i), kZero));
    }
  }
}

// A product of Q2_K has 6 bits. Those of other types have up to 14 with a sign: the low digit has 7 of them. A product of Q4_K is
// one of 4 bits and a scale of 6, and its digits are products with the lower and with the higher half of the scale.
template <BlockType kType>
inline constexpr int kDigits = kType == BlockType::kQ2_K ? 1 : 2;
template <BlockType kType>
inline constexpr bool kScaleHasDigits = kType == BlockType::kQ2_K || kType == BlockType::kQ4_K;
template <BlockType kType>
inline constexpr int kDigitBits = kScaleHasDigits<kType> ? 3 : 7;

#if defined(__AVX512VNNI__) && defined(__AVX512VL__)

inline __m512i twice(__m512i halves) { return _mm512_or_si512(_mm512_slli_epi32(halves, 16), halves); }

// Codes [kTileRows][4] times the scales of their rows. Two products of bytes without a sign fit the 16 bits in which codes are.
template <BlockType kType>
inline void write_digits(const uint8_t* codes, Ints scales, int8_t* digits) {
  const __m512i all = _mm512_loadu_si512(codes);
  if constexpr (kDigits<kType> == 1) {
    _mm512_storeu_si512(digits, _mm512_mullo_epi16(all, twice(scales)));
  } else if constexpr (kScaleHasDigits<kType>) {
    const __m512i low = twice(_mm512_and_si512(scales, _mm512_set1_epi32(7))), high = twice(_mm512_srli_epi32(scales, 3));
    _mm512_storeu_si512(digits, _mm512_mullo_epi16(all, low));
    _mm512_storeu_si512(digits + kDigitBytes, _mm512_mullo_epi16(all, high));
  } else {
    const __m512i own = twice(_mm512_and_si512(scales, _mm512_set1_epi32(0xffff))), first = _mm512_set1_epi16(255);
    const __m512i even = _mm512_mullo_epi16(_mm512_srai_epi16(_mm512_slli_epi16(all, 8), 8), own);
    const __m512i odd = _mm512_mullo_epi16(_mm512_srai_epi16(all, 8), own);
    const __m512i low = _mm512_or_si512(_mm512_and_si512(even, first), _mm512_slli_epi16(odd, 8));
    const __m512i high = _mm512_or_si512(_mm512_and_si512(_mm512_srai_epi16(even, 7), first),
                                         _mm512_andnot_si512(first, _mm512_slli_epi16(odd, 1)));
    _mm512_storeu_si512(digits, _mm512_and_si512(low, _mm512_set1_epi8(127)));
    _mm512_storeu_si512(digits + kDigitBytes, high);
  }
}

template <BlockType kType>
inline Ints sum_of_digits(Ints low, Ints high) {
  return _mm512_add_epi32(low, _mm512_slli_epi32(high, kDigitBits<kType>));
}

#else

template <BlockType kType>
inline void write_digits(const uint8_t* codes, const Ints& scales, int8_t* digits) {
  constexpr int kBase = 1 << kDigitBits<kType>;
  for (int i = 0; i < 4 * kTileRows; ++i) {
    const int code = static_cast<int8_t>(codes[i]), scale = scales.elements[i / 4];
    if constexpr (kDigits<kType> == 1) {
      digits[i] = static_cast<int8_t>(code * scale);
    } else {
      const int low = kScaleHasDigits<kType> ? code * (scale & (kBase - 1)) : code * scale & (kBase - 1);
      digits[i] = static_cast<int8_t>(low);
      digits[kDigitBytes + i] = static_cast<int8_t>((code * scale - low) / kBase);
    }
  }
}

template <BlockType kType>
inline Ints sum_of_digits(const Ints& low, const Ints& high) {
  return each_element<Ints>([&](int i) { return low.elements[i] + (high.elements[i] << kDigitBits<kType>); });
}

#endif

// A tile of a weight.
template <BlockType kType>
struct DigitTile {
  alignas(64) int8_t digits[kDigits<kType> * kDigitBytes];
  TileNumbers numbers;
};

template <BlockType kType>
inline void decode_digits(const uint8_t* weight, int64_t count, int64_t k, int64_t begin, Tile& tile, DigitTile<kType>& to) {
  constexpr int64_t kGroup = block_form(kType).group;
  decode_rows<kType>(weight, count, k, begin, kTileColumns, tile);
  interleave_codes(tile, kTileColumns);
  take_zero<kType>(tile, kTileColumns);
  for (int64_t c = 0; c < kTileColumns; c += kGroup) {
    const Ints scales = group_scales(tile.numbers, c / kGroup);
    for (int64_t at = kTileRows * c; at < kTileRows * (c + kGroup); at += 4 * kTileRows) {
      write_digits<kType>(tile.codes + at, scales, to.digits + at);
    }
  }
  to.numbers = tile.numbers;
}

// Sums that have left tiles and are to be added.
struct Leftover {
  const int32_t* sums;  // [part][digit][kPartRows, kTileRows]
  const TileNumbers* numbers;
  const RoundedBlock* x;
  int64_t rows, part;  // rows of both parts, and of the first
  float* y;            // [rows, kTileRows]
};

template <BlockType kType, int kRows>
inline void add_digits(const int32_t* sums, const TileNumbers& numbers, const RoundedBlock* x, float* y) {
  Ints products[kRows];
  for (int r = 0; r < kRows; ++r) {
    products[r] = load_ints(sums + r * kTileRows);
    if constexpr (kDigits<kType> == 2) products[r] = sum_of_digits<kType>(products[r], load_ints(sums + kSums + r * kTileRows));
  }
  add_blocks<kType, true>(products, numbers, x, y);
}

// Half of the rows of a part.
template <BlockType kType>
inline void add_quarter(const Leftover& left, int64_t quarter) {
  constexpr int kHalf = kPartRows / 2;
  const int64_t part = quarter / 2, begin = quarter % 2 * kHalf, first = part * left.part + begin;
  const int64_t of_part = left.rows - part * left.part < left.part ? left.rows - part * left.part : left.part;
  if (of_part <= begin) return;
  const int32_t* sums = left.sums + part * kDigits<kType> * kSums + begin * kTileRows;
  const RoundedBlock* x = left.x + first;
  float* y = left.y + first * kTileRows;
  if (of_part - begin >= kHalf) return add_digits<kType, kHalf>(sums, *left.numbers, x, y);
  for (int64_t m = begin; m < of_part; ++m, sums += kTileRows, ++x, y += kTileRows) {
    add_digits<kType, 1>(sums, *left.numbers, x, y);
  }
}

// Products of kParts parts of x with a tile's digits. Meanwhile `before` is added.
template <BlockType kType, int kParts, class Tiles>
inline void multiply_digits(Tiles& tiles, const RoundedBlock* x, int64_t part, const int8_t* digits, int32_t* sums,
                            const Leftover& before) {
  constexpr int kCount = kDigits<kType>;
  auto each = [&]<int... kAt>(std::integer_sequence<int, kAt...>, auto&& body) { (body.template operator()<kAt>(), ...); };
  constexpr auto kAll = std::make_integer_sequence<int, kParts * kCount>();
  each(kAll, [&]<int kAt>() { tiles.template clear<kAt>(); });
  for (int64_t c = 0; c < kTileColumns; c += 64) {
    each(std::make_integer_sequence<int, kParts>(),
         [&]<int kPart>() { tiles.template load<4 + kPart>(x[kPart * part].codes + c, sizeof(RoundedBlock)); });
    each(std::make_integer_sequence<int, kCount>(),
         [&]<int kDigit>() { tiles.template load<6 + kDigit>(digits + kDigit * kDigitBytes + kTileRows * c, 4 * kTileRows); });
    each(kAll, [&]<int kAt>() { tiles.template add_product<kAt, 4 + kAt / kCount, 6 + kAt % kCount>(); });
    add_quarter<kType>(before, c / 64);
  }
  each(kAll, [&]<int kAt>() { tiles.template store<kAt>(sums + kAt * kSums); });
}

// y [tiles][task.rows, kTileRows] += x times a block of kTilesTogether tiles of a weight, of which `count` are there.
template <BlockType kType, class Tiles>
inline void add_digit_tiles(Tiles& tiles, const DigitTile<kType>* weights, int64_t count, const RoundedBlock* x, int64_t rows,
                            float* y) {
  alignas(64) int32_t sums[2][2 * kDigits<kType> * kSums];
  const int64_t part = rows_of_part(rows);
  Leftover left{};
  int turn = 0;
  for (int64_t m = 0; m < rows; m += 2 * part) {
    const int64_t own = rows - m < 2 * part ? rows - m : 2 * part;
    for (int64_t n = 0; n < count; ++n, turn = 1 - turn) {
      if (own > part) {
        multiply_digits<kType, 2>(tiles, x + m, part, weights[n].digits, sums[turn], left);
      } else {
        multiply_digits<kType, 1>(tiles, x + m, part, weights[n].digits, sums[turn], left);
      }
      left = {sums[turn], &weights[n].numbers, x + m, own, part, y + (n * rows + m) * kTileRows};
    }
  }
  for (int64_t quarter = 0; quarter < 4; ++quarter) add_quarter<kType>(left, quarter);
}

template <BlockType kType, class Tiles>
void multiply_by_digits(const BlockTask& task) {
  const int64_t count = ceil_div(task.weight_rows, kTileRows);
  const int64_t tile_bytes = kTileRows * (task.k / kTileColumns * block_form(kType).bytes);
  const auto* x = reinterpret_cast<const RoundedBlock*>(task.x);
  Tiles tiles(rows_of_part(task.rows), 64);
  Tile tile;
  DigitTile<kType> weights[kTilesTogether];
  std::memset(task.y, 0, static_cast<size_t>(count * task.rows * kTileRows) * sizeof(float));
  for (int64_t begin = 0; begin < task.k; begin += kTileColumns, x += rows_of_parts(task.rows)) {
    for (int64_t n = 0; n < count; n += kTilesTogether) {
      const int64_t together = count - n < kTilesTogether ? count - n : kTilesTogether;
      for (int64_t i = n; i < n + together; ++i) {
        decode_digits<kType>(task.weight + i * tile_bytes, task.weight_rows - i * kTileRows, task.k, begin, tile, weights[i - n]);
      }
      add_digit_tiles<kType>(tiles, weights, together, x, task.rows, task.y + n * task.rows * kTileRows);
    }
  }
}

}  // namespace
}  // namespace asyncengine
