// Products of blocks by vectors. Compiled for each instruction set.
#include <bit>
#include <cmath>
#include <cstring>

#include "platform/cpu/block_row.inl"

namespace asyncengine {
namespace {

// y [kRows, kTileRows] += rows of x times columns [begin, begin + columns) of a tile.
template <BlockType kType, int kRows>
inline void add_tile(const Tile& tile, const float* x, int64_t k, int64_t begin, int64_t columns, float* y) {
  constexpr BlockForm kForm = block_form(kType);
  constexpr int kFours = static_cast<int>(kForm.group) / 4;
  const int64_t stride = rounded_row_floats(k);
  Floats total[kRows];
  for (int r = 0; r < kRows; ++r) total[r] = load_floats(y + r * kTileRows);
  for (int64_t c = 0; c < columns; c += kForm.group) {
    Ints products[kRows];
    for (int r = 0; r < kRows; ++r) products[r] = no_ints();
    for (int q = 0; q < kFours; ++q) {
      for (int r = 0; r < kRows; ++r) {
        const auto* row = reinterpret_cast<const int8_t*>(x + r * stride) + begin + c + 4 * q;
        products[r] = add_products<(kForm.zero > 64)>(products[r], tile.codes + kTileRows * (c + 4 * q), row);
      }
    }
    for (int r = 0; r < kRows; ++r) {
      const float *row = x + r * stride, sum = sums_of<kType>(row, k)[(begin + c) / kForm.group];
      total[r] = add_group<kType, false>(total[r], products[r], tile, c / kForm.group, sum, row[k / 4 + (begin + c) / 32]);
    }
  }
  for (int r = 0; r < kRows; ++r) store_floats(y + r * kTileRows, total[r]);
}

// The same for one row, of codes that are not interleaved.
template <BlockType kType>
inline void add_row(const Tile& tile, const float* row, int64_t k, int64_t begin, int64_t columns, float* y) {
  constexpr int64_t kGroup = block_form(kType).group, kGroups = 64 / kGroup;
  const auto* codes = reinterpret_cast<const int8_t*>(row) + begin;
  const float *sums = sums_of<kType>(row, k) + begin / kGroup, *scales = row + k / 4 + begin / 32;
  Floats total = load_floats(y);
  for (int64_t c = 0; c < columns; c += 64) {
    Ints products[4];
    row_products<(block_form(kType).zero > 64)>(tile.row_codes[0] + c, kTileColumns, codes + c, products);
    for (int64_t i = 0; i < kGroups && c + i * kGroup < columns; ++i) {
      const Ints own = kGroup == 16 ? products[i] : added(products[2 * i], products[2 * i + 1]);
      const int64_t g = c / kGroup + i;
      total = add_group<kType, false>(total, own, tile, g, sums[g], scales[(c + i * kGroup) / 32]);
    }
  }
  store_floats(y, total);
}

template <BlockType kType>
void multiply_tile(const BlockTask& task) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
  if constexpr (kType == BlockType::kQ4_K) {
    if (task.rows == 1 && task.weight_rows == kTileRows) return multiply_row_of_q4_k(task);
  }
#endif
  constexpr int kRowsTogether = 8;
  const int64_t stride = rounded_row_floats(task.k);
  Tile tile;
  if (task.k % kTileColumns != 0) std::memset(&tile, 0, sizeof(tile));  // whole vectors are interleaved
  std::memset(task.y, 0, static_cast<size_t>(task.rows * kTileRows) * sizeof(float));
  for (int64_t begin = 0; begin < task.k; begin += kTileColumns) {
    const int64_t columns = task.k - begin < kTileColumns ? task.k - begin : kTileColumns;
    decode_rows<kType>(task.weight, task.weight_rows, task.k, begin, columns, tile);
    if (task.rows == 1) {
      add_row<kType>(tile, task.x, task.k, begin, columns, task.y);
      continue;
    }
    interleave_codes(tile, columns);
    int64_t m = 0;
    for (; m + kRowsTogether <= task.rows; m += kRowsTogether) {
      add_tile<kType, kRowsTogether>(tile, task.x + m * stride, task.k, begin, columns, task.y + m * kTileRows);
    }
    for (; m < task.rows; ++m) add_tile<kType, 1>(tile, task.x + m * stride, task.k, begin, columns, task.y + m * kTileRows);
  }
}

void multiply(const BlockTask& task) {
  for_block_type(task.type, [&]<BlockType kType>() { multiply_tile<kType>(task); });
}

// The largest number of 32 becomes 127. Ties go to even.
void round_row(Dtype dtype, const void* x, int64_t k, float* row) {
  auto* codes = reinterpret_cast<int8_t*>(row);
  float *scales = row + k / 4, *sums = scales + k / 32, *half_sums = sums + k / 32;
  for (int64_t c = 0; c < k; c += 32) {
    float values[32];
    uint32_t most = 0;  // bits of the largest number, or of NaN, which is above
    for (int i = 0; i < 32; ++i) {
      values[i] = dtype == Dtype::kFloat32
                      ? static_cast<const float*>(x)[c + i]
                      : std::bit_cast<float>(static_cast<uint32_t>(static_cast<const BFloat16*>(x)[c + i].bits) << 16);
    }
    for (float value : values) {
      const uint32_t bits = std::bit_cast<uint32_t>(value) & 0x7fffffffu;
      most = bits > most ? bits : most;
    }
    const float largest = std::bit_cast<float>(most);
    const float inverse = largest > 1e-36f ? 127.f / largest : 0.f;  // what is smaller becomes 0
    int32_t whole[32];
    int found[2] = {0, 0};
    for (int i = 0; i < 32; ++i) {  // in a form that compilers make vectors of, as is the rest
      const float code = std::nearbyint(values[i] * inverse);
      const bool fits = (code >= -127.f) & (code <= 127.f);
      whole[i] = static_cast<int32_t>(fits ? code : 127.f);  // NaN has a scale of NaN
    }
    for (int i = 0; i < 32; ++i) codes[c + i] = static_cast<int8_t>(whole[i]);
    for (int half = 0; half < 2; ++half) {
      for (int i = 0; i < 16; ++i) found[half] += whole[16 * half + i];
    }
    scales[c / 32] = largest / 127.f;
    sums[c / 32] = static_cast<float>(found[0] + found[1]);
    for (int half = 0; half < 2; ++half) half_sums[c / 16 + half] = static_cast<float>(found[half]);
  }
}

constexpr BlockKernels kKernels{kVectors, 1, round_row, multiply};

}  // namespace
}  // namespace asyncengine
