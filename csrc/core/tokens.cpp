#include "core/tokens.h"

#include <algorithm>
#include <cassert>

namespace asyncengine {

Tokens::Tokens(std::span<const int32_t> prompt, int32_t max_total, const Tokens* sibling, int32_t shared)
    : sibling_(sibling), shared_(shared) {
  own_.reserve(static_cast<size_t>(max_total - shared));
  own_.assign(prompt.begin() + shared, prompt.end());
}

void Tokens::copy(int32_t position, int32_t count, int32_t* out) const {
  assert(position + count <= size());
  const int32_t of_sibling = std::clamp(shared_ - position, 0, count);
  if (of_sibling > 0) out = std::copy_n(at(position), of_sibling, out);
  std::copy_n(at(position + of_sibling), count - of_sibling, out);
}

void Tokens::settle(Tail& tail, const PublishedBlocks& published) {
  while (size() < tail.begin_) {  // whole blocks: only such have gone from the tail to the prefix cache
    const int32_t* block = published.at(size());
    own_.insert(own_.end(), block, block + published.block_size());
  }
  own_.insert(own_.end(), tail.newest_, tail.newest_ + tail.count());
  tail.begin_ = tail.end_;
}

}  // namespace asyncengine
