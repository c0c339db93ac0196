// AVX-512 with products of bfloat16 by AMX; everything else is AVX-512's own.
//
// An output is one chain over K in steps of 32, acc += even + odd, where even and odd are the sums of x · w over the
// step's even and odd places, ascending. The last step is filled up with zeros. Which operand of the instruction the
// weights are does not matter: plain rows of W [16 columns of y, 32 steps] are the first one as they lie, which leaves
// the transpose of y in the tile; panels are the second one as they lie, in pairs of steps [16][16 columns][2]. x is
// packed as the other. Every count of rows takes this one instruction; few of them shorten the tiles of x and y.
#include "platform/cpu/isa.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__FMA__)
#define ASYNCENGINE_VECTOR_BYTES 64
#include "platform/cpu/vec.inl"

#include "platform/cpu/tile_scope.h"
#include "platform/cpu/units.inl"

namespace asyncengine {
namespace {

constexpr int64_t kTileRows = 16, kTileSteps = 32;  // of x or W; 64 bytes a row
constexpr int64_t kRowBytes = 64, kTileBytes = kTileRows * kRowBytes, kTileFloats = kTileBytes / 4, kWordBytes = 4;
constexpr int64_t kPairRows = 2 * kTileRows;  // two tiles of x meet two of W: four of y, all that there is room for
constexpr int64_t kFewRows = kPairRows;
constexpr int64_t kPassTiles = 16;  // of K, in many rows: a pair of tiles of x and one of W stay in L1
constexpr int64_t kTilesAhead = 4;  // of weights that come from memory

int64_t tiles_of_k(int64_t k) { return (k + kTileSteps - 1) / kTileSteps; }

// Tiles 0 to 3 are y, 4 and 5 x, 6 and 7 the weights; x is the first operand if the weights are in panels.
TileShapes tile_shapes(bool panels, int64_t x_rows) {
  TileShapes shapes = {};
  for (int tile = 0; tile < 8; ++tile) {
    const bool short_rows = !panels && tile < 6, few_rows = panels && tile < 6;
    shapes.row_bytes[tile] = short_rows ? x_rows * kWordBytes : kRowBytes;
    shapes.rows[tile] = few_rows ? x_rows : kTileRows;
  }
  return shapes;
}

// ---- x: tiles of up to 16 rows, each [tile of K][tile of x] ----

// Two tiles of x, or one if that is enough.
int64_t amx_tile_rows(int64_t rows) { return rows <= kTileRows ? rows : rows <= kPairRows ? (rows + 1) / 2 * 2 : kPairRows; }

int64_t rows_of_x_tile(int64_t rows) { return rows <= kTileRows ? rows : amx_tile_rows(rows) / 2; }

int64_t amx_packed_x_floats(int64_t rows, int64_t k) {
  const int64_t x_rows = rows_of_x_tile(rows);
  return (rows + x_rows - 1) / x_rows * x_rows * tiles_of_k(k) * kRowBytes / kWordBytes;
}

// Rows as they are; rows past the last one and steps past K are zero.
void pack_rows(const LinearInput& x, const BFloat16* first, int64_t rows, int64_t tile_rows, char* packed) {
  const int64_t tile_bytes = tile_rows * kRowBytes;
  for (int64_t k = 0; k < x.k; k += kTileSteps, packed += tile_bytes) {
    const int64_t steps = x.k - k < kTileSteps ? x.k - k : kTileSteps;
    if (rows < tile_rows || steps < kTileSteps) memset(packed, 0, static_cast<size_t>(tile_bytes));
    for (int64_t row = 0; row < rows; ++row) {
      memcpy(packed + row * kRowBytes, first + row * x.stride + k, static_cast<size_t>(steps) * sizeof(BFloat16));
    }
  }
}

// The same in pairs of steps, each beside the same pair of the other rows.
void pack_pairs(const LinearInput& x, const BFloat16* first, int64_t rows, int64_t tile_rows, char* packed) {
  constexpr int64_t kSteps = kUnitSteps<BFloat16>;
  const __mmask16 filled = static_cast<__mmask16>((1u << tile_rows) - 1);
  for (int64_t k = 0; k < tiles_of_k(x.k) * kTileSteps; k += kSteps) {
    const int64_t left = x.k - k, steps = left < 0 ? 0 : left < kSteps ? left : kSteps;
    UVec words[4];
    load_unit(words, [&](int64_t i) __attribute__((always_inline)) {
      if (i >= rows) return Quad{};
      const BFloat16* row = first + i * x.stride + k;
      return steps == kSteps ? load_quad(row) : load_first_quad(row, steps);
    });
    for (int64_t i = 0; i < 4; ++i, packed += tile_rows * kWordBytes) {
      _mm512_mask_storeu_epi32(packed, filled, (__m512i)words[i]);
    }
  }
}

void amx_pack_x(const LinearInput& x, int64_t tile_begin, int64_t tile_end, float* packed) {
  const int64_t tile_rows = amx_tile_rows(x.rows), x_rows = rows_of_x_tile(x.rows);
  const int64_t end = tile_end * tile_rows < x.rows ? tile_end * tile_rows : x.rows;
  for (int64_t m = tile_begin * tile_rows; m < end; m += x_rows) {
    const BFloat16* first = static_cast<const BFloat16*>(x.x) + m * x.stride;
    const int64_t rows = end - m < x_rows ? end - m : x_rows;
    char* to = reinterpret_cast<char*>(packed) + m * tiles_of_k(x.k) * kRowBytes;
    if (x.panels) {
      pack_rows(x, first, rows, x_rows, to);
    } else {
      pack_pairs(x, first, rows, x_rows, to);
    }
  }
}

// ---- weights of two tiles of columns ----

struct Weights {
  const char* first;
  int64_t distance;      // bytes to the second 16 columns
  int64_t stride, step;  // bytes between the rows of a tile, and to the next tile of K
  int64_t skip;          // bytes from the end of these columns' weights to the next two tiles'
  int64_t columns, k;    // that are there

