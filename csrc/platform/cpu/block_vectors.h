// Vectors of 16 numbers, one for each row of a tile. Integers are exact: results differ between instruction sets by the
// rounding of floats alone.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace asyncengine {
namespace {

// ---- 32 bytes, in which codes lie ----

#if defined(__AVX2__)

using Bytes = __m256i;

inline Bytes load_bytes(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline void store_bytes(uint8_t* p, Bytes a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a); }
// (a >> shift) & mask of each byte.
inline Bytes field(Bytes a, int shift, int mask) {
  return _mm256_and_si256(_mm256_srli_epi16(a, shift), _mm256_set1_epi8(static_cast<char>(mask)));
}
// a | b << shift of each byte, with a b whose bits stay in it.
inline Bytes with_bits(Bytes a, Bytes b, int shift) { return _mm256_or_si256(a, _mm256_slli_epi16(b, shift)); }
inline Bytes flipped(Bytes a, int bits) { return _mm256_xor_si256(a, _mm256_set1_epi8(static_cast<char>(bits))); }
inline Bytes less(Bytes a, int by) { return _mm256_sub_epi8(a, _mm256_set1_epi8(static_cast<char>(by))); }
// The low halves of 16 bytes, then their high halves.
inline Bytes halves_of_16(const uint8_t* p) {
  const __m128i a = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_and_si256(_mm256_set_m128i(_mm_srli_epi16(a, 4), a), _mm256_set1_epi8(15));
}
// 1 for each of the 32 bits at p that is set.
inline Bytes bits_of_4(const uint8_t* p) {
  int32_t all = 0;
  std::memcpy(&all, p, 4);
  const __m256i spread = _mm256_set_epi64x(0x0303030303030303, 0x0202020202020202, 0x0101010101010101, 0);
  const __m256i own = _mm256_shuffle_epi8(_mm256_set1_epi32(all), spread), bit = _mm256_set1_epi64x(0x8040201008040201ll);
  return _mm256_and_si256(_mm256_cmpeq_epi8(_mm256_and_si256(own, bit), bit), _mm256_set1_epi8(1));
}
// table[a] of each byte, which is below 16.
inline Bytes look_up(Bytes a, const uint8_t* table) {
  const __m128i numbers = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(numbers), a);
}

#else

struct Bytes {
  uint8_t elements[32];
};

template <class Body>
inline Bytes each_byte(Body&& body) {
  Bytes result;
  for (int i = 0; i < 32; ++i) result.elements[i] = static_cast<uint8_t>(body(i));
  return result;
}

inline Bytes load_bytes(const uint8_t* p) {
  Bytes a;
  std::memcpy(a.elements, p, sizeof(a.elements));
  return a;
}
inline void store_bytes(uint8_t* p, const Bytes& a) { std::memcpy(p, a.elements, sizeof(a.elements)); }
inline Bytes field(const Bytes& a, int shift, int mask) {
  return each_byte([&](int i) { return a.elements[i] >> shift & mask; });
}
inline Bytes with_bits(const Bytes& a, const Bytes& b, int shift) {
  return each_byte([&](int i) { return a.elements[i] | b.elements[i] << shift; });
}
inline Bytes flipped(const Bytes& a, int bits) {
  return each_byte([&](int i) { return a.elements[i] ^ bits; });
}
inline Bytes less(const Bytes& a, int by) {
  return each_byte([&](int i) { return a.elements[i] - by; });
}
inline Bytes halves_of_16(const uint8_t* p) {
  return each_byte([&](int i) { return i < 16 ? p[i] & 15 : p[i - 16] >> 4; });
}
inline Bytes bits_of_4(const uint8_t* p) {
  return each_byte([&](int i) { return p[i / 8] >> (i % 8) & 1; });
}
inline Bytes look_up(const Bytes& a, const uint8_t* table) {
  return each_byte([&](int i) { return table[a.elements[i]]; });
}

