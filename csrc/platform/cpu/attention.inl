// Attention over a paged KV cache, for decode rows and prefill chunks alike.
//
// The result of one (query, head) is defined as follows and depends on nothing else. Keys are taken in partitions of
// kPartitionKeys absolute positions, ascending. Within a partition: scores, capped if asked, their maximum, e^(score - maximum), the sum
// of these by element of the absolute position, and the weighted sum of values, one key after the other. Partitions are
// folded in order by fold(). A key outside the query's window is skipped, not weighted with zero: what its cell holds
// (NaN, another sequence) cannot matter.
//
// A score is two chains over the even and the odd dimensions, added at the end; elements of a vector are keys. Keys that are
// not transposed have an order of their own (token_keys.inl).
//
// Keys and values in float8 are used as they lie: the scale of a head's keys is part of its queries' scale, and the scale
// of its values is multiplied with the result.
namespace asyncengine {
namespace {

constexpr int kKeyVectors = 16 / kWidth;  // vectors that cover 16 keys, the granule of a block
// Rows (query, head) that share one pass over keys: 2 chains × rows × kKeyVectors accumulators stay in registers.
constexpr int kScoreRows = kWidth == 16 ? 8 : kWidth == 8 ? 2 : 1;
// Rows and vectors of head_dim that share one pass over values.
constexpr int kValueRows = kWidth == 16 ? 4 : 2;
constexpr int kValueVectors = kWidth == 16 ? 4 : 2;
constexpr int64_t kGranulesAhead = 4;  // of 16 keys: what the prefetch of a decode step runs ahead

struct Range {
  int64_t begin, end;
};

AE_INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
AE_INLINE int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

struct AttentionScratch {
  int64_t padded_dim;  // head_dim rounded up to whole vectors
  float* q;  // [rows][padded_dim], scaled
  float* weights;  // [rows][kPartitionKeys]: scores, then e^(score - maximum)
  float* values;  // [rows][padded_dim]: weighted sums of the partition
  float* state;  // [rows][attention_partial_floats]: folded so far
  float* widened;  // [kWidenedKeys][padded_dim]: keys [head_dim][16] or values [keys][head_dim] of float8
};

AE_INLINE AttentionScratch split_scratch(float* memory, int64_t head_dim) {
  const int64_t padded = (head_dim + 15) / 16 * 16;
  AttentionScratch s{};
  s.padded_dim = padded;
  s.q = memory;
  s.weights = s.q + kAttentionRows * padded;
  s.values = s.weights + kAttentionRows * kPartitionKeys;
  s.state = s.values + kAttentionRows * padded;
  s.widened = s.state + kAttentionRows * attention_partial_floats(head_dim);
  return s;
}

// One KV head of one sequence.
template <class T>
struct KeyValues {
  static constexpr bool kFromMemory = true;
  static constexpr int kBytes = sizeof(T);
  const T* k;
  const T* v;
  const int32_t* block_table;
  int64_t block_stride, block_size, head_dim;

  AE_INLINE const T* k_granule(int64_t key) const {  // key a multiple of 16
    const Place at = place(key);
    return k + at.block + at.offset;
  }
  AE_INLINE const T* k_row(int64_t key) const {  // of keys that lie as values do
    const Place at = place(key);
    return k + at.block + at.offset * head_dim;
  }
  AE_INLINE const T* v_row(int64_t key) const {
    const Place at = place(key);
    return v + at.block + at.offset * head_dim;
  }

  struct Place {
    int64_t block, offset;
  };
  // Positions fit 32 bits, and a 64-bit division costs three times as much.
  AE_INLINE Place place(int64_t key) const {
    const uint32_t position = static_cast<uint32_t>(key), size = static_cast<uint32_t>(block_size);
    return {block_table[position / size] * block_stride, position % size};
  }
};

// Scores of 16 keys for `Rows` rows.
template <class T, int Rows>
AE_INLINE void score_granule(const T* k, int64_t block_size, int64_t head_dim, const float* q, int64_t q_stride, float* scores,
                             const T* ahead) {
  Vec even[Rows][kKeyVectors] = {}, odd[Rows][kKeyVectors] = {};
  auto step = [&](Vec(&acc)[Rows][kKeyVectors], int64_t d) __attribute__((always_inline)) {
    if (ahead != nullptr) prefetch(ahead + d * block_size);
    Vec keys[kKeyVectors];
#pragma GCC unroll 4
    for (int i = 0; i < kKeyVectors; ++i) keys[i] = load(k + d * block_size + i * kWidth);
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
      const Vec qv = splat(q[r * q_stride + d]);
#pragma GCC unroll 4
      for (int i = 0; i < kKeyVectors; ++i) acc[r][i] = fma(qv, keys[i], acc[r][i]);
    }
  };
  int64_t d = 0;
  for (; d + 2 <= head_dim; d += 2) {
    step(even, d);
    step(odd, d + 1);
  }
  if (d < head_dim) step(even, d);
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
    for (int i = 0; i < kKeyVectors; ++i) store(scores + r * kPartitionKeys + i * kWidth, even[r][i] + odd[r][i]);
  }
}