  AE_INLINE bool whole(int64_t tile) const { return columns == kPairRows && (tile + 1) * kTileSteps <= k; }
};

// Rows past the last one of W, and steps past K, read as zero.
void copy_tiles(const Weights& w, int64_t tile, char* to) {
  const int64_t left = w.k - tile * kTileSteps, steps = left < kTileSteps ? left : kTileSteps;
  memset(to, 0, 2 * kTileBytes);
  for (int64_t row = 0; row < w.columns; ++row) {
    memcpy(to + row * kRowBytes, w.first + row * w.stride + tile * w.step, static_cast<size_t>(steps) * sizeof(BFloat16));
  }
  TileScope::written(to);
}

template <bool Panels>
Weights weights_of(const LinearTask& task, int64_t n) {
  const char* weight = static_cast<const char*>(task.weight);
  const int64_t left = task.n_end - n, columns = left < kPairRows ? left : kPairRows;
  if constexpr (Panels) {  // filled up with zeros
    const int64_t panel = tiles_of_k(task.k) * kTileBytes;
    return {weight + n / kTileRows * panel, panel, kRowBytes, kTileBytes, panel, kPairRows, tiles_of_k(task.k) * kTileSteps};
  }
  const int64_t row = task.k * static_cast<int64_t>(sizeof(BFloat16));
  return {weight + n * row, kTileRows * row, row, kRowBytes, (kPairRows - 1) * row, columns, task.k};
}

}  // namespace
}  // namespace asyncengine

#include "platform/cpu/amx_codes.inl"