#endif

// ---- 16 numbers ----

#if defined(__AVX512VNNI__) && defined(__AVX512VL__)

using Ints = __m512i;
using Floats = __m512;

inline constexpr const char* kVectors = "vnni";
inline constexpr int kRowsTogether = 8;  // of x, whose sums stay in registers
inline constexpr bool kWideLessZero = false;  // products of wide codes are those of codes less their zero
inline Ints no_ints() { return _mm512_setzero_si512(); }
inline Ints all_ints(int a) { return _mm512_set1_epi32(a); }
inline Ints load_ints(const int32_t* p) { return _mm512_loadu_si512(p); }
inline Ints added(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
inline Ints times(Ints a, Ints b) { return _mm512_mullo_epi32(a, b); }
// One of each of 16 pairs, and sums + the products of each of them with one pair.
inline Ints first_of_pairs(const int16_t* pairs) { return _mm512_srai_epi32(_mm512_slli_epi32(_mm512_loadu_si512(pairs), 16), 16); }
inline Ints second_of_pairs(const int16_t* pairs) { return _mm512_srai_epi32(_mm512_loadu_si512(pairs), 16); }
inline Ints add_pairs(Ints sums, const int16_t* pairs, const int16_t* one) {
  int32_t both = 0;
  std::memcpy(&both, one, 4);
  return _mm512_dpwssd_epi32(sums, _mm512_loadu_si512(pairs), _mm512_set1_epi32(both));
}
inline Floats to_floats(Ints a) { return _mm512_cvtepi32_ps(a); }
inline Floats load_floats(const float* p) { return _mm512_loadu_ps(p); }
inline Floats all_floats(float a) { return _mm512_set1_ps(a); }
inline void store_floats(float* p, Floats a) { _mm512_storeu_ps(p, a); }
inline Floats times(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats times_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }

// sums + the products of four codes of each row of a tile and four of x.
template <bool kWide>
inline Ints add_products(Ints sums, const uint8_t* codes, const int8_t* x) {
  int32_t four = 0;
  std::memcpy(&four, x, 4);
  return _mm512_dpbusd_epi32(sums, _mm512_loadu_si512(codes), _mm512_set1_epi32(four));
}

// Sums of four numbers in a row of each of 16 vectors, one vector after another.
inline void sums_of_quarters(const __m512i (&a)[16], Ints (&sums)[4]) {
  __m512i b[8], c[4];
  for (int i = 0; i < 8; ++i)
    b[i] = _mm512_add_epi32(_mm512_unpacklo_epi32(a[2 * i], a[2 * i + 1]), _mm512_unpackhi_epi32(a[2 * i], a[2 * i + 1]));
  for (int i = 0; i < 4; ++i)
    c[i] = _mm512_add_epi32(_mm512_unpacklo_epi64(b[2 * i], b[2 * i + 1]), _mm512_unpackhi_epi64(b[2 * i], b[2 * i + 1]));
  // Quarter q of c[i] has the sums of columns 16 q and on, of rows 4 i to 4 i + 3.
  const __m512i low = _mm512_shuffle_i32x4(c[0], c[1], 0x44), low2 = _mm512_shuffle_i32x4(c[2], c[3], 0x44);
  const __m512i high = _mm512_shuffle_i32x4(c[0], c[1], 0xee), high2 = _mm512_shuffle_i32x4(c[2], c[3], 0xee);
  sums[0] = _mm512_shuffle_i32x4(low, low2, 0x88);
  sums[1] = _mm512_shuffle_i32x4(low, low2, 0xdd);
  sums[2] = _mm512_shuffle_i32x4(high, high2, 0x88);
  sums[3] = _mm512_shuffle_i32x4(high, high2, 0xdd);
}

// Products of one row of x with codes that are not interleaved: sums of 16 columns of each row of a tile.
template <bool kWide>
inline void row_products(const uint8_t* rows, int64_t stride, const int8_t* x, Ints (&sums)[4]) {
  __m512i products[16];
  const __m512i all = _mm512_loadu_si512(x);
  for (int i = 0; i < 16; ++i) products[i] = _mm512_dpbusd_epi32(no_ints(), _mm512_loadu_si512(rows + i * stride), all);
  sums_of_quarters(products, sums);
}

// 64 columns of 16 rows, `stride` bytes apart, to [16 times four columns][16 rows][4].
inline void interleave(const uint8_t* rows, int64_t stride, uint8_t* to) {
  __m512i a[16], b[16];
  for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512(rows + i * stride);
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    for (int j = 0; j < 2; ++j) {
      a[i + 2 * j] = _mm512_unpacklo_epi64(b[i + j], b[i + j + 2]);
      a[i + 2 * j + 1] = _mm512_unpackhi_epi64(b[i + j], b[i + j + 2]);
    }
  }
  // a[4 i + j] has column 4 q + j of rows 4 i to 4 i + 3 in its quarter q.
  for (int j = 0; j < 4; ++j) {
    const __m512i low = _mm512_shuffle_i32x4(a[j], a[4 + j], 0x88), high = _mm512_shuffle_i32x4(a[j], a[4 + j], 0xdd);
    const __m512i low2 = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0x88), high2 = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0xdd);
    _mm512_storeu_si512(to + 64 * j, _mm512_shuffle_i32x4(low, low2, 0x88));
    _mm512_storeu_si512(to + 64 * (4 + j), _mm512_shuffle_i32x4(high, high2, 0x88));
    _mm512_storeu_si512(to + 64 * (8 + j), _mm512_shuffle_i32x4(low, low2, 0xdd));
    _mm512_storeu_si512(to + 64 * (12 + j), _mm512_shuffle_i32x4(high, high2, 0xdd));
  }
}

