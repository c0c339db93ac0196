// State of each slot that lives with an executor from step to step, and its updates by a StepInput.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/mask_board.h"
#include "core/step_batch.h"
#include "core/step_input.h"

namespace asyncengine {

// Host twin of the device-resident rows: last token, block table, sampling state and needs of every slot; and where a
// step may append several tokens, its length and drafts.
class SlotState {
 public:
  SlotState(const StepLimits& limits, int32_t max_blocks, int32_t block_size, const MaskBoard& masks = {});

  // Applies the updates in `input` and describes the step as flat arrays. The returned batch is reused by the next call.
  // `records`: the record section of the step's output, of which it empties what the step may use.
  StepBatch& ingest(const StepInputView& input, std::span<int32_t> records = {});
  // To be called after sampling: remembers the new last tokens, and how many there are. `tokens` has one entry per
  // sample.
  void remember(const StepInputView& input, const int32_t* tokens);

  // The tokens that follow last_token[slot] in the slot's next row. Whoever samples writes them.
  std::span<int32_t> drafts(int32_t slot) {
    return std::span(drafts_).subspan(static_cast<size_t>(slot) * max_drafts_, max_drafts_);
  }

 private:
  int32_t context_of(const StepInputRow& row) const;
  void add_row(const StepInputView& input, const StepInputRow& row);
  void add_samples(const StepInputView& input, const StepInputRow& row, std::span<int32_t> records);
  void add_host_rows(const StepInputView& input);
  void take_adapter(int32_t slot, std::span<const int32_t> entries);
  int32_t* table(int32_t slot) { return tables_.data() + int64_t{slot} * max_blocks_; }

  int32_t* window_table(int32_t group, int32_t slot) {
    return window_tables_.data() + (int64_t{slot} * window_groups_ + group) * max_blocks_;
  }
  void add_windows(const StepInputView& input, const StepInputRow& row, size_t first_token);

  int32_t max_blocks_, block_size_, window_groups_;
  MaskBoard masks_;
  size_t max_drafts_;
  std::vector<int32_t> last_token_;
  std::vector<int32_t> length_, drafts_;  // where there are drafts
  std::vector<int32_t> tables_, window_tables_;
  std::vector<SamplingState> sampling_;
  std::vector<Needs> needs_;
  std::vector<int32_t> adapters_;
  bool has_adapters_ = false;  // a slot has or had one
  StepBatch batch_;
};

}  // namespace asyncengine
