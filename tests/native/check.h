// The smallest test harness that names what failed: TEST registers itself, CHECK goes on after a failure.
#pragma once

#include <iostream>
#include <vector>

namespace asyncengine::testing {

struct TestCase {
  const char* name;
  void (*body)();
};
inline std::vector<TestCase>& test_cases() {
  static std::vector<TestCase> cases;
  return cases;
}
inline int& failures() {
  static int count = 0;
  return count;
}
struct Registration {
  Registration(const char* name, void (*body)()) { test_cases().push_back({name, body}); }
};
inline void report(const char* file, int line, const char* what) {
  ++failures();
  std::cerr << file << ':' << line << ": " << what << '\n';
}

}  // namespace asyncengine::testing

#define TEST(name)                                                                \
  static void test_##name();                                                      \
  static const asyncengine::testing::Registration register_##name(#name, test_##name); \
  static void test_##name()
#define CHECK(condition)                                                       \
  do {                                                                         \
    if (!(condition)) asyncengine::testing::report(__FILE__, __LINE__, #condition); \
  } while (false)
#define CHECK_EQ(left, right)                                                  \
  do {                                                                         \
    const auto left_value = (left);                                            \
    const auto right_value = (right);                                          \
    if (!(left_value == right_value)) {                                        \
      asyncengine::testing::report(__FILE__, __LINE__, #left " == " #right);   \
      std::cerr << "  " << left_value << " != " << right_value << '\n';        \
    }                                                                          \
  } while (false)