#elif defined(__AVX2__)

struct Ints {
  __m256i low, high;
};
struct Floats {
  __m256 low, high;
};

inline constexpr const char* kVectors = "avx2";
inline constexpr int kRowsTogether = 4;
inline constexpr bool kWideLessZero = true;
inline Ints no_ints() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline Ints all_ints(int a) { return {_mm256_set1_epi32(a), _mm256_set1_epi32(a)}; }
inline Ints load_ints(const int32_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 8))};
}
inline Ints added(const Ints& a, const Ints& b) { return {_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)}; }
inline Ints times(const Ints& a, const Ints& b) { return {_mm256_mullo_epi32(a.low, b.low), _mm256_mullo_epi32(a.high, b.high)}; }
inline Ints second_of_pairs(const int16_t* pairs) {
  const Ints a = load_ints(reinterpret_cast<const int32_t*>(pairs));
  return {_mm256_srai_epi32(a.low, 16), _mm256_srai_epi32(a.high, 16)};
}
inline Ints first_of_pairs(const int16_t* pairs) {
  const Ints a = load_ints(reinterpret_cast<const int32_t*>(pairs));
  return {_mm256_srai_epi32(_mm256_slli_epi32(a.low, 16), 16), _mm256_srai_epi32(_mm256_slli_epi32(a.high, 16), 16)};
}
inline Ints add_pairs(const Ints& sums, const int16_t* pairs, const int16_t* one) {
  int32_t both = 0;
  std::memcpy(&both, one, 4);
  const Ints a = load_ints(reinterpret_cast<const int32_t*>(pairs));
  const __m256i b = _mm256_set1_epi32(both);
  return added(sums, {_mm256_madd_epi16(a.low, b), _mm256_madd_epi16(a.high, b)});
}
inline Floats to_floats(Ints a) { return {_mm256_cvtepi32_ps(a.low), _mm256_cvtepi32_ps(a.high)}; }
inline Floats load_floats(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline Floats all_floats(float a) { return {_mm256_set1_ps(a), _mm256_set1_ps(a)}; }
inline void store_floats(float* p, Floats a) {
  _mm256_storeu_ps(p, a.low);
  _mm256_storeu_ps(p + 8, a.high);
}
inline Floats times(Floats a, Floats b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
inline Floats times_add(Floats a, Floats b, Floats c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}

// Two products of bytes are added in 16 bits, and saturate for codes above 128. Such codes are made numbers with a sign, less their
// zero of 128, and the sign goes over to x.
template <bool kWide>
inline __m256i add_half(__m256i sums, const uint8_t* codes, __m256i x) {
  const __m256i ones = _mm256_set1_epi16(1), all = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
  if constexpr (!kWide) return _mm256_add_epi32(sums, _mm256_madd_epi16(_mm256_maddubs_epi16(all, x), ones));
  const __m256i own = _mm256_xor_si256(all, _mm256_set1_epi8(static_cast<char>(0x80)));
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(own), _mm256_sign_epi8(x, own));
  return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, ones));
}

