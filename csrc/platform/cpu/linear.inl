// y = x · Wᵀ + bias with W row-major [N, K], read where it lies.
//
// An output is one chain over K in ascending order, acc = fma(x[k], w[k], acc) from zero, then the bias. Elements of a vector are
// columns of y, so weights are transposed in registers on their way. Tiles, passes over K and the place where a sum
// waits for the next pass decide nothing but which chains advance at the same time.
//
// Few rows: what was just transposed is used at once by the sums of a tile, which stay in registers from the first to
// the last k. Many rows: the weights of a group of columns are transposed into L2 once, and the tiles of x pass by.
namespace asyncengine {
namespace {

// Sums stay in registers, of which there are 32 (AVX-512) or 16: a vector per row, or kPanelVectors in many rows.
constexpr int kFewTileRows = ASYNCENGINE_VECTOR_BYTES == 64 ? 16 : 8;
constexpr int kManyTileRows = ASYNCENGINE_VECTOR_BYTES == 64 ? 12 : 6;
constexpr int64_t kFewRows = 2 * kFewTileRows;
constexpr int kTwoPanelRows = ASYNCENGINE_VECTOR_BYTES == 64 ? 14 : 6;  // of a tile, with two vectors per row
constexpr int kPanelVectors = 2;
constexpr int64_t kPanelColumns = kPanelVectors * kWidth;
constexpr int64_t kPassSteps = 768;  // of K, in many rows: panels of kBlockColumns (kernels.cpp) take 590 KB of L2

constexpr int64_t kBytesAhead = 512;  // in each of the rows that are read side by side
constexpr int64_t kBytesAheadInPanel = 2048;
constexpr int64_t kBlockWords = 16;  // of two panels, 2 KB
constexpr int64_t kPanelStepsAhead = 8, kTileStepsAhead = 16;  // both come from L2

// ---- weights ----

// kWidth rows of W that are read side by side; row i belongs to element i.
template <class T>
struct Columns {
  const T* first;
  int64_t stride, k;             // elements between rows, and of a row
  int64_t last;                  // row: the elements after it repeat it
  int64_t first_element, n, count;  // elements that are wanted, and the columns of y that they are

