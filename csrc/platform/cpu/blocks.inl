// Compiled for each instruction set. Layouts are those of ggml-common.h.
#include <cmath>
#include <cstring>

#include "platform/cpu/blocks.h"

#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
#include <immintrin.h>
#endif

namespace asyncengine {
namespace {

float from_half(const uint8_t* bytes) {
  uint16_t half = 0;
  std::memcpy(&half, bytes, 2);
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
  return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(half)));
#else
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const int exponent = half >> 10 & 31;
  const auto fraction = static_cast<float>(half & 1023u);
  float value = exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024.f + fraction, exponent - 25);
  if (exponent == 31) value = fraction == 0 ? INFINITY : NAN;
  return sign != 0 ? -value : value;
#endif
}

void set_groups(const CodeRow& row, int64_t column, int64_t count, float scale, float offset) {
  for (int64_t g = column / kCodeGroup; g < (column + count) / kCodeGroup; ++g) {
    row.scales[g] = scale;
    row.offsets[g] = offset;
  }
}

void low_and_high(const uint8_t* codes, int64_t run, uint8_t* out) {
  for (int64_t i = 0; i < run; ++i) {
    out[i] = codes[i] & 15;
    out[run + i] = static_cast<uint8_t>(codes[i] >> 4);
  }
}

void add_fifth_bits(const uint8_t* bits, uint8_t* out) {
  uint32_t all = 0;
  std::memcpy(&all, bits, 4);
  for (int i = 0; i < 32; ++i) out[i] = static_cast<uint8_t>(out[i] | (all >> i & 1u) << 4);
}

void decode_q8_0(const uint8_t* block, int64_t k, const CodeRow& row) {
  for (int64_t c = 0; c < k; c += 32, block += 34) {
    const float d = from_half(block);
    for (int i = 0; i < 32; ++i) row.codes[c + i] = block[2 + i] ^ 0x80;
    set_groups(row, c, 32, d, -128.f * d);
  }
}

// Codes of 4 or 5 bits; with a minimum, or else less half of their range.
template <bool kFive, bool kMinimum>
void decode_nibbles(const uint8_t* block, int64_t k, const CodeRow& row) {
  constexpr int64_t kBits = kMinimum ? 4 : 2, kCodes = kBits + (kFive ? 4 : 0);
  for (int64_t c = 0; c < k; c += 32, block += kCodes + 16) {
    const float d = from_half(block);
    low_and_high(block + kCodes, 16, row.codes + c);
    if (kFive) add_fifth_bits(block + kBits, row.codes + c);
    set_groups(row, c, 32, d, kMinimum ? from_half(block + 2) : (kFive ? -16.f : -8.f) * d);
  }
}

template <bool kFive>
void decode_k(const uint8_t* block, int64_t k, const CodeRow& row) {
  constexpr int64_t kCodes = kFive ? 48 : 16;
  for (int64_t c = 0; c < k; c += 256, block += kCodes + 128) {
    const float d = from_half(block), least = from_half(block + 2);
    const uint8_t *s = block + 4, *codes = block + kCodes;
    for (int g = 0; g < 8; ++g) {
      const int scale = g < 4 ? s[g] & 63 : (s[g + 4] & 15) | (s[g - 4] >> 6) << 4;
      const int offset = g < 4 ? s[g + 4] & 63 : s[g + 4] >> 4 | (s[g] >> 6) << 4;
      set_groups(row, c + 32 * g, 32, d * static_cast<float>(scale), -least * static_cast<float>(offset));
    }
    for (int q = 0; q < 4; ++q) low_and_high(codes + 32 * q, 32, row.codes + c + 64 * q);
    for (int g = 0; g < 8 && kFive; ++g) {
      uint8_t* out = row.codes + c + 32 * g;
      for (int i = 0; i < 32; ++i) out[i] = static_cast<uint8_t>(out[i] | (block[16 + i] >> g & 1) << 4);
    }
  }
}

