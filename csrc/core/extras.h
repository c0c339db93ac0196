// Needs that few requests have of a step beyond one token: records, scored prompts, several tokens, entries of a slot update,
// masks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "core/mask_board.h"
#include "core/roster.h"
#include "core/step_plan.h"

namespace asyncengine {

class Extras {
 public:
  Extras(const SchedulerConfig& config, Roster& roster)
      : roster_(roster), limits_(config.limits()), max_step_tokens_(config.max_step_tokens()) {}

  // Sets the memory that masks are written to: before the first sequence that has some.
  void write_masks_to(const MaskBoard& board) { board_ = board; }
  // True if the needs of the request fit into a step that has nothing else. From any thread.
  bool can_fit(const RequestSpec& spec) const;

  // ---- schedule

  // True if the step has room for the entries of a new sequence and for the records that it may want at once.
  bool fits_budgets(const Sequence& sequence, const StepPlan& plan);
  // True if the step has room for so many words of records. Otherwise they are wanted from the next step.
  bool fits_records(int32_t words, const StepPlan& plan);
  // So many of these tokens of a prompt as there is room for their samples and records. Each row that the step may still get
  // keeps one sample.
  int32_t fit_samples(const Slot& slot, int32_t query_len, const StepPlan& plan);
  // The sequence's next row would find no mask.
  bool waits_for_mask(const Slot& slot) const { return (slot.needs & kNeedMask) != 0 && slot.sequence->frozen; }
  // Counts what the row has beyond one sample, or none, that it is counted with.
  void add(Slot& slot, PlanRow& row, StepPlan& plan) const;
  // Calls add(slot) for each sequence that decodes and wants records, and for which there is room. They take turns where there
  // is no room for those of all. Some words are kept for the end of a prompt that has waited for them.
  template <typename Add>
  void share_records(const StepPlan& plan, Add&& add) {
    const std::vector<Slot*>& running = roster_.running();
    const size_t count = running.size(), first = results_from_ < count ? results_from_ : 0;
    const int32_t budget = limits_.max_result_words - std::exchange(results_wanted_, 0);
    bool left_out = false;
    for (size_t k = 0; k < count; ++k) {
      const size_t i = first + k < count ? first + k : first + k - count;
      Slot& slot = *running[i];
      if (!slot.results || slot.state != SequenceState::kRunning || !slot.wants_more() || !slot.decodes()) continue;
      const int32_t samples = std::min<int32_t>(slot.step_tokens, slot.max_total - slot.total());
      const int32_t words = samples * slot.sequence->request->extras.result_words;
      if (words <= budget - plan.num_result_words) {
        add(slot);
      } else if (!std::exchange(left_out, true)) {
        results_from_ = i;
      }
    }
    if (!left_out) results_from_ = 0;
  }

  // ---- masks and results

  // A sequence has got the slot, perhaps again.
  void took_slot(Slot& slot) {
    if (slot.sequence->masks != nullptr) begin_masks(slot);
  }
  // Takes in the masks, and the tokens that need no sampling, that were posted.
  void take_masks(MaskInbox& inbox, Outbox& outbox, int64_t now_ns);
  // Takes in the samples of a row that has extras. A row that was to append a token and gives none ends its sequence: its
  // records are the answer.
  void take_samples(const PlanRow& row, Slot& slot, uint64_t step, const int32_t* tokens, const int32_t* records, Outbox& outbox,
                    int64_t now_ns);

 private:
  int32_t count_samples(const Slot& slot, int32_t begin, int32_t query_len, bool last) const;
  void begin_masks(Slot& slot);
  void offer_mask(Slot& slot, Outbox& outbox, int64_t now_ns);
  void force_tokens(Slot& slot, Outbox& outbox, int64_t now_ns);
  void freeze(Slot& slot, uint64_t step, Outbox& outbox, int64_t now_ns);

  Roster& roster_;
  StepLimits limits_;
  int32_t max_step_tokens_;
  MaskBoard board_;
  size_t results_from_ = 0;     // place among those that run of the first that the last step had no room for the records of
  int32_t results_wanted_ = 0;  // words of records that a prompt's end waits for
};

}  // namespace asyncengine