  AE_INLINE bool full() const { return last == kWidth - 1; }
  AE_INLINE void load(UVec (&words)[4], int64_t at) const {
    if (full() && at + kUnitSteps<T> <= k) {
      load_unit(words, [&](int i) __attribute__((always_inline)) { return load_quad(first + i * stride + at); });
    } else {
      const int64_t steps = k - at < kUnitSteps<T> ? k - at : kUnitSteps<T>;
      load_unit(words, [&](int i) __attribute__((always_inline)) {
        return load_first_quad(first + (i < last ? i : last) * stride + at, steps);
      });
    }
  }
};

// Columns of y from n on. At the end of a matrix its last kWidth rows are read, if it has as many.
template <class T>
AE_INLINE Columns<T> start_columns(const LinearTask& task, int64_t n) {
  const int64_t left = task.n_end - n, count = left < kWidth ? left : kWidth;
  const int64_t shift = task.n_end >= kWidth ? kWidth - count : 0;
  const T* first = static_cast<const T*>(task.weight) + (n - shift) * task.k;
  return {first, task.k, task.k, count + shift - 1, shift, n, count};
}

// ---- weights in panels: [N / kWidth][words of a row][kWidth], N rounded up to kPanelColumns ----

template <class T>
AE_INLINE const uint32_t* column_words(const LinearTask& task, int64_t n) {
  return static_cast<const uint32_t*>(task.weight) + n * ((task.k + kPartsPerWord<T> - 1) / kPartsPerWord<T>);
}

// Columns of y from n on: where they are written, not what is read.
template <class T>
AE_INLINE Columns<T> panel_columns(const LinearTask& task, int64_t n) {
  const int64_t left = task.n_end - n;
  return {nullptr, 0, task.k, kWidth - 1, 0, n, left < kWidth ? left : kWidth};
}

AE_INLINE UVec load_words(const uint32_t* p) { return *reinterpret_cast<const UnalignedUVec*>(p); }

// ---- x: tiles of rows, each [step][row] ----

// Rows of each tile when x has `rows` rows: as even as it goes.
int64_t tile_rows_of(int64_t rows) {
  const int64_t most = rows <= kFewRows ? kFewTileRows : kManyTileRows;
  const int64_t tiles = (rows + most - 1) / most, even = (rows + tiles - 1) / tiles;
  return rows <= kFewRows && even > 4 ? (even + 1) / 2 * 2 : even;
}

// Whole units, and a vector that the last step may write past its end.
AE_INLINE int64_t tile_floats(int64_t tile_rows, int64_t k) { return tile_rows * ((k + 7) / 8 * 8) + kWidth; }

int64_t packed_x_floats(int64_t rows, int64_t k) {
  const int64_t tile_rows = tile_rows_of(rows);
  return (rows + tile_rows - 1) / tile_rows * tile_floats(tile_rows, k);
}

// Rows past the last one repeat it.
template <class T>
void pack_tile(const T* x, int64_t x_stride, int64_t first, int64_t rows, int64_t tile_rows, int64_t k, float* packed) {
  const int64_t groups = (tile_rows + kWidth - 1) / kWidth;
  const T* row[kFewTileRows + kWidth];
  for (int64_t i = 0; i < groups * kWidth; ++i) row[i] = x + (first + i < rows ? first + i : rows - 1) * x_stride;
  for (int64_t at = 0; at < k; at += kUnitSteps<T>) {
    // Only the last group writes past its rows, into the next step; so it goes first.
    for (int64_t group = groups - 1; group >= 0; --group) {
      const T* const* element_row = row + group * kWidth;
      UVec words[4];
      if (at + kUnitSteps<T> <= k) {
        load_unit(words, [&](int i) __attribute__((always_inline)) { return load_quad(element_row[i] + at); });
      } else {
        load_unit(words, [&](int i) __attribute__((always_inline)) { return load_first_quad(element_row[i] + at, k - at); });
      }
      float* dst = packed + at * tile_rows + group * kWidth;
      for (int64_t step = 0; step < kUnitSteps<T>; ++step, dst += tile_rows) {
        store(dst, part<T>(words[step / kPartsPerWord<T>], step % kPartsPerWord<T>));
      }
    }
  }
}

template <class T>
void pack_x_tiles(const LinearInput& x, int64_t tile_begin, int64_t tile_end, float* packed) {
  const int64_t tile_rows = tile_rows_of(x.rows);
  for (int64_t tile = tile_begin; tile < tile_end; ++tile) {
    pack_tile(static_cast<const T*>(x.x), x.stride, tile * tile_rows, x.rows, tile_rows, x.k,
              packed + tile * tile_floats(tile_rows, x.k));
  }
}

// ---- y ----

template <class T, class Out>
AE_INLINE void write_elements(const T* bias, Out* y, Vec sums, int64_t first_element, int64_t count) {
  if (count == kWidth) {
    store(y, bias == nullptr ? sums : sums + load(bias));
    return;
  }
  float sum[kWidth];
  store(sum, sums);
  for (int64_t i = 0; i < count; ++i) {
    const float value = sum[first_element + i];
    from_float(y + i, bias == nullptr ? value : value + to_float(bias[i]));
  }
}

template <class T>
AE_INLINE void write_sums(const LinearTask& task, Vec sums, int64_t m, const Columns<T>& at) {
  const T* bias = task.bias == nullptr ? nullptr : static_cast<const T*>(task.bias) + at.n;
  const int64_t offset = m * task.y_stride + at.n;
  if (task.y_float32) {
    write_elements(bias, static_cast<float*>(task.y) + offset, sums, at.first_element, at.count);
  } else {
    write_elements(bias, static_cast<T*>(task.y) + offset, sums, at.first_element, at.count);
  }
}

// ---- few rows ----

template <class T, int Rows>
AE_INLINE const float* multiply_unit(Vec (&sums)[Rows], const float* x, const UVec (&words)[4], int64_t steps) {
#pragma GCC unroll 8
  for (int64_t step = 0; step < kUnitSteps<T>; ++step, x += Rows) {
    if (step >= steps) break;
    const Vec w = part<T>(words[step / kPartsPerWord<T>], step % kPartsPerWord<T>);
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) sums[r] = fma(splat(x[r]), w, sums[r]);
  }
  return x;
}

// Rows of weights are copied line by line into a small buffer one line ahead of their use: those of a matrix with a
// stride of 4 KB would evict each other from L1 between the units of a line.
template <class T, int Rows>
void few_rows_tile(const LinearTask& task, const Columns<T>& columns, int64_t m) {
  constexpr int64_t kLine = kLineBytes / static_cast<int64_t>(sizeof(T)), kUnitsPerLine = kLine / kUnitSteps<T>;
  constexpr int64_t kAhead = kBytesAhead / static_cast<int64_t>(sizeof(T));
  constexpr int kUnitRows = kWidth / static_cast<int>(kUnitsPerLine);
  alignas(64) char lines[2][kWidth][kLineBytes];
  const float* x = task.packed_x + m / Rows * tile_floats(Rows, task.k);
  Vec sums[Rows] = {};
  UVec words[4];
  const int64_t whole = columns.full() ? task.k / kLine * kLine : 0;
  if (whole > 0) {
    for (int i = 0; i < kWidth; ++i) copy_line(lines[0][i], columns.first + i * columns.stride);
  }
  for (int64_t k = 0, half = 0; k < whole; k += kLine, half ^= 1) {
    const T* wanted = columns.first + (k + kAhead < task.k ? k + kAhead : k + kAhead + (kWidth - 1) * task.k);
    const T* next = columns.first + (k + kLine < whole ? k + kLine : k);
    char* next_line = lines[half ^ 1][0];
    const char* line = lines[half][0];
#pragma GCC unroll 1
    for (int64_t unit = 0; unit < kUnitsPerLine; ++unit, line += 16) {
#pragma GCC unroll 4
      for (int i = 0; i < kUnitRows; ++i) {
        prefetch(wanted + i * columns.stride);
        copy_line(next_line + i * kLineBytes, next + i * columns.stride);
      }
      wanted += kUnitRows * columns.stride;
      next += kUnitRows * columns.stride;
      next_line += kUnitRows * kLineBytes;
      load_unit(words, [&](int i) __attribute__((always_inline)) { return load_quad(line + i * kLineBytes); });
      x = multiply_unit<T>(sums, x, words, kUnitSteps<T>);
    }
  }
  for (int64_t k = whole; k < task.k; k += kUnitSteps<T>) {
    columns.load(words, k);
    x = multiply_unit<T>(sums, x, words, task.k - k);
  }
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r) {
    if (m + r < task.m_end) write_sums(task, sums[r], m + r, columns);
  }
}

