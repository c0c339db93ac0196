// What few requests want of a step beyond one token: records, scored prompts, several tokens, entries of a slot update,
// masks.
#include <algorithm>
#include <cassert>
#include <utility>

#include "core/scheduler.h"

namespace asyncengine {
namespace {

bool masks_fit(const RequestSpec& spec, int32_t mask_words) {
  const RequestExtras& extras = spec.extras;
  const auto fits = [&](const auto& channel) {
    return channel != nullptr && channel->words.size() == static_cast<size_t>(mask_words) && channel->forced.empty();
  };
  return mask_words > 0 && extras.tokens_per_step == 1 && extras.masks.size() == static_cast<size_t>(spec.n) &&
         std::ranges::all_of(extras.masks, fits);
}

}  // namespace

bool Scheduler::can_fit(const RequestSpec& spec) const {
  const RequestExtras& extras = spec.extras;
  const auto prompt_len = static_cast<int64_t>(spec.prompt.size());
  const int64_t history = extras.history ? 1 + prompt_len + spec.max_tokens : 0;
  const bool scores = extras.score_from >= 0;
  return static_cast<int64_t>(extras.entries.size()) + history <= config_.max_update_words &&
         extras.result_words >= 0 && int64_t{extras.result_words} * extras.tokens_per_step <= config_.max_result_words &&
         extras.tokens_per_step >= 1 && extras.tokens_per_step <= config_.max_step_tokens() &&
         (extras.masks.empty() || masks_fit(spec, config_.mask_words)) &&
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

// Sequences that want records take turns where there is no room for those of all. Some words are kept for the end of a
// prompt that has waited for them.
void Scheduler::schedule_decodes_with_results(StepPlan& plan) {
  const size_t count = running_.size(), first = results_from_ < count ? results_from_ : 0;
  const int32_t budget = config_.max_result_words - std::exchange(results_wanted_, 0);
  bool left_out = false;
  for (size_t k = 0; k < count; ++k) {
    const size_t i = first + k < count ? first + k : first + k - count;
    Slot& slot = *running_[i];
    if (!slot.results || slot.state != SequenceState::kRunning || !slot.wants_more() || !slot.decodes()) continue;
    const int32_t samples = std::min<int32_t>(slot.step_tokens, slot.max_total - slot.total());
    const int32_t words = samples * slot.sequence->request->extras.result_words;
    if (words <= budget - plan.num_result_words) {
      add_decode_extras(slot, plan);
    } else if (!std::exchange(left_out, true)) {
      results_from_ = i;
    }
  }
  if (!left_out) results_from_ = 0;
}

// What add_row() has counted as a row of one sample, or of none.
void Scheduler::add_extras(Slot& slot, PlanRow& row, StepPlan& plan) const {
  const int32_t counted = row.num_samples;
  row.num_samples = row.from_device ? row.query_len : count_samples(slot, row.context_len, row.query_len, counted > 0);
  if (row.from_device) row.num_appends = static_cast<int8_t>(row.query_len);
  slot.pending = static_cast<int8_t>(slot.pending + row.num_appends - counted);
  plan.num_samples += row.num_samples - counted;
  plan.num_scored += row.num_samples - row.num_appends;
  const Needs needs = slot.sequence->needs;
  plan.needs |= row.num_samples > 0 ? needs : needs & kNeedMean;  // each part of a prompt adds to its mean
  row.result_offset = plan.num_result_words;
  plan.num_result_words += row.num_samples * slot.sequence->request->extras.result_words;
}

// ---- masks ---------------------------------------------------------------------------------------------------------

// A sequence has just got its slot, perhaps again.
void Scheduler::begin_masks(Slot& slot) {
  Sequence& sequence = *slot.sequence;
  const MaskChannel& channel = *sequence.masks;
  sequence.frozen = false;
  sequence.frozen_until = 0;
  board_.clear(index(slot));
  if (channel.arrived && channel.position == slot.num_tokens() && channel.forced.empty()) {
    board_.put(index(slot), channel.position, channel.allows_all, channel.words);
  }
}

void Scheduler::take_masks(MaskInbox& inbox, Outbox& outbox, int64_t now_ns) {
  inbox.take([&](MaskChannel& channel) {
    Sequence* sequence = channel.sequence;
    channel.arrived = true;
    if (sequence == nullptr || sequence->state != SequenceState::kRunning) return;
    offer_mask(slot_of(*sequence), outbox, now_ns);
    if (sequence->state == SequenceState::kFinished && !in_flight(*sequence)) settle(*sequence, &outbox);
  });
  compact_running();
}

// Uses the message of the sequence's channel, if it is there and may be used yet.
void Scheduler::offer_mask(Slot& slot, Outbox& outbox, int64_t now_ns) {
  Sequence& sequence = *slot.sequence;
  MaskChannel& channel = *sequence.masks;
  if (slot.state != SequenceState::kRunning || !channel.arrived || channel.position != slot.num_tokens()) return;
  if (!channel.forced.empty()) {
    if (slot.in_flight > 0 && !sequence.frozen) return;  // a row in flight is going to find no mask, and freezes it
    force_tokens(slot, outbox, now_ns);
    if (slot.state != SequenceState::kRunning) return;
  }
  board_.put(index(slot), channel.position, channel.allows_all, channel.words);
  sequence.frozen = false;
}

// Appends tokens that were not sampled. The next row brings them, and samples behind the last one.
void Scheduler::force_tokens(Slot& slot, Outbox& outbox, int64_t now_ns) {
  MaskChannel& channel = *slot.sequence->masks;
  for (const int32_t token : channel.forced) {
    if (slot.state == SequenceState::kRunning) take_token(slot, token, outbox, now_ns);
  }
  channel.position += static_cast<int32_t>(channel.forced.size());
  channel.forced.clear();
  slot.on_device = false;
  slot.forked = true;  // as in freeze()
}

// A row of the sequence has found no mask, so those in flight behind it come to nothing. Its last token is computed again
// once the mask is there, which gives the logits once more. The block that it is in may have been published meanwhile: then
// a copy of it is written.
void Scheduler::freeze(Slot& slot, uint64_t step, Outbox& outbox, int64_t now_ns) {
  Sequence& sequence = *slot.sequence;
  sequence.frozen = true;
  sequence.frozen_until = step + (slot.planned_step - static_cast<uint32_t>(step));
  slot.pending = 0;
  slot.computed = slot.num_tokens() - 1;
  slot.on_device = false;
  slot.forked = true;
  offer_mask(slot, outbox, now_ns);
}

}  // namespace asyncengine
