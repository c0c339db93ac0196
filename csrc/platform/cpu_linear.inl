// y = x · Wᵀ + bias with W row-major [N, K], read where it lies.
//
// Lanes run along K. An output is one vector accumulator: for each step of kLanes inputs in ascending order,
// acc = fma(x, w, acc), then one fixed reduction across lanes, then the bias. Tiles only decide which accumulators
// are in registers at the same time; an accumulator that leaves its register is stored whole.
//
// bfloat16: a 32-bit word holds two neighbours. The step for the even elements (w << 16) precedes the step for the odd
// ones (w & 0xffff0000), and pack_x lays x out the same way, so unpacking costs one operation per vector.
namespace asyncengine {
namespace {

// Accumulators of a tile stay in registers: kTileRows × kPanelRows + kPanelRows + 1 ≤ 32 (AVX-512) or 16.
#if ASYNCENGINE_VECTOR_BYTES == 64
constexpr int kTileRows = 4, kPanelRows = 6;
#else
constexpr int kTileRows = 3, kPanelRows = 4;
#endif
// Weight rows that one row of x is multiplied with at the same time: independent chains hide the latency of fma.
constexpr int kSingleRowPanel = 8;
constexpr int kFewRowsPanel = 4;
// Steps of a weight panel that stays in L1 while the tiles of x pass by.
constexpr int64_t kPanelSteps = 4608 / (kPanelRows * kLanes);

template <class T>
constexpr int64_t kPartsPerWord = 4 / static_cast<int64_t>(sizeof(T));  // steps made of one vector of words

template <class T>
constexpr int64_t kWordElements = kLanes * kPartsPerWord<T>;

template <class T>
AE_INLINE int64_t count_words(int64_t k) {
  return (k + kWordElements<T> - 1) / kWordElements<T>;
}

template <class T>
AE_INLINE int64_t count_steps(int64_t k) {
  return count_words<T>(k) * kPartsPerWord<T>;
}

AE_INLINE UVec load_words(const void* p) { return *static_cast<const UnalignedUVec*>(p); }

// `elements` of T, the rest zero.
template <class T>
AE_INLINE UVec load_first_words(const T* p, int64_t elements) {
  UVec words{};
  memcpy(&words, p, static_cast<size_t>(elements) * sizeof(T));
  return words;
}

template <class T>
AE_INLINE Vec part(UVec words, int64_t index) {
  if constexpr (sizeof(T) == 4) return (Vec)words;
  return (Vec)(index == 0 ? words << 16 : words & 0xffff0000u);
}

// One row into `dst`, where a step is `dst_step` floats after the one before it.
template <class T>
AE_INLINE void unpack_row(const T* row, int64_t k, int64_t word_begin, int64_t word_end, float* dst, int64_t dst_step) {
  const int64_t whole = k / kWordElements<T>;
  for (int64_t word = word_begin; word < word_end; ++word) {
    const T* p = row + word * kWordElements<T>;
    const UVec words = word < whole ? load_words(p) : load_first_words(p, k - word * kWordElements<T>);
    for (int64_t i = 0; i < kPartsPerWord<T>; ++i) {
      store(dst, part<T>(words, i));
      dst += dst_step;
    }
  }
}

// Tile of `rows` ≤ kTileRows rows of x: [step][row][lane].
template <class T>
void pack_x_rows(const T* x, int64_t x_stride, int64_t rows, int64_t k, int64_t m_begin, int64_t m_end, float* packed) {
  const int64_t steps = count_steps<T>(k);
  for (int64_t m = m_begin; m < m_end; ++m) {
    const int64_t tile = m / kTileRows * kTileRows;
    const int64_t tile_rows = rows - tile < kTileRows ? rows - tile : kTileRows;
    float* dst = packed + (tile * steps + (m - tile)) * kLanes;
    unpack_row(x + m * x_stride, k, 0, count_words<T>(k), dst, tile_rows * kLanes);
  }
}

template <class Out, class T>
AE_INLINE void write_outputs(const LinearTask& task, const float* sums, int rows, int panel, int64_t m, int64_t n) {
  const int64_t columns = task.n_end - n < panel ? task.n_end - n : panel;
  const T* bias = static_cast<const T*>(task.bias);
  for (int r = 0; r < rows; ++r) {
    Out* y = static_cast<Out*>(task.y) + (m + r) * task.y_stride + n;
    for (int64_t c = 0; c < columns; ++c) {
      float value = sums[r * panel + c];
      if (bias != nullptr) value += to_float(bias[n + c]);
      from_float(y + c, value);
    }
  }
}

template <class T, int Rows, int Panel>
AE_INLINE void finish_tile(const LinearTask& task, const Vec (&acc)[Rows][Panel], int64_t m, int64_t n) {
  float sums[Rows * Panel];
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < Panel; ++c) sums[r * Panel + c] = reduce_add(acc[r][c]);
  }
  if (task.y_float32) {
    write_outputs<float, T>(task, sums, Rows, Panel, m, n);
  } else {
    write_outputs<T, T>(task, sums, Rows, Panel, m, n);
  }
}

