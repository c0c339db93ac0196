#include "platform/json_scan.h"

#include <algorithm>
#include <cstring>

namespace asyncengine {
namespace {

constexpr uint64_t kOnes = 0x0101010101010101, kHighBits = 0x8080808080808080;

// Not zero if one of the eight bytes of `word` is `byte`.
uint64_t has_byte(uint64_t word, char byte) {
  const uint64_t difference = word ^ (kOnes * static_cast<unsigned char>(byte));
  return (difference - kOnes) & ~difference & kHighBits;
}

// Behind the quote that ends the string in which `p` is, or the end of the document.
const char* skip_string(const char* p, const char* end) {
  while (p < end) {
    if (end - p >= 8) {
      uint64_t word;
      std::memcpy(&word, p, sizeof word);
      if ((has_byte(word, '"') | has_byte(word, '\\')) == 0) {
        p += 8;
        continue;
      }
    }
    // The word holds something: these steps find it without looking at the word again after each.
    for (int i = 0; i < 8 && p < end; ++i) {
      const char c = *p++;
      if (c == '"') return p;
      if (c == '\\' && p < end) ++p;
    }
  }
  return end;
}

}  // namespace

JsonExtent scan_json(const char* data, size_t size) {
  const char *p = data, *const end = data + size;
  int64_t marks = 0, depth = 0, deepest = 0;
  while (p < end) {
    const char c = *p++;
    if (c == '"') {
      ++marks;
      p = skip_string(p, end);
      continue;
    }
    // Without branches: a hostile document would have each of them guessed wrong.
    const char bracket = static_cast<char>(c | 0x20);  // [ and ] differ from { and } in this bit
    const int64_t opens = bracket == '{', closes = bracket == '}';
    marks += opens + (c == ',');
    depth += opens - closes;
    deepest = std::max(deepest, depth);
  }
  return {marks + 1, deepest};
}

}  // namespace asyncengine
