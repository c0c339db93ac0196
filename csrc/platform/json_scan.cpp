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

// Returns the place behind the quote that ends the string in which `p` is, or the end of the document.
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

JsonExtent scan_json(const char* data, size_t size, size_t long_size) {
  const char *p = data, *const end = data + size;
  int64_t marks = 0, depth = 0, deepest = 0;
  JsonExtent extent;
  JsonMember member;
  const char* value = nullptr;  // behind the name of the member under way
  bool expects_name = false;
  const auto end_member = [&](const char* at) {
    member.size = value == nullptr ? 0 : static_cast<size_t>(at - value);
    if (value != nullptr && member.size >= long_size) extent.long_members.push_back(member);
    value = nullptr;
  };
  while (p < end) {
    const char c = *p++;
    if (c == '"') {
      ++marks;
      const char* text = p;
      p = skip_string(p, end);
      if (expects_name) {
        // The closing quote is missing where the document ends within the name, which no parser accepts.
        member = {static_cast<size_t>(text - data), static_cast<size_t>(std::max(p - 1, text) - text), 0};
        value = p;
        expects_name = false;
      }
      continue;
    }
    // The scan has no branches: a hostile document would have each of them guessed wrong.
    const char bracket = static_cast<char>(c | 0x20);  // [ and ] differ from { and } in this bit
    const int64_t opens = bracket == '{', closes = bracket == '}', comma = c == ',';
    const int64_t before = depth;
    marks += opens + comma;
    depth += opens - closes;
    deepest = std::max(deepest, depth);
    // The bracket of the outermost object, or a comma between its members.
    if ((before == 1 && (closes | comma)) || (before == 0 && opens)) {
      end_member(p - 1);
      expects_name = depth == 1;
    }
  }
  end_member(end);
  extent.values = marks + 1;
  extent.depth = deepest;
  return extent;
}

}  // namespace asyncengine
