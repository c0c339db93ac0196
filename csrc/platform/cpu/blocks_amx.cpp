// Products of blocks by tiles of AMX where rows are many, and by AVX-512's VNNI where they are few.
#include "platform/cpu/blocks.h"

#if defined(__AMX_TILE__) && defined(__AMX_INT8__) && defined(__AVX512VNNI__) && defined(__AVX512VL__)
#include "platform/cpu/block_tiles.inl"
#include "platform/cpu/tile_scope.h"

namespace asyncengine {
namespace {

// Fewer rows take longer by tiles (bench/log/cpu.md).
constexpr int64_t many_rows(BlockForm form) { return form.columns == kTileColumns ? 32 : 64; }

// Instructions are written out, as GCC's functions take numbers of tiles as text.
class AmxTiles {
 public:
  AmxTiles(int64_t rows, int64_t columns) : scope_(shapes(rows, columns)) {}

  template <int kTile>
  [[gnu::always_inline]] void clear() {
    asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
  }
  template <int kTile>
  [[gnu::always_inline]] void load(const void* from, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(kTile) : "memory");
  }
  template <int kSums, int kX, int kCodes>
  [[gnu::always_inline]] void add_product() {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSums), "i"(kX), "i"(kCodes));
  }
  template <int kTile>
  [[gnu::always_inline]] void store(int32_t* to) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(kTileRows * 4), "i"(kTile) : "memory");
  }

 private:
  static TileShapes shapes(int64_t rows, int64_t columns) {
    const int64_t sums = 4 * kTileRows, codes = 4 * kTileRows;
    return {.row_bytes = {sums, sums, sums, sums, columns, columns, codes, codes},
            .rows = {rows, rows, rows, rows, rows, rows, columns / 4, columns / 4}};
  }

  TileScope scope_;
};

void multiply(const BlockTask& task) {
  const BlockForm form = block_form(task.type);
  if (task.rows >= many_rows(form)) return multiply_blocks_by_tiles<AmxTiles>(task);
  BlockTask part = task;  // a tile of the weight at a time
  for (int64_t n = 0; n < task.weight_rows; n += kTileRows) {
    part.weight = task.weight + n * (task.k / form.columns * form.bytes);
    part.weight_rows = task.weight_rows - n < kTileRows ? task.weight_rows - n : kTileRows;
    part.y = task.y + n * task.rows;
    block_kernels_vnni()->multiply(part);
  }
}

void round_row(Dtype dtype, const void* row, int64_t k, int64_t block_columns, int64_t at, int64_t rows, float* x) {
  block_kernels_vnni()->round_row(dtype, row, k, block_columns, at, rows, x);
}

void write_rows(const BlockSums& from, Dtype dtype, void* y) { block_kernels_vnni()->write_rows(from, dtype, y); }

void unpack_row(const BlockRows& rows, int64_t row, void* to) { block_kernels_vnni()->unpack_row(rows, row, to); }

constexpr BlockKernels kKernels{"amx", kWeightTiles, round_row, multiply, write_rows, unpack_row};

}  // namespace
}  // namespace asyncengine

const asyncengine::BlockKernels* asyncengine::block_kernels_amx() { return &kKernels; }
#else
const asyncengine::BlockKernels* asyncengine::block_kernels_amx() { return nullptr; }
#endif