struct Stretch {
  const uint32_t* words;  // of the first of two panels
  int64_t distance;       // to the other one
  const float* x;
  int64_t begin, end;  // in K
};

// Adds a stretch of K to the sums of a part of a tile's rows.
template <class T, int Rows, int Part, int Halves>
AE_INLINE void run_panels(Stretch at, int half, int64_t k, Vec (&into)[Part][kPanelVectors]) {
  constexpr int64_t kAhead = kBytesAheadInPanel / static_cast<int64_t>(sizeof(uint32_t));
  Vec sums[Part][kPanelVectors];
  memcpy(sums, into, sizeof(sums));
  const float* row = at.x + half * Part;
  for (int64_t step = at.begin; step < at.end; step += kPartsPerWord<T>, at.words += kWidth) {
    UVec word[kPanelVectors];
#pragma GCC unroll 2
    for (int c = 0; c < kPanelVectors; ++c) {
      if (Halves == 1 || c == half) prefetch(at.words + c * at.distance + kAhead);
      word[c] = load_words(at.words + c * at.distance);
    }
#pragma GCC unroll 2
    for (int64_t i = 0; i < kPartsPerWord<T>; ++i, row += Rows) {
      if (i > 0 && step + i == k) break;
      Vec w[kPanelVectors];
#pragma GCC unroll 2
      for (int c = 0; c < kPanelVectors; ++c) w[c] = part<T>(word[c], i);
#pragma GCC unroll 16
      for (int r = 0; r < Part; ++r) {
        const Vec xv = splat(row[r]);
#pragma GCC unroll 2
        for (int c = 0; c < kPanelVectors; ++c) sums[r][c] = fma(xv, w[c], sums[r][c]);
      }
    }
  }
  memcpy(into, sums, sizeof(sums));
}

