// One row of x times rows of Q4_K, by vectors of AVX-512: codes go from memory to products, and the scales of sixteen rows are
// unpacked together. The bits are those of add_row (blocks.inl): integers are exact, and floats are added in the same order.
#include "platform/cpu/block_tile.inl"

#if defined(__AVX512VNNI__) && defined(__AVX512VL__)

namespace asyncengine {
namespace {

constexpr int64_t kQ4KBytes = block_form(BlockType::kQ4_K).bytes, kQ4KHeader = 16, kQ4KGroups = 8;

// Scales and offsets of a block of each of 16 rows, a group after another.
struct GroupScales {
  __m512 scales[kQ4KGroups], offsets[kQ4KGroups];
};

inline __m128i load_header(const uint8_t* block) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(block)); }

// The headers of rows i, 4 + i, 8 + i and 12 + i.
inline __m512i four_headers(const uint8_t* const (&blocks)[kTileRows], int i) {
  __m512i a = _mm512_castsi128_si512(load_header(blocks[i]));
  a = _mm512_inserti32x4(a, load_header(blocks[4 + i]), 1);
  a = _mm512_inserti32x4(a, load_header(blocks[8 + i]), 2);
  return _mm512_inserti32x4(a, load_header(blocks[12 + i]), 3);
}

inline __m512 halves_to_floats(__m512i low_halves) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(low_halves)); }

inline __m512i bits_at(__m512i words, int shift, int mask) {
  return _mm512_and_si512(_mm512_srli_epi32(words, static_cast<unsigned>(shift)), _mm512_set1_epi32(mask));
}

// A header has a scale and an offset in halves, and in three words the scales and offsets of groups, in 6 bits.
inline void unpack_headers(const uint8_t* const (&blocks)[kTileRows], GroupScales& to) {
  const __m512i a = four_headers(blocks, 0), b = four_headers(blocks, 1), c = four_headers(blocks, 2), d = four_headers(blocks, 3);
  const __m512i low = _mm512_unpacklo_epi32(a, b), low2 = _mm512_unpacklo_epi32(c, d);
  const __m512i high = _mm512_unpackhi_epi32(a, b), high2 = _mm512_unpackhi_epi32(c, d);
  const __m512i halves = _mm512_unpacklo_epi64(low, low2), first = _mm512_unpackhi_epi64(low, low2);
  const __m512i second = _mm512_unpacklo_epi64(high, high2), third = _mm512_unpackhi_epi64(high, high2);
  const __m512 scale = halves_to_floats(halves);
  const __m512 offset = _mm512_sub_ps(_mm512_set1_ps(-0.f), halves_to_floats(_mm512_srli_epi32(halves, 16)));
  for (int g = 0; g < 4; ++g) {
    const int at = 8 * g;
    const __m512i scale4 = _mm512_or_si512(bits_at(third, at, 15), bits_at(first, at + 2, 0x30));
    const __m512i offset4 = _mm512_or_si512(bits_at(third, at + 4, 15), bits_at(second, at + 2, 0x30));
    to.scales[g] = _mm512_mul_ps(scale, _mm512_cvtepi32_ps(bits_at(first, at, 63)));
    to.offsets[g] = _mm512_mul_ps(offset, _mm512_cvtepi32_ps(bits_at(second, at, 63)));
    to.scales[4 + g] = _mm512_mul_ps(scale, _mm512_cvtepi32_ps(scale4));
    to.offsets[4 + g] = _mm512_mul_ps(offset, _mm512_cvtepi32_ps(offset4));
  }
}

// Products of x with 64 bytes of each row: their low halves, or the high ones. They are codes of two groups of 32 columns.
template <bool kHigh>
inline void group_products(const uint8_t* const (&blocks)[kTileRows], int64_t at, __m512i x, Ints& one, Ints& other) {
  __m512i products[kTileRows];
  for (int i = 0; i < kTileRows; ++i) {
    const __m512i both = _mm512_loadu_si512(blocks[i] + at);
    const __m512i codes = _mm512_and_si512(kHigh ? _mm512_srli_epi16(both, 4) : both, _mm512_set1_epi8(15));
    products[i] = _mm512_dpbusd_epi32(no_ints(), codes, x);
  }
  Ints sums[4];
  sums_of_quarters(products, sums);
  one = added(sums[0], sums[1]);
  other = added(sums[2], sums[3]);
}

void multiply_row_of_q4_k(const BlockTask& task) {
  const int64_t k = task.k, row_bytes = k / 256 * kQ4KBytes;
  const auto* codes = reinterpret_cast<const int8_t*>(task.x);
  const float *scales = task.x + k / 4, *sums = sums_of<BlockType::kQ4_K>(task.x, k);
  const uint8_t* blocks[kTileRows];
  for (int64_t i = 0; i < kTileRows; ++i) blocks[i] = task.weight + (i < task.weight_rows ? i : task.weight_rows - 1) * row_bytes;
  Floats total = all_floats(0.f);
  for (int64_t g = 0; g < k / 32; g += kQ4KGroups, codes += 256) {
    GroupScales known;
    unpack_headers(blocks, known);
    Ints products[kQ4KGroups];
    for (int half = 0; half < 2; ++half) {
      const __m512i a = _mm512_loadu_si512(codes + 128 * half), b = _mm512_loadu_si512(codes + 128 * half + 64);
      const int64_t at = kQ4KHeader + 64 * half;
      Ints* to = products + 4 * half;
      group_products<false>(blocks, at, _mm512_shuffle_i64x2(a, b, 0x44), to[0], to[2]);
      group_products<true>(blocks, at, _mm512_shuffle_i64x2(a, b, 0xee), to[1], to[3]);
    }
    for (int i = 0; i < kQ4KGroups; ++i) {
      Floats part = times(to_floats(products[i]), known.scales[i]);
      part = times_add(all_floats(sums[g + i]), known.offsets[i], part);
      total = times_add(part, all_floats(scales[g + i]), total);
    }
    for (const uint8_t*& block : blocks) {
      fetch(block + kTileRows * row_bytes, kQ4KBytes);
      block += kQ4KBytes;
    }
  }
  store_floats(task.y, total);
}

}  // namespace
}  // namespace asyncengine

#endif