template <bool kWide>
inline Ints add_products(Ints sums, const uint8_t* codes, const int8_t* x) {
  int32_t four = 0;
  std::memcpy(&four, x, 4);
  const __m256i all = _mm256_set1_epi32(four);
  return {add_half<kWide>(sums.low, codes, all), add_half<kWide>(sums.high, codes + 32, all)};
}

// Each half of a[i] gets the sums of that half of vectors 4 i to 4 i + 3, for i = 0 and 1.
inline void sum_halves(__m256i (&a)[8]) {
  for (int i = 0; i < 4; ++i) a[i] = _mm256_hadd_epi32(a[2 * i], a[2 * i + 1]);
  for (int i = 0; i < 2; ++i) a[i] = _mm256_hadd_epi32(a[2 * i], a[2 * i + 1]);
}

template <bool kWide>
inline void row_products(const uint8_t* rows, int64_t stride, const int8_t* x, Ints (&sums)[4]) {
  for (int half = 0; half < 2; ++half) {
    const __m256i all = load_bytes(reinterpret_cast<const uint8_t*>(x) + 32 * half);
    for (int eight = 0; eight < 2; ++eight) {
      __m256i a[8];
      const uint8_t* first = rows + 8 * eight * stride + 32 * half;
      for (int i = 0; i < 8; ++i) a[i] = add_half<kWide>(_mm256_setzero_si256(), first + i * stride, all);
      sum_halves(a);
      (eight == 0 ? sums[2 * half].low : sums[2 * half].high) = _mm256_permute2x128_si256(a[0], a[1], 0x20);
      (eight == 0 ? sums[2 * half + 1].low : sums[2 * half + 1].high) = _mm256_permute2x128_si256(a[0], a[1], 0x31);
    }
  }
}