// In panels there is nothing to transpose. Two of them at a time halve the loads of x, and read memory faster. Sums of
// more than kTwoPanelRows have no room: such a tile goes through small blocks of the weights in two halves. The second half
// finds them in L1, and each asks for one of the panels, so that memory and multiplication overlap.
template <class T, int Rows>
void few_rows_panels(const LinearTask& task, int64_t n, int64_t m) {
  constexpr int kHalves = Rows <= kTwoPanelRows ? 1 : 2, kPart = Rows / kHalves;
  static_assert(kPart * kHalves == Rows);
  const int64_t words = (task.k + kPartsPerWord<T> - 1) / kPartsPerWord<T>;
  const int64_t block = kHalves == 1 ? words : kBlockWords;
  const uint32_t* panel = column_words<T>(task, n);
  const int64_t distance = column_words<T>(task, n + kWidth) - panel;
  const float* x = task.packed_x + m / Rows * tile_floats(Rows, task.k);
  Vec sums[kHalves][kPart][kPanelVectors] = {};
  for (int64_t first = 0; first < words; first += block) {
    const int64_t last = words < first + block ? words : first + block;
#pragma GCC unroll 2
    for (int half = 0; half < kHalves; ++half) {
      run_panels<T, Rows, kPart, kHalves>({panel + first * kWidth, distance, x + first * kPartsPerWord<T> * Rows,
                                           first * kPartsPerWord<T>, last * kPartsPerWord<T>},
                                          half, task.k, sums[half]);
    }
  }
#pragma GCC unroll 2
  for (int c = 0; c < kPanelVectors; ++c) {
    const Columns<T> columns = panel_columns<T>(task, n + c * kWidth);
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
      if (columns.count > 0 && m + r < task.m_end) write_sums(task, sums[r / kPart][r % kPart][c], m + r, columns);
    }
  }
}

template <class T, int Rows>
void few_rows_of_codes(const LinearTask& task);

template <class T, int Rows>
void few_rows(const LinearTask& task) {
  if (task.codes != nullptr) return few_rows_of_codes<T, Rows>(task);
  if (task.panels) {
    for (int64_t n = task.n_begin; n < task.n_end; n += kPanelColumns) {
      for (int64_t m = task.m_begin; m < task.m_end; m += Rows) few_rows_panels<T, Rows>(task, n, m);
    }
    return;
  }
  for (int64_t n = task.n_begin; n < task.n_end; n += kWidth) {
    const Columns<T> columns = start_columns<T>(task, n);
    for (int64_t m = task.m_begin; m < task.m_end; m += Rows) few_rows_tile<T, Rows>(task, columns, m);
  }
}

// ---- many rows ----

struct Tile {
  const float* x;      // [step][row]
  const float* panel;  // [step][kWidth], and the next kWidth columns `distance` floats on
  int64_t distance;
  int64_t steps;
  const float* from;  // [row][vectors][kWidth]: what the pass before left, null at the first one
  float* to;          // the same, may be `from`
};