// Values from `first` on, widened already.
struct WidenedValues {
  static constexpr bool kFromMemory = false;
  static constexpr int kBytes = sizeof(float);
  const float* v;
  int64_t first, head_dim;

  AE_INLINE const float* v_row(int64_t key) const { return v + (key - first) * head_dim; }
};

// To widen float8 takes a dozen instructions a vector: rows that pass over it several times widen it once.
template <class T>
AE_INLINE bool widens(int64_t rows, int64_t rows_of_pass) {
  return sizeof(T) == 1 && rows > rows_of_pass;
}

template <class T>
AE_INLINE void widen_keys(const T* k, int64_t block_size, int64_t head_dim, float* to, const T* ahead) {
  for (int64_t d = 0; d < head_dim; ++d) {
    prefetch(ahead + d * block_size);
#pragma GCC unroll 4
    for (int i = 0; i < kKeyVectors; ++i) store(to + d * 16 + i * kWidth, load(k + d * block_size + i * kWidth));
  }
}

// Scores of all rows for the granules that cover `keys`, a part of the partition that starts at `origin`.
template <class T>
void score_keys(const KeyValues<T>& kv, const AttentionScratch& s, int64_t rows, Range keys, int64_t origin) {
  for (int64_t key = keys.begin / 16 * 16; key < keys.end; key += 16) {
    const T* k = kv.k_granule(key);
    const T* ahead = kv.k_granule(min64(key + 16 * kGranulesAhead, (keys.end - 1) / 16 * 16));
    float* out = s.weights + (key - origin);
    const bool widened = widens<T>(rows, kScoreRows);
    if (widened) widen_keys(k, kv.block_size, kv.head_dim, s.widened, ahead);
    int64_t r = 0;
    auto pass = [&](auto count) __attribute__((always_inline)) {
      constexpr int kCount = decltype(count)::value;
      for (; r + kCount <= rows && widened; r += kCount) {
        score_granule<float, kCount>(s.widened, 16, kv.head_dim, s.q + r * s.padded_dim, s.padded_dim, out + r * kPartitionKeys,
                                     nullptr);
      }
      for (; r + kCount <= rows; r += kCount) {
        score_granule<T, kCount>(k, kv.block_size, kv.head_dim, s.q + r * s.padded_dim, s.padded_dim, out + r * kPartitionKeys,
                                 r == 0 ? ahead : nullptr);
      }
    };
    if constexpr (kScoreRows >= 8) pass(Count<8>{});
    if constexpr (kScoreRows >= 4) pass(Count<4>{});
    if constexpr (kScoreRows >= 2) pass(Count<2>{});
    pass(Count<1>{});
  }
}

}  // namespace
}  // namespace asyncengine

#include "platform/cpu/token_keys.inl"

