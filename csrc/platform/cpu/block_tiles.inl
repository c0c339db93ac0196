// Products of blocks with many rows of x, by tiles of AMX or by a stand-in that a test gives.
//
// A tile of sums has the products of a part's rows of x with sixteen rows of a weight, over the columns of one group: the
// scales of both sides belong to a group, so sums leave the tile after each. Tiles of x are rows as they were rounded, and
// tiles of a weight are codes as vectors read them, less the type's zero. Four groups are multiplied while vectors scale and
// add the four before. Blocks of 256 columns are multiplied otherwise (block_digits.inl).
//
// Tiles(rows, columns) has eight tiles: 0 to 3 of sums, int32 [rows][16]; 4 and 5 of x, int8 [rows][columns]; 6 and 7 of
// codes, int8 [columns / 4][16][4]. clear<T>(), load<T>(from, bytes between rows), store<T>(to), whose rows lie side by side,
// and add_product<S, X, W>(): sums += x * codes.
#include <cstring>
#include <utility>

#include "platform/cpu/block_digits.inl"

namespace asyncengine {
namespace {

constexpr int kGroupsTogether = 4;

// Groups of a part of x and of a tile, into sums that lie kSums apart.
template <int64_t kGroup, class Tiles, int... kAt>
inline void multiply_groups(Tiles& tiles, const int8_t* x, int64_t stride, const uint8_t* codes, int32_t* sums,
                            std::integer_sequence<int, kAt...>) {
  (tiles.template clear<kAt>(), ...);
  auto multiply_one = [&]<int kOne>() {
    tiles.template load<4 + kOne % 2>(x + kOne * kGroup, stride);
    tiles.template load<6 + kOne % 2>(codes + kOne * kGroup * kTileRows, 4 * kTileRows);
    tiles.template add_product<kOne, 4 + kOne % 2, 6 + kOne % 2>();
  };
  (multiply_one.template operator()<kAt>(), ...);
  (tiles.template store<kAt>(sums + kAt * kSums), ...);
}

// Up to kGroupsTogether of them.
template <int64_t kGroup, class Tiles>
inline void multiply_groups(Tiles& tiles, const int8_t* x, int64_t stride, const uint8_t* codes, int64_t count, int32_t* sums) {
  if (count >= kGroupsTogether) {
    return multiply_groups<kGroup>(tiles, x, stride, codes, sums, std::make_integer_sequence<int, kGroupsTogether>());
  }
  for (int64_t i = 0; i < count; ++i) {
    multiply_groups<kGroup>(tiles, x + i * kGroup, stride, codes + i * kGroup * kTileRows, sums + i * kSums,
                            std::integer_sequence<int, 0>());
  }
}

// Groups of columns that tiles have multiplied: `first` counts in the tile, where `begin` is the tile's first column.
struct Groups {
  const TileNumbers& numbers;
  int64_t k, begin, first, count;
};

// y [kRows, kTileRows] += sums of rows of x.
template <BlockType kType, int kRows>
inline void add_sums(const Groups& groups, const int32_t* sums, const float* x, float* y) {
  constexpr int64_t kGroup = block_form(kType).group;
  const int64_t stride = rounded_row_floats(groups.k);
  Floats total[kRows];
  for (int r = 0; r < kRows; ++r) total[r] = load_floats(y + r * kTileRows);
  for (int64_t i = 0; i < groups.count; ++i) {
    const int64_t column = groups.begin + (groups.first + i) * kGroup;
    for (int r = 0; r < kRows; ++r) {
      const Ints products = load_ints(sums + i * kSums + r * kTileRows);
      total[r] = add_group<kType, true>(total[r], products, groups.numbers, groups.first + i, {x + r * stride, groups.k, column});
    }
  }
  for (int r = 0; r < kRows; ++r) store_floats(y + r * kTileRows, total[r]);
}

// y [rows, kTileRows] += a part of x times columns [begin, begin + columns) of a tile. The part has `rows` that are there.
template <BlockType kType, class Tiles>
inline void add_part(Tiles& tiles, const Tile& tile, const float* x, int64_t rows, int64_t k, int64_t begin, int64_t columns,
                     float* y) {
  constexpr int64_t kGroup = block_form(kType).group;
  const int64_t stride = rounded_row_floats(k), groups = columns / kGroup;
  const auto* codes = reinterpret_cast<const int8_t*>(x) + begin;
  alignas(64) int32_t sums[2][kGroupsTogether * kSums];
  auto run = [&](int64_t first) {
    multiply_groups<kGroup>(tiles, codes + first * kGroup, stride * static_cast<int64_t>(sizeof(float)),
                            tile.codes + first * kGroup * kTileRows, groups - first, sums[first / kGroupsTogether % 2]);
  };
  run(0);
  for (int64_t first = 0; first < groups; first += kGroupsTogether) {
    const int64_t next = first + kGroupsTogether;
    if (next < groups) run(next);
    const int32_t* own = sums[first / kGroupsTogether % 2];
    const Groups done{tile.numbers, k, begin, first, next < groups ? kGroupsTogether : groups - first};
    int64_t m = 0;
    for (; m + kRowsTogether <= rows; m += kRowsTogether) {
      add_sums<kType, kRowsTogether>(done, own + m * kTileRows, x + m * stride, y + m * kTileRows);
    }
    for (; m < rows; ++m) add_sums<kType, 1>(done, own + m * kTileRows, x + m * stride, y + m * kTileRows);
  }
}

template <BlockType kType, class Tiles>
void multiply_by_groups(const BlockTask& task) {
  constexpr BlockForm kForm = block_form(kType);
  const int64_t part = rows_of_part(task.rows), stride = rounded_row_floats(task.k),
                row_bytes = task.k / kForm.columns * kForm.bytes;
  const int64_t count = ceil_div(task.weight_rows, kTileRows);
  Tiles tiles(part, kForm.group);
  Tile weights[kWeightTiles];
  if (task.k % kTileColumns != 0) std::memset(weights, 0, sizeof(weights));  // whole vectors are interleaved
  std::memset(task.y, 0, static_cast<size_t>(count * task.rows * kTileRows) * sizeof(float));
  for (int64_t begin = 0; begin < task.k; begin += kTileColumns) {
    const int64_t columns = task.k - begin < kTileColumns ? task.k - begin : kTileColumns;
    for (int64_t n = 0; n < count; ++n) {
      const uint8_t* weight = task.weight + n * kTileRows * row_bytes;
      decode_rows<kType>(weight, task.weight_rows - n * kTileRows, task.k, begin, columns, weights[n]);
      interleave_codes(weights[n], columns);
      take_zero<kType>(weights[n], columns);
    }
    for (int64_t m = 0; m < task.rows; m += part) {
      const int64_t rows = task.rows - m < part ? task.rows - m : part;
      for (int64_t n = 0; n < count; ++n) {
        float* y = task.y + (n * task.rows + m) * kTileRows;
        add_part<kType>(tiles, weights[n], task.x + m * stride, rows, task.k, begin, columns, y);
      }
    }
  }
}

template <class Tiles>
void multiply_blocks_by_tiles(const BlockTask& task) {
  for_block_type(task.type, [&]<BlockType kType>() {
    if constexpr (kIntegerScales<kType>) {
      multiply_by_digits<kType, Tiles>(task);
    } else {
      multiply_by_groups<kType, Tiles>(task);
    }
  });
}

}  // namespace
}  // namespace asyncengine
