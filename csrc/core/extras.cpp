#include "core/extras.h"

#include <cassert>
#include <span>

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

bool Extras::can_fit(const RequestSpec& spec) const {
  const RequestExtras& extras = spec.extras;
  const auto prompt_len = static_cast<int64_t>(spec.prompt.size());
  const int64_t history = extras.history ? 1 + prompt_len + spec.max_tokens : 0;
  const bool scores = extras.score_from >= 0;
  return static_cast<int64_t>(extras.entries.size()) + history <= limits_.max_update_words && extras.result_words >= 0 &&
         int64_t{extras.result_words} * extras.tokens_per_step <= limits_.max_result_words && extras.tokens_per_step >= 1 &&
         extras.tokens_per_step <= max_step_tokens_ && (extras.masks.empty() || masks_fit(spec, limits_.mask_words)) &&
         (!scores || (extras.score_from < prompt_len && limits_.max_samples > limits_.max_rows));
}

bool Extras::fits_budgets(const Sequence& sequence, const StepPlan& plan) {
  const int32_t words = sequence.request->extras.result_words;
  return fits_records(words, plan) && sequence.update_words() <= limits_.max_update_words - plan.num_update_words;
}

bool Extras::fits_records(int32_t words, const StepPlan& plan) {
  if (words <= limits_.max_result_words - plan.num_result_words) return true;
  results_wanted_ = std::max(results_wanted_, words);
  return false;
}

// Samples of `query_len` tokens of the prompt from `begin` on; `last`: they reach its end.
int32_t Extras::count_samples(const Slot& slot, int32_t begin, int32_t query_len, bool last) const {
  const int32_t end = begin + query_len, from = slot.sequence->scores_from();
  return from < 0 ? int32_t{last} : std::max(int32_t{last}, std::min(query_len, end - from));
}

int32_t Extras::fit_samples(const Slot& slot, int32_t query_len, const StepPlan& plan) {
  const int32_t words = slot.sequence->request->extras.result_words;
  const int32_t other_rows = limits_.max_rows - static_cast<int32_t>(plan.rows.size()) - 1;
  int32_t room = limits_.samples() - plan.num_samples - other_rows;
  assert(room >= 1);
  if (words > 0) room = std::min(room, (limits_.max_result_words - plan.num_result_words) / words);
  const int32_t samples = count_samples(slot, slot.computed, query_len, slot.computed + query_len >= slot.total());
  if (samples <= room) return query_len;
  if (room == 0) results_wanted_ = std::max(results_wanted_, words);
  return query_len - samples + room;
}

void Extras::add(Slot& slot, PlanRow& row, StepPlan& plan) const {
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

void Extras::take_samples(const PlanRow& row, Slot& slot, uint64_t step, const int32_t* tokens, const int32_t* records,
                          Outbox& outbox, int64_t now_ns) {
  Sequence& sequence = *slot.sequence;
  if (step <= sequence.frozen_until) return;
  const int32_t first = row.num_samples - row.num_appends;
  const int32_t words = sequence.request->extras.result_words;
  const auto add_records = [&](int32_t i) {
    const std::span region(records + row.result_offset + i * words, static_cast<size_t>(words));
    const size_t length = entries_length(region);
    if (length > 0) outbox.filling().add_records(region.first(length));
    return length > 0;
  };
  if (row.num_appends > 0 && (tokens[first] == kNoMask || tokens[first] == kDeferred)) {
    if (tokens[first] == kDeferred && add_records(first)) {
      outbox.filling().events.push_back({&sequence, -1, FinishReason::kNone, false, now_ns});
    }
    return freeze(slot, step, outbox, now_ns);
  }
  int32_t accepted = 0;
  while (accepted < row.num_appends && tokens[first + accepted] >= 0) ++accepted;
  if (row.from_device) slot.computed -= row.num_appends - accepted;
  if (!row.from_device) sequence.scored = std::max(sequence.scored, row.context_len + row.query_len);
  for (int32_t i = 0; i < row.num_samples && slot.alive(); ++i) {
    if (i > first && i >= first + accepted) return;
    const bool added = words > 0 && has_records(i, row.num_samples, row.num_appends, tokens) && add_records(i);
    if (i < first) {
      if (added) outbox.filling().events.push_back({&sequence, -1, FinishReason::kNone, false, now_ns});
    } else if (tokens[i] != kNoToken) {
      if (sequence.masks != nullptr) sequence.masks->arrived = false;
      roster_.append(slot, tokens[i], outbox, now_ns);
    } else {
      outbox.filling().events.push_back({&sequence, -1, FinishReason::kStop, false, now_ns});
      roster_.finish(sequence, FinishReason::kStop);
    }
  }
}

// ---- masks ---------------------------------------------------------------------------------------------------------

void Extras::begin_masks(Slot& slot) {
  Sequence& sequence = *slot.sequence;
  const MaskChannel& channel = *sequence.masks;
  sequence.frozen = false;
  sequence.frozen_until = 0;
  board_.clear(roster_.index(slot));
  if (channel.arrived && channel.position == slot.num_tokens() && channel.forced.empty()) {
    board_.put(roster_.index(slot), channel.position, channel.allows_all, channel.words);
  }
}

void Extras::take_masks(MaskInbox& inbox, Outbox& outbox, int64_t now_ns) {
  inbox.take([&](MaskChannel& channel) {
    Sequence* sequence = channel.sequence;
    channel.arrived = true;
    if (sequence == nullptr || sequence->state != SequenceState::kRunning) return;
    offer_mask(roster_.slot_of(*sequence), outbox, now_ns);
    if (sequence->state == SequenceState::kFinished && !roster_.in_flight(*sequence)) roster_.settle(*sequence, &outbox);
  });
  roster_.compact();
}

// Uses the message of the sequence's channel, if it is there and may be used yet.
void Extras::offer_mask(Slot& slot, Outbox& outbox, int64_t now_ns) {
  Sequence& sequence = *slot.sequence;
  MaskChannel& channel = *sequence.masks;
  if (slot.state != SequenceState::kRunning || !channel.arrived || channel.position != slot.num_tokens()) return;
  if (!channel.forced.empty()) {
    if (slot.in_flight > 0 && !sequence.frozen) return;  // a row in flight is going to find no mask, and freezes it
    force_tokens(slot, outbox, now_ns);
    if (slot.state != SequenceState::kRunning) return;
  }
  board_.put(roster_.index(slot), channel.position, channel.allows_all, channel.words);
  sequence.frozen = false;
}

// Appends tokens that were not sampled. The next row brings them, and samples behind the last one.
void Extras::force_tokens(Slot& slot, Outbox& outbox, int64_t now_ns) {
  MaskChannel& channel = *slot.sequence->masks;
  for (const int32_t token : channel.forced) {
    if (slot.state == SequenceState::kRunning) roster_.append(slot, token, outbox, now_ns);
  }
  channel.position += static_cast<int32_t>(channel.forced.size());
  channel.forced.clear();
  slot.on_device = false;
  slot.forked = true;  // as in freeze()
}

// A row of the sequence has found no mask, so those in flight behind it come to nothing. Its last token is computed again
// once the mask is there, which gives the logits once more. The block that it is in may have been published meanwhile: then
// a copy of it is written.
void Extras::freeze(Slot& slot, uint64_t step, Outbox& outbox, int64_t now_ns) {
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