template <int Rows, int Vectors = kPanelVectors>
void run_tile(const Tile& tile) {
  Vec sums[Rows][Vectors] = {};
  auto at = [&](int i) __attribute__((always_inline)) -> Vec& { return sums[i / Vectors][i % Vectors]; };
  if (tile.from != nullptr) {
#pragma GCC unroll 32
    for (int i = 0; i < Rows * Vectors; ++i) at(i) = load(tile.from + i * kWidth);
  }
  const float* x = tile.x;
  const float* panel = tile.panel;
  for (int64_t step = 0; step < tile.steps; ++step) {
    Vec w[Vectors];
#pragma GCC unroll 2
    for (int c = 0; c < Vectors; ++c) {
      prefetch(panel + c * tile.distance + kPanelStepsAhead * kWidth);
      w[c] = load(panel + c * tile.distance);
    }
    prefetch(x + kTileStepsAhead * Rows);
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
      const Vec xv = splat(x[r]);
#pragma GCC unroll 2
      for (int c = 0; c < Vectors; ++c) sums[r][c] = fma(xv, w[c], sums[r][c]);
    }
    x += Rows;
    panel += kWidth;
  }
#pragma GCC unroll 32
  for (int i = 0; i < Rows * Vectors; ++i) store(tile.to + i * kWidth, at(i));
}

// Columns from n on, as one vector of every step [begin, end) of K.
template <class T>
AE_INLINE void pack_columns(const LinearTask& task, int64_t n, int64_t begin, int64_t end, float* panel) {
  constexpr int64_t kLine = kLineBytes / static_cast<int64_t>(sizeof(T));
  constexpr int64_t kAhead = kBytesAhead / static_cast<int64_t>(sizeof(T));
  const Columns<T> columns = start_columns<T>(task, n);
  alignas(64) char lines[kWidth][kLineBytes];
  UVec words[4];
  auto put = [&]() __attribute__((always_inline)) {
#pragma GCC unroll 8
    for (int64_t step = 0; step < kUnitSteps<T>; ++step, panel += kWidth) {
      store(panel, part<T>(words[step / kPartsPerWord<T>], step % kPartsPerWord<T>));
    }
  };
  int64_t k = begin;
  for (; columns.full() && k + kLine <= end; k += kLine) {
    for (int i = 0; i < kWidth; ++i) {
      const T* row = columns.first + i * columns.stride + k;
      copy_line(lines[i], row);
      prefetch(row + kAhead);
    }
    for (int64_t byte = 0; byte < kLineBytes; byte += 16) {
      load_unit(words, [&](int i) __attribute__((always_inline)) { return load_quad(lines[i] + byte); });
      put();
    }
  }
  for (; k < end; k += kUnitSteps<T>) {
    columns.load(words, k);
    put();
  }
}

// Sums of the columns of a panel from n on.
template <class T, int Rows>
AE_INLINE void write_tile(const LinearTask& task, const float* sums, int64_t m, int64_t n) {
  for (int64_t c = 0; c < kPanelVectors && n < task.n_end; ++c, n += kWidth) {
    const Columns<T> columns = task.panels ? panel_columns<T>(task, n) : start_columns<T>(task, n);
    for (int64_t r = 0; r < Rows && m + r < task.m_end; ++r) {
      write_sums(task, load(sums + (r * kPanelVectors + c) * kWidth), m + r, columns);
    }
  }
}

// Words [begin, end) of K, widened.
template <class T>
AE_INLINE void widen_columns(const LinearTask& task, int64_t n, int64_t begin, int64_t end, float* panel) {
  const uint32_t* words = column_words<T>(task, n) + begin / kPartsPerWord<T> * kWidth;
  for (int64_t k = begin; k < end; k += kPartsPerWord<T>, words += kWidth) {
    for (int64_t i = 0; i < kPartsPerWord<T>; ++i, panel += kWidth) store(panel, part<T>(load_words(words), i));
  }
}