// ---- few rows of x: each weight is used Rows times, straight from memory ----

template <class T, int Rows, int Panel>
void direct_columns(const LinearTask& task) {
  const int64_t words = count_words<T>(task.k), whole = task.k / kWordElements<T>;
  const T* weight = static_cast<const T*>(task.weight);
  const float* x = task.packed_x + task.m_begin * count_steps<T>(task.k) * kLanes;
  for (int64_t n = task.n_begin; n < task.n_end; n += Panel) {
    const T* row[Panel];  // past the last column: the last one again, its result not written
    for (int c = 0; c < Panel; ++c) row[c] = weight + (n + c < task.n_end ? n + c : task.n_end - 1) * task.k;
    Vec acc[Rows][Panel] = {};
    auto accumulate = [&](int64_t word, auto&& load_row) __attribute__((always_inline)) {
#pragma GCC unroll 8
      for (int c = 0; c < Panel; ++c) {
        const UVec w = load_row(c);
#pragma GCC unroll 2
        for (int64_t i = 0; i < kPartsPerWord<T>; ++i) {
          const Vec wv = part<T>(w, i);
          const float* xs = x + (word * kPartsPerWord<T> + i) * Rows * kLanes;
#pragma GCC unroll 8
          for (int r = 0; r < Rows; ++r) acc[r][c] = fma(load(xs + r * kLanes), wv, acc[r][c]);
        }
      }
    };
    for (int64_t word = 0; word < whole; ++word) {
      accumulate(word, [&](int c) __attribute__((always_inline)) {
        const T* p = row[c] + word * kWordElements<T>;
        prefetch(p + Panel * task.k);  // the same place in the next panel
        return load_words(p);
      });
    }
    if (whole < words) {
      accumulate(whole, [&](int c) __attribute__((always_inline)) {
        return load_first_words(row[c] + whole * kWordElements<T>, task.k - whole * kWordElements<T>);
      });
    }
    finish_tile<T>(task, acc, task.m_begin, n);
  }
}

// ---- many rows of x: a panel of weights is unpacked into L1 and every tile of x passes by it ----

template <int Rows, int Prefetches>
AE_INLINE void multiply_panel(Vec (&acc)[Rows][kPanelRows], const float* x, const float* panel, int64_t steps,
                              const char* ahead) {
  for (int64_t step = 0; step < steps; ++step) {
#pragma GCC unroll 8
    for (int i = 0; i < Prefetches; ++i) prefetch(ahead + i * 64);
    ahead += Prefetches * 64;
    Vec w[kPanelRows];
#pragma GCC unroll 8
    for (int c = 0; c < kPanelRows; ++c) w[c] = load(panel + c * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
      const Vec xv = load(x + r * kLanes);
#pragma GCC unroll 8
      for (int c = 0; c < kPanelRows; ++c) acc[r][c] = fma(xv, w[c], acc[r][c]);
    }
    x += Rows * kLanes;
    panel += kPanelRows * kLanes;
  }
}

struct PanelPass {
  const float* panel;
  int64_t step_begin, step_end, total_steps;
  const char* ahead;  // where the next panel's weights start, and how much of them a tile asks for per step
  int prefetches;
};

template <class T, int Rows>
void tile_pass(const LinearTask& task, const PanelPass& pass, int64_t m, int64_t n, float* spilled) {
  Vec acc[Rows][kPanelRows] = {};
  if (pass.step_begin > 0) memcpy(&acc, spilled, sizeof acc);
  const float* x = task.packed_x + (m * pass.total_steps + pass.step_begin * Rows) * kLanes;
  const int64_t steps = pass.step_end - pass.step_begin;
  if (pass.prefetches == 0) {
    multiply_panel<Rows, 0>(acc, x, pass.panel, steps, pass.ahead);
  } else if (pass.prefetches == 1) {
    multiply_panel<Rows, 1>(acc, x, pass.panel, steps, pass.ahead);
  } else {
    multiply_panel<Rows, 3>(acc, x, pass.panel, steps, pass.ahead);
  }
  if (pass.step_end < pass.total_steps) {
    memcpy(spilled, &acc, sizeof acc);
  } else {
    finish_tile<T>(task, acc, m, n);
  }
}

