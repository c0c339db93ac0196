// Products of blocks by tiles, with plain code in place of AMX's instructions, beside the portable kernels. Then the kernels of
// this machine beside each other: with AMX among them, the instructions themselves.
#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "block_fixture.h"
#include "check.h"
#include "platform/cpu/block_tiles.inl"
#include "platform/cpu/kernels.h"

using namespace asyncengine;
using namespace block_fixture;
using check::sample_of;

namespace {

// As Intel's manual defines the instructions: a load clears the bytes behind its shape.
class PlainTiles {
 public:
  PlainTiles(int64_t rows, int64_t columns) : rows_(rows), columns_(columns) {
    CHECK(rows >= 1 && rows <= 16 && columns % 4 == 0 && columns <= 64);
  }

  template <int kTile>
  void clear() {
    static_assert(kTile < 4);
    std::memset(tiles_[kTile], 0, sizeof(tiles_[kTile]));
  }
  template <int kTile>
  void load(const void* from, int64_t stride) {
    static_assert(kTile >= 4 && kTile < 8);
    const int64_t rows = kTile < 6 ? rows_ : columns_ / 4, bytes = kTile < 6 ? columns_ : 64;
    std::memset(tiles_[kTile], 0, sizeof(tiles_[kTile]));
    for (int64_t row = 0; row < rows; ++row) {
      std::memcpy(tiles_[kTile] + 64 * row, static_cast<const char*>(from) + row * stride, static_cast<size_t>(bytes));
    }
  }
  template <int kSums, int kX, int kCodes>
  void add_product() {
    for (int64_t m = 0; m < rows_; ++m) {
      for (int64_t n = 0; n < 16; ++n) {
        int32_t sum = 0;
        std::memcpy(&sum, tiles_[kSums] + 64 * m + 4 * n, sizeof(sum));
        for (int64_t i = 0; i < columns_; ++i) sum += tiles_[kX][64 * m + i] * tiles_[kCodes][i / 4 * 64 + 4 * n + i % 4];
        std::memcpy(tiles_[kSums] + 64 * m + 4 * n, &sum, sizeof(sum));
      }
    }
  }
  template <int kTile>
  void store(int32_t* to) {
    std::memcpy(to, tiles_[kTile], static_cast<size_t>(64 * rows_));
  }

 private:
  int64_t rows_, columns_;
  int8_t tiles_[8][16 * 64];
};

// x for blocks of so many columns, with rows of no meaning up to whole parts, at the alignment that kernels may rely on.
class RoundedX {
 public:
  RoundedX(int64_t block_columns, int64_t rows, int64_t k)
      : lines_(static_cast<size_t>(rounded_floats(block_columns, rows, k) / 16)) {
    const std::vector<float> x = normal_numbers(rows * k);
    std::memset(lines_.data(), 0x77, lines_.size() * sizeof(Line));
    for (int64_t m = 0; m < rows; ++m) {
      block_kernels_portable().round_row(Dtype::kFloat32, x.data() + m * k, k, block_columns, m, rows, lines_[0].floats);
    }
  }
  const float* data() const { return lines_[0].floats; }

 private:
  struct alignas(64) Line {
    float floats[16];
  };
  std::vector<Line> lines_;
};

// y [tiles of the weight][rows, kTileRows], a task for as many tiles as the kernels take.
std::vector<float> product(int64_t tiles, void (*multiply)(const BlockTask&), const BlockTask& whole) {
  const BlockForm form = block_form(whole.type);
  std::vector<float> y(static_cast<size_t>(round_up(whole.weight_rows, kTileRows) * whole.rows));
  for (int64_t n = 0; n < whole.weight_rows; n += tiles * kTileRows) {
    BlockTask task = whole;
    task.weight = whole.weight + n * (whole.k / form.columns * form.bytes);
    task.weight_rows = std::min(tiles * kTileRows, whole.weight_rows - n);
    task.y = y.data() + n * whole.rows;
    multiply(task);
  }
  return y;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

using Sizes = std::vector<int64_t>;

// body(task) for types, rows of x, rows of the weight and columns, of which some fill no tile.
template <class Body>
void for_shapes(Body&& body) {
  for (const BlockType type : kTypes) {
    const bool small = block_form(type).columns == 32;
    for (const int64_t k : small ? sample_of<Sizes>({32, 160, 512, 608}, {32, 608}) : sample_of<Sizes>({256, 768}, {768})) {
      for (const int64_t outputs : sample_of<Sizes>({1, 16, 37, 83}, {16, 83})) {
        const std::vector<uint8_t> blocks = random_blocks(type, outputs, k);
        for (const int64_t rows : sample_of<Sizes>({1, 7, 8, 16, 17, 33, 64}, {1, 8, 33})) {
          const RoundedX x(small ? 32 : 256, rows, k);
          body(BlockTask{type, blocks.data(), outputs, k, x.data(), rows, nullptr});
        }
      }
    }
  }
}

}  // namespace

TEST(blocks_by_tiles_give_the_bits_of_the_portable_kernels) {
  for_shapes([](const BlockTask& task) {
    const std::vector<float> found = product(kWeightTiles, multiply_blocks_by_tiles<PlainTiles>, task);
    CHECK(same_bits(found, product(1, block_kernels_portable().multiply, task)));
  });
}

TEST(blocks_give_the_same_bits_in_all_instruction_sets_that_fuse) {
  std::vector<const BlockKernels*> kernels;
  for (const std::string& name : available_cpu_isas()) {
    if (name != "portable") kernels.push_back(&select_block_kernels(select_cpu_isa(name)));
  }
  for_shapes([&](const BlockTask& task) {
    std::vector<float> first;
    for (const BlockKernels* own : kernels) {
      const std::vector<float> found = product(own->tiles, own->multiply, task);
      if (first.empty()) first = found;
      CHECK(same_bits(found, first));
    }
  });
}