template <class T, int Rows>
void many_rows(const LinearTask& task) {
  constexpr int64_t kVectorFloats = kPassSteps * kWidth, kTileFloats = Rows * kPanelColumns;
  const int64_t panels = (task.n_end - task.n_begin + kPanelColumns - 1) / kPanelColumns;
  const bool in_place = task.panels && sizeof(T) == 4;
  alignas(64) float done[kTileFloats];
  float* group = task.scratch;
  for (int64_t begin = 0; begin < task.k; begin += kPassSteps) {
    const int64_t end = begin + kPassSteps < task.k ? begin + kPassSteps : task.k;
    for (int64_t n = task.n_begin; n < task.n_end && !in_place; n += kWidth) {
      float* panel = group + (n - task.n_begin) / kWidth * kVectorFloats;
      if (task.codes != nullptr) {
        decode_columns(task, n, begin, end, panel);
      } else if (task.panels) {
        widen_columns<T>(task, n, begin, end, panel);
      } else {
        pack_columns<T>(task, n, begin, end, panel);
      }
    }
    const float* first = group;
    int64_t distance = kVectorFloats;
    if (in_place) {
      first = reinterpret_cast<const float*>(column_words<T>(task, task.n_begin)) + begin * kWidth;
      distance = task.k * kWidth;
    }
    float* sums = group + panels * kPanelVectors * kVectorFloats;
    for (int64_t m = task.m_begin; m < task.m_end; m += Rows) {
      const float* x = task.packed_x + m / Rows * tile_floats(Rows, task.k) + begin * Rows;
      for (int64_t p = 0; p < panels; ++p, sums += kTileFloats) {
        const float* from = begin == 0 ? nullptr : sums;
        const bool last = end == task.k;
        run_tile<Rows>({x, first + p * kPanelVectors * distance, distance, end - begin, from, last ? done : sums});
        if (last) write_tile<T, Rows>(task, done, m, task.n_begin + p * kPanelColumns);
      }
    }
  }
}

template <class T, int Rows>
AE_INLINE bool run_few(const LinearTask& task) {
  if (task.tile_rows != Rows) return false;
  few_rows<T, Rows>(task);
  return true;
}

template <class T, int Rows>
AE_INLINE bool run_many(const LinearTask& task) {
  if (task.tile_rows != Rows) return false;
  many_rows<T, Rows>(task);
  return true;
}

template <class T, int... Few, int... Many>
AE_INLINE void run_any(const LinearTask& task, Counts<Few...>, Counts<Many...>) {
  if (task.rows <= kFewRows) {
    (void)(run_few<T, Few>(task) || ...);
  } else {
    (void)(run_many<T, Many>(task) || ...);
  }
}

template <class T>
void linear_columns(const LinearTask& task) {
#if ASYNCENGINE_VECTOR_BYTES == 64
  run_any<T>(task, Counts<1, 2, 3, 4, 6, 8, 10, 12, 14, 16>{}, Counts<9, 10, 11, 12>{});
#else
  run_any<T>(task, Counts<1, 2, 3, 4, 6, 8>{}, Counts<5, 6>{});
#endif
}

int64_t linear_scratch_floats(int64_t rows, int64_t block_rows, int64_t columns) {
  if (rows <= kFewRows) return 0;
  return (kPassSteps + block_rows + kManyTileRows) * (columns + kPanelColumns);
}

template <class T>
constexpr LinearKernels make_linear_kernels() {
  return {
      .panel_columns = kPanelColumns,
      .panel_steps = kPartsPerWord<T>,
      .few_rows = kFewRows,
      .tile_rows = tile_rows_of,
      .packed_x_floats = packed_x_floats,
      .scratch_floats = linear_scratch_floats,
      .pack_x = pack_x_tiles<T>,
      .run = linear_columns<T>,
  };
}

}  // namespace
}  // namespace asyncengine
