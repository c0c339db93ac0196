// StepCosts: predicts the time of a step from measured times of earlier steps.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "core/record.h"

namespace asyncengine {

// Times are nanoseconds. A default one knows nothing, and says 0 of everything. Nothing here allocates after construction or
// takes a lock: the step thread asks and teaches it.
class StepCosts {
 public:
  struct Point {
#define RECORD Point
#define FIELDS "core/cost_point.inl"
#include "core/record.inl"
  };
  struct Copy {
#define RECORD Copy
#define FIELDS "core/cost_copy.inl"
#include "core/record.inl"
    int64_t ns(int64_t bytes) const { return static_cast<int64_t>(call_ns + byte_ns * static_cast<double>(bytes)); }
  };
  struct Factors {
#define RECORD Factors
#define FIELDS "core/cost_factors.inl"
#include "core/record.inl"
  };

  StepCosts() = default;
  // Points ascend by tokens.
  StepCosts(std::vector<Point> decode, std::vector<Point> prompt, Copy to_device, Copy to_host, Factors factors)
      : decode_(std::move(decode)), prompt_(std::move(prompt)), to_device_(to_device), to_host_(to_host), factors_(factors) {}

  bool known() const { return !decode_.empty() && !prompt_.empty(); }

  // A step of `rows` decode rows alone that attend to `attended` tokens together.
  int64_t decode_ns(int32_t rows, int64_t attended) const;
  // The same with so many tokens of host rows (hybrid/host_rows.h), whose exchange adds to it.
  int64_t hybrid_ns(int32_t rows, int32_t host_tokens, int64_t attended, double exchange_ns) const;
  // A step of `tokens`, those it is padded to included, among which are such decode rows. `chunks_ns` is the sum of the
  // attention_ns() of its chunks.
  int64_t mixed_ns(int32_t tokens, int32_t rows, int64_t attended, double chunks_ns) const;
  // Attention of `tokens` of a prompt after `context` others. Not corrected.
  double attention_ns(int32_t tokens, int64_t context) const;
  // To compute a prompt's `tokens` after `context` others, in large chunks that share their steps with nobody.
  int64_t recompute_ns(int64_t tokens, int64_t context) const;
  // To copy so many bytes in one call, from pinned memory or to it.
  int64_t copy_ns(int64_t bytes, bool to_device) const { return (to_device ? to_device_ : to_host_).ns(bytes); }

  // A step has taken so long; `predicted_ns` was foreseen. Few steps change little, and one that was held up changes little
  // more. Of a step with chunks, each part learns in proportion to its share of the step. The first steps without host rows leave
  // what those with host rows are known to take as it is.
  void learn_decode(int64_t predicted_ns, int64_t took_ns);
  void learn_hybrid(int64_t predicted_ns, int64_t took_ns);
  void learn_mixed(int64_t predicted_ns, double chunks_ns, int64_t took_ns);
  const Factors& factors() const { return factors_; }

 private:
  std::vector<Point> decode_, prompt_;
  Copy to_device_, to_host_;
  Factors factors_;
  int32_t num_decode_steps_ = 0;  // learned from, up to a few
};

}  // namespace asyncengine
