// The settings of sequences that decode on the host, and what is predicted of them.
#pragma once

#include <cstdint>

#include "core/hybrid/host_rows.h"
#include "core/step_costs.h"

namespace asyncengine {

// Settings of sequences that decode on the host (host_rows.h).
struct HybridConfig {
  int32_t lanes = 0;   // of each step that has host rows; 0: nobody decodes on the host
  int32_t layers = 0;  // that attend
  int32_t workers = 1;
  double attend_ns = 0;  // of one worker, for a token of context in a layer; 0: not known
  double exchange_ns = 0;  // what lanes add to a step beside their tokens
  double min_gain = 0.05;  // of throughput, as predicted: for less nobody is moved to the host
  int32_t max_rows = 0;    // sequences on the host at most; 0: as many as keep the workers busy
  int64_t host_tokens = 0;  // that the host's pool has room for, when the gain is predicted; 0: for all
  int64_t job_timeout_ns = 10'000'000'000;  // of attention of a row in a layer: the row's request fails

  bool any() const { return lanes > 0; }
  HostRowsLimits limits() const { return {lanes, any() ? layers + 1 : 0}; }

  // Tokens of context that were attended to: from then on their times tell more than what was measured beforehand.
  static constexpr int64_t kEnoughTokens = 20'000'000;
  struct Gain {
    double busy_rows = 0;  // host rows that together make as many tokens as workers and lanes can
    double share = 0;      // of throughput, with the host rows that there is room for: 0.1 is a tenth more
  };
  // Beside `rows` on the device that see `attended` tokens in all, where one who attends takes so long (as `attend_ns`).
  // Precondition: costs are known, and there is a row.
  Gain gain(const StepCosts& costs, double attending_ns, int32_t rows, int64_t attended) const;
};

}  // namespace asyncengine
