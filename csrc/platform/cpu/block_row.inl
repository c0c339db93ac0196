// One row of x times sixteen rows of a weight, whose codes go from memory to products. The bits are those of add_row (blocks.inl):
// sums over a block are exact. By vectors of AVX-512 for Q4_K, with scales of sixteen rows unpacked together; by AVX2 for types
// whose codes and scales leave room in 16 bits. kRowIsDirect says of which types multiply_row is.
#include "platform/cpu/block_tile.inl"

#if defined(__AVX512VNNI__) && defined(__AVX512VL__)

namespace asyncengine {
namespace {

template <BlockType kType>
inline constexpr bool kRowIsDirect = kType == BlockType::kQ4_K;

constexpr int64_t kQ4KBytes = block_form(BlockType::kQ4_K).bytes, kQ4KHeader = 16;

// A block of each of 16 rows that are row_bytes apart.
struct RowBlocks {
  const uint8_t* quarters[4];  // in rows 0, 4, 8 and 12
  int64_t row_bytes;

  const uint8_t* at(int quarter, int i) const { return quarters[quarter] + i * row_bytes; }
};

// 16 bytes of rows i, 4 + i, 8 + i and 12 + i.
inline __m512i four_rows(const RowBlocks& blocks, int i, int64_t byte) {
  auto load = [&](int quarter) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(blocks.at(quarter, i) + byte)); };
  const __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(load(0)), load(1), 1);
  const __m256i high = _mm256_inserti128_si256(_mm256_castsi128_si256(load(2)), load(3), 1);
  return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

inline __m512 halves_to_floats(__m512i low_halves) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(low_halves)); }

// Scales and offsets of a block of each row, and those of its groups in 6 bits: a byte for each of four groups.
struct BlockScales {
  __m512 scale, offset;
  __m512i scales[2], offsets[2];
};

// A header has a scale and an offset in halves, and in three words the scales and offsets of groups.
inline BlockScales unpack_headers(const RowBlocks& blocks) {
  const __m512i a = four_rows(blocks, 0, 0), b = four_rows(blocks, 1, 0), c = four_rows(blocks, 2, 0), d = four_rows(blocks, 3, 0);
  const __m512i low = _mm512_unpacklo_epi32(a, b), low2 = _mm512_unpacklo_epi32(c, d);
  const __m512i high = _mm512_unpackhi_epi32(a, b), high2 = _mm512_unpackhi_epi32(c, d);
  const __m512i halves = _mm512_unpacklo_epi64(low, low2), first = _mm512_unpackhi_epi64(low, low2);
  const __m512i second = _mm512_unpacklo_epi64(high, high2), third = _mm512_unpackhi_epi64(high, high2);
  auto bits = [](__m512i words, unsigned shift, char mask) {
    return _mm512_and_si512(_mm512_srli_epi32(words, shift), _mm512_set1_epi8(mask));
  };
  return {.scale = halves_to_floats(halves),
          .offset = _mm512_sub_ps(_mm512_set1_ps(-0.f), halves_to_floats(_mm512_srli_epi32(halves, 16))),
          .scales = {bits(first, 0, 63), _mm512_or_si512(bits(third, 0, 15), bits(first, 2, 0x30))},
          .offsets = {bits(second, 0, 63), _mm512_or_si512(bits(third, 4, 15), bits(second, 2, 0x30))}};
}

inline __m512i byte_of(__m512i words, int i) {
  return _mm512_and_si512(_mm512_srli_epi32(words, static_cast<unsigned>(8 * i)), _mm512_set1_epi32(255));
}

// Bytes 2 i and 2 i + 1 of each word, in 16 bits.
inline __m512i pair_of_bytes(__m512i words, int i) {
  const __m512i places = i == 0 ? _mm512_set4_epi32(0x800d800c, 0x80098008, 0x80058004, 0x80018000)
                                : _mm512_set4_epi32(0x800f800e, 0x800b800a, 0x80078006, 0x80038002);
  return _mm512_shuffle_epi8(words, places);
}

// Sums of each quarter of four vectors, those of a quarter side by side.
inline Ints sums_of_four(const __m512i (&a)[4]) {
  const __m512i b = _mm512_add_epi32(_mm512_unpacklo_epi32(a[0], a[1]), _mm512_unpackhi_epi32(a[0], a[1]));
  const __m512i c = _mm512_add_epi32(_mm512_unpacklo_epi32(a[2], a[3]), _mm512_unpackhi_epi32(a[2], a[3]));
  return _mm512_add_epi32(_mm512_unpacklo_epi64(b, c), _mm512_unpackhi_epi64(b, c));
}

// Products of x with two groups, whose codes are the low and the high halves of 32 bytes of each row. High halves stay where they
// are, as 16 times a code.
inline void group_products(const RowBlocks& blocks, int64_t byte, const int8_t* x, Ints& first, Ints& second) {
  __m512i codes[4], low[4], high[4];
  for (int i = 0; i < 4; ++i) codes[i] = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x) + i));
  const __m512i low_half = _mm512_set1_epi8(15), high_half = _mm512_set1_epi8(static_cast<char>(0xf0));
  for (int i = 0; i < 4; ++i) {
    const __m512i a = four_rows(blocks, i, byte), b = four_rows(blocks, i, byte + 16);
    low[i] = _mm512_dpbusd_epi32(no_ints(), _mm512_and_si512(a, low_half), codes[0]);
    low[i] = _mm512_dpbusd_epi32(low[i], _mm512_and_si512(b, low_half), codes[1]);
    high[i] = _mm512_dpbusd_epi32(no_ints(), _mm512_and_si512(a, high_half), codes[2]);
    high[i] = _mm512_dpbusd_epi32(high[i], _mm512_and_si512(b, high_half), codes[3]);
  }
  first = sums_of_four(low);
  second = _mm512_srai_epi32(sums_of_four(high), 4);
}

