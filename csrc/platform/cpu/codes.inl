// Products of few rows with weights in codes: a stretch of K of two vectors of columns is decoded into L1, and each tile of
// rows passes by. The sums of a tile wait in memory for the next stretch.
namespace asyncengine {
namespace {

template <class T, int Rows>
void few_rows_of_codes(const LinearTask& task) {
  constexpr int64_t kTiles = kFewRows / Rows + 1, kTileFloats = Rows * kPanelColumns;
  constexpr bool kOneVector = Rows > kTwoPanelRows;  // sums of two have no room
  alignas(64) float panels[kPanelVectors][kDecodedSteps * kWidth];
  alignas(64) float sums[kTiles][kTileFloats];
  for (int64_t n = task.n_begin; n < task.n_end; n += kPanelColumns) {
    const int64_t vectors = n + kWidth < task.n_end ? kPanelVectors : 1;
    for (int64_t begin = 0; begin < task.k; begin += kDecodedSteps) {
      const int64_t end = begin + kDecodedSteps < task.k ? begin + kDecodedSteps : task.k;
      for (int64_t c = 0; c < vectors; ++c) decode_columns(task, n + c * kWidth, begin, end, panels[c]);
      int64_t tile = 0;
      for (int64_t m = task.m_begin; m < task.m_end; m += Rows, ++tile) {
        const float* x = task.packed_x + m / Rows * tile_floats(Rows, task.k) + begin * Rows;
        float* to = sums[tile];
        if constexpr (kOneVector) {
          for (int64_t c = 0; c < vectors; ++c) {
            float* part = to + c * Rows * kWidth;
            run_tile<Rows, 1>({x, panels[c], 0, end - begin, begin == 0 ? nullptr : part, part});
          }
        } else {
          run_tile<Rows>({x, panels[0], kDecodedSteps * kWidth, end - begin, begin == 0 ? nullptr : to, to});
        }
      }
    }
    int64_t tile = 0;
    for (int64_t m = task.m_begin; m < task.m_end; m += Rows, ++tile) {
      for (int64_t c = 0; c < vectors; ++c) {
        const Columns<T> columns = start_columns<T>(task, n + c * kWidth);
        for (int64_t r = 0; r < Rows && m + r < task.m_end; ++r) {
          const int64_t at = kOneVector ? c * Rows + r : r * kPanelVectors + c;
          write_sums(task, load(sums[tile] + at * kWidth), m + r, columns);
        }
      }
    }
  }
}

}  // namespace
}  // namespace asyncengine
