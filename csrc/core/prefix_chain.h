// Chain: what a block of the prefix cache follows.
#pragma once

#include <compare>
#include <cstdint>

namespace asyncengine {

// The predecessor of a block: another block, by the chain id of its entry, or nothing but the salt that separates tenants.
struct Chain {
  uint64_t id = 0;
  bool root = true;  // id is a salt

  auto operator<=>(const Chain&) const = default;
};

}  // namespace asyncengine
