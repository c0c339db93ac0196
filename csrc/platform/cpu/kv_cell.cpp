#include "platform/cpu/kv_cell.h"

#include <algorithm>
#include <cstring>

namespace asyncengine {
namespace {

// Elements of a key that are quantised before they are spread over its block.
constexpr int64_t kQuantizedAtOnce = 256;

// `Word` is as wide as an element.
template <class Word>
void spread_key(const Word* k, int64_t count, Word* column, int64_t stride) {
  for (int64_t d = 0; d < count; ++d) column[d * stride] = k[d];
}

template <class Word>
void store_words(const void* k, const void* v, const KVCell& cell) {
  const auto bytes = static_cast<size_t>(cell.head_dim) * sizeof(Word);
  if (cell.keys_by_token) {
    std::memcpy(static_cast<Word*>(cell.k) + cell.offset * cell.head_dim, k, bytes);
  } else {
    spread_key(static_cast<const Word*>(k), cell.head_dim, static_cast<Word*>(cell.k) + cell.offset, cell.block_size);
  }
  std::memcpy(static_cast<Word*>(cell.v) + cell.offset * cell.head_dim, v, bytes);
}

void store_float8(const CpuIsa& isa, Dtype dtype, const void* k, const void* v, const KVCell& cell) {
  const int64_t dim = cell.head_dim;
  const float key_inverse = cell.scales.key_inverse(cell.head);
  auto* keys = static_cast<Float8*>(cell.k);
  if (cell.keys_by_token) {
    isa.quantize(dtype, k, dim, key_inverse, keys + cell.offset * dim);
  } else {
    Float8 quantized[kQuantizedAtOnce];
    for (int64_t first = 0; first < dim; first += kQuantizedAtOnce) {
      const int64_t count = std::min(kQuantizedAtOnce, dim - first);
      isa.quantize(dtype, static_cast<const char*>(k) + first * dtype_size(dtype), count, key_inverse, quantized);
      spread_key(quantized, count, keys + first * cell.block_size + cell.offset, cell.block_size);
    }
  }
  isa.quantize(dtype, v, dim, cell.scales.value_inverse(cell.head), static_cast<Float8*>(cell.v) + cell.offset * dim);
}

}  // namespace

void store_head(const CpuIsa& isa, Dtype dtype, const void* k, const void* v, const KVCell& cell) {
  if (cell.scales.values != nullptr) {
    store_float8(isa, dtype, k, v, cell);
  } else if (dtype == Dtype::kFloat32) {
    store_words<uint32_t>(k, v, cell);
  } else {
    store_words<uint16_t>(k, v, cell);
  }
}

}  // namespace asyncengine
