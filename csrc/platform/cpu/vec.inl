// One vector of floats and the arithmetic that kernels are written in. Included once per instruction set, by a
// file that defines ASYNCENGINE_VECTOR_BYTES (64, 32 or 16) and is compiled with the flags that match.
//
// Arithmetic rule: these files are compiled with -ffp-contract=off, so a * b + c rounds twice wherever it stands, and
// fma() is the only operation that may round once (it does where the instruction set has it). The value of an
// expression therefore never depends on how the compiler arranged the loop around it.
//
// Everything here has internal linkage and calls no template of the standard library: a weak symbol compiled with
// -mavx512f could be the copy that the linker keeps for code that runs on any machine.
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "platform/cpu/isa.h"

#if ASYNCENGINE_VECTOR_BYTES >= 32
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#define AE_INLINE inline __attribute__((always_inline))

namespace asyncengine {
namespace {

constexpr int kWidth = ASYNCENGINE_VECTOR_BYTES / 4;

typedef float Vec __attribute__((vector_size(ASYNCENGINE_VECTOR_BYTES)));
typedef int32_t IVec __attribute__((vector_size(ASYNCENGINE_VECTOR_BYTES)));
typedef uint32_t UVec __attribute__((vector_size(ASYNCENGINE_VECTOR_BYTES)));
typedef uint16_t HVec __attribute__((vector_size(ASYNCENGINE_VECTOR_BYTES / 2)));
typedef uint8_t BVec __attribute__((vector_size(ASYNCENGINE_VECTOR_BYTES / 4)));

typedef Vec UnalignedVec __attribute__((aligned(1), may_alias));
typedef UVec UnalignedUVec __attribute__((aligned(1), may_alias));
typedef HVec UnalignedHVec __attribute__((aligned(1), may_alias));
typedef BVec UnalignedBVec __attribute__((aligned(1), may_alias));

// A broadcast: x - 0 is x for every x, which the compiler knows; 0 + x is not for x = -0.
AE_INLINE Vec splat(float value) { return value - Vec{}; }

AE_INLINE Vec fma(Vec a, Vec b, Vec c) {
#if ASYNCENGINE_VECTOR_BYTES == 64
  return _mm512_fmadd_ps(a, b, c);
#elif ASYNCENGINE_VECTOR_BYTES == 32
  return _mm256_fmadd_ps(a, b, c);
#elif defined(__ARM_NEON) && defined(__aarch64__)
  return (Vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

// b where a is NaN.
AE_INLINE Vec max(Vec a, Vec b) { return a > b ? a : b; }

AE_INLINE IVec element_index() {
  IVec index{};
  for (int i = 0; i < kWidth; ++i) index[i] = i;
  return index;
}

// ---- memory ----

AE_INLINE Vec load(const float* p) { return *reinterpret_cast<const UnalignedVec*>(p); }
AE_INLINE void store(float* p, Vec v) { *reinterpret_cast<UnalignedVec*>(p) = v; }

// The compiler does __builtin_convertvector between these widths in halves, where one instruction is enough. (maskz:
// GCC 12 warns about the undefined operand inside the plain intrinsics.)
AE_INLINE UVec zero_extend(HVec h) {
#if ASYNCENGINE_VECTOR_BYTES == 64
  return (UVec)_mm512_maskz_cvtepu16_epi32(0xffff, (__m256i)h);
#elif ASYNCENGINE_VECTOR_BYTES == 32
  return (UVec)_mm256_cvtepu16_epi32((__m128i)h);
#else
  return __builtin_convertvector(h, UVec);
#endif
}

AE_INLINE HVec low_halves(UVec v) {
#if ASYNCENGINE_VECTOR_BYTES == 64
  return (HVec)_mm512_maskz_cvtepi32_epi16(0xffff, (__m512i)v);
#else
  return __builtin_convertvector(v, HVec);
#endif
}

AE_INLINE Vec widen(HVec h) { return (Vec)(zero_extend(h) << 16); }

// Round to nearest, ties to even; NaN stays NaN.
AE_INLINE HVec narrow(Vec v) {
  const UVec bits = (UVec)v;
  const UVec rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  const UVec result = v == v ? rounded : (bits | 0x00400000u);
  return low_halves(result >> 16);
}

AE_INLINE Vec load(const BFloat16* p) { return widen(*reinterpret_cast<const UnalignedHVec*>(p)); }
AE_INLINE void store(BFloat16* p, Vec v) { *reinterpret_cast<UnalignedHVec*>(p) = narrow(v); }

AE_INLINE UVec zero_extend(BVec b) {
#if ASYNCENGINE_VECTOR_BYTES == 64
  return (UVec)_mm512_maskz_cvtepu8_epi32(0xffff, (__m128i)b);
#elif ASYNCENGINE_VECTOR_BYTES == 32
  return (UVec)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)b));
#else
  return __builtin_convertvector(b, UVec);
#endif
}

#if ASYNCENGINE_VECTOR_BYTES == 64
// e4m3 is a half-precision float with a shorter exponent, 256 times as large: what converts halves knows those without an
// exponent. 0x7f becomes a half that is NaN by the carry.
AE_INLINE Vec widen(BVec b) {
  const HVec shifted = (HVec)_mm256_cvtepu8_epi16((__m128i)b) << 7;
  const HVec half = shifted + (shifted & 0x4000);  // the sign from bit 14 to 15
  return (Vec)_mm512_maskz_cvtph_ps(0xffff, (__m256i)(half | ((half + 0x80) & 0x4000))) * 256.f;
}

// The low byte of each element.
AE_INLINE Vec widen_float8(UVec bits) { return widen((BVec)_mm512_maskz_cvtepi32_epi8(0xffff, (__m512i)bits)); }
#else
// An exponent of e4m3 is a float's less 120. A subnormal number counts in steps of 2^-9: as the fraction of a float
// whose exponent is that of 2^-6, less 2^-6, so that no operand is a denormal float, which would take a hundred cycles.
AE_INLINE Vec widen_float8(UVec bits) {
  const UVec size = (bits & 0x7fu) << 20;
  const Vec below = (Vec)(size + (121u << 23)) - 0x1p-6f;
  Vec y = size < (1u << 23) ? below : (Vec)(size + (120u << 23));
  y = size == (0x7fu << 20) ? splat(__builtin_nanf("")) : y;
  return (Vec)((UVec)y | (bits & 0x80u) << 24);
}

AE_INLINE Vec widen(BVec b) { return widen_float8(zero_extend(b)); }
#endif

// Round to nearest, ties to even; beyond 448 it is 448; NaN stays NaN. In the low byte of each element.
AE_INLINE UVec narrow_to_float8(Vec v) {
  const UVec sign = (UVec)v >> 24 & 0x80u;
  Vec size = (Vec)((UVec)v & 0x7fffffffu);
  size = size > 448.f ? splat(448.f) : size;
  const UVec bits = (UVec)size;
  const UVec rounded = ((bits + 0x7ffffu + (bits >> 20 & 1u)) >> 20) - (120u << 3);
  const UVec below = (UVec)(size + 0x1p14f) - (UVec)splat(0x1p14f);  // the last place of 2^14 is 2^-9
  const UVec result = size < 0x1p-6f ? below : rounded;
  return sign | (v == v ? result : result * 0u + 0x7fu);
}

AE_INLINE Vec load(const Float8* p) { return widen(*reinterpret_cast<const UnalignedBVec*>(p)); }

// The first count < kWidth elements; the others read as zero and are not touched in memory.
AE_INLINE Vec load_first(const float* p, int64_t count) {
#if ASYNCENGINE_VECTOR_BYTES == 64
  return _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << count) - 1), p);
