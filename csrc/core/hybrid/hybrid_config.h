// The settings of sequences that decode on the host, and what is predicted of them.
#pragma once

#include <cstdint>

#include "core/hybrid/host_rows.h"
#include "core/record.h"
#include "core/step_costs.h"

namespace asyncengine {

// Settings of sequences that decode on the host (host_rows.h).
struct HybridConfig {
#define RECORD HybridConfig
#define FIELDS "core/hybrid/hybrid_config.inl"
#include "core/record.inl"

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
