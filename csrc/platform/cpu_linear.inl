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
// Rows of x up to which weights are multiplied where they lie.
constexpr int64_t kInPlaceRows = 32;
// Panels that work on one range of K before the next: their spilled accumulators share L2 with x.
constexpr int64_t kGroupPanels = 12;
constexpr int64_t kTileFloats = kTileRows * kPanelRows * kLanes;
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

// ---- one tile of outputs ----

template <int Panel, class Out, class T>
AE_INLINE void write_row(const float* sums, int64_t columns, const T* bias, Out* y) {
  for (int c = 0; c < Panel && c < columns; ++c) {
    const float value = bias == nullptr ? sums[c] : sums[c] + to_float(bias[c]);
    from_float(y + c, value);
  }
}

template <class Out, class T, int Rows, int Panel>
AE_INLINE void write_tile(const LinearTask& task, const float* sums, int64_t m, int64_t n) {
  const T* bias = task.bias == nullptr ? nullptr : static_cast<const T*>(task.bias) + n;
  Out* y = static_cast<Out*>(task.y) + m * task.y_stride + n;
  for (int r = 0; r < Rows; ++r) {
    if (n + Panel <= task.n_end) {
      write_row<Panel>(sums + r * Panel, Panel, bias, y + r * task.y_stride);
    } else {
      write_row<Panel>(sums + r * Panel, task.n_end - n, bias, y + r * task.y_stride);
    }
  }
}

template <class T, int Rows, int Panel>
AE_INLINE void finish_tile(const LinearTask& task, const Vec (&acc)[Rows][Panel], int64_t m, int64_t n) {
  constexpr int kCount = Rows * Panel;
  float sums[(kCount + 3) / 4 * 4];
  auto at = [&](int i) __attribute__((always_inline)) { return i < kCount ? acc[i / Panel][i % Panel] : Vec{}; };
#pragma GCC unroll 8
  for (int i = 0; i < kCount; i += 4) reduce_add4(at(i), at(i + 1), at(i + 2), at(i + 3), sums + i);
  if (task.y_float32) {
    write_tile<float, T, Rows, Panel>(task, sums, m, n);
  } else {
    write_tile<T, T, Rows, Panel>(task, sums, m, n);
  }
}

// A range of K for one panel of weight rows and one tile after the other.
template <class T, int Panel>
struct Pass {
  const T* row[Panel];
  const float* unpacked;  // null, or the range of the rows as [step][row][lane]
  int64_t k, word_begin, word_end, total_words;
  const char* ahead;  // what the tile asks the memory for, `prefetches` lines per word
  int prefetches;
};

template <int Rows, int Panel>
AE_INLINE void multiply_step(Vec (&acc)[Rows][Panel], const float* x, const Vec (&w)[Panel]) {
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r) {
    const Vec xv = load(x + r * kLanes);
#pragma GCC unroll 8
    for (int c = 0; c < Panel; ++c) acc[r][c] = fma(xv, w[c], acc[r][c]);
  }
}

template <int Prefetches>
AE_INLINE const char* prefetch_lines(const char* ahead) {
#pragma GCC unroll 8
  for (int i = 0; i < Prefetches; ++i) prefetch(ahead + i * ASYNCENGINE_VECTOR_BYTES);
  return ahead + Prefetches * ASYNCENGINE_VECTOR_BYTES;
}

template <class T, int Rows, int Panel, int Prefetches>
AE_INLINE void multiply_in_place(Vec (&acc)[Rows][Panel], const float* x, const Pass<T, Panel>& pass) {
  const int64_t whole = pass.k / kWordElements<T>;
  const char* ahead = pass.ahead;
  const T* row[Panel];
#pragma GCC unroll 8
  for (int c = 0; c < Panel; ++c) row[c] = pass.row[c];
  auto step = [&](auto&& words_of) __attribute__((always_inline)) {
#pragma GCC unroll 2
    for (int64_t i = 0; i < kPartsPerWord<T>; ++i) {
      Vec w[Panel];
#pragma GCC unroll 8
      for (int c = 0; c < Panel; ++c) w[c] = part<T>(words_of(c), i);
      multiply_step(acc, x, w);
      x += Rows * kLanes;
    }
  };
  int64_t word = pass.word_begin;
  for (; word < pass.word_end && word < whole; ++word) {
    ahead = prefetch_lines<Prefetches>(ahead);
    step([&](int c) __attribute__((always_inline)) { return load_words(row[c] + word * kWordElements<T>); });
  }
  if (word < pass.word_end) {
    const int64_t first = word * kWordElements<T>;
    step([&](int c) __attribute__((always_inline)) { return load_first_words(row[c] + first, pass.k - first); });
  }
}