#else
  Vec v{};
  memcpy(&v, p, static_cast<size_t>(count) * sizeof(float));
  return v;
#endif
}

AE_INLINE Vec load_first(const BFloat16* p, int64_t count) {
#if ASYNCENGINE_VECTOR_BYTES == 64
  return widen((HVec)_mm256_maskz_loadu_epi16(static_cast<__mmask16>((1u << count) - 1), p));
#else
  HVec h{};
  memcpy(&h, p, static_cast<size_t>(count) * sizeof(BFloat16));
  return widen(h);
#endif
}

AE_INLINE Vec load_first(const Float8* p, int64_t count) {
  BVec b{};
  memcpy(&b, p, static_cast<size_t>(count));
  return widen(b);
}

AE_INLINE void store_first(Float8* p, Vec v, int64_t count) {
  const BVec b = __builtin_convertvector(narrow_to_float8(v), BVec);
  memcpy(p, &b, static_cast<size_t>(count));
}

AE_INLINE void store(Float8* p, Vec v) {
  *reinterpret_cast<UnalignedBVec*>(p) = __builtin_convertvector(narrow_to_float8(v), BVec);
}

AE_INLINE void store_first(float* p, Vec v, int64_t count) { memcpy(p, &v, static_cast<size_t>(count) * sizeof(float)); }

