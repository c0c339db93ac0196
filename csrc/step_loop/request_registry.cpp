#include "step_loop/request_registry.h"

#include <algorithm>
#include <utility>

namespace asyncengine {
namespace {

// Beyond the queue's limits, an eighth of them is kept for requests that say so.
constexpr int64_t kReservedShare = 8;

// A stack that many may push to and one empties; `Next` is the intrusive link.
template <Request* Request::* Next>
void push(std::atomic<Request*>& head, Request* request) {
  request->inbox_references.fetch_add(1, std::memory_order_relaxed);
  Request* top = head.load(std::memory_order_relaxed);
  do {
    request->*Next = top;
  } while (!head.compare_exchange_weak(top, request, std::memory_order_release, std::memory_order_relaxed));
}

// Takes all, oldest first.
template <Request* Request::* Next>
Request* take_all(std::atomic<Request*>& head) {
  Request* reversed = nullptr;
  for (Request* top = head.exchange(nullptr, std::memory_order_acquire); top != nullptr;) {
    Request* next = std::exchange(top->*Next, reversed);
    reversed = std::exchange(top, next);
  }
  return reversed;
}

}  // namespace

// ---- event loop ----------------------------------------------------------------------------------------------------

SubmitResult RequestRegistry::check(const RequestSpec& spec, const Scheduler& scheduler) const {
  if (requests_.contains(spec.id)) return SubmitResult::kDuplicate;
  const auto prompt_len = static_cast<int32_t>(spec.prompt.size());
  // The last token of a sequence is sampled and never computed: it takes no place of the context or the cache.
  const int64_t computed = int64_t{prompt_len} + spec.max_tokens - 1;
  if (prompt_len == 0 || spec.max_tokens < 1 || computed > config_.max_total) return SubmitResult::kTooLarge;
  if (!scheduler.can_fit(spec)) return SubmitResult::kTooLarge;
  if ((spec.needs() & ~config_.needs) != 0 || !spec.extras.writes_records()) return SubmitResult::kUnserved;
  return SubmitResult::kAccepted;
}

SubmitResult RequestRegistry::submit(const RequestSpec& spec, const Scheduler& scheduler, int64_t now_ns) {
  const SubmitResult checked = check(spec, scheduler);
  if (checked != SubmitResult::kAccepted) return checked;
  const auto prompt_len = static_cast<int32_t>(spec.prompt.size());
  const int64_t waiting = queued_tokens();
  const auto limit = [&](int64_t most) { return spec.reserved ? most + most / kReservedShare + 1 : most; };
  if (queued_requests() >= limit(config_.max_queued_requests) ||
      (waiting > 0 && waiting + prompt_len > limit(config_.max_queued_tokens))) {
    return SubmitResult::kQueueFull;
  }
  const int64_t order = now_ns + spec.delay_ns + int64_t{spec.priority} * config_.priority_ageing.count();
  auto request = make_request(spec, order, next_sequence_number_++, config_.block_size, tenants_.find(spec.tenant));
  Request* raw = request.get();
  requests_.emplace(spec.id, std::move(request));  // the last thing that may run out of memory
  Tenants::enter(raw->tenant);
  queued_requests_.fetch_add(1, std::memory_order_relaxed);
  queued_tokens_.fetch_add(prompt_len, std::memory_order_relaxed);
  live_requests_.fetch_add(1, std::memory_order_relaxed);
  push<&Request::next_submitted>(submitted_, raw);
  return SubmitResult::kAccepted;
}

bool RequestRegistry::abort(uint64_t id, int32_t index) {
  const auto found = requests_.find(id);
  if (found == requests_.end()) return false;
  Request* request = found->second.get();
  for (Sequence& sequence : request->sequences) {
    if (index < 0 || sequence.index == index) sequence.abort_requested.store(true, std::memory_order_seq_cst);
  }
  if (request->abort_under_way.exchange(true, std::memory_order_seq_cst)) return false;
  push<&Request::next_aborted>(aborted_, request);
  return true;
}

void RequestRegistry::accept(Outbox& outbox) {
  if (next_news_ < num_news_) return;
  if (delivery_ == nullptr) delivery_ = outbox.take();
  if (delivery_ == nullptr) return;
  next_news_ = num_news_ = 0;
  const size_t grouped = group(*delivery_);
  released_.reserve(released_.size() + delivery_->released.size());
  step_error_ += delivery_->step_error;
  // Up to here all may be done again. From here on nothing is thrown.
  collect(*std::exchange(delivery_, nullptr));
  num_news_ = grouped;
}

size_t RequestRegistry::group(const Delivery& delivery) {
  ++drain_epoch_;
  size_t count = 0, event_index = 0;
  auto records = delivery.records.begin();
  const int32_t* words = delivery.record_words.data();
  for (const OutputEvent& event : delivery.events) {
    Sequence& sequence = *event.sequence;
    if (sequence.drain_epoch != drain_epoch_) {
      sequence.drain_epoch = drain_epoch_;
      sequence.drain_place = count++;
      if (news_.size() < count) news_.emplace_back();
      News& fresh = news_[sequence.drain_place];
      fresh.sequence = &sequence;
      fresh.tokens.clear();
      fresh.host_tokens = 0;
      fresh.records.clear();
      fresh.record_words.clear();
      fresh.finish = FinishReason::kNone;
      fresh.first_ns = event.time_ns;
    }
    News& news = news_[sequence.drain_place];
    if (records != delivery.records.end() && records->event == event_index++) {
      news.add_records(std::span(words, records->words), event.token >= 0);
      words += (records++)->words;
    }
    if (event.token >= 0) news.tokens.push_back(event.token);
    news.host_tokens += event.on_host;
    if (event.finish != FinishReason::kNone) news.finish = event.finish;
    news.last_ns = event.time_ns;
  }
  return count;
}

void RequestRegistry::News::add_records(std::span<const int32_t> words, bool of_next_token) {
  const auto next = static_cast<int32_t>(tokens.size());
  for_each_entry(words, [&](uint32_t kind, std::span<const int32_t> data) {
    records.push_back({kind, of_next_token || kind == kLogits ? next : -1, record_words.size(), data.size()});
    record_words.insert(record_words.end(), data.begin(), data.end());
  });
}

void RequestRegistry::collect(const Delivery& delivery) {
  for (Request* request : delivery.released) {
    const auto found = requests_.find(request->id);
    released_.push_back(std::move(found->second));
    requests_.erase(found);
  }
}

void RequestRegistry::free_released() {
  // An abort may be on its way to the step thread while the request ends by itself: receive() wakes the loop for it.
  const size_t freed = std::erase_if(released_, [this](const auto& r) {
    if (r->inbox_references.load(std::memory_order_acquire) > 0) return false;
    tenants_.leave(r->tenant);
    return true;
  });
  live_requests_.fetch_sub(static_cast<int64_t>(freed), std::memory_order_relaxed);
}

// ---- step thread ---------------------------------------------------------------------------------------------------

void RequestRegistry::receive(Scheduler& scheduler, Outbox& outbox) {
  // Aborts are read before submissions: an abort's request was submitted earlier, so it is either known or in the
  // submissions that are read next; those come first.
  Request* aborted = take_all<&Request::next_aborted>(aborted_);
  for (Request* request = take_all<&Request::next_submitted>(submitted_); request != nullptr;) {
    Request* next = request->next_submitted;
    scheduler.add(request);
    request->inbox_references.fetch_sub(1, std::memory_order_release);
    request = next;
  }
  while (aborted != nullptr) {
    Request* next = aborted->next_aborted;  // read before the flag is cleared: the next push overwrites it
    // Cleared before the scheduler looks: whoever asks for another abort from now on sends another message.
    aborted->abort_under_way.exchange(false, std::memory_order_seq_cst);
    const bool had_ended = aborted->unreleased == 0;
    scheduler.abort(aborted, outbox);
    aborted->inbox_references.fetch_sub(1, std::memory_order_release);
    if (had_ended) outbox.wake();  // the drain that heard of its end could not free it yet
    aborted = next;
  }
  scheduler.after_aborts();
}

void RequestRegistry::left_queue(const Request& request) {
  queued_requests_.fetch_sub(1, std::memory_order_relaxed);
  queued_tokens_.fetch_sub(request.prompt_len, std::memory_order_relaxed);
}

}  // namespace asyncengine