void decode_q6_k(const uint8_t* block, int64_t k, const CodeRow& row) {
  for (int64_t c = 0; c < k; c += 256, block += 210) {
    const float d = from_half(block + 208);
    for (int half = 0; half < 2; ++half) {
      const uint8_t *low = block + 64 * half, *high = block + 128 + 32 * half;
      uint8_t* out = row.codes + c + 128 * half;
      for (int i = 0; i < 64; ++i) {
        out[i] = static_cast<uint8_t>((low[i] & 15) | (high[i % 32] >> (i / 32 * 2) & 3) << 4);
        out[64 + i] = static_cast<uint8_t>(low[i] >> 4 | (high[i % 32] >> (4 + i / 32 * 2) & 3) << 4);
      }
    }
    for (int g = 0; g < 16; ++g) {
      const float scale = d * static_cast<float>(static_cast<int8_t>(block[192 + g]));
      set_groups(row, c + 16 * g, 16, scale, -32.f * scale);
    }
  }
}

void decode(int type, const uint8_t* blocks, int64_t k, const CodeRow& row) {
  switch (static_cast<BlockType>(type)) {
    case BlockType::kQ4_0: return decode_nibbles<false, false>(blocks, k, row);
    case BlockType::kQ4_1: return decode_nibbles<false, true>(blocks, k, row);
    case BlockType::kQ5_0: return decode_nibbles<true, false>(blocks, k, row);
    case BlockType::kQ5_1: return decode_nibbles<true, true>(blocks, k, row);
    case BlockType::kQ8_0: return decode_q8_0(blocks, k, row);
    case BlockType::kQ4_K: return decode_k<false>(blocks, k, row);
    case BlockType::kQ5_K: return decode_k<true>(blocks, k, row);
    case BlockType::kQ6_K: return decode_q6_k(blocks, k, row);
  }
}

void quantise(const float* x, int64_t k, const CodeRow& row) {
  for (int64_t c = 0; c < k; c += 32) {
    float largest = 0;
    for (int i = 0; i < 32; ++i) largest = std::fabs(x[c + i]) > largest ? std::fabs(x[c + i]) : largest;
    const float scale = largest / 127.f, inverse = largest > 0 ? 127.f / largest : 0.f;
    for (int half = 0; half < 2; ++half) {
      int sum = 0;
      for (int i = 0; i < 16; ++i) {
        const int code = static_cast<int>(std::nearbyint(x[c + 16 * half + i] * inverse));
        row.codes[c + 16 * half + i] = static_cast<uint8_t>(static_cast<int8_t>(code));
        sum += code;
      }
      row.scales[c / 16 + half] = scale;
      row.offsets[c / 16 + half] = scale * static_cast<float>(sum);
    }
  }
}

#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
float dot(const CodeRow& weight, const CodeRow& x, int64_t filled) {
  const __m512i spread = _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
  __m512 sums = _mm512_setzero_ps();
  __m128 offsets = _mm_setzero_ps();
  for (int64_t c = 0; c < filled; c += kCodeStep) {
    const int64_t g = c / kCodeGroup;
    const __m512i products = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_loadu_si512(weight.codes + c),
                                                 _mm512_loadu_si512(x.codes + c));
    const __m128 scale = _mm_mul_ps(_mm_loadu_ps(weight.scales + g), _mm_loadu_ps(x.scales + g));
    const __m512 scales = _mm512_permutexvar_ps(spread, _mm512_castps128_ps512(scale));
    sums = _mm512_fmadd_ps(_mm512_cvtepi32_ps(products), scales, sums);
    offsets = _mm_fmadd_ps(_mm_loadu_ps(weight.offsets + g), _mm_loadu_ps(x.offsets + g), offsets);
  }
  offsets = _mm_add_ps(offsets, _mm_movehl_ps(offsets, offsets));
  return _mm512_reduce_add_ps(sums) + _mm_cvtss_f32(offsets) + _mm_cvtss_f32(_mm_movehdup_ps(offsets));
}
#else
float dot(const CodeRow& weight, const CodeRow& x, int64_t filled) {
  float sum = 0;
  for (int64_t g = 0; g < filled / kCodeGroup; ++g) {
    int product = 0;
    for (int64_t i = g * kCodeGroup; i < (g + 1) * kCodeGroup; ++i) {
      product += static_cast<int>(weight.codes[i]) * static_cast<int8_t>(x.codes[i]);
    }
    sum += static_cast<float>(product) * weight.scales[g] * x.scales[g] + weight.offsets[g] * x.offsets[g];
  }
  return sum;
}
#endif

constexpr BlockKernels kKernels{decode, quantise, dot};

}  // namespace
}  // namespace asyncengine