AE_INLINE void store_first(BFloat16* p, Vec v, int64_t count) {
  const HVec h = narrow(v);
  memcpy(p, &h, static_cast<size_t>(count) * sizeof(BFloat16));
}

AE_INLINE float to_float(float value) { return value; }
AE_INLINE float to_float(BFloat16 value) {
  const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float result;
  memcpy(&result, &bits, sizeof result);
  return result;
}

AE_INLINE void from_float(float* p, float value) { *p = value; }
AE_INLINE void from_float(BFloat16* p, float value) { store_first(p, splat(value), 1); }

template <int N>
struct Count {
  static constexpr int value = N;
};

template <int...>
struct Counts {};

AE_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }

// Calls body(offset, count) per vector of a row of n elements, where count is kWidth for all but a partial last vector;
// elements do not depend on each other, so an element's value does not depend on where the row ends.
template <class Body>
AE_INLINE void for_each_vector(int64_t n, Body&& body) {
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) body(i, int64_t{kWidth});
  if (i < n) body(i, n - i);
}

template <class T>
AE_INLINE Vec load_elements(const T* p, int64_t count) {
  return count == kWidth ? load(p) : load_first(p, count);
}

template <class T>
AE_INLINE void store_elements(T* p, Vec v, int64_t count) {
  if (count == kWidth) {
    store(p, v);
  } else {
    store_first(p, v, count);
  }
}

// ---- across a vector: element i with element i + half, halving until one is left ----

#if ASYNCENGINE_VECTOR_BYTES == 64
AE_INLINE Vec swap_half8(Vec v) { return __builtin_shuffle(v, IVec{8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7}); }
AE_INLINE Vec swap_half4(Vec v) { return __builtin_shuffle(v, IVec{4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11}); }
AE_INLINE Vec swap_half2(Vec v) { return __builtin_shuffle(v, IVec{2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13}); }
AE_INLINE Vec swap_half1(Vec v) { return __builtin_shuffle(v, IVec{1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14}); }
#elif ASYNCENGINE_VECTOR_BYTES == 32
AE_INLINE Vec swap_half4(Vec v) { return __builtin_shuffle(v, IVec{4, 5, 6, 7, 0, 1, 2, 3}); }
AE_INLINE Vec swap_half2(Vec v) { return __builtin_shuffle(v, IVec{2, 3, 0, 1, 6, 7, 4, 5}); }
AE_INLINE Vec swap_half1(Vec v) { return __builtin_shuffle(v, IVec{1, 0, 3, 2, 5, 4, 7, 6}); }
#else
AE_INLINE Vec swap_half2(Vec v) { return Vec{v[2], v[3], v[0], v[1]}; }
AE_INLINE Vec swap_half1(Vec v) { return Vec{v[1], v[0], v[3], v[2]}; }
#endif

template <class Op>
AE_INLINE float reduce(Vec v, Op&& op) {
#if ASYNCENGINE_VECTOR_BYTES >= 64
  v = op(v, swap_half8(v));
#endif
#if ASYNCENGINE_VECTOR_BYTES >= 32
  v = op(v, swap_half4(v));
#endif
  v = op(v, swap_half2(v));
  v = op(v, swap_half1(v));
  return v[0];
}