template <class T, int Rows, int Panel>
AE_INLINE void multiply_unpacked(Vec (&acc)[Rows][Panel], const float* x, const Pass<T, Panel>& pass) {
  const float* panel = pass.unpacked;
  const char* ahead = pass.ahead;
  for (int64_t step = (pass.word_end - pass.word_begin) * kPartsPerWord<T>; step > 0; --step) {
    prefetch(ahead);
    ahead += ASYNCENGINE_VECTOR_BYTES / kPartsPerWord<T>;
    Vec w[Panel];
#pragma GCC unroll 8
    for (int c = 0; c < Panel; ++c) w[c] = load(panel + c * kLanes);
    multiply_step(acc, x, w);
    x += Rows * kLanes;
    panel += Panel * kLanes;
  }
}

template <class T, int Rows, int Panel, int Prefetches, bool Unpacked>
void run_tile(const LinearTask& task, const Pass<T, Panel>& pass, int64_t m, int64_t n, float* spilled) {
  Vec acc[Rows][Panel] = {};
  if (pass.word_begin > 0) {
#pragma GCC unroll 32
    for (int i = 0; i < Rows * Panel; ++i) acc[i / Panel][i % Panel] = load(spilled + i * kLanes);
  }
  const float* x = task.packed_x + (m * pass.total_words + pass.word_begin * Rows) * kPartsPerWord<T> * kLanes;
  if constexpr (Unpacked) {
    multiply_unpacked<T>(acc, x, pass);
  } else {
    multiply_in_place<T, Rows, Panel, Prefetches>(acc, x, pass);
  }
  if (pass.word_end < pass.total_words) {
#pragma GCC unroll 32
    for (int i = 0; i < Rows * Panel; ++i) store(spilled + i * kLanes, acc[i / Panel][i % Panel]);
  } else {
    finish_tile<T>(task, acc, m, n);
  }
}

// ---- panels ----

// Columns from n on; past the last column: the last one again, whose result is not written.
template <class T, int Panel>
AE_INLINE Pass<T, Panel> start_panel(const LinearTask& task, int64_t n) {
  const T* weight = static_cast<const T*>(task.weight);
  Pass<T, Panel> pass{};
  for (int c = 0; c < Panel; ++c) pass.row[c] = weight + (n + c < task.n_end ? n + c : task.n_end - 1) * task.k;
  pass.k = task.k;
  pass.total_words = count_words<T>(task.k);
  pass.ahead = reinterpret_cast<const char*>(weight + (n + Panel) * task.k);
  return pass;
}

// One tile: each weight is used once, on its way from memory.
template <class T, int Rows, int Panel>
void one_tile_columns(const LinearTask& task) {
  for (int64_t n = task.n_begin; n < task.n_end; n += Panel) {
    Pass<T, Panel> pass = start_panel<T, Panel>(task, n);
    pass.word_end = pass.total_words;
    run_tile<T, Rows, Panel, Panel, false>(task, pass, task.m_begin, n, task.scratch);
  }
}

template <class T, bool Unpacked>
void run_any_tile(const LinearTask& task, const Pass<T, kPanelRows>& pass, int64_t m, int64_t n, float* spilled) {
  constexpr int kPanel = kPanelRows;
  switch (task.m_end - m) {
    case 1: return run_tile<T, 1, kPanel, 0, Unpacked>(task, pass, m, n, spilled);
    case 2: return run_tile<T, 2, kPanel, 0, Unpacked>(task, pass, m, n, spilled);
#if ASYNCENGINE_VECTOR_BYTES == 64
    case 3: return run_tile<T, 3, kPanel, 0, Unpacked>(task, pass, m, n, spilled);
#endif
    default: break;
  }
  if constexpr (!Unpacked) {
    switch (pass.prefetches) {
      case 0: break;
      case 1: return run_tile<T, kTileRows, kPanel, 1, false>(task, pass, m, n, spilled);
      case 2: return run_tile<T, kTileRows, kPanel, 2, false>(task, pass, m, n, spilled);
      default: return run_tile<T, kTileRows, kPanel, 3, false>(task, pass, m, n, spilled);
    }
  }
  run_tile<T, kTileRows, kPanel, 0, Unpacked>(task, pass, m, n, spilled);
}

struct PassRanges {
  int64_t count, words;
};

template <class T>
AE_INLINE PassRanges split_k(int64_t k) {
  const int64_t words = count_words<T>(k), count = (words * kPartsPerWord<T> + kPanelSteps - 1) / kPanelSteps;
  return {count, (words + count - 1) / count};
}

