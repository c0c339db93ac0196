#include <cstdio>
#include <exception>
#include <string>

#include "check.h"

// Runs all tests, or those whose name contains the first argument.
int main(int argc, char** argv) {
  const std::string wanted = argc > 1 ? argv[1] : "";
  int passed = 0, failed = 0;
  for (const check::Test& test : check::tests()) {
    if (std::string(test.name).find(wanted) == std::string::npos) continue;
    check::failures() = 0;
    try {
      test.run();
    } catch (const std::exception& error) {
      check::fail(test.name, 0, std::string("threw: ") + error.what());
    }
    if (check::failures() == 0) {
      ++passed;
    } else {
      ++failed;
      std::fprintf(stderr, "FAILED %s\n", test.name);
    }
  }
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed == 0 && passed > 0 ? 0 : 1;
}