inline void interleave_eight(const uint8_t* rows, int64_t stride, uint8_t* to) {
  __m256i a[8], b[8];
  for (int i = 0; i < 8; ++i) a[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows + i * stride));
  for (int i = 0; i < 8; i += 2) {
    b[i] = _mm256_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm256_unpackhi_epi32(a[i], a[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    for (int j = 0; j < 2; ++j) {
      a[i + 2 * j] = _mm256_unpacklo_epi64(b[i + j], b[i + j + 2]);
      a[i + 2 * j + 1] = _mm256_unpackhi_epi64(b[i + j], b[i + j + 2]);
    }
  }
  for (int j = 0; j < 4; ++j) {
    auto* first = reinterpret_cast<__m256i*>(to + 64 * j);
    auto* second = reinterpret_cast<__m256i*>(to + 64 * (4 + j));
    _mm256_storeu_si256(first, _mm256_permute2x128_si256(a[j], a[4 + j], 0x20));
    _mm256_storeu_si256(second, _mm256_permute2x128_si256(a[j], a[4 + j], 0x31));
  }
}

inline void interleave(const uint8_t* rows, int64_t stride, uint8_t* to) {
  for (int columns = 0; columns < 2; ++columns) {
    for (int half = 0; half < 2; ++half) {
      interleave_eight(rows + 8 * half * stride + 32 * columns, stride, to + 512 * columns + 32 * half);
    }
  }
}

#else

struct Ints {
  int32_t elements[16];
};
struct Floats {
  float elements[16];
};

template <class Result, class Body>
inline Result each_element(Body&& body) {
  Result result;
  for (int i = 0; i < 16; ++i) result.elements[i] = body(i);
  return result;
}

inline constexpr const char* kVectors = "portable";
inline constexpr int kRowsTogether = 4;
inline constexpr bool kWideLessZero = false;
inline Ints no_ints() { return {}; }
inline Ints all_ints(int a) {
  return each_element<Ints>([&](int) { return a; });
}
inline Ints load_ints(const int32_t* p) {
  return each_element<Ints>([&](int i) { return p[i]; });
}
inline Ints added(const Ints& a, const Ints& b) {
  return each_element<Ints>([&](int i) { return a.elements[i] + b.elements[i]; });
}
inline Ints times(const Ints& a, const Ints& b) {
  return each_element<Ints>([&](int i) { return a.elements[i] * b.elements[i]; });
}
inline Ints first_of_pairs(const int16_t* pairs) {
  return each_element<Ints>([&](int i) { return pairs[2 * i]; });
}
inline Ints second_of_pairs(const int16_t* pairs) {
  return each_element<Ints>([&](int i) { return pairs[2 * i + 1]; });
}
inline Ints add_pairs(const Ints& sums, const int16_t* pairs, const int16_t* one) {
  return each_element<Ints>([&](int i) { return sums.elements[i] + pairs[2 * i] * one[0] + pairs[2 * i + 1] * one[1]; });
}
inline Floats to_floats(const Ints& a) {
  return each_element<Floats>([&](int i) { return static_cast<float>(a.elements[i]); });
}
inline Floats load_floats(const float* p) {
  return each_element<Floats>([&](int i) { return p[i]; });
}
inline Floats all_floats(float a) {
  return each_element<Floats>([&](int) { return a; });
}
inline void store_floats(float* p, const Floats& a) { std::memcpy(p, a.elements, sizeof(a.elements)); }
inline Floats times(const Floats& a, const Floats& b) {
  return each_element<Floats>([&](int i) { return a.elements[i] * b.elements[i]; });
}
inline Floats times_add(const Floats& a, const Floats& b, const Floats& c) {
  return each_element<Floats>([&](int i) { return a.elements[i] * b.elements[i] + c.elements[i]; });
}

template <bool kWide>
inline Ints add_products(const Ints& sums, const uint8_t* codes, const int8_t* x) {
  return each_element<Ints>([&](int i) {
    const uint8_t* c = codes + 4 * i;
    return sums.elements[i] + c[0] * x[0] + c[1] * x[1] + c[2] * x[2] + c[3] * x[3];
  });
}

template <bool kWide>
inline void row_products(const uint8_t* rows, int64_t stride, const int8_t* x, Ints (&sums)[4]) {
  for (int quarter = 0; quarter < 4; ++quarter) {
    sums[quarter] = each_element<Ints>([&](int row) {
      int32_t sum = 0;
      for (int i = 16 * quarter; i < 16 * quarter + 16; ++i) sum += rows[row * stride + i] * x[i];
      return sum;
    });
  }
}

inline void interleave(const uint8_t* rows, int64_t stride, uint8_t* to) {
  for (int64_t four = 0; four < 16; ++four) {
    for (int64_t row = 0; row < 16; ++row) std::memcpy(to + 64 * four + 4 * row, rows + row * stride + 4 * four, 4);
  }
}

#endif

}  // namespace
}  // namespace asyncengine
