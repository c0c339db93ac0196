#include <cstring>
#include <iostream>

#include "check.h"

// Runs all tests, or those whose name contains argv[1].
int main(int argc, char** argv) {
  using namespace asyncengine::testing;
  int passed = 0, failed = 0;
  for (const TestCase& test : test_cases()) {
    if (argc > 1 && std::strstr(test.name, argv[1]) == nullptr) continue;
    const int before = failures();
    test.body();
    const bool ok = failures() == before;
    (ok ? passed : failed) += 1;
    std::cout << (ok ? "ok      " : "FAILED  ") << test.name << std::endl;
  }
  std::cout << passed << " passed, " << failed << " failed" << std::endl;
  return failed == 0 && passed > 0 ? 0 : 1;
}