namespace asyncengine {
namespace {

// Tiles that were decoded from `begin` of K on.
Weights decoded(const char* tiles, int64_t begin, int64_t k) {
  const char* first = tiles - begin * 2 * kTileBytes;
  return {first, kTileBytes, kRowBytes, 2 * kTileBytes, 0, kPairRows, tiles_of_k(k) * kTileSteps};
}

// ---- products: tmm0 … tmm3 are the sums of x tile i and column tile j at 2 i + j; 4, 5 are x, 6, 7 the weights ----

struct Stretch {
  const char* x;                           // of the first tile of rows
  int64_t x_distance, x_stride, x_step;    // bytes to the second one, between rows of a tile, to the next tile of K
  int64_t begin, end, tiles;               // tiles of K: of this pass, and of all
  bool cold;                               // the weights come from memory
  const float* from;                       // sums of the passes before, null at the first one
  float* to;                               // may be `from`
};

template <bool Panels, int XTiles>
AE_INLINE void multiply(const Stretch& at, const char* x, const char* w, int64_t w_distance, int64_t w_stride) {
  _tile_loadd(4, x, at.x_stride);
  _tile_loadd(6, w, w_stride);
  _tile_loadd(7, w + w_distance, w_stride);
  if constexpr (XTiles == 2) _tile_loadd(5, x + at.x_distance, at.x_stride);
  if constexpr (Panels) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (XTiles == 2) {
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  } else {
    _tile_dpbf16ps(0, 6, 4);
    _tile_dpbf16ps(1, 7, 4);
    if constexpr (XTiles == 2) {
      _tile_dpbf16ps(2, 6, 5);
      _tile_dpbf16ps(3, 7, 5);
    }
  }
}

template <bool Panels, int XTiles>
void run_tiles(const Stretch& at, const Weights& w) {
  if (at.from == nullptr) {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (XTiles == 2) {
      _tile_zero(2);
      _tile_zero(3);
    }
  } else {
    _tile_loadd(0, at.from, kRowBytes);
    _tile_loadd(1, at.from + kTileFloats, kRowBytes);
    if constexpr (XTiles == 2) {
      _tile_loadd(2, at.from + 2 * kTileFloats, kRowBytes);
      _tile_loadd(3, at.from + 3 * kTileFloats, kRowBytes);
    }
  }
  alignas(64) char edge[2 * kTileBytes];
  const char* x = at.x + at.begin * at.x_step;
  for (int64_t tile = at.begin; tile < at.end; ++tile, x += at.x_step) {
    const char* weights = w.first + tile * w.step;
    if (!w.whole(tile)) {
      copy_tiles(w, tile, edge);
      multiply<Panels, XTiles>(at, x, edge, kTileBytes, kRowBytes);
      continue;
    }
    if (at.cold) {
      const char* wanted = weights + kTilesAhead * w.step + (tile + kTilesAhead < at.tiles ? 0 : w.skip);
#pragma GCC unroll 16
      for (int64_t row = 0; row < kTileRows; ++row) {
        prefetch(wanted + row * w.stride);
        prefetch(wanted + row * w.stride + w.distance);
      }
    }
    multiply<Panels, XTiles>(at, x, weights, w.distance, w.stride);
  }
  _tile_stored(0, at.to, kRowBytes);
  _tile_stored(1, at.to + kTileFloats, kRowBytes);
  if constexpr (XTiles == 2) {
    _tile_stored(2, at.to + 2 * kTileFloats, kRowBytes);
    _tile_stored(3, at.to + 3 * kTileFloats, kRowBytes);
  }
}

// ---- y ----

AE_INLINE void write_row(const LinearTask& task, Vec sums, int64_t m, int64_t n, int64_t count) {
  if (task.bias != nullptr) sums = sums + load_elements(static_cast<const BFloat16*>(task.bias) + n, count);
  const int64_t offset = m * task.y_stride + n;
  if (task.y_float32) {
    store_elements(static_cast<float*>(task.y) + offset, sums, count);
  } else {
    store_elements(static_cast<BFloat16*>(task.y) + offset, sums, count);
  }
}

// A tile of sums: rows of y, or columns of y.
template <bool Panels>
void write_tile(const LinearTask& task, const float* sums, int64_t m, int64_t x_rows, int64_t n) {
  const int64_t rows = task.m_end - m < x_rows ? task.m_end - m : x_rows;
  const int64_t count = task.n_end - n < kTileRows ? task.n_end - n : kTileRows;
  if (count <= 0) return;
  if constexpr (Panels) {
    for (int64_t row = 0; row < rows; ++row) write_row(task, load(sums + row * kWidth), m + row, n, count);
    return;
  }
  for (int64_t row = 0; row < rows; row += 4) {
    UVec words[4];
    load_unit(words, [&](int i) __attribute__((always_inline)) { return load_quad(sums + i * kWidth + row); });
    for (int64_t i = 0; i < 4 && row + i < rows; ++i) write_row(task, (Vec)words[i], m + row + i, n, count);
  }
}

int64_t decoded_floats(int64_t columns) { return (columns + kPairRows) * kPassTiles * kTileSteps / 2; }

// The passes of few rows with weights in codes: the rows are one or two tiles of x, whose sums wait in `done`.
void few_rows_of_codes(const LinearTask& task) {
  const int64_t x_rows = rows_of_x_tile(task.rows), x_step = x_rows * kRowBytes, all = tiles_of_k(task.k);
  const TileScope tiles(tile_shapes(false, x_rows));
  const bool two = task.m_begin + x_rows < task.m_end;
  alignas(64) float done[4 * kTileFloats];
  alignas(64) char weights[2 * kDecodedTiles * kTileBytes];
  for (int64_t n = task.n_begin; n < task.n_end; n += kPairRows) {
    for (int64_t begin = 0; begin < all; begin += kDecodedTiles) {
      const int64_t end = begin + kDecodedTiles < all ? begin + kDecodedTiles : all;
      decode_tiles(task, n, begin, end, weights);
      TileScope::written(weights);
      const Stretch at{.x = reinterpret_cast<const char*>(task.packed_x) + task.m_begin * all * kRowBytes,
                       .x_distance = all * x_step,
                       .x_stride = x_rows * kWordBytes,
                       .x_step = x_step,
                       .begin = begin,
                       .end = end,
                       .tiles = all,
                       .cold = false,
                       .from = begin == 0 ? nullptr : done,
                       .to = done};
      if (two) {
        run_tiles<false, 2>(at, decoded(weights, begin, task.k));
      } else {
        run_tiles<false, 1>(at, decoded(weights, begin, task.k));
      }
    }
    for (int64_t i = 0; i < (two ? 4 : 2); ++i) {
      write_tile<false>(task, done + i * kTileFloats, task.m_begin + i / 2 * x_rows, x_rows, n + i % 2 * kTileRows);
    }
  }
}

template <bool Panels>
void linear_tiles(const LinearTask& task) {
  if (task.codes != nullptr && task.rows <= kFewRows) return few_rows_of_codes(task);
  const int64_t x_rows = rows_of_x_tile(task.rows), x_step = x_rows * kRowBytes;
  const TileScope tiles(tile_shapes(Panels, x_rows));
  const int64_t all = tiles_of_k(task.k), pass = task.rows <= kFewRows ? all : kPassTiles;
  const bool coded = task.codes != nullptr;
  char* const codes = reinterpret_cast<char*>(task.scratch);
  alignas(64) float done[4 * kTileFloats];
  for (int64_t begin = 0; begin < all; begin += pass) {
    const int64_t end = begin + pass < all ? begin + pass : all, pair_bytes = 2 * pass * kTileBytes;
    float* sums = task.scratch + (coded ? decoded_floats(task.n_end - task.n_begin) : 0);
    for (int64_t n = task.n_begin; coded && n < task.n_end; n += kPairRows) {
      decode_tiles(task, n, begin, end, codes + (n - task.n_begin) / kPairRows * pair_bytes);
    }
    TileScope::written(codes);
    for (int64_t m = task.m_begin; m < task.m_end; m += task.tile_rows) {
      const char* x = reinterpret_cast<const char*>(task.packed_x) + m * all * kRowBytes;
      const bool two = m + x_rows < task.m_end, last = end == all;
      for (int64_t n = task.n_begin; n < task.n_end; n += kPairRows, sums += 4 * kTileFloats) {
        const char* tiles_of_n = codes + (n - task.n_begin) / kPairRows * pair_bytes;
        const Weights w = coded ? decoded(tiles_of_n, begin, task.k) : weights_of<Panels>(task, n);
        const Stretch at{.x = x,
                         .x_distance = all * x_step,
                         .x_stride = Panels ? kRowBytes : x_rows * kWordBytes,
                         .x_step = x_step,
                         .begin = begin,
                         .end = end,
                         .tiles = all,
                         .cold = !coded && m == task.m_begin,
                         .from = begin == 0 ? nullptr : sums,
                         .to = last ? done : sums};
        if (two) {
          run_tiles<Panels, 2>(at, w);
        } else {
          run_tiles<Panels, 1>(at, w);
        }
        for (int64_t i = 0; last && i < (two ? 4 : 2); ++i) {
          write_tile<Panels>(task, done + i * kTileFloats, m + i / 2 * x_rows, x_rows, n + i % 2 * kTileRows);
        }
      }
    }
  }
}

void amx_linear(const LinearTask& task) {
  if (task.panels) {
    linear_tiles<true>(task);
  } else {
    linear_tiles<false>(task);
  }
}

int64_t amx_scratch_floats(int64_t rows, int64_t block_rows, int64_t columns) {
  if (rows <= kFewRows) return 0;
  return (block_rows + kPairRows) * (columns + kPairRows) + decoded_floats(columns);
}

}  // namespace

const CpuIsa* cpu_isa_amx() {
  static const CpuIsa kIsa = [] {
    CpuIsa isa = *cpu_isa_avx512();
    isa.name = "amx";
    isa.linear_bfloat16 = {
        .panel_columns = kPairRows,
        .panel_steps = kTileSteps,
        .few_rows = kFewRows,
        .tile_rows = amx_tile_rows,
        .packed_x_floats = amx_packed_x_floats,
        .scratch_floats = amx_scratch_floats,
        .pack_x = amx_pack_x,
        .run = amx_linear,
    };
    return isa;
  }();
  return &kIsa;
}

}  // namespace asyncengine
#else
const asyncengine::CpuIsa* asyncengine::cpu_isa_amx() { return nullptr; }
#endif
