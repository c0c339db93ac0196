// Recurrences of Mamba-2 and gated DeltaNet. Every token of a sequence goes through the same operations in the same order,
// wherever a prompt is cut: the state is read from its slot and written to it in the same numbers.
#include "platform/cpu/mixer.h"

extern "C" {
float expf(float);
float log1pf(float);
float sqrtf(float);
}

namespace asyncengine {
namespace {

// ln(1 + e^x)
AE_INLINE float softplus(float x) { return (x > 0.f ? x : 0.f) + log1pf(expf(x > 0.f ? -x : x)); }

AE_INLINE float sum_of_squares(const float* x, int64_t count) {
  Vec sum{};
  for_each_vector(count, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
    const Vec v = load_elements(x + i, n);
    sum = fma(v, v, sum);
  });
  return reduce_add(sum);
}

AE_INLINE void scale_floats(float* x, int64_t count, float factor) {
  for_each_vector(count, [&](int64_t i, int64_t n)
                             __attribute__((always_inline)) { store_elements(x + i, load_elements(x + i, n) * factor, n); });
}

// The convolution of a token, its time steps and, of DeltaNet, its unit keys and queries.
template <class T>
void mix_token(const MixerTask& task, const MixerRow& row, int64_t token) {
  const CpuMixer& mixer = *task.mixer;
  const T* x = static_cast<const T*>(task.x);
  const int64_t channels = mixer.channels(), before = mixer.conv_size - 1;
  const float* kept = reinterpret_cast<const float*>(row.slot);
  float* mixed = task.mixed + token * channels;
  for_each_vector(channels, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
    Vec sum = mixer.conv_bias == nullptr ? Vec{} : load_elements(mixer.conv_bias + i, n);
    for (int64_t k = 0; k <= before; ++k) {
      const int64_t at = token - before + k, behind = at - row.begin;
      const Vec input = behind < 0 ? load_elements(kept + (before + behind) * channels + i, n)
                                   : load_elements(x + at * task.x_stride + mixer.mixed_at() + i, n);
      sum = fma(load_elements(mixer.conv_weight + k * channels + i, n), input, sum);
    }
    store_elements(mixed + i, silu(sum), n);
  });
  const T* steps = x + token * task.x_stride + mixer.steps_at();
  float* keeps = task.steps + token * 2 * mixer.heads;
  float* second = keeps + mixer.heads;
  for (int64_t head = 0; head < mixer.heads; ++head) {
    float step = softplus(to_float(steps[head]) + mixer.dt_bias[head]);
    if (mixer.delta) {
      second[head] = 1.f / (1.f + expf(-to_float(x[token * task.x_stride + mixer.rates_at() + head])));
    } else {
      step = step < mixer.dt_low ? mixer.dt_low : step > mixer.dt_high ? mixer.dt_high : step;
      second[head] = step;
    }
    keeps[head] = expf(step * mixer.decay[head]);
  }
  if (!mixer.delta) return;
  const float of_queries = 1.f / sqrtf(static_cast<float>(mixer.size));
  for (int64_t group = 0; group < mixer.groups; ++group) {
    float* q = mixed + mixer.queries_at() + group * mixer.size;
    float* k = mixed + mixer.keys_at() + group * mixer.size;
    scale_floats(q, mixer.size, of_queries / sqrtf(sum_of_squares(q, mixer.size) + 1e-6f));
    scale_floats(k, mixer.size, 1.f / sqrtf(sum_of_squares(k, mixer.size) + 1e-6f));
  }
}

void isa_mix_tokens(Dtype dtype, const MixerTask& task, const MixerRow& row, int64_t begin, int64_t end) {
  for (int64_t token = begin; token < end; ++token) {
    if (dtype == Dtype::kFloat32) {
      mix_token<float>(task, row, token);
    } else {
      mix_token<BFloat16>(task, row, token);
    }
  }
}

// The last inputs of the convolution, once all tokens of the row have read those before them.
template <class T>
void keep_inputs(const MixerTask& task, const MixerRow& row) {
  const CpuMixer& mixer = *task.mixer;
  const int64_t channels = mixer.channels(), before = mixer.conv_size - 1, tokens = row.end - row.begin;
  float* kept = reinterpret_cast<float*>(row.slot);
  for (int64_t i = 0; i < before; ++i) {
    const int64_t from = i + tokens;  // of the inputs that were kept and those of the row, one behind another
    const T* x = static_cast<const T*>(task.x) + (row.begin + from - before) * task.x_stride + mixer.mixed_at();
    for_each_vector(channels, [&](int64_t c, int64_t n) __attribute__((always_inline)) {
      const Vec input = from < before ? load_elements(kept + from * channels + c, n) : load_elements(x + c, n);
      store_elements(kept + i * channels + c, input, n);
    });
  }
}

void isa_keep_inputs(Dtype dtype, const MixerTask& task, const MixerRow& row) {
  if (dtype == Dtype::kFloat32) {
    keep_inputs<float>(task, row);
  } else {
    keep_inputs<BFloat16>(task, row);
  }
}

