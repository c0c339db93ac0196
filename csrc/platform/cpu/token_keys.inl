// Scores over keys that lie as values do, [block_size, head_dim] for a head: the layout of the device's blocks.
//
// A score is a chain per element of a vector over the dimensions, vector by vector of a key, and then the sum of the elements.
// It depends on nothing else, but it is another order than that of transposed keys (attention.inl), so it rounds differently.
namespace asyncengine {
namespace {

// Rows and keys that share one pass: their chains stay in registers.
constexpr int kTokenRows = kWidth == 16 ? 4 : 2;
constexpr int kTokenKeys = 4;

// Scores of 16 keys for `Rows` rows.
template <class T, int Rows>
AE_INLINE void score_tokens(const T* k, int64_t head_dim, const float* q, int64_t q_stride, float* scores) {
  for (int key = 0; key < 16; key += kTokenKeys, k += kTokenKeys * head_dim) {
    Vec acc[kTokenKeys][Rows] = {};
    for_each_vector(head_dim, [&](int64_t d, int64_t elements) __attribute__((always_inline)) {
      Vec queries[Rows];
#pragma GCC unroll 4
      for (int r = 0; r < Rows; ++r) queries[r] = load(q + r * q_stride + d);  // zero beyond head_dim
#pragma GCC unroll 4
      for (int i = 0; i < kTokenKeys; ++i) {
        const Vec at = load_elements(k + i * head_dim + d, elements);
#pragma GCC unroll 4
        for (int r = 0; r < Rows; ++r) acc[i][r] = fma(queries[r], at, acc[i][r]);
      }
    });
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) {
      reduce_add4(acc[0][r], acc[1][r], acc[2][r], acc[3][r], scores + r * kPartitionKeys + key);
    }
  }
}

template <class T>
AE_INLINE void prefetch_keys(const T* k, int64_t head_dim) {
  const char* p = reinterpret_cast<const char*>(k);
  for (int64_t i = 0; i < 16 * head_dim * static_cast<int64_t>(sizeof(T)); i += 64) prefetch(p + i);
}

// Does the work of score_keys() for keys in this layout.
template <class T>
void score_token_keys(const KeyValues<T>& kv, const AttentionScratch& s, int64_t rows, Range keys, int64_t origin) {
  const bool widened = widens<T>(rows, kTokenRows);
  for (int64_t key = keys.begin / 16 * 16; key < keys.end; key += 16) {
    const T* k = kv.k_row(key);
    prefetch_keys(kv.k_row(min64(key + 16 * kGranulesAhead, (keys.end - 1) / 16 * 16)), kv.head_dim);
    for (int64_t i = 0; i < 16 && widened; ++i) {
      for_each_vector(kv.head_dim, [&](int64_t d, int64_t count) __attribute__((always_inline)) {
        store_elements(s.widened + i * kv.head_dim + d, load_elements(k + i * kv.head_dim + d, count), count);
      });
    }
    float* out = s.weights + (key - origin);
    int64_t r = 0;
    auto pass = [&](auto count) __attribute__((always_inline)) {
      constexpr int kCount = decltype(count)::value;
      for (; r + kCount <= rows; r += kCount) {
        const float* q = s.q + r * s.padded_dim;
        if (widened) {
          score_tokens<float, kCount>(s.widened, kv.head_dim, q, s.padded_dim, out + r * kPartitionKeys);
        } else {
          score_tokens<T, kCount>(k, kv.head_dim, q, s.padded_dim, out + r * kPartitionKeys);
        }
      }
    };
    if constexpr (kTokenRows >= 4) pass(Count<4>{});
    pass(Count<2>{});
    pass(Count<1>{});
  }
}

}  // namespace
}  // namespace asyncengine
