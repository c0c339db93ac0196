// Per-slot state that lives with an executor from step to step, and how a StepInput updates it.
#pragma once

#include <cstdint>
#include <vector>

#include "core/step_batch.h"
#include "core/step_input.h"

namespace asyncengine {

// Host twin of the device-resident rows: last token, block table and sampling state of every slot.
class SlotState {
 public:
  SlotState(const StepLimits& limits, int32_t max_blocks, int32_t block_size);

  // Applies the updates in `input` and describes the step as flat arrays. The returned batch is reused by the next call.
  StepBatch& ingest(const StepInputView& input);
  // After sampling: remembers the new last tokens. `tokens` has one entry per sampled row.
  void remember(const StepInputView& input, const int32_t* tokens);

 private:
  int32_t* table(int32_t slot) { return tables_.data() + int64_t{slot} * max_blocks_; }

  int32_t max_blocks_, block_size_;
  std::vector<int32_t> last_token_;
  std::vector<int32_t> tables_;
  std::vector<SamplingState> sampling_;
  StepBatch batch_;
};

}  // namespace asyncengine
