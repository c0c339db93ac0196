// Rows in memory to elements of vectors: transposition in registers, four 32-bit words of kWidth rows at a time.
namespace asyncengine {
namespace {

constexpr int64_t kLineBytes = 64;

// Four 32-bit words of a row, each one float or two neighbouring bfloat16, the first in the low half. A unit is such
// four words of kWidth rows.
typedef uint32_t Quad __attribute__((vector_size(16)));
typedef Quad UnalignedQuad __attribute__((aligned(1), may_alias));

template <class T>
constexpr int64_t kPartsPerWord = 4 / static_cast<int64_t>(sizeof(T));

template <class T>
constexpr int64_t kUnitSteps = 4 * kPartsPerWord<T>;

template <class T>
AE_INLINE Vec part(UVec words, int64_t index) {
  if constexpr (sizeof(T) == 4) return (Vec)words;
  return (Vec)(index == 0 ? words << 16 : words & 0xffff0000u);
}

AE_INLINE Quad load_quad(const void* p) { return *static_cast<const UnalignedQuad*>(p); }

// `elements` of T, the rest zero.
template <class T>
AE_INLINE Quad load_first_quad(const T* p, int64_t elements) {
  Quad words{};
  memcpy(&words, p, static_cast<size_t>(elements) * sizeof(T));
  return words;
}

// Quads from memory beside each other: loads, and blends that need no shuffle unit.
template <class QuadOf>
AE_INLINE UVec join_quads(int first, QuadOf&& quad_of) {
#if ASYNCENGINE_VECTOR_BYTES == 64
  __m512i v = _mm512_zextsi128_si512((__m128i)quad_of(first));
  v = _mm512_inserti32x4(v, (__m128i)quad_of(first + 4), 1);
  v = _mm512_inserti32x4(v, (__m128i)quad_of(first + 8), 2);
  return (UVec)_mm512_inserti32x4(v, (__m128i)quad_of(first + 12), 3);
#elif ASYNCENGINE_VECTOR_BYTES == 32
  return (UVec)_mm256_inserti128_si256(_mm256_zextsi128_si256((__m128i)quad_of(first)), (__m128i)quad_of(first + 4), 1);
#else
  return quad_of(first);
#endif
}

typedef uint64_t UVec64 __attribute__((vector_size(ASYNCENGINE_VECTOR_BYTES)));

// Interleaves the low or the high halves of the quads of a and b: by words, or by pairs of words.
template <int High>
AE_INLINE UVec interleave_words(UVec a, UVec b) {
  UVec index{};
  for (int i = 0; i < kWidth; ++i) index[i] = static_cast<uint32_t>(i / 4 * 4 + High * 2 + i % 4 / 2 + i % 2 * kWidth);
  return __builtin_shuffle(a, b, index);
}

template <int High>
AE_INLINE UVec interleave_pairs(UVec a, UVec b) {
  UVec64 index{};
  for (int i = 0; i < kWidth / 2; ++i) index[i] = static_cast<uint64_t>(i / 2 * 2 + High + i % 2 * (kWidth / 2));
  return (UVec)__builtin_shuffle((UVec64)a, (UVec64)b, index);
}

// words[i]: word i of row 0, 1, … of the unit.
template <class QuadOf>
AE_INLINE void load_unit(UVec (&words)[4], QuadOf&& quad_of) {
  const UVec a = join_quads(0, quad_of), b = join_quads(1, quad_of);
  const UVec c = join_quads(2, quad_of), d = join_quads(3, quad_of);
  const UVec ab_low = interleave_words<0>(a, b), ab_high = interleave_words<1>(a, b);
  const UVec cd_low = interleave_words<0>(c, d), cd_high = interleave_words<1>(c, d);
  words[0] = interleave_pairs<0>(ab_low, cd_low);
  words[1] = interleave_pairs<1>(ab_low, cd_low);
  words[2] = interleave_pairs<0>(ab_high, cd_high);
  words[3] = interleave_pairs<1>(ab_high, cd_high);
}

AE_INLINE void copy_line(char* dst, const void* src) {
#pragma GCC unroll 4
  for (int i = 0; i < kLineBytes; i += ASYNCENGINE_VECTOR_BYTES) {
    store(reinterpret_cast<float*>(dst + i), load(reinterpret_cast<const float*>(static_cast<const char*>(src) + i)));
  }
}

}  // namespace
}  // namespace asyncengine
