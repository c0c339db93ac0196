#include "step_loop/step_loop.h"

#ifdef __linux__
#include <pthread.h>
#include <sched.h>
#include <sys/prctl.h>
#endif

#include <algorithm>
#include <cassert>
#include <utility>

#include "core/batch_packer.h"

namespace asyncengine {
namespace {

using std::chrono::nanoseconds;

// Beyond the queue's limits, an eighth of them is kept for requests that say so.
constexpr int64_t kReservedShare = 8;

constexpr nanoseconds kIdle = std::chrono::milliseconds(200);  // nothing waits without a limit
// Rounds that are further apart say that the process was stopped, or its machine was: the thread sleeps no longer than kIdle.
constexpr nanoseconds kStopped = 2 * kIdle;
// Steps that fail one by one are their requests' affair, until nothing else happens any more.
constexpr int kMostFailedSteps = 16;

// A stack that many may push to and one empties; `Next` is the intrusive link.
template <Request* Request::*Next>
void push(std::atomic<Request*>& head, Request* request) {
  request->inbox_references.fetch_add(1, std::memory_order_relaxed);
  Request* top = head.load(std::memory_order_relaxed);
  do {
    request->*Next = top;
  } while (!head.compare_exchange_weak(top, request, std::memory_order_release, std::memory_order_relaxed));
}

// Takes all, oldest first.
template <Request* Request::*Next>
Request* take_all(std::atomic<Request*>& head) {
  Request* reversed = nullptr;
  for (Request* top = head.exchange(nullptr, std::memory_order_acquire); top != nullptr;) {
    Request* next = std::exchange(top->*Next, reversed);
    reversed = std::exchange(top, next);
  }
  return reversed;
}

#ifdef __linux__
void pin_this_thread(int cpu) {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  CPU_SET(static_cast<size_t>(cpu), &cores);
  (void)pthread_setaffinity_np(pthread_self(), sizeof(cores), &cores);
}

// A thread's sleep may last 50 us longer than it asked for, unless it says less.
void sleep_no_longer_than_asked() { (void)prctl(PR_SET_TIMERSLACK, 1UL); }
#else
void pin_this_thread(int) {}
void sleep_no_longer_than_asked() {}
#endif

}  // namespace

int64_t steady_now_ns() {
  return std::chrono::duration_cast<nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

StepLoop::StepLoop(const StepLoopConfig& config, std::unique_ptr<Executor> executor)
    : config_(config),
      outbox_(static_cast<size_t>(config.scheduler.max_num_seqs) * 4),
      executor_(std::move(executor)),
      scheduler_(config.scheduler),
      ring_(static_cast<size_t>(config.steps_in_flight)),
      timing_(executor_->num_kinds()) {
  assert(executor_->num_staging() >= config.steps_in_flight);
  for (InFlightStep& step : ring_) step.plan.reserve(scheduler_.limits().max_rows);
  scheduler_.observe(&left_queue_);
  executor_->attach(notifier_);
  publish_stats();
}

StepLoop::~StepLoop() {
  const bool stopped = stop(std::chrono::seconds(hangs_ ? 0 : 5));
  if (thread_.joinable()) thread_.join();
  if (!stopped) (void)executor_.release();
}

void StepLoop::dispose(StepLoop* loop, nanoseconds limit) {
  const bool stopped = loop->stop(limit);
  if (stopped || loop->ended_.load(std::memory_order_acquire)) delete loop;
}

void StepLoop::start(int cpu) {
  ended_.store(false, std::memory_order_relaxed);
  thread_ = std::thread([this, cpu] {
    if (cpu >= 0) pin_this_thread(cpu);
    sleep_no_longer_than_asked();
    run();
    ended_.store(true, std::memory_order_release);
    end_.notify();
  });
}

bool StepLoop::stop(nanoseconds limit) {
  stopping_.store(true, std::memory_order_release);
  notifier_->notify();
  const int64_t deadline = steady_now_ns() + limit.count();
  const auto left = [&] { return nanoseconds(std::max<int64_t>(0, deadline - steady_now_ns())); };
  // A thread that does not hang ends within kIdle, whatever the limit for the executor.
  if (!ended_.load(std::memory_order_acquire)) end_.wait(std::max<nanoseconds>(left(), 2 * kIdle));
  hangs_ = !ended_.load(std::memory_order_acquire);
  if (!hangs_ && thread_.joinable()) thread_.join();
  hangs_ = hangs_ || !executor_->close(left());
  return !hangs_;
}

// ---- step thread ---------------------------------------------------------------------------------------------------

void StepLoop::run() {
  while (!stopping_.load(std::memory_order_acquire) && !failed_.load(std::memory_order_relaxed)) {
    if (!advance()) notifier_->wait(patience());
  }
}

// Whatever is thrown here leaves the state unknown: the engine ends, the process around it goes on.
bool StepLoop::advance() noexcept {
  if (stopping_.load(std::memory_order_acquire) || failed_.load(std::memory_order_relaxed)) return false;
  try {
    return round();
  } catch (const std::exception& e) {
    die(e.what());
  } catch (...) {
    die("an exception that is no std::exception");
  }
  return true;
}

// Hear what is new, take in results, launch.
bool StepLoop::round() {
  const int64_t now = now_ns();
  note_gap(now);
  receive();
  bool moved = retire_oldest(now);
  moved |= launch_next(now);
  publish_stats();  // first: who got its last token finds it counted
  outbox_.publish();
  return moved;
}

bool StepLoop::retire_oldest(int64_t now) {
  if (oldest_step_ == next_step_) return false;
  const auto i = static_cast<int>(oldest_step_ % ring_.size());
  InFlightStep& step = ring_[static_cast<size_t>(i)];
  switch (executor_->poll(i)) {
    case StepStatus::kFailed:
      fail(executor_->error());
      return true;
    case StepStatus::kStepFailed:
      return fail_oldest(step, now);
    case StepStatus::kPending:
      if (overdue(step, now)) {
        fail("step " + std::to_string(step.plan.step) + " did not finish within " +
             std::to_string(std::chrono::duration<double>(config_.step_timeout).count()) + " s");
        return true;
      }
      saw_pending(now);
      return false;
    case StepStatus::kReady:
      break;
  }
  saw_end(step, now);
  restart_clock(now);
  scheduler_.commit(step.plan, executor_->results(i), outbox_, now);
  step.plan.clear();
  step.leased = false;
  failed_in_a_row_ = 0;
  ++oldest_step_;
  return true;
}

bool StepLoop::fail_oldest(InFlightStep& step, int64_t now) {
  const std::string why = executor_->error();
  outbox_.filling().step_error += "step " + std::to_string(step.plan.step) + ": " + why + "\n";
  ++failed_steps_;
  draining_ = true;
  restart_clock(now);
  scheduler_.fail_step(step.plan, outbox_, now);
  step.plan.clear();
  step.leased = false;
  if (std::exchange(step.refused, false)) {
    assert(next_step_ == oldest_step_ + 1);  // nothing was launched behind it
    next_step_ = oldest_step_;
  } else {
    ++oldest_step_;
  }
  if (++failed_in_a_row_ == kMostFailedSteps) {
    fail(std::to_string(kMostFailedSteps) + " steps failed one after another, the last one with: " + why);
  }
  return true;
}

// ---- time limit ----------------------------------------------------------------------------------------------------

// The next step in flight is the oldest from now on.
void StepLoop::restart_clock(int64_t now) {
  oldest_since_ns_ = now;
  stopped_ns_ = 0;
  held_up_from_ns_ = -1;
}

void StepLoop::note_gap(int64_t now) {
  const int64_t gap = now - std::exchange(last_round_ns_, now);
  if (gap > kStopped.count()) stopped_ns_ += gap - kIdle.count();
}

// Whether the step has had its time, that for which it could not go on left out.
bool StepLoop::overdue(const InFlightStep& step, int64_t now) {
  const int64_t limit = config_.step_timeout.count();
  const int64_t waited = now - std::max(step.launched_ns, oldest_since_ns_) - stopped_ns_;
  if (waited <= limit / 4) return false;
  // Only now: looking may cost the executor something.
  const int64_t held_up = executor_->held_up_ns(now);
  if (held_up_from_ns_ < 0) held_up_from_ns_ = held_up;
  return waited - (held_up - held_up_from_ns_) > limit;
}

bool StepLoop::launch_next(int64_t now) {
  if (failed_.load(std::memory_order_relaxed) || next_step_ - oldest_step_ == ring_.size()) return false;
  draining_ = draining_ && oldest_step_ != next_step_;
  if (draining_ || hold_back(now)) return false;
  const bool held = std::exchange(held_, false);
  const int64_t due_ns = held ? std::max(hold_.due_ns, hold_.looked_ns) : now_ns();
  const auto i = static_cast<int>(next_step_ % ring_.size());
  InFlightStep& step = ring_[static_cast<size_t>(i)];
  assert(!step.leased);
  step.plan.step = next_step_;
  scheduler_.schedule(step.plan, now);
  if (step.plan.empty()) return false;
  step.leased = true;
  const size_t bytes = pack_step(step.plan, scheduler_.tables(), executor_->staging(i));
  step.kind = executor_->kind(i);
  step.launched_ns = now_ns();
  watched_step_ = held ? next_step_ : 0;
  if (held && oldest_step_ == next_step_) launched_late(now);
  if (oldest_step_ == next_step_) restart_clock(step.launched_ns);
  ++next_step_;
  const LaunchStatus status = executor_->launch(i, bytes);
  step.refused = draining_ = status == LaunchStatus::kRefused;
  if (status == LaunchStatus::kFailed) fail(executor_->error());
  timing_.launched(now_ns() - due_ns);
  return true;
}

// ---- late launch ---------------------------------------------------------------------------------------------------

bool StepLoop::hold_back(int64_t now) {
  const int64_t end_ns = foresee_end(), due_ns = end_ns - timing_.lead();
  if (now >= due_ns) return false;
  held_ = true;
  hold_ = {now, due_ns, end_ns};
  return true;
}

// When what is in flight will be over, at the earliest; 0: unknown, or nothing is.
int64_t StepLoop::foresee_end() const {
  if (!config_.late_launch || oldest_step_ == next_step_) return 0;
  int64_t end = oldest_from_ns_;
  for (uint64_t k = oldest_step_; k != next_step_; ++k) {
    const InFlightStep& step = ring_[k % ring_.size()];
    const int64_t duration = timing_.expected(step.kind, step.plan.attended);
    if (duration == 0) return 0;
    end = std::max(end, step.launched_ns) + duration;
  }
  return end;
}

// From when on the oldest step may be over; where nobody knows, from its beginning. Looks every 5 us take half of a core.
int64_t StepLoop::foresee_news() const {
  const InFlightStep& step = ring_[oldest_step_ % ring_.size()];
  const int64_t duration = timing_.expected(step.kind, step.plan.attended);
  return std::max(oldest_from_ns_, step.launched_ns) + duration - duration / 16;
}

void StepLoop::saw_pending(int64_t now) {
  pending_ns_ = now;
  watched_step_ = 0;
}

void StepLoop::saw_end(const InFlightStep& step, int64_t now) {
  const int64_t start = std::max(step.launched_ns, oldest_since_ns_);
  const int64_t foreseen = foresee_news();
  if (pending_ns_ > start && pending_ns_ >= foreseen) {
    timing_.ran(step.kind, step.plan.attended, now - start);
  } else if (now - start < timing_.expected(step.kind, step.plan.attended)) {
    timing_.forget(step.kind);  // over before the look that was to see its end: nobody knows by how much
  } else if (foreseen > start) {
    // That look came late. What the thread oversleeps is no part of the step, or it would sleep longer and longer.
    timing_.ran(step.kind, step.plan.attended, foreseen - start);
  }
  oldest_from_ns_ = pending_ns_;
  if (watched_step_ == step.plan.step + 1) launched_late(now);
}

// A step that was held back found nothing in flight, or what was in flight was over at the first look after it.
void StepLoop::launched_late(int64_t end_ns) {
  ++late_launches_;
  watched_step_ = 0;
  // Else the launch itself took too long, which its cost tells.
  if (end_ns < hold_.end_ns) timing_.ended_early();
}

void StepLoop::receive() {
  // Aborts are read before submissions: an abort's request was submitted earlier, so it is either known or in the
  // submissions that are read next; those come first.
  Request* aborted = take_all<&Request::next_aborted>(aborted_);
  for (Request* request = take_all<&Request::next_submitted>(submitted_); request != nullptr;) {
    Request* next = request->next_submitted;
    scheduler_.add(request);
    request->inbox_references.fetch_sub(1, std::memory_order_release);
    request = next;
  }
  while (aborted != nullptr) {
    Request* next = aborted->next_aborted;  // read before the flag is cleared: the next push overwrites it
    // Cleared before the scheduler looks: whoever asks for another abort from now on sends another message.
    aborted->abort_under_way.exchange(false, std::memory_order_seq_cst);
    scheduler_.abort(aborted, outbox_);
    aborted->inbox_references.fetch_sub(1, std::memory_order_release);
    aborted = next;
  }
  scheduler_.after_aborts();
}

// The engine is dead: the loop hears it once, and the thread ends.
void StepLoop::fail(std::string why) {
  error_ = std::move(why);
  failed_.store(true, std::memory_order_release);
  outbox_.filling().engine_failed = true;
  outbox_.publish();
}

void StepLoop::die(const char* what) noexcept {
  try {
    fail(std::string("the step thread failed: ") + what);
  } catch (...) {  // no memory, not even for that
    if (!failed_.load(std::memory_order_relaxed)) error_ = "out of memory";  // short enough to need none
    failed_.store(true, std::memory_order_release);
    outbox_.wake();
  }
}

nanoseconds StepLoop::patience() const {
  if (oldest_step_ == next_step_) return kIdle;
  const int64_t now = now_ns();
  const int64_t started = std::max(ring_[oldest_step_ % ring_.size()].launched_ns, oldest_since_ns_);
  const nanoseconds to_limit = config_.step_timeout - nanoseconds(now - started - stopped_ns_) + std::chrono::microseconds(100);
  // Past it, only the time for which the step could not go on keeps it alive.
  // Before it, overdue() wants to look when a quarter of it is over.
  const nanoseconds left = to_limit > nanoseconds(0) ? std::min(to_limit, config_.step_timeout / 4) : std::chrono::milliseconds(10);
  const nanoseconds held = held_ ? nanoseconds(hold_.due_ns - now) : nanoseconds::max();
  // What takes long past that is looked at less and less: half a percent of what it takes is how late that may be.
  const int64_t past = now - foresee_news();
  const nanoseconds look = std::max({executor_->poll_interval(), nanoseconds(-past), nanoseconds(past / 200)});
  return std::clamp(std::min({look, left, held}), nanoseconds(0), kIdle);
}

void StepLoop::LeftQueue::left_queue(const Request& request) {
  loop.queued_requests_.fetch_sub(1, std::memory_order_relaxed);
  loop.queued_tokens_.fetch_sub(request.prompt_len, std::memory_order_relaxed);
}

void StepLoop::publish_stats() {
  const SchedulerStats& s = scheduler_.stats();
  const auto put = [](std::atomic<int64_t>& to, int64_t value) { to.store(value, std::memory_order_relaxed); };
  put(stats_.running, s.running);
  put(stats_.waiting, s.waiting);
  put(stats_.preemptions, s.preemptions);
  put(stats_.prefix_queries, s.prefix_queries);
  put(stats_.prefix_hits, s.prefix_hits);
  put(stats_.prompt_tokens, s.prompt_tokens);
  put(stats_.generated_tokens, s.generated_tokens);
  put(stats_.free_blocks, s.free_blocks);
  put(stats_.free_slots, s.free_slots);
  put(stats_.steps, static_cast<int64_t>(next_step_ - 1));
  put(stats_.late_launches, late_launches_);
  put(stats_.leases, static_cast<int64_t>(next_step_ - oldest_step_));
  put(stats_.cached_blocks, s.cached_blocks);
  put(stats_.block_references, s.block_references);
  put(stats_.failed_steps, failed_steps_);
  quiescent_.store(oldest_step_ == next_step_ && scheduler_.idle(), std::memory_order_release);
}

// ---- event loop ----------------------------------------------------------------------------------------------------

SubmitResult StepLoop::submit(const RequestSpec& spec) {
  if (stopping_.load(std::memory_order_relaxed) || failed_.load(std::memory_order_acquire)) return SubmitResult::kClosed;
  if (requests_.contains(spec.id)) return SubmitResult::kDuplicate;
  const auto prompt_len = static_cast<int32_t>(spec.prompt.size());
  const int64_t total = int64_t{prompt_len} + spec.max_tokens;
  const int64_t capacity = int64_t{config_.scheduler.num_blocks} * config_.scheduler.block_size;
  if (prompt_len == 0 || spec.max_tokens < 1 || total > config_.scheduler.max_model_len || total > capacity) {
    return SubmitResult::kTooLarge;
  }
  if (!scheduler_.can_fit(spec)) return SubmitResult::kTooLarge;
  if ((spec.needs() & ~executor_->needs()) != 0) return SubmitResult::kUnserved;
  const int64_t waiting = queued_tokens_.load(std::memory_order_relaxed);
  const auto limit = [&](int64_t most) { return spec.reserved ? most + most / kReservedShare + 1 : most; };
  if (queued_requests_.load(std::memory_order_relaxed) >= limit(config_.max_queued_requests) ||
      (waiting > 0 && waiting + prompt_len > limit(config_.max_queued_tokens))) {
    return SubmitResult::kQueueFull;
  }
  const int64_t arrived_ns = now_ns();
  const int64_t order = arrived_ns + spec.delay_ns + int64_t{spec.priority} * config_.priority_ageing.count();
  auto request = make_request(spec, order, next_sequence_number_++, config_.scheduler.block_size);
  Request* raw = request.get();
  requests_.emplace(spec.id, std::move(request));  // the last thing that may run out of memory
  queued_requests_.fetch_add(1, std::memory_order_relaxed);
  queued_tokens_.fetch_add(prompt_len, std::memory_order_relaxed);
  live_requests_.fetch_add(1, std::memory_order_relaxed);
  push<&Request::next_submitted>(submitted_, raw);
  notifier_->notify();
  return SubmitResult::kAccepted;
}

void StepLoop::abort(uint64_t id, int32_t index) {
  const auto found = requests_.find(id);
  if (found == requests_.end()) return;
  Request* request = found->second.get();
  for (Sequence& sequence : request->sequences) {
    if (index < 0 || sequence.index == index) sequence.abort_requested.store(true, std::memory_order_seq_cst);
  }
  if (request->abort_under_way.exchange(true, std::memory_order_seq_cst)) return;
  push<&Request::next_aborted>(aborted_, request);
  notifier_->notify();
}

void StepLoop::accept() {
  if (next_news_ < num_news_) return;
  if (delivery_ == nullptr) delivery_ = outbox_.take();
  if (delivery_ == nullptr) return;
  next_news_ = num_news_ = 0;
  const size_t grouped = group(*delivery_);
  released_.reserve(released_.size() + delivery_->released.size());
  step_error_ += delivery_->step_error;
  // Up to here all may be done again. From here on nothing is thrown.
  collect(*std::exchange(delivery_, nullptr));
  num_news_ = grouped;
}

size_t StepLoop::group(const Delivery& delivery) {
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
    if (event.finish != FinishReason::kNone) news.finish = event.finish;
    news.last_ns = event.time_ns;
  }
  return count;
}

void StepLoop::News::add_records(std::span<const int32_t> words, bool of_next_token) {
  for_each_entry(words, [&](uint32_t kind, std::span<const int32_t> data) {
    records.push_back({kind, of_next_token ? static_cast<int32_t>(tokens.size()) : -1, record_words.size(), data.size()});
    record_words.insert(record_words.end(), data.begin(), data.end());
  });
}

void StepLoop::collect(const Delivery& delivery) {
  for (Request* request : delivery.released) {
    const auto found = requests_.find(request->id);
    released_.push_back(std::move(found->second));
    requests_.erase(found);
  }
}

void StepLoop::free_released() {
  // An abort may be on its way to the step thread while the request ends by itself.
  const size_t freed =
      std::erase_if(released_, [](const auto& r) { return r->inbox_references.load(std::memory_order_acquire) == 0; });
  live_requests_.fetch_sub(static_cast<int64_t>(freed), std::memory_order_relaxed);
}

StepLoopStats StepLoop::stats() const {
  const auto get = [](const std::atomic<int64_t>& from) { return from.load(std::memory_order_relaxed); };
  return {get(stats_.running), get(stats_.waiting), get(stats_.preemptions), get(stats_.prefix_queries),
          get(stats_.prefix_hits), get(stats_.prompt_tokens), get(stats_.generated_tokens), get(stats_.free_blocks),
          get(stats_.free_slots), config_.scheduler.num_blocks, get(stats_.steps), get(stats_.late_launches),
          get(stats_.leases), get(queued_requests_), get(queued_tokens_), get(live_requests_), get(stats_.cached_blocks),
          get(stats_.block_references), get(stats_.failed_steps)};
}

}  // namespace asyncengine
