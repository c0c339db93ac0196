// The clock of timed waits: steady, so that setting the system's clock turns no short wait into a long one.
#pragma once

#include <chrono>

namespace asyncengine {

#ifdef __SANITIZE_THREAD__
using WaitClock = std::chrono::system_clock;  // the only one whose waits GCC 12's thread sanitizer understands
#else
using WaitClock = std::chrono::steady_clock;
#endif

}  // namespace asyncengine
