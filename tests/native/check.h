// The smallest test harness that does: TEST(name) { ... CHECK(...); } registers itself, main.cpp runs them.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <string>
#include <vector>

namespace check {

struct Test {
  const char* name;
  void (*run)();
};

inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

// Failed checks of the test that runs.
inline int& failures() {
  static int count = 0;
  return count;
}

struct Registrar {
  Registrar(const char* name, void (*run)()) { tests().push_back({name, run}); }
};

// Returns all of what a test could go through where all cases run (make exhaustive), and a sample of it in make test.
template <class T>
T sample_of(T everything, T sample) {
  return std::getenv("TESTS_EXHAUSTIVE") != nullptr ? everything : sample;
}

inline void fail(const char* file, int line, const std::string& what) {
  ++failures();
  std::fprintf(stderr, "%s:%d: %s\n", file, line, what.c_str());
}

template <class A, class B>
void equal(const A& a, const B& b, const char* text, const char* file, int line) {
  if (a == b) return;
  std::ostringstream what;
  what << "CHECK_EQ(" << text << "): " << a << " != " << b;
  fail(file, line, what.str());
}

}  // namespace check

#define TEST(name)                                                    \
  static void test_##name();                                          \
  static const check::Registrar registrar_##name(#name, test_##name); \
  static void test_##name()

#define CHECK(condition)                                                        \
  do {                                                                          \
    if (!(condition)) check::fail(__FILE__, __LINE__, "CHECK(" #condition ")"); \
  } while (0)

#define CHECK_EQ(a, b) check::equal((a), (b), #a ", " #b, __FILE__, __LINE__)