template <class T>
void any_tile_pass(const LinearTask& task, const PanelPass& pass, int64_t m, int64_t n, float* spilled) {
  switch (task.m_end - m) {
    case 1: return tile_pass<T, 1>(task, pass, m, n, spilled);
    case 2: return tile_pass<T, 2>(task, pass, m, n, spilled);
#if ASYNCENGINE_VECTOR_BYTES == 64
    case 3: return tile_pass<T, 3>(task, pass, m, n, spilled);
#endif
    default: return tile_pass<T, kTileRows>(task, pass, m, n, spilled);
  }
}

template <class T>
void panel_columns(const LinearTask& task) {
  constexpr int64_t kTileFloats = kTileRows * kPanelRows * kLanes;
  const int64_t total_steps = count_steps<T>(task.k);
  const int64_t passes = (total_steps + kPanelSteps - 1) / kPanelSteps;
  const int64_t pass_steps = (total_steps / kPartsPerWord<T> + passes - 1) / passes * kPartsPerWord<T>;
  const int64_t tiles = (task.m_end - task.m_begin + kTileRows - 1) / kTileRows;
  const T* weight = static_cast<const T*>(task.weight);
  float* panel = task.scratch;
  float* spilled = panel + kPanelSteps * kPanelRows * kLanes;
  for (int64_t n = task.n_begin; n < task.n_end; n += kPanelRows) {
    const int64_t columns = task.n_end - n < kPanelRows ? task.n_end - n : kPanelRows;
    const char* ahead = reinterpret_cast<const char*>(weight + (n + kPanelRows) * task.k);
    for (int64_t begin = 0; begin < total_steps; begin += pass_steps) {
      const int64_t end = begin + pass_steps < total_steps ? begin + pass_steps : total_steps;
      for (int64_t c = 0; c < kPanelRows; ++c) {  // past the last column: the last one again
        const T* row = weight + (n + (c < columns ? c : columns - 1)) * task.k;
        unpack_row(row, task.k, begin / kPartsPerWord<T>, end / kPartsPerWord<T>, panel + c * kLanes,
                   kPanelRows * kLanes);
      }
      const int64_t wanted = (kPanelRows / kPartsPerWord<T> + tiles - 1) / tiles;
      PanelPass pass{panel, begin, end, total_steps, ahead, wanted > 1 ? 3 : 1};
      for (int64_t tile = 0; tile < tiles; ++tile) {
        any_tile_pass<T>(task, pass, task.m_begin + tile * kTileRows, n, spilled + tile * kTileFloats);
        pass.ahead += pass.prefetches * (end - begin) * 64;
        if (tile * wanted >= kPanelRows) pass.prefetches = 0;
      }
      ahead = pass.ahead;
    }
  }
}

template <class T>
void linear_columns(const LinearTask& task) {
  switch (task.m_end - task.m_begin) {
    case 1: return direct_columns<T, 1, kSingleRowPanel>(task);
    case 2: return direct_columns<T, 2, kFewRowsPanel>(task);
    case 3: return direct_columns<T, 3, kFewRowsPanel>(task);
#if ASYNCENGINE_VECTOR_BYTES == 64
    case 4: return direct_columns<T, 4, kFewRowsPanel>(task);
#endif
    default: return panel_columns<T>(task);
  }
}

int64_t isa_packed_x_floats(Dtype dtype, int64_t rows, int64_t k) {
  return rows * kLanes * (dtype == Dtype::kFloat32 ? count_steps<float>(k) : count_steps<BFloat16>(k));
}

int64_t isa_linear_scratch_floats(int64_t block_rows) {
  const int64_t tiles = (block_rows + kTileRows - 1) / kTileRows;
  return (kPanelSteps * kPanelRows + tiles * kTileRows * kPanelRows) * kLanes;
}

void isa_pack_x(Dtype dtype, const void* x, int64_t x_stride, int64_t rows, int64_t k, int64_t m_begin, int64_t m_end,
                float* packed) {
  if (dtype == Dtype::kFloat32) {
    pack_x_rows(static_cast<const float*>(x), x_stride, rows, k, m_begin, m_end, packed);
  } else {
    pack_x_rows(static_cast<const BFloat16*>(x), x_stride, rows, k, m_begin, m_end, packed);
  }
}

void isa_linear(Dtype dtype, const LinearTask& task) {
  if (dtype == Dtype::kFloat32) {
    linear_columns<float>(task);
  } else {
    linear_columns<BFloat16>(task);
  }
}

}  // namespace
}  // namespace asyncengine