namespace asyncengine {
namespace {

void isa_soft_cap(float* x, int64_t count, float cap) {
  for_each_vector(count, [&](int64_t i, int64_t elements) __attribute__((always_inline)) {
    store_elements(x + i, cap * tanh(load_elements(x + i, elements) / cap), elements);
  });
}

struct Moments {
  float max, sum;
};

// Scores of the visible keys become weights; those of other keys in the same vectors become zero.
AE_INLINE Moments softmax_keys(float* weights, Range keys, int64_t origin) {
  const int32_t begin = static_cast<int32_t>(keys.begin - origin), end = static_cast<int32_t>(keys.end - origin);
  const int32_t first = begin / kWidth * kWidth;
  const Vec low = splat(-__builtin_inff());
  Vec maximum = low;
  for (int32_t i = first; i < end; i += kWidth) {
    const IVec index = element_index() + i;
    const Vec scores = load(weights + i);
    maximum = max(((index >= begin) & (index < end)) ? scores : low, maximum);
  }
  const float top = reduce_max(maximum);
  Vec sum{};
  for (int32_t i = first; i < end; i += kWidth) {
    const IVec index = element_index() + i;
    const Vec e = exp(load(weights + i) - top);
    const Vec visible = ((index >= begin) & (index < end)) ? e : Vec{};
    store(weights + i, visible);
    sum = sum + visible;
  }
  return {top, reduce_add(sum)};
}

// values[r] += Σ weight · V over `keys`, one key after the other, for Vectors · kWidth dimensions of Rows rows.
template <class Kv, int Rows, int Vectors>
AE_INLINE void add_values(const Kv& kv, const float* weights, float* values, int64_t padded_dim, Range keys, int64_t origin,
                          int64_t d, int64_t elements, int64_t last_key) {
  Vec acc[Rows][Vectors];
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
    for (int i = 0; i < Vectors; ++i) acc[r][i] = load(values + r * padded_dim + d + i * kWidth);
  }
  for (int64_t key = keys.begin; key < keys.end;) {
    const int64_t stop = min64(keys.end, (key / 16 + 1) * 16);
    const auto* v = kv.v_row(key) + d;
    const auto* ahead = Kv::kFromMemory ? kv.v_row(min64(key + 16 * kGranulesAhead, last_key)) + d : v;
    for (; key < stop; ++key, v += kv.head_dim, ahead += kv.head_dim) {
#pragma GCC unroll 8
      for (int i = 0; i < Vectors * kWidth * Kv::kBytes && Kv::kFromMemory; i += 64) {
        prefetch(reinterpret_cast<const char*>(ahead) + i);
      }
      Vec row[Vectors];
      if constexpr (Vectors == 1) {
        row[0] = load_elements(v, elements);
      } else {
#pragma GCC unroll 8
        for (int i = 0; i < Vectors; ++i) row[i] = load(v + i * kWidth);
      }
#pragma GCC unroll 4
      for (int r = 0; r < Rows; ++r) {
        const Vec weight = splat(weights[r * kPartitionKeys + key - origin]);
#pragma GCC unroll 8
        for (int i = 0; i < Vectors; ++i) acc[r][i] = fma(weight, row[i], acc[r][i]);
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
    for (int i = 0; i < Vectors; ++i) store(values + r * padded_dim + d + i * kWidth, acc[r][i]);
  }
}

template <class Kv, int Rows>
void add_values_rows(const Kv& kv, const AttentionScratch& s, int64_t row, Range keys, int64_t origin, int64_t last_key) {
  if (keys.begin >= keys.end) return;
  const float* weights = s.weights + row * kPartitionKeys;
  float* values = s.values + row * s.padded_dim;
  int64_t d = 0;
  for (; d + kValueVectors * kWidth <= kv.head_dim; d += kValueVectors * kWidth) {
    add_values<Kv, Rows, kValueVectors>(kv, weights, values, s.padded_dim, keys, origin, d, kWidth, last_key);
  }
  for (; d < kv.head_dim; d += kWidth) {
    add_values<Kv, Rows, 1>(kv, weights, values, s.padded_dim, keys, origin, d, min64(kWidth, kv.head_dim - d), last_key);
  }
}

// Rows [0, rows) with their own ranges, ascending in the row: keys that all rows of a group see are shared.
template <class Kv, class RangeOf>
void weigh_values(const Kv& kv, const AttentionScratch& s, int64_t rows, int64_t origin, int64_t last_key, RangeOf&& range_of) {
  int64_t row = 0;
  auto pass = [&](auto count) __attribute__((always_inline)) {
    constexpr int kCount = decltype(count)::value;
    for (; row + kCount <= rows; row += kCount) {
      const Range shared{range_of(row + kCount - 1).begin, range_of(row).end};
      const bool any_shared = shared.begin < shared.end;
      for (int64_t r = row; r < row + kCount; ++r) {
        const Range own = range_of(r);
        add_values_rows<Kv, 1>(kv, s, r, any_shared ? Range{own.begin, shared.begin} : own, origin, last_key);
      }
      if (!any_shared) continue;
      add_values_rows<Kv, kCount>(kv, s, row, shared, origin, last_key);
      for (int64_t r = row; r < row + kCount; ++r) {
        add_values_rows<Kv, 1>(kv, s, r, Range{shared.end, range_of(r).end}, origin, last_key);
      }
    }
  };
  if constexpr (kValueRows >= 4) pass(Count<4>{});
  pass(Count<2>{});
  for (; row < rows; ++row) add_values_rows<Kv, 1>(kv, s, row, range_of(row), origin, last_key);
}

// The same of float8, widened a few keys at a time. `all` is what any row sees.
template <class T, class RangeOf>
void weigh_widened(const KeyValues<T>& kv, const AttentionScratch& s, int64_t rows, int64_t origin, Range all, RangeOf&& range_of) {
  for (int64_t first = all.begin; first < all.end; first += kWidenedKeys) {
    const int64_t end = min64(all.end, first + kWidenedKeys);
    for (int64_t key = first; key < end; ++key) {
      const T* v = kv.v_row(key);
      prefetch(kv.v_row(min64(key + 16 * kGranulesAhead, all.end - 1)));
      float* to = s.widened + (key - first) * kv.head_dim;
      for_each_vector(kv.head_dim, [&](int64_t d, int64_t count) __attribute__((always_inline)) {
        store_elements(to + d, load_elements(v + d, count), count);
      });
    }
    weigh_values(WidenedValues{s.widened, first, kv.head_dim}, s, rows, origin, end - 1, [&](int64_t row) {
      const Range keys = range_of(row);
      return Range{max64(keys.begin, first), min64(keys.end, end)};
    });
  }
}

// state and partial: maximum, sum, values. An empty partial has sum zero; the first one is taken over as it is.
AE_INLINE void fold(float* state, Moments partial, const float* values, int64_t head_dim) {
  if (partial.sum == 0.f) return;
  const int64_t padded = (head_dim + kWidth - 1) / kWidth * kWidth;
  if (state[1] == 0.f) {
    state[0] = partial.max;
    state[1] = partial.sum;
    for (int64_t d = 0; d < padded; d += kWidth) store(state + kPartialHeader + d, load(values + d));
    return;
  }
  const float top = state[0] > partial.max ? state[0] : partial.max;
  const Vec keep = exp(splat(state[0] - top)), add = exp(splat(partial.max - top));
  state[0] = top;
  state[1] = state[1] * keep[0] + partial.sum * add[0];
  for (int64_t d = 0; d < padded; d += kWidth) {
    store(state + kPartialHeader + d, fma(load(values + d), add, load(state + kPartialHeader + d) * keep));
  }
}

AE_INLINE const float* sink_of(const AttentionTask& task, int64_t head) {
  return task.sinks == nullptr ? nullptr : task.sinks + head;
}

template <class T>
AE_INLINE void write_out(T* out, const float* state, int64_t head_dim, float scale, const float* sink) {
  Vec sum = splat(state[1]);
  if (sink != nullptr) sum = sum + exp(splat(*sink - state[0]));
  for_each_vector(head_dim, [&](int64_t d, int64_t count) __attribute__((always_inline)) {
    store_elements(out + d, load(state + kPartialHeader + d) / sum * scale, count);
  });
}

template <class T>
void load_queries(const AttentionTask& task, const AttentionItem& item, const AttentionScratch& s) {
  const int64_t heads = item.head_end - item.head_begin;
  const int64_t first_head = item.kv_head * (task.num_q_heads / task.num_kv_heads) + item.head_begin;
  const float scale = task.scale * task.scales.key(item.kv_head);
  for (int64_t t = 0; t < item.num_queries; ++t) {
    for (int64_t h = 0; h < heads; ++h) {
      const T* q = static_cast<const T*>(task.q) + (item.first_token + t) * task.q_stride + (first_head + h) * task.head_dim;
      float* dst = s.q + (t * heads + h) * s.padded_dim;
      for_each_vector(task.head_dim, [&](int64_t d, int64_t count)
                                         __attribute__((always_inline)) { store(dst + d, load_elements(q + d, count) * scale); });
    }
  }
}

// T is what queries and results are in, Cached what keys and values are in.
template <class T, class Cached>
void attend_item(const AttentionTask& task, const AttentionItem& item, float* memory) {
  const AttentionScratch s = split_scratch(memory, task.head_dim);
  const int64_t heads = item.head_end - item.head_begin, rows = item.num_queries * heads;
  const int64_t head_size = task.head_dim * task.block_size, partial_floats = attention_partial_floats(task.head_dim);
  const int64_t stride = task.block_stride != 0 ? task.block_stride : task.num_kv_heads * head_size;
  const KeyValues<Cached> kv{static_cast<const Cached*>(task.k_cache) + item.kv_head * head_size,
                             static_cast<const Cached*>(task.v_cache) + item.kv_head * head_size,
                             item.block_table,
                             stride,
                             task.block_size,
                             task.head_dim};
  load_queries<T>(task, item, s);
  for (int64_t r = 0; r < rows; ++r) s.state[r * partial_floats + 1] = 0.f;

  for (int64_t p = item.partition_begin; p < item.partition_end; ++p) {
    const int64_t origin = p * kPartitionKeys;
    auto range_of = [&](int64_t row) {
      const int64_t position = item.first_position + row / heads;
      const int64_t begin = task.window > 0 ? max64(origin, position - task.window + 1) : origin;
      return Range{begin, min64(origin + kPartitionKeys, position + 1)};
    };
    const Range all{range_of(0).begin, range_of(rows - 1).end};
    if (all.begin < all.end && task.keys_by_token) score_token_keys(kv, s, rows, all, origin);
    if (all.begin < all.end && !task.keys_by_token) score_keys(kv, s, rows, all, origin);
    Moments moments[kAttentionRows];
    for (int64_t r = 0; r < rows; ++r) {
      const Range keys = range_of(r);
      moments[r] = Moments{0.f, 0.f};
      if (keys.begin < keys.end) {
        float* scores = s.weights + r * kPartitionKeys;
        if (task.softcap > 0.f) isa_soft_cap(scores + (keys.begin - origin), keys.end - keys.begin, task.softcap);
        moments[r] = softmax_keys(scores, keys, origin);
      }
      memset(s.values + r * s.padded_dim, 0, static_cast<size_t>(s.padded_dim) * sizeof(float));
    }
    if (widens<Cached>(rows, kValueRows)) {
      weigh_widened(kv, s, rows, origin, all, range_of);
    } else {
      weigh_values(kv, s, rows, origin, all.end - 1, range_of);
    }
    for (int64_t r = 0; r < rows; ++r) {
      float* state = s.state + r * partial_floats;
      if (item.partials != nullptr) {
        state = item.partials + ((p - item.partition_begin) * rows + r) * partial_floats;
        state[1] = 0.f;
      }
      fold(state, moments[r], s.values + r * s.padded_dim, task.head_dim);
    }
  }
  if (item.partials != nullptr) return;
  const int64_t first_head = item.kv_head * (task.num_q_heads / task.num_kv_heads) + item.head_begin;
  for (int64_t r = 0; r < rows; ++r) {
    T* out = static_cast<T*>(task.out) +
             ((item.first_token + r / heads) * task.num_q_heads + first_head + r % heads) * task.head_dim;
    write_out(out, s.state + r * partial_floats, task.head_dim, task.scales.value(item.kv_head),
              sink_of(task, first_head + r % heads));
  }
}

template <class T>
void attend_with(const AttentionTask& task, const AttentionItem& item, float* scratch) {
  if (task.scales.values != nullptr) {
    attend_item<T, Float8>(task, item, scratch);
  } else {
    attend_item<T, T>(task, item, scratch);
  }
}

void isa_attend(Dtype dtype, const AttentionTask& task, const AttentionItem& item, float* scratch) {
  if (dtype == Dtype::kFloat32) {
    attend_with<float>(task, item, scratch);
  } else {
    attend_with<BFloat16>(task, item, scratch);
  }
}

void isa_combine(Dtype dtype, const AttentionTask& task, int64_t token, int64_t head, const float* partials, int64_t count,
                 int64_t stride, float* state) {
  state[1] = 0.f;
  for (int64_t p = 0; p < count; ++p) {
    const float* partial = partials + p * stride;
    fold(state, {partial[0], partial[1]}, partial + kPartialHeader, task.head_dim);
  }
  const int64_t offset = (token * task.num_q_heads + head) * task.head_dim;
  const float scale = task.scales.value(head / (task.num_q_heads / task.num_kv_heads));
  if (dtype == Dtype::kFloat32) {
    write_out(static_cast<float*>(task.out) + offset, state, task.head_dim, scale, sink_of(task, head));
  } else {
    write_out(static_cast<BFloat16*>(task.out) + offset, state, task.head_dim, scale, sink_of(task, head));
  }
}

template <class T>
void quantize_values(const T* x, int64_t count, float inverse, Float8* y) {
  for_each_vector(count, [&](int64_t i, int64_t elements) __attribute__((always_inline)) {
    store_elements(y + i, load_elements(x + i, elements) * inverse, elements);
  });
}

void isa_quantize(Dtype dtype, const void* x, int64_t count, float inverse, Float8* y) {
  if (dtype == Dtype::kFloat32) {
    quantize_values(static_cast<const float*>(x), count, inverse, y);
  } else {
    quantize_values(static_cast<const BFloat16*>(x), count, inverse, y);
  }
}

}  // namespace
}  // namespace asyncengine