AE_INLINE float reduce_add(Vec v) {
  return reduce(v, [](Vec a, Vec b) __attribute__((always_inline)) { return a + b; });
}
// reduce_add of four vectors at once: the same additions, in fewer shuffles.
AE_INLINE void reduce_add4(Vec a, Vec b, Vec c, Vec d, float* sums) {
#if ASYNCENGINE_VECTOR_BYTES == 64
  const IVec low8{0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23};
  const IVec low4{0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27};
  const Vec ab = __builtin_shuffle(a, b, low8) + __builtin_shuffle(a, b, low8 + 8);
  const Vec cd = __builtin_shuffle(c, d, low8) + __builtin_shuffle(c, d, low8 + 8);
  Vec abcd = __builtin_shuffle(ab, cd, low4) + __builtin_shuffle(ab, cd, low4 + 4);
  abcd = abcd + swap_half2(abcd);
  abcd = abcd + swap_half1(abcd);
  const Vec packed = __builtin_shuffle(abcd, IVec{0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12});
  for (int i = 0; i < 4; ++i) sums[i] = packed[i];
#else
  sums[0] = reduce_add(a);
  sums[1] = reduce_add(b);
  sums[2] = reduce_add(c);
  sums[3] = reduce_add(d);
#endif
}
AE_INLINE float reduce_max(Vec v) {
  return reduce(v, [](Vec a, Vec b) __attribute__((always_inline)) { return max(a, b); });
}

// ---- functions ----

// e^x to about 1 ulp: x = n ln 2 + r, e^r by a polynomial fitted to minimise the relative error (3e-9).
// Zero below -87.33 (denormals are not produced), infinity above 88.72, NaN for NaN; exp(0) is exactly 1.
AE_INLINE Vec exp(Vec x) {
  const Vec rounder = splat(12582912.f);  // 1.5 * 2^23: adding it leaves the rounded integer in the low bits
  const Vec shifted = fma(x, splat(1.44269504088896341f), rounder);
  const Vec n = shifted - rounder;
  Vec r = fma(n, splat(-0.693359375f), x);  // ln 2 in two parts; the first has 9 significant bits
  r = fma(n, splat(2.12194440e-4f), r);
  Vec q = splat(0.0013950602151453495f);
  q = fma(q, r, splat(0.008368953131139278f));
  q = fma(q, r, splat(0.04166620597243309f));
  q = fma(q, r, splat(0.166665181517601f));
  q = fma(q, r, splat(0.5f));
  const Vec p = fma(r * r, q, r) + 1.f;
  const UVec exponent = ((UVec)shifted - (UVec)rounder) << 23;
  Vec y = (Vec)((UVec)p + exponent);
  y = x < -87.33f ? Vec{} : y;
  y = x > 88.72f ? splat(__builtin_inff()) : y;
  return x == x ? y : x;
}

AE_INLINE Vec sigmoid(Vec x) { return 1.f / (1.f + exp(-x)); }

// tanh x to about 2 ulp. Up to 1.5 it is Lambert's continued fraction cut after its seventh term, where nothing cancels;
// beyond, 1 - 2 / (e^2|x| + 1) with the sign of x.
AE_INLINE Vec tanh(Vec x) {
  const Vec size = x < 0.f ? -x : x, square = x * x;
  const Vec above = fma(fma(square + 378.f, square, splat(17325.f)), square, splat(135135.f));
  const Vec below = fma(fma(fma(square, splat(28.f), splat(3150.f)), square, splat(62370.f)), square, splat(135135.f));
  const Vec far = 1.f - 2.f / (exp(2.f * size) + 1.f);
  return size < 1.5f ? x * above / below : x < 0.f ? -far : far;
}

// erfc(z) for z >= 0: t exp(-z² + h(t)) with t = 1 / (1 + z / 2), h fitted to ln(erfc(z) / t) + z² (error 5e-8).
// Exact to about (1 + z²) half-ulps in relative terms, so the far tail keeps its digits.
AE_INLINE Vec erfc_positive(Vec z) {
  const Vec t = 1.f / (1.f + 0.5f * z);
  Vec h = splat(0.1450791193184316f);
  h = fma(h, t, splat(-0.6818777505385545f));
  h = fma(h, t, splat(1.1598797496344313f));
  h = fma(h, t, splat(-0.7015063063512169f));
  h = fma(h, t, splat(-0.07489001013916462f));
  h = fma(h, t, splat(-0.0022474205631394144f));
  h = fma(h, t, splat(0.03605491413535105f));
  h = fma(h, t, splat(0.38627548518121374f));
  h = fma(h, t, splat(0.998683159609073f));
  h = fma(h, t, splat(-1.2654508930853412f));
  return t * exp(fma(-z, z, h));
}

}  // namespace
}  // namespace asyncengine
