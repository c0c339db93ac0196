// Kernels that work on one row (or one head) at a time: norms, embedding, activations, rotary embedding.
namespace asyncengine {
namespace {

// ---- norms: statistics in float32, kNormChains vector sums over the row, added in order ----

constexpr int kNormChains = 4;

// Sum over the row of term(values), which must be zero for the elements past the row's end.
template <class T, class Term>
AE_INLINE float row_sum(const T* x, int64_t width, Term&& term) {
  Vec sums[kNormChains] = {};
  int64_t i = 0;
  for (; i + kNormChains * kWidth <= width; i += kNormChains * kWidth) {
#pragma GCC unroll 4
    for (int c = 0; c < kNormChains; ++c) sums[c] = sums[c] + term(load(x + i + c * kWidth), int64_t{kWidth});
  }
  for (; i < width; i += kWidth) {
    const int64_t count = width - i < kWidth ? width - i : kWidth;
    sums[0] = sums[0] + term(load_elements(x + i, count), count);
  }
  return reduce_add((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

template <class T>
void add_row(const T* x, T* residual, int64_t width) {
  for_each_vector(width, [&](int64_t i, int64_t count) __attribute__((always_inline)) {
    store_elements(residual + i, load_elements(x + i, count) + load_elements(residual + i, count), count);
  });
}

template <class T, class W>
void rms_norm_row(const T* x, const W* weight, T* y, int64_t width, float eps) {
  const float squares = row_sum(x, width, [](Vec v, int64_t) __attribute__((always_inline)) { return v * v; });
  const Vec scale = splat(1.f / __builtin_sqrtf(squares / static_cast<float>(width) + eps));
  for_each_vector(width, [&](int64_t i, int64_t count) __attribute__((always_inline)) {
    store_elements(y + i, load_elements(x + i, count) * scale * load_elements(weight + i, count), count);
  });
}

template <class T>
void layer_norm_row(const T* x, const T* weight, const T* bias, T* y, int64_t width, float eps) {
  const float sum = row_sum(x, width, [](Vec v, int64_t) __attribute__((always_inline)) { return v; });
  const Vec mean = splat(sum / static_cast<float>(width));
  const float squares = row_sum(x, width, [&](Vec v, int64_t count) __attribute__((always_inline)) {
    const Vec d = v - mean;
    return count == kWidth ? d * d : (element_index() < static_cast<int32_t>(count) ? d * d : Vec{});
  });
  const Vec scale = splat(1.f / __builtin_sqrtf(squares / static_cast<float>(width) + eps));
  for_each_vector(width, [&](int64_t i, int64_t count) __attribute__((always_inline)) {
    const Vec normed = (load_elements(x + i, count) - mean) * scale;
    store_elements(y + i, fma(normed, load_elements(weight + i, count), load_elements(bias + i, count)), count);
  });
}

template <class T>
void norm_rows(const NormTask& task, int64_t row_begin, int64_t row_end) {
  const T* weight = static_cast<const T*>(task.weight);
  const T* bias = static_cast<const T*>(task.bias);
  for (int64_t row = row_begin; row < row_end; ++row) {
    const int64_t token = row / task.heads, column = row % task.heads * task.width;
    const T* x = static_cast<const T*>(task.x) + token * task.x_stride + column;
    T* y = static_cast<T*>(task.y) + token * task.y_stride + column;
    if (task.residual != nullptr) {
      T* residual = static_cast<T*>(task.residual) + row * task.width;
      add_row(x, residual, task.width);
      x = residual;
    }
    if (bias != nullptr) {
      layer_norm_row(x, weight, bias, y, task.width, task.eps);
    } else if (task.float_weight) {
      rms_norm_row(x, static_cast<const float*>(task.weight), y, task.width, task.eps);
    } else {
      rms_norm_row(x, weight, y, task.width, task.eps);
    }
  }
}

// ---- embedding ----

template <class T>
void scale_row(T* y, int64_t width, float scale) {
  for_each_vector(width, [&](int64_t i, int64_t count)
                             __attribute__((always_inline)) { store_elements(y + i, load_elements(y + i, count) * scale, count); });
}

template <class T>
void embed_tokens(const EmbedTask& task, int64_t token_begin, int64_t token_end) {
  const int64_t whole = task.width / kPartsPerWord<T>, left = task.width % kPartsPerWord<T>;
  for (int64_t token = token_begin; token < token_end; ++token) {
    const int64_t id = task.ids[token];
    T* y = static_cast<T*>(task.y) + token * task.width;
    if (task.panel_words == 0) {
      memcpy(y, static_cast<const T*>(task.table) + id * task.width, static_cast<size_t>(task.width) * sizeof(T));
    } else {
      const uint32_t* word = static_cast<const uint32_t*>(task.table) + id / kWidth * kWidth * task.panel_words + id % kWidth;
      for (int64_t i = 0; i < whole; ++i, word += kWidth) memcpy(y + i * kPartsPerWord<T>, word, sizeof(*word));
      if (left > 0) memcpy(y + whole * kPartsPerWord<T>, word, static_cast<size_t>(left) * sizeof(T));
    }
    if (task.scale != 1.f) scale_row(y, task.width, task.scale);
    if (task.position_table != nullptr) {
      add_row(static_cast<const T*>(task.position_table) + task.positions[token] * task.width, y, task.width);
    }
  }
}

// ---- activations ----

AE_INLINE Vec silu(Vec x) { return x * sigmoid(x); }

// 0.5 x (1 + tanh(u)) with u = sqrt(2/π) (x + 0.044715 x³), written as x sigmoid(2u): nothing cancels for x << 0.
AE_INLINE Vec gelu_tanh(Vec x) {
  const Vec twice_u = x * fma(x * x, splat(0.0713548162726f), splat(1.59576912161f));
  return x * sigmoid(twice_u);
}

// x Φ(x), with Φ(x) = erfc(-x / sqrt 2) / 2 taken from the side where erfc is small.
AE_INLINE Vec gelu(Vec x) {
  const Vec z = x * 0.70710678118654752f;
  const Vec tail = erfc_positive(z < 0.f ? -z : z);
  return 0.5f * x * (x < 0.f ? tail : 2.f - tail);
}

template <class T, class Function>
AE_INLINE void activate_rows(bool gated, const T* x, T* y, int64_t width, int64_t row_begin, int64_t row_end, Function&& function) {
  for (int64_t row = row_begin; row < row_end; ++row) {
    T* out = y + row * width;
    const T* in = x + row * width * (gated ? 2 : 1);
    if (gated) {
      for_each_vector(width, [&](int64_t i, int64_t count) __attribute__((always_inline)) {
        store_elements(out + i, function(load_elements(in + i, count)) * load_elements(in + width + i, count), count);
      });
    } else {
      for_each_vector(width, [&](int64_t i, int64_t count) __attribute__((always_inline)) {
        store_elements(out + i, function(load_elements(in + i, count)), count);
      });
    }
  }
}

template <class T>
AE_INLINE void clamped_silu_rows(const T* x, T* y, int64_t width, int64_t row_begin, int64_t row_end) {
  for (int64_t row = row_begin; row < row_end; ++row) {
    const T* in = x + row * width * 2;
    for_each_vector(width, [&](int64_t i, int64_t count) __attribute__((always_inline)) {
      Vec gate = load_elements(in + i, count), up = load_elements(in + width + i, count);
      gate = gate > 7.f ? splat(7.f) : gate;  // what is no number stays so
      up = up > 7.f ? splat(7.f) : up;
      up = up < -7.f ? splat(-7.f) : up;
      store_elements(y + row * width + i, gate * sigmoid(1.702f * gate) * (up + 1.f), count);
    });
  }
}

template <class T>
void activation_rows(Activation kind, const T* x, T* y, int64_t width, int64_t row_begin, int64_t row_end) {
  auto rows = [&](auto&& function)
                  __attribute__((always_inline)) { activate_rows(kind.gated, x, y, width, row_begin, row_end, function); };
  switch (kind.function) {
    case ActivationFunction::kSilu: return rows([](Vec v) __attribute__((always_inline)) { return silu(v); });
    case ActivationFunction::kGeluTanh: return rows([](Vec v) __attribute__((always_inline)) { return gelu_tanh(v); });
    case ActivationFunction::kGelu: return rows([](Vec v) __attribute__((always_inline)) { return gelu(v); });
    case ActivationFunction::kRelu2:
      return rows([](Vec v) __attribute__((always_inline)) { return v * (v < 0.f ? splat(0.f) : v); });
    case ActivationFunction::kClampedSilu: return clamped_silu_rows(x, y, width, row_begin, row_end);
  }
}

// ---- rotary embedding, half-split pairs (x[i], x[i + head_dim / 2]); float32, rounded once ----

template <class T>
void rotary_tokens(const RotaryTask& task, int64_t token_begin, int64_t token_end) {
  const int64_t half = task.head_dim / 2;
  for (int64_t token = token_begin; token < token_end; ++token) {
    const float* cosine = task.cos_sin + task.positions[token] * task.head_dim;
    const float* sine = cosine + half;
    for (int64_t head = 0; head < task.heads; ++head) {
      T* low = static_cast<T*>(task.x) + token * task.token_stride + head * task.head_dim;
      T* high = low + half;
      for_each_vector(half, [&](int64_t i, int64_t count) __attribute__((always_inline)) {
        const Vec a = load_elements(low + i, count), b = load_elements(high + i, count);
        const Vec c = load_elements(cosine + i, count), s = load_elements(sine + i, count);
        store_elements(low + i, a * c - b * s, count);
        store_elements(high + i, b * c + a * s, count);
      });
    }
  }
}

void isa_embed(Dtype dtype, const EmbedTask& task, int64_t token_begin, int64_t token_end) {
  if (dtype == Dtype::kFloat32) {
    embed_tokens<float>(task, token_begin, token_end);
  } else {
    embed_tokens<BFloat16>(task, token_begin, token_end);
  }
}

void isa_norm(Dtype dtype, const NormTask& task, int64_t row_begin, int64_t row_end) {
  if (dtype == Dtype::kFloat32) {
    norm_rows<float>(task, row_begin, row_end);
  } else {
    norm_rows<BFloat16>(task, row_begin, row_end);
  }
}

void isa_activation(Dtype dtype, Activation kind, const void* x, void* y, int64_t width, int64_t row_begin, int64_t row_end) {
  if (dtype == Dtype::kFloat32) {
    activation_rows(kind, static_cast<const float*>(x), static_cast<float*>(y), width, row_begin, row_end);
  } else {
    activation_rows(kind, static_cast<const BFloat16*>(x), static_cast<BFloat16*>(y), width, row_begin, row_end);
  }
}

void isa_rotary(Dtype dtype, const RotaryTask& task, int64_t token_begin, int64_t token_end) {
  if (dtype == Dtype::kFloat32) {
    rotary_tokens<float>(task, token_begin, token_end);
  } else {
    rotary_tokens<BFloat16>(task, token_begin, token_end);
  }
}

}  // namespace
}  // namespace asyncengine
