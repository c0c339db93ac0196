// The size of a JSON document, before anybody makes objects of it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace asyncengine {

struct JsonExtent {
  int64_t values = 0;  // a number counts once, a string, also a member's name, an array and an object twice
  int64_t depth = 0;   // of nested arrays and objects
};

// One pass without recursion. Only strings, commas and brackets are told apart, so a document that is not JSON gets
// numbers too. They hold for its part before the first mistake, which is all that a parser makes objects of.
JsonExtent scan_json(const char* data, size_t size);

}  // namespace asyncengine