template <BlockType kType>
void multiply_row(const BlockTask& task) {
  const int64_t k = task.k, row_bytes = k / 256 * kQ4KBytes;
  const auto* x = reinterpret_cast<const RoundedBlock*>(task.x);
  const uint8_t* weight = task.weight;
  RowBlocks blocks{{weight, weight + 4 * row_bytes, weight + 8 * row_bytes, weight + 12 * row_bytes}, row_bytes};
  Floats total = all_floats(0.f);
  for (const RoundedBlock* end = x + k / 256; x < end; ++x) {
    const BlockScales known = unpack_headers(blocks);
    Ints sums = no_ints(), offsets = no_ints();
#pragma GCC unroll 4
    for (int two = 0; two < 4; ++two) {
      Ints first, second;
      group_products(blocks, kQ4KHeader + 32 * two, x->codes + 64 * two, first, second);
      for (int i = 0; i < 4; ++i) fetch(blocks.at(two, i) + kTileRows * row_bytes, kQ4KBytes);  // a burst takes longer
      sums = added(sums, times(first, byte_of(known.scales[two / 2], two % 2 * 2)));
      sums = added(sums, times(second, byte_of(known.scales[two / 2], two % 2 * 2 + 1)));
      int32_t both = 0;
      std::memcpy(&both, x->sums_of_32 + 2 * two, 4);
      offsets = _mm512_dpwssd_epi32(offsets, pair_of_bytes(known.offsets[two / 2], two % 2), _mm512_set1_epi32(both));
    }
    const Floats part = block_part<kType, true>(sums, offsets, known.scale, known.offset);
    total = times_add(part, all_floats(x->scale), total);
    for (const uint8_t*& quarter : blocks.quarters) quarter += kQ4KBytes;
  }
  store_floats(task.y, total);
}

}  // namespace
}  // namespace asyncengine

#elif defined(__AVX2__)

namespace asyncengine {
namespace {

// Two products of a byte fit 16 bits where codes have seven.
template <BlockType kType>
inline constexpr bool kRowIsDirect = kIntegerScales<kType> && block_form(kType).zero <= 64;

// A row of a weight that is multiplied as it is decoded. What adds up products in pairs multiplies them with their scale as well.
template <BlockType kType>
struct ProductRow {
  static constexpr bool kWideGroup = block_form(kType).group == 32;

  const RoundedBlock& x;
  Tile::RowNumbers numbers;
  float &scale, &offset;
  __m256i sum = _mm256_setzero_si256();

  void put(int64_t column, Bytes codes) {
    const int16_t* scales = numbers.ints[0] + column / block_form(kType).group;
    const __m256i own = kWideGroup ? _mm256_set1_epi16(scales[0])
                                   : _mm256_set_m128i(_mm_set1_epi16(scales[1]), _mm_set1_epi16(scales[0]));
    const __m256i pairs = _mm256_maddubs_epi16(codes, load_bytes(reinterpret_cast<const uint8_t*>(x.codes) + column));
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, own));
  }

  // The sums of x's codes times the offsets of their groups, or times the scales for the zero of codes.
  __m256i sums() const {
    auto half = [](const int16_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); };
    const int16_t* own = numbers.ints[block_form(kType).offsets ? 1 : 0];
    if constexpr (kWideGroup) return _mm256_zextsi128_si256(_mm_madd_epi16(half(own), half(x.sums_of_32)));
    const __m256i low = _mm256_zextsi128_si256(_mm_madd_epi16(half(own), half(x.sums_of_16)));
    return _mm256_add_epi32(low, _mm256_zextsi128_si256(_mm_madd_epi16(half(own + 8), half(x.sums_of_16 + 8))));
  }
};

// The sum of each of eight vectors.
inline __m256i sums_of_eight(__m256i (&a)[8]) {
  sum_halves(a);
  return _mm256_add_epi32(_mm256_permute2x128_si256(a[0], a[1], 0x20), _mm256_permute2x128_si256(a[0], a[1], 0x31));
}

template <BlockType kType>
void multiply_row(const BlockTask& task) {
  constexpr BlockForm kForm = block_form(kType);
  const int64_t blocks = task.k / kTileColumns, row_bytes = blocks * kForm.bytes;
  const auto* x = reinterpret_cast<const RoundedBlock*>(task.x);
  Floats total = all_floats(0.f);
  for (int64_t b = 0; b < blocks; ++b) {
    __m256i products[2][8], sums[2][8];
    alignas(32) float scales[kTileRows], offsets[kTileRows];
    for (int64_t row = 0; row < kTileRows; ++row) {
      const uint8_t* block = task.weight + row * row_bytes + b * kForm.bytes;
      fetch(block + kTileRows * row_bytes, kForm.bytes);
      ProductRow<kType> own{x[b], {}, scales[row], offsets[row]};
      decode_row<kType>(block, kTileColumns, own);
      products[row / 8][row % 8] = own.sum;
      sums[row / 8][row % 8] = own.sums();
    }
    const Ints whole{sums_of_eight(products[0]), sums_of_eight(products[1])};
    const Ints of_codes{sums_of_eight(sums[0]), sums_of_eight(sums[1])};
    const Floats part = block_part<kType, false>(whole, of_codes, load_floats(scales), load_floats(offsets));
    total = times_add(part, all_floats(x[b].scale), total);
  }
  store_floats(task.y, total);
}

}  // namespace
}  // namespace asyncengine

#else

namespace asyncengine {
namespace {

template <BlockType kType>
inline constexpr bool kRowIsDirect = false;
template <BlockType kType>
void multiply_row(const BlockTask&) {}

}  // namespace
}  // namespace asyncengine

#endif