// Columns of a head's state, `vectors` whole ones or one of `count` < kWidth elements, through the tokens of a row.
template <class S, int kVectors>
AE_INLINE void scan_columns(const MixerTask& task, const MixerRow& row, int64_t head, int64_t column, int64_t count) {
  const CpuMixer& mixer = *task.mixer;
  const int64_t size = mixer.size, dim = mixer.dim, group = head / (mixer.heads / mixer.groups);
  S* state = reinterpret_cast<S*>(row.slot + mixer.conv_bytes()) + head * size * dim + column;
  for (int64_t token = row.begin; token < row.end; ++token) {
    const float* mixed = task.mixed + token * mixer.channels();
    const float* keys = mixed + mixer.keys_at() + group * size;
    const float* queries = mixed + mixer.queries_at() + group * size;
    const float* values = mixed + mixer.values_at() + head * dim + column;
    const float* steps = task.steps + token * 2 * mixer.heads + head;
    float* result = task.results + token * mixer.inner() + head * dim + column;
    const Vec keep = splat(steps[0]), second = splat(steps[mixer.heads]);
    Vec added[kVectors], sum[kVectors]{};
    for (int v = 0; v < kVectors; ++v) added[v] = second * load_elements(values + v * kWidth, count);
    if (mixer.delta) {
      Vec known[kVectors]{};
      for (int64_t n = 0; n < size; ++n) {
        const Vec key = splat(keys[n]);
        for (int v = 0; v < kVectors; ++v) known[v] = fma(key, load_elements(state + n * dim + v * kWidth, count), known[v]);
      }
      for (int v = 0; v < kVectors; ++v) added[v] = fma(-(second * keep), known[v], added[v]);
    }
    for (int64_t n = 0; n < size; ++n) {
      const Vec key = splat(keys[n]), query = splat(queries[n]);
      for (int v = 0; v < kVectors; ++v) {
        S* p = state + n * dim + v * kWidth;
        const Vec s = fma(keep, load_elements(p, count), key * added[v]);
        sum[v] = fma(query, s, sum[v]);
        store_elements(p, s, count);
      }
    }
    if (mixer.skip != nullptr) {
      for (int v = 0; v < kVectors; ++v) sum[v] = fma(splat(mixer.skip[head]), load_elements(values + v * kWidth, count), sum[v]);
    }
    for (int v = 0; v < kVectors; ++v) store_elements(result + v * kWidth, sum[v], count);
  }
}

template <class S>
void scan_head(const MixerTask& task, const MixerRow& row, int64_t head) {
  const int64_t dim = task.mixer->dim;
  int64_t column = 0;
  for (; column + 4 * kWidth <= dim; column += 4 * kWidth) scan_columns<S, 4>(task, row, head, column, kWidth);
  for (; column + kWidth <= dim; column += kWidth) scan_columns<S, 1>(task, row, head, column, kWidth);
  if (column < dim) scan_columns<S, 1>(task, row, head, column, dim - column);
}

void isa_scan_head(const MixerTask& task, const MixerRow& row, int64_t head) {
  if (task.mixer->half_states) {
    scan_head<BFloat16>(task, row, head);
  } else {
    scan_head<float>(task, row, head);
  }
}

// A token's result behind gate and norm.
template <class T>
void finish_token(const MixerTask& task, int64_t token) {
  const CpuMixer& mixer = *task.mixer;
  const int64_t parts = mixer.delta ? mixer.heads : mixer.groups, width = mixer.inner() / parts;
  const T* gates = static_cast<const T*>(task.x) + token * task.x_stride + mixer.gate_at();
  T* out = static_cast<T*>(task.out) + token * mixer.inner();
  float* results = task.results + token * mixer.inner();
  const bool gate_first = !mixer.delta && !mixer.norm_before_gate;
  for (int64_t part = 0; part < parts; ++part) {
    float* y = results + part * width;
    const T* gate = gates + part * width;
    if (gate_first) {
      for_each_vector(width, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
        store_elements(y + i, load_elements(y + i, n) * silu(load_elements(gate + i, n)), n);
      });
    }
    const float scale = mixer.norm == nullptr ? 1.f : 1.f / sqrtf(sum_of_squares(y, width) / static_cast<float>(width) + mixer.eps);
    const float* weight = mixer.norm == nullptr || mixer.delta ? mixer.norm : mixer.norm + part * width;
    for_each_vector(width, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
      Vec v = load_elements(y + i, n);
      if (weight != nullptr) v = v * scale * load_elements(weight + i, n);
      if (!gate_first) v = v * silu(load_elements(gate + i, n));
      store_elements(out + part * width + i, v, n);
    });
  }
}

void isa_finish_tokens(Dtype dtype, const MixerTask& task, int64_t begin, int64_t end) {
  for (int64_t token = begin; token < end; ++token) {
    if (dtype == Dtype::kFloat32) {
      finish_token<float>(task, token);
    } else {
      finish_token<BFloat16>(task, token);
    }
  }
}

}  // namespace
}  // namespace asyncengine
