// Place of one head's key and value of one token in a KV block.
#pragma once

#include <cstdint>

#include "platform/cpu/isa.h"

namespace asyncengine {

struct KVCell {
  void* k;  // the head's keys of the block: [head_dim, block_size], or by token [block_size, head_dim]
  void* v;  // its values: [block_size, head_dim]
  int64_t head_dim, block_size;
  int64_t offset;  // of the token in the block
  bool keys_by_token;
  KVScales scales;  // with them keys and values are quantised to Float8
  int64_t head;     // of the scales
};

// k and v: [head_dim] in `dtype`.
void store_head(const CpuIsa& isa, Dtype dtype, const void* k, const void* v, const KVCell& cell);

}  // namespace asyncengine
