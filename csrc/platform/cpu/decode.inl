// Weights in codes (WeightCodes) to vectors: element i of a vector belongs to row i of the weight, step by step along K.
//
// A weight is fma(number, scale, offset), or number * scale where there are no offsets: one value, whoever decodes it.
namespace asyncengine {
namespace {

constexpr int64_t kDecodedSteps = 128;  // of K at a time: a line of codes of 4 bits in each row
constexpr int64_t kGroupSteps = 16;     // scales change no more often
constexpr int64_t kCodeBytesAhead = 512;

// Numbers of codes of 4 bits; the bits above those are ignored.
struct CodeTable {
#if ASYNCENGINE_VECTOR_BYTES == 64
  Vec numbers;
  explicit CodeTable(const float* table) : numbers(load(table)) {}
  AE_INLINE Vec of(UVec codes) const { return _mm512_maskz_permutexvar_ps(0xffff, (__m512i)codes, numbers); }
#elif ASYNCENGINE_VECTOR_BYTES == 32
  Vec low, high;
  explicit CodeTable(const float* table) : low(load(table)), high(load(table + 8)) {}
  AE_INLINE Vec of(UVec codes) const {
    const __m256i index = (__m256i)codes;
    const __m256 a = _mm256_permutevar8x32_ps(low, index), b = _mm256_permutevar8x32_ps(high, index);
    return _mm256_blendv_ps(a, b, (__m256)(codes << 28));
  }
#else
  const float* table;
  explicit CodeTable(const float* numbers) : table(numbers) {}
  AE_INLINE Vec of(UVec codes) const {
    Vec numbers;
    for (int i = 0; i < kWidth; ++i) numbers[i] = table[codes[i] & 15u];
    return numbers;
  }
#endif
};

struct NoTable {
  explicit NoTable(const float*) {}
};

template <CodeType C>
using TableOf = std::conditional_t<C == CodeType::kInt4, CodeTable, NoTable>;

template <CodeType C>
constexpr int64_t kCodesPerWord = C == CodeType::kInt4 ? 8 : 4;

// The numbers of code `index` of each word.
template <CodeType C>
AE_INLINE Vec numbers_of(const TableOf<C>& table, UVec words, int64_t index) {
  if constexpr (C == CodeType::kInt4) {
    return table.of(words >> static_cast<uint32_t>(4 * index));
  } else if constexpr (C == CodeType::kInt8) {
    return __builtin_convertvector((IVec)(words << static_cast<uint32_t>(24 - 8 * index)) >> 24, Vec);
  } else {
    return widen_float8(words >> static_cast<uint32_t>(8 * index) & 0xffu);
  }
}

// Codes of kWidth rows, line by line; rows past `last` repeat it, codes past the end of a row read as zero.
struct CodeRows {
  const char* first;
  int64_t stride, last;  // bytes of a row; the last row
  int64_t n, rows;       // the first one, and all of the matrix

  AE_INLINE void copy(char (&lines)[kWidth][kLineBytes], int64_t byte) const {
    const int64_t left = stride - byte;
    // Past the end of the rows come those that are decoded next, in few rows.
    const int64_t ahead = kCodeBytesAhead + (byte + kCodeBytesAhead < stride ? 0 : (2 * kWidth - 1) * stride);
    for (int64_t i = 0; i < kWidth; ++i) {
      const char* from = first + (i < last ? i : last) * stride + byte;
      if (left >= kLineBytes) {
        copy_line(lines[i], from);
        prefetch(from + ahead);
      } else {
        memset(lines[i], 0, kLineBytes);
        memcpy(lines[i], from, static_cast<size_t>(left));
      }
    }
  }
};

template <CodeType C>
AE_INLINE CodeRows code_rows(const LinearTask& task, int64_t n) {
  const int64_t left = task.n_end - n, count = left < kWidth ? left : kWidth;
  const int64_t first = n - (task.n_end >= kWidth ? kWidth - count : 0);
  const int64_t stride = C == CodeType::kInt4 ? task.k / 2 : task.k;
  return {static_cast<const char*>(task.weight) + first * stride, stride,
          task.n_end - first - 1 < kWidth - 1 ? task.n_end - first - 1 : kWidth - 1, first, task.codes->rows};
}

template <CodeType C, bool Offsets>
void decode_rows(const LinearTask& task, int64_t n, int64_t begin, int64_t end, float* panel) {
  constexpr int64_t kPerWord = kCodesPerWord<C>, kLineSteps = kLineBytes / 4 * kPerWord, kUnit = 4 * kPerWord;
  constexpr int64_t kWordsPerGroup = kGroupSteps / kPerWord;
  const WeightCodes& codes = *task.codes;
  const CodeRows rows = code_rows<C>(task, n);
  const TableOf<C> table(codes.table);
  alignas(64) char lines[kWidth][kLineBytes];
  UVec words[4];
  for (int64_t k = begin; k < end; k += kLineSteps) {
    rows.copy(lines, k / kPerWord * 4);
    for (int64_t byte = 0, at = k; byte < kLineBytes && at < end; byte += 16) {
      load_unit(words, [&](int i) __attribute__((always_inline)) { return load_quad(lines[i] + byte); });
#pragma GCC unroll 2
      for (int64_t word = 0; word < kUnit / kPerWord; word += kWordsPerGroup, at += kGroupSteps) {
        if (at >= end) break;
        const int64_t group = (at >> codes.group_shift) * rows.rows + rows.n;
        const Vec scale = load(codes.scales + group), offset = Offsets ? load(codes.offsets + group) : Vec{};
        const int64_t steps = end - at;
#pragma GCC unroll 16
        for (int64_t step = 0; step < kGroupSteps; ++step, panel += kWidth) {
          if (step >= steps) break;
          const Vec number = numbers_of<C>(table, words[word + step / kPerWord], step % kPerWord);
          store(panel, Offsets ? fma(number, scale, offset) : number * scale);
        }
      }
    }
  }
}

// Steps [begin, end) of K, begin a multiple of kDecodedSteps, of the columns of y from n on, as start_columns has them:
// panel [step][kWidth].
void decode_columns(const LinearTask& task, int64_t n, int64_t begin, int64_t end, float* panel) {
  const bool offsets = task.codes->offsets != nullptr;
  switch (task.codes->type) {
    case CodeType::kInt4:
      return (offsets ? decode_rows<CodeType::kInt4, true> : decode_rows<CodeType::kInt4, false>)(task, n, begin, end, panel);
    case CodeType::kInt8:
      return (offsets ? decode_rows<CodeType::kInt8, true> : decode_rows<CodeType::kInt8, false>)(task, n, begin, end, panel);
    case CodeType::kFloat8:
      return (offsets ? decode_rows<CodeType::kFloat8, true> : decode_rows<CodeType::kFloat8, false>)(task, n, begin, end, panel);
  }
}

}  // namespace
}  // namespace asyncengine