// A few tiles: a panel passes by all of them while it is in L1, in ranges of K that let it stay there, and they share
// the prefetching of the next panel.
template <class T>
void few_tile_columns(const LinearTask& task) {
  const int64_t tiles = (task.m_end - task.m_begin + kTileRows - 1) / kTileRows;
  const int64_t pass_words = split_k<T>(task.k).words;
  for (int64_t n = task.n_begin; n < task.n_end; n += kPanelRows) {
    Pass<T, kPanelRows> pass = start_panel<T, kPanelRows>(task, n);
    for (; pass.word_begin < pass.total_words; pass.word_begin = pass.word_end) {
      pass.word_end = pass.word_begin + pass_words < pass.total_words ? pass.word_begin + pass_words : pass.total_words;
      int wanted = kPanelRows;  // lines of the next panel per word of this one
      for (int64_t tile = 0; tile < tiles; ++tile) {
        pass.prefetches = wanted <= 0 ? 0 : static_cast<int>((kPanelRows + tiles - 1) / tiles);
        run_any_tile<T, false>(task, pass, task.m_begin + tile * kTileRows, n, task.scratch + tile * kTileFloats);
        pass.ahead += pass.prefetches * (pass.word_end - pass.word_begin) * ASYNCENGINE_VECTOR_BYTES;
        wanted -= pass.prefetches;
      }
    }
  }
}

// Many tiles: the range of a panel is unpacked into L1 first, which also takes rows apart that would compete for the
// same cache sets. A group of panels works on one range of K, so that this range of x stays in L2.
template <class T>
void many_tile_columns(const LinearTask& task) {
  const int64_t tiles = (task.m_end - task.m_begin + kTileRows - 1) / kTileRows;
  const int64_t pass_words = split_k<T>(task.k).words, total_words = count_words<T>(task.k);
  float* panel = task.scratch;
  float* spilled = panel + kPanelSteps * kPanelRows * kLanes;
  for (int64_t group = task.n_begin; group < task.n_end; group += kGroupPanels * kPanelRows) {
    const int64_t group_end = group + kGroupPanels * kPanelRows < task.n_end ? group + kGroupPanels * kPanelRows
                                                                             : task.n_end;
    for (int64_t begin = 0; begin < total_words; begin += pass_words) {
      for (int64_t n = group; n < group_end; n += kPanelRows) {
        Pass<T, kPanelRows> pass = start_panel<T, kPanelRows>(task, n);
        pass.word_begin = begin;
        pass.word_end = begin + pass_words < total_words ? begin + pass_words : total_words;
        pass.unpacked = panel;
        for (int64_t c = 0; c < kPanelRows; ++c) {
          unpack_row(pass.row[c], task.k, pass.word_begin, pass.word_end, panel + c * kLanes, kPanelRows * kLanes);
        }
        // Tile c asks for row c of the panel that comes next; the tiles after these ask for what is there already.
        const bool last = n + kPanelRows >= group_end;
        const T* next = static_cast<const T*>(task.weight) + (last ? group : n + kPanelRows) * task.k +
                        (last ? pass.word_end : begin) * kWordElements<T>;
        float* tile_spilled = spilled + (n - group) / kPanelRows * tiles * kTileFloats;
        for (int64_t tile = 0; tile < tiles; ++tile) {
          pass.ahead = reinterpret_cast<const char*>(next + (tile < kPanelRows ? tile : kPanelRows - 1) * task.k);
          run_any_tile<T, true>(task, pass, task.m_begin + tile * kTileRows, n, tile_spilled + tile * kTileFloats);
        }
      }
    }
  }
}

template <class T>
void linear_columns(const LinearTask& task) {
  switch (task.m_end - task.m_begin) {
    case 1: return one_tile_columns<T, 1, kSingleRowPanel>(task);
    case 2: return one_tile_columns<T, 2, kPanelRows>(task);
    case 3: return one_tile_columns<T, 3, kPanelRows>(task);
#if ASYNCENGINE_VECTOR_BYTES == 64
    case 4: return one_tile_columns<T, 4, kPanelRows>(task);
#endif
    default:
      return task.m_end - task.m_begin <= kInPlaceRows ? few_tile_columns<T>(task) : many_tile_columns<T>(task);
  }
}

int64_t isa_packed_x_floats(Dtype dtype, int64_t rows, int64_t k) {
  return rows * kLanes * (dtype == Dtype::kFloat32 ? count_steps<float>(k) : count_steps<BFloat16>(k));
}

int64_t isa_linear_scratch_floats(int64_t block_rows) {
  const int64_t tiles = (block_rows + kTileRows - 1) / kTileRows;
  return kPanelSteps * kPanelRows * kLanes + kGroupPanels * tiles * kTileFloats;
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
