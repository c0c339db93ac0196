// Sizes by which products are divided among threads and caches.
#pragma once

#include <cstdint>

namespace asyncengine {

// Items per thread of a loop: what one thread waits for the other at the end is one item.
inline constexpr int64_t kItemsPerThread = 4;
// Below this many elements a loop costs less than telling another thread about it (about 2 us). Its data tends to come
// from the other core or from memory.
inline constexpr int64_t kElementsPerChunk = 4096;
// Rows of x that share one transposition of weights, and columns whose weights stay in L2 meanwhile.
inline constexpr int64_t kBlockRows = 1024, kBlockColumns = 192;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

}  // namespace asyncengine
