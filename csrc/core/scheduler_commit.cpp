// What the results of a step mean for its sequences: tokens, ends, and blocks that the prefix cache may know.
#include <algorithm>
#include <array>
#include <cassert>

#include "core/scheduler.h"

namespace asyncengine {

void Scheduler::take_token(Slot& slot, int32_t token, Outbox& outbox, int64_t now_ns) {
  Sequence& sequence = *slot.sequence;
  if (token < 0) return fail(sequence, FinishReason::kFailed, outbox, now_ns);
  sequence.tokens.append(slot.tail, token, published(slot));
  ++stats_.generation_tokens;
  FinishReason reason = FinishReason::kNone;
  if (slot.stops_at(token)) {
    reason = FinishReason::kStop;
  } else if (slot.num_tokens() >= slot.max_total) {
    reason = FinishReason::kLength;
  }
  outbox.filling().events.push_back({&sequence, token, reason, false, now_ns});
  if (reason != FinishReason::kNone) finish(sequence, reason);
}

// Takes in the samples of a row that has extras. A row that was to append a token and gives none ends its sequence: its
// records are the answer.
void Scheduler::take_samples(const PlanRow& row, Slot& slot, uint64_t step, const int32_t* tokens, const int32_t* records, Outbox& outbox,
                             int64_t now_ns) {
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
      take_token(slot, tokens[i], outbox, now_ns);
    } else {
      outbox.filling().events.push_back({&sequence, -1, FinishReason::kStop, false, now_ns});
      finish(sequence, FinishReason::kStop);
    }
  }
}

void Scheduler::commit(StepPlan& plan, StepResults results, Outbox& outbox, int64_t now_ns) {
  publish_blocks(plan);
  if (plan.num_lanes > 0) [[unlikely]] lanes_retired(plan);
  std::vector<OutputEvent>& events = outbox.filling().events;
  int64_t plain_tokens = 0;
  // A token that neither ends its sequence nor fills what the slot has for it: the sequence itself is not touched.
  const auto take_plain = [&](Slot& slot) {
    const int32_t token = *results.tokens;
    if (slot.state != SequenceState::kRunning || slot.tail.full() || slot.may_stop_at(token) || slot.num_tokens() + 1 >= slot.max_total) {
      return false;
    }
    ++results.tokens;
    --slot.pending;
    slot.tail.append(token);
    events.push_back({slot.sequence, token, FinishReason::kNone, false, now_ns});
    ++plain_tokens;
    return true;
  };
  retire_rows(plan, outbox, take_plain, [&](const PlanRow& row, Slot& slot) {
    const int32_t* tokens = results.tokens;
    results.tokens += row.num_samples;
    // A sequence that ended, or was aborted, while this step was under way: the surplus row never shows.
    if (row.num_samples == 0 || !slot.alive()) return;
    const size_t first = events.size();
    if (row.extras) {
      take_samples(row, slot, plan.step, tokens, results.records, outbox, now_ns);
    } else {
      take_token(slot, *tokens, outbox, now_ns);
    }
    if (row.lane >= 0) [[unlikely]] note_host_tokens(first, outbox);
  });
  stats_.generation_tokens += plain_tokens;
}

// Events from this one on are of a host row.
void Scheduler::note_host_tokens(size_t first, Outbox& outbox) {
  for (size_t i = first; i < outbox.filling().events.size(); ++i) {
    OutputEvent& event = outbox.filling().events[i];
    event.on_host = event.token >= 0;
    stats_.host_row_tokens += event.on_host;
  }
}

void Scheduler::fail_step(StepPlan& plan, Outbox& outbox, int64_t now_ns) {
  lanes_retired(plan);
  for (const LaneEntry& lane : plan.lanes) {
    if (lane.slot < 0 || !slots_[static_cast<size_t>(lane.slot)].alive()) continue;
    fail(*slots_[static_cast<size_t>(lane.slot)].sequence, FinishReason::kStepFailed, outbox, now_ns);
  }
  retire_rows(plan, outbox, [](Slot&) { return false; }, [&](const PlanRow&, Slot& slot) {
    if (slot.alive()) fail(*slot.sequence, FinishReason::kStepFailed, outbox, now_ns);
  });
}

// `on_plain_row` takes in the result of a plain row, and says whether that was all.
template <typename OnPlainRow, typename OnRow>
inline void Scheduler::retire_rows(const StepPlan& plan, Outbox& outbox, OnPlainRow&& on_plain_row, OnRow&& on_row) {
  for (size_t i = 0; i < plan.rows.size(); ++i) {
    if (i + kAhead < plan.rows.size()) prefetch_slot(plan.rows[i + kAhead].slot);
    const PlanRow& row = plan.rows[i];
    Slot& slot = slots_[static_cast<size_t>(row.slot)];
    --slot.in_flight;
    if (row.plain && on_plain_row(slot)) continue;
    if (!came_to_nothing(row, plan.step)) slot.pending = static_cast<int8_t>(slot.pending - row.num_appends);
    on_row(row, slot);
    // What is or was a host row waits for its worker, too: advance_host_rows() settles it.
    if (slot.in_flight == 0 && slot.state != SequenceState::kRunning && !is_hosted(row.slot)) settle(*slot.sequence, &outbox);
  }
  for (const int32_t block : plan.held_blocks) blocks_.release(block);
  compact_running();
}

