// Weights in codes (WeightCodes) to tiles of bfloat16 for AMX: the float32 that number * scale + offset gives, rounded.
//
// A tile is 16 rows of the weight and 32 steps of K, as plain rows of W are. Two tiles of rows lie one behind the other.
namespace asyncengine {
namespace {

constexpr int64_t kDecodedTiles = 8;  // of K at a time, in few rows: two tiles of rows take 16 KB of L1
constexpr int64_t kCodeBytesAhead = 512;

AE_INLINE Vec scaled(Vec numbers, float scale, const float* offset) {
  return offset == nullptr ? numbers * scale : fma(numbers, splat(scale), splat(*offset));
}

// Rounds to nearest, as narrow() does, but for denormal numbers, which become zero. Every machine with AMX has it.
AE_INLINE __m512i narrow_pair(Vec low, Vec high) { return (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low); }

// Codes of 4 bits are looked up among the 16 weights that a group of a row can have. Indices have 5 bits: each weight is
// there twice, whatever the fifth is.
AE_INLINE __m512i weights_of_group(Vec table, float scale, const float* offset) {
  const Vec weights = scaled(table, scale, offset);
  return narrow_pair(weights, weights);
}

AE_INLINE void decode_nibbles(const char* codes, __m512i weights, char* to) {
  const __m512i bytes = _mm512_maskz_cvtepu8_epi32(0xffff, _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
  const __m512i index = bytes | _mm512_maskz_slli_epi32(0xffff, bytes, 12);
  _mm512_storeu_si512(to, _mm512_maskz_permutexvar_epi16(0xffffffff, index, weights));
}

template <CodeType C>
AE_INLINE Vec byte_numbers(const char* codes) {
  const BVec bytes = *reinterpret_cast<const UnalignedBVec*>(codes);
  if constexpr (C == CodeType::kFloat8) return widen(bytes);
  return __builtin_convertvector((IVec)_mm512_maskz_cvtepi8_epi32(0xffff, (__m128i)bytes), Vec);
}

template <CodeType C>
constexpr int64_t kTileCodeBytes = C == CodeType::kInt4 ? kTileSteps / 2 : kTileSteps;

// `count` tiles of K of one row that share a scale, `stride` bytes from tile to tile.
template <CodeType C>
AE_INLINE void decode_group(const char* from, int64_t count, Vec table, float scale, const float* offset, char* to,
                            int64_t stride) {
  if constexpr (C == CodeType::kInt4) {
    const __m512i weights = weights_of_group(table, scale, offset);
    for (int64_t tile = 0; tile < count; ++tile, to += stride, from += kTileCodeBytes<C>) decode_nibbles(from, weights, to);
  } else {
    for (int64_t tile = 0; tile < count; ++tile, to += stride, from += kTileCodeBytes<C>) {
      const Vec low = byte_numbers<C>(from), high = byte_numbers<C>(from + kWidth);
      _mm512_storeu_si512(to, narrow_pair(scaled(low, scale, offset), scaled(high, scale, offset)));
    }
  }
}

// A tile of two groups of 16, or one at the end of a row: what is behind the end is zero.
template <CodeType C>
void decode_edge(const LinearTask& task, int64_t row, int64_t tile, const char* from, char* to) {
  const WeightCodes& codes = *task.codes;
  const int64_t left = task.k - tile * kTileSteps, steps = left < kTileSteps ? left : kTileSteps;
  alignas(64) char copy[kTileSteps] = {}, made[kRowBytes];
  memcpy(copy, from, static_cast<size_t>(C == CodeType::kInt4 ? steps / 2 : steps));
  for (int64_t at = 0; at < steps; at += kWidth) {
    const int64_t place = ((tile * kTileSteps + at) >> codes.group_shift) * codes.rows + row;
    const float* offset = codes.offsets == nullptr ? nullptr : codes.offsets + place;
    const Vec table = C == CodeType::kInt4 ? load(codes.table) : Vec{};
    decode_group<C>(copy, 1, table, codes.scales[place], offset, made, 0);
    memcpy(to + at * 2, made + at * 2, static_cast<size_t>(kWidth) * 2);
  }
  memset(to + steps * 2, 0, static_cast<size_t>((kTileSteps - steps) * 2));
}

// Tiles [begin, end) of K of one row of the weight, `stride` bytes from tile to tile.
template <CodeType C>
AE_INLINE void decode_row(const LinearTask& task, int64_t row, int64_t begin, int64_t end, char* to, int64_t stride) {
  const WeightCodes& codes = *task.codes;
  const int64_t row_bytes = C == CodeType::kInt4 ? task.k / 2 : task.k;
  const char* from = static_cast<const char*>(task.weight) + row * row_bytes;
  const int64_t whole = codes.group_shift == 4 ? 0 : task.k / kTileSteps;
  const Vec table = C == CodeType::kInt4 ? load(codes.table) : Vec{};
  for (int64_t tile = begin; tile < end;) {
    const char* at = from + tile * kTileCodeBytes<C>;
    if (tile >= whole) {
      decode_edge<C>(task, row, tile, at, to + (tile - begin) * stride);
      ++tile;
      continue;
    }
    const int64_t group = tile * kTileSteps >> codes.group_shift, place = group * codes.rows + row;
    int64_t next = end < whole ? end : whole;
    if (codes.group_shift < 62 && ((group + 1) << codes.group_shift) / kTileSteps < next) {
      next = ((group + 1) << codes.group_shift) / kTileSteps;
    }
    for (int64_t byte = 0; byte < (next - tile) * kTileCodeBytes<C>; byte += kRowBytes) {
      // Past the end of a row comes that of the rows that are decoded next, in few rows.
      const int64_t last = at + byte + kCodeBytesAhead < from + row_bytes ? 0 : (kPairRows - 1) * row_bytes;
      prefetch(at + byte + kCodeBytesAhead + last);
    }
    const float* offset = codes.offsets == nullptr ? nullptr : codes.offsets + place;
    decode_group<C>(at, next - tile, table, codes.scales[place], offset, to + (tile - begin) * stride, stride);
    tile = next;
  }
}

// The two tiles of rows from n on, for tiles [begin, end) of K: to [tile of K][2][16 rows][32 steps]. Rows past the last one
// are zero.
void decode_tiles(const LinearTask& task, int64_t n, int64_t begin, int64_t end, char* to) {
  for (int64_t row = 0; row < kPairRows; ++row, to += kRowBytes) {
    if (n + row >= task.n_end) {
      for (int64_t tile = 0; tile < end - begin; ++tile) memset(to + tile * 2 * kTileBytes, 0, static_cast<size_t>(kRowBytes));
      continue;
    }
    switch (task.codes->type) {
      case CodeType::kInt4: decode_row<CodeType::kInt4>(task, n + row, begin, end, to, 2 * kTileBytes); break;
      case CodeType::kInt8: decode_row<CodeType::kInt8>(task, n + row, begin, end, to, 2 * kTileBytes); break;
      case CodeType::kFloat8: decode_row<CodeType::kFloat8>(task, n + row, begin, end, to, 2 * kTileBytes); break;
    }
  }
}

}  // namespace
}  // namespace asyncengine
