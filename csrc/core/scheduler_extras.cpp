// What few requests want of a step beyond one token: records, scored prompts, several tokens, entries of a slot update.
#include <algorithm>
#include <cassert>

#include "core/scheduler.h"

namespace asyncengine {

bool Scheduler::can_fit(const RequestSpec& spec) const {
  const RequestExtras& extras = spec.extras;
  const auto prompt_len = static_cast<int64_t>(spec.prompt.size());
  const int64_t history = extras.history ? 1 + prompt_len + spec.max_tokens : 0;
  const bool scores = extras.score_from >= 0;
  return static_cast<int64_t>(extras.entries.size()) + history <= config_.max_update_words &&
         extras.result_words >= 0 && int64_t{extras.result_words} * extras.tokens_per_step <= config_.max_result_words &&
         extras.tokens_per_step >= 1 && extras.tokens_per_step <= config_.max_step_tokens() &&
         (!scores || (extras.score_from < prompt_len && config_.max_samples > config_.max_num_seqs));
}

// Whether the step has room for what a new sequence brings and may want at once.
bool Scheduler::fits_budgets(const Sequence& sequence, const StepPlan& plan) {
  const int32_t words = sequence.request->extras.result_words;
  if (words > config_.max_result_words - plan.num_result_words) {
    results_wanted_ = std::max(results_wanted_, words);
    return false;
  }
  return sequence.update_words() <= config_.max_update_words - plan.num_update_words;
}

// Of `query_len` tokens of the prompt; `last`: they reach its end.
int32_t Scheduler::count_samples(const Slot& slot, int32_t begin, int32_t query_len, bool last) const {
  const int32_t end = begin + query_len, from = slot.sequence->scores_from();
  return from < 0 ? int32_t{last} : std::max(int32_t{last}, std::min(query_len, end - from));
}

// So many of these tokens as there is room for their samples and records. Each row that the step may still get keeps one
// sample.
int32_t Scheduler::fit_samples(const Slot& slot, int32_t query_len, const StepPlan& plan) {
  const int32_t words = slot.sequence->request->extras.result_words;
  const int32_t other_rows = config_.max_num_seqs - static_cast<int32_t>(plan.rows.size()) - 1;
  int32_t room = limits().samples() - plan.num_samples - other_rows;
  assert(room >= 1);
  if (words > 0) room = std::min(room, (config_.max_result_words - plan.num_result_words) / words);
  const int32_t samples = count_samples(slot, slot.computed, query_len, slot.computed + query_len >= slot.total());
  if (samples <= room) return query_len;
  if (room == 0) results_wanted_ = std::max(results_wanted_, words);
  return query_len - samples + room;
}

// What add_row() has counted as a row of one sample, or of none.
void Scheduler::add_extras(Slot& slot, PlanRow& row, StepPlan& plan) const {
  const int32_t counted = row.num_samples;
  row.num_samples = row.from_device ? row.query_len : count_samples(slot, row.context_len, row.query_len, counted > 0);
  if (row.from_device) row.num_appends = static_cast<int8_t>(row.query_len);
  slot.pending = static_cast<int8_t>(slot.pending + row.num_appends - counted);
  plan.num_samples += row.num_samples - counted;
  plan.num_scored += row.num_samples - row.num_appends;
  if (row.num_samples > 0) plan.needs |= slot.needs;
  row.result_offset = plan.num_result_words;
  plan.num_result_words += row.num_samples * slot.sequence->request->extras.result_words;
}

}  // namespace asyncengine