// Concerns this request alone. Its other sequences may have rows later in the plan being committed.
void Scheduler::fail(Sequence& sequence, FinishReason reason, Outbox& outbox, int64_t now_ns) {
  for (Sequence& other : sequence.request->sequences) {
    if (other.state == SequenceState::kFinished || other.state == SequenceState::kReleased) continue;
    outbox.filling().events.push_back({&other, -1, reason, false, now_ns});
    finish(other, reason);
    if (&other != &sequence && !in_flight(other)) settle(other, &outbox);
  }
}

// Blocks that the step has filled may be shared from now on. What that touches is scattered in memory: two stages of
// prefetching go ahead of it, the first for what the second one needs.
void Scheduler::publish_blocks(const StepPlan& plan) {
  const size_t count = plan.full_rows.size();
  const auto full_row = [&](size_t i) -> const PlanRow& { return plan.rows[static_cast<size_t>(plan.full_rows[i])]; };
  std::array<uint64_t, kAhead> hashes;
  for (size_t i = 0; i < count + kAhead; ++i) {
    if (i < count) {
      const PlanRow& row = full_row(i);
      prefetch_slot(row.slot);
      prefetch(tables_.blocks(row.slot).data() + row.context_len / config_.block_size);
    }
    if (const size_t soon = i - kAhead / 2; soon < count) {  // wraps at first
      Slot& slot = slots_[static_cast<size_t>(full_row(soon).slot)];
      if (slot.alive()) {  // of one that has ended, surplus rows have computed more than it has tokens
        if (has_full_block(slot, full_row(soon), plan.step)) {
          hashes[soon % kAhead] = prefetch_block(slot);
        } else {
          slot.sequence->tokens.settle(slot.tail, published(slot));
        }
      }
    }
    if (const size_t now = i - kAhead; now < count) publish_blocks(full_row(now), plan.step, hashes[now % kAhead]);
  }
}

// `hash` is of the first of them.
void Scheduler::publish_blocks(const PlanRow& row, uint64_t step, uint64_t hash) {
  Slot& slot = slots_[static_cast<size_t>(row.slot)];
  if (!slot.alive()) return;
  while (has_full_block(slot, row, step)) {
    const int32_t* tokens = tokens_to_publish(slot);
    if (blocks_.keeps_names()) [[unlikely]] name_block(slot, tokens);
    slot.chain = blocks_.publish(block_to_publish(slot), slot.prefix(), tokens, hash).id;
    slot.published_end += config_.block_size;
    slot.sequence->tokens.was_published(slot.tail, tokens);
    if (has_full_block(slot, row, step)) hash = prefetch_block(slot);
  }
}

uint64_t Scheduler::prefetch_block(Slot& slot) {
  return blocks_.prefetch(block_to_publish(slot), slot.prefix(), tokens_to_publish(slot));
}

Stats& Scheduler::stats() {
  stats_.num_requests_running = static_cast<int64_t>(running_.size() + hosted_.size());
  stats_.num_host_rows = static_cast<int64_t>(hosted_.size());
  stats_.num_requests_waiting = static_cast<int64_t>(waiting_.size()) + (tier_ != nullptr ? tier_->num_loading() : 0);
  stats_.num_kv_blocks = blocks_.num_blocks();
  stats_.num_free_blocks = blocks_.num_free();
  stats_.num_free_slots = static_cast<int64_t>(free_slots_.size());
  stats_.cached_blocks = blocks_.num_cached();
  stats_.block_references = blocks_.num_references();
  if (attention_ != nullptr) {
    const HostAttentionTimes times = attention_->times();
    stats_.host_attention_ns = times.busy_ns;
    stats_.host_attention_tokens = times.tokens;
  }
  if (tier_ == nullptr) return stats_;
  stats_.num_host_blocks = blocks_.num_host_blocks();
  stats_.host_cached_blocks = blocks_.num_host_cached();
  stats_.blocks_to_host = tier_->copied_out();
  stats_.blocks_from_host = tier_->copied_in();
  stats_.failed_transfers = tier_->failed_transfers();
  if (const DiskTier* disk = tier_->disk(); disk != nullptr) {
    stats_.blocks_to_disk = disk->written();
    stats_.blocks_from_disk = disk->read_blocks();
    stats_.failed_disk_transfers = disk->failed();
  }
  return stats_;
}

}  // namespace asyncengine
