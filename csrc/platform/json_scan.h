// The size of a JSON document, before anybody makes objects of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace asyncengine {

// A member of the outermost object, by the places of its parts in the document.
struct JsonMember {
  size_t name = 0, name_size = 0;  // what stands between the quotes, escapes included
  size_t size = 0;                 // bytes from the end of the name to the comma or bracket behind the value
};

struct JsonExtent {
  int64_t values = 0;  // a number counts once, a string, also a member's name, an array and an object twice
  int64_t depth = 0;   // of nested arrays and objects
  std::vector<JsonMember> long_members;
};

// One pass without recursion. Only strings, commas and brackets are told apart, so a document that is not JSON gets
// numbers too. They hold for its part before the first mistake, which is all that a parser makes objects of.
// Members of the outermost object are listed if they have at least `long_size` bytes. It bounds the list's length.
JsonExtent scan_json(const char* data, size_t size, size_t long_size = SIZE_MAX);

}  // namespace asyncengine
