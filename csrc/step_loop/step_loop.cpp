#include "step_loop/step_loop.h"

#include <algorithm>
#include <cassert>
#include <utility>

#include "core/batch_packer.h"

namespace asyncengine {
namespace {

using std::chrono::nanoseconds;

// Steps that fail one by one are their requests' affair, until nothing else happens any more.
constexpr int kMostFailedSteps = 16;
// Time between two looks at copies of blocks while no step is in flight. A copy that takes long is looked at less and
// less: its end may be seen late by half a percent of its time.
constexpr nanoseconds kMovesLook{20'000};
constexpr int64_t kMovesLate = 200;
// The same time while a step is in flight. A transfer takes a few times as long, and two are under way: so the link
// does not stand still.
constexpr nanoseconds kMovesLookInStep{100'000};

// Time for a call of the disk that is under way when the loop ends. A call that has been left alone is not waited for.
constexpr nanoseconds kDiskPatience{1'000'000'000};

std::unique_ptr<DiskBlocks> make_disk(const StepLoopConfig& config, const BlockMover& mover, std::shared_ptr<Notifier> notifier) {
  if (config.disk_path.empty()) return nullptr;
  DiskStore::Config store;
  store.path = config.disk_path;
  store.layout = {config.fingerprint, mover.block_bytes(), config.scheduler.block_size};
  store.max_bytes = config.disk_bytes;
  store.files = config.files;
  store.max_pending = static_cast<int>(DiskTier::kReads * DiskTier::kPendingBlocks);
  // One reads 3 to 9 GB/s of the system's file cache, and checks it; the link takes what many of them bring.
  store.num_threads = static_cast<int>(std::clamp(std::thread::hardware_concurrency() / 2, 4u, 8u));
  return std::make_unique<DiskBlocks>(store, [notifier = std::move(notifier)] { notifier->notify(); });
}

RegistryConfig registry_config(const StepLoopConfig& config, Needs needs) {
  const SchedulerConfig& s = config.scheduler;
  return {std::min(int64_t{s.max_model_len}, int64_t{s.num_blocks} * s.block_size),
          s.block_size,
          needs,
          config.max_queued_requests,
          config.max_queued_tokens,
          std::chrono::duration_cast<nanoseconds>(config.priority_ageing_s)};
}

}  // namespace

int64_t steady_now_ns() {
  return std::chrono::duration_cast<nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

StepLoop::StepLoop(const StepLoopConfig& config, std::unique_ptr<Executor> executor)
    : config_(config),
      outbox_(static_cast<size_t>(config.scheduler.max_num_seqs) * 4),
      executor_(std::move(executor)),
      life_(*executor_, *notifier_, outbox_),
      registry_(registry_config(config, executor_->needs() & config.scheduler.needs())),
      scheduler_(config.scheduler),
      mask_inbox_(std::make_shared<MaskInbox>([notifier = notifier_] { notifier->notify(); })),
      limit_(std::chrono::duration_cast<nanoseconds>(config.step_timeout_s), LifeCycle::kIdle),
      late_launch_(config.late_launch, executor_->num_kinds(), config.steps_in_flight),
      ring_(static_cast<size_t>(config.steps_in_flight)),
      watch_(config.scheduler.num_blocks) {
  assert(executor_->num_staging() >= config.steps_in_flight);
  for (InFlightStep& step : ring_) step.plan.reserve(scheduler_.limits().max_rows, scheduler_.limits().host_rows.num_entries());
  scheduler_.observe(&registry_);
  scheduler_.write_masks_to(executor_->masks());
  if (config.scheduler.num_host_blocks > 0) {
    disk_ = make_disk(config, *executor_->mover(), notifier_);
    scheduler_.move_blocks_with(*executor_->mover(), disk_.get(), executor_->state_mover());
  }
  if (config.scheduler.hybrid.any()) scheduler_.attend_on_host_with(*executor_->host_attention());
  executor_->attach(notifier_);
  publish_stats();
}

StepLoop::~StepLoop() {
  mask_inbox_->close();
  const bool ended = life_.end();
  close_disk();
  if (!ended || !disk_at_rest_) (void)executor_.release();
}

bool StepLoop::stop(nanoseconds limit) {
  const bool stopped = life_.stop(limit);
  if (life_.ended()) close_disk();  // else the thread may still use it
  return stopped;
}

void StepLoop::close_disk() {
  if (disk_ == nullptr || std::exchange(disk_closed_, true)) return;
  disk_at_rest_ = disk_->close(kDiskPatience);
}

void StepLoop::dispose(StepLoop* loop, nanoseconds limit) {
  const bool stopped = loop->stop(limit);
  if (stopped || loop->life_.ended()) delete loop;
}

void StepLoop::start(int cpu) {
  life_.start(cpu, [this] { run(); });
}

// ---- event loop ----------------------------------------------------------------------------------------------------

SubmitResult StepLoop::submit(const RequestSpec& spec) {
  if (!life_.running()) return SubmitResult::kClosed;
  for (const auto& channel : spec.extras.masks) channel->attach(mask_inbox_);
  const SubmitResult result = registry_.submit(spec, scheduler_, now_ns());
  if (result == SubmitResult::kAccepted) notifier_->notify();
  return result;
}

SubmitResult StepLoop::check(const RequestSpec& spec) const {
  return life_.running() ? registry_.check(spec, scheduler_) : SubmitResult::kClosed;
}

void StepLoop::abort(uint64_t id, int32_t index) {
  if (registry_.abort(id, index)) notifier_->notify();
}

// ---- step thread ---------------------------------------------------------------------------------------------------

void StepLoop::run() {
  executor_->adopt_thread();
  while (life_.running()) {
    if (!advance()) notifier_->wait(patience());
  }
}

// Whatever is thrown here leaves the state unknown: the engine ends, the process around it goes on.
bool StepLoop::advance() noexcept {
  if (!life_.running()) return false;
  try {
    return round();
  } catch (const std::exception& e) {
    life_.die(e.what());
  } catch (...) {
    life_.die("an exception that is no std::exception");
  }
  return true;
}

bool StepLoop::round() {
  const int64_t now = now_ns();
  limit_.look(now);
  registry_.receive(scheduler_, outbox_);
  scheduler_.take_masks(*mask_inbox_, outbox_, now);
  bool moved = scheduler_.move_blocks(outbox_, now, limit_.awake(now));
  moved |= retire_oldest(now);
  moved |= launch_next(now);
  moved |= watch_.sweep(scheduler_.blocks());
  if (moved || !scheduler_.moves_blocks()) moved_ns_ = now;
  publish_stats();  // first: who got its last token finds it counted
  outbox_.publish();
  return moved;
}

bool StepLoop::retire_oldest(int64_t now) {
  if (none_in_flight()) return false;
  const auto i = static_cast<int>(oldest_step_ % ring_.size());
  InFlightStep& step = ring_[static_cast<size_t>(i)];
  switch (executor_->poll(i)) {
    case StepStatus::kFailed: life_.fail(executor_->error()); return true;
    case StepStatus::kStepFailed: return fail_oldest(step, now);
    case StepStatus::kPending:
      if (limit_.over(now, *executor_)) {
        life_.fail("step " + std::to_string(step.plan.step) + " did not finish within " +
                   std::to_string(config_.step_timeout_s.count()) + " s");
        return true;
      }
      late_launch_.pending(now);
      return false;
    case StepStatus::kReady: break;
  }
  late_launch_.ended(limit_.since(), now);
  scheduler_.took(step.plan, limit_.took(now));
  limit_.restart(now);
  scheduler_.commit(step.plan, executor_->results(i), outbox_, now);
  step_tokens_.add(step.plan.num_tokens);
  if (watch_.on()) record(step, now);
  step.plan.clear();
  step.leased = false;
  failed_in_a_row_ = 0;
  ++oldest_step_;
  return true;
}

void StepLoop::record(const InFlightStep& step, int64_t ready) {
  StepRecord record = step.times;
  record.step = static_cast<int64_t>(step.plan.step);
  record.ready_ns = ready;
  record.committed_ns = now_ns();
  record.rows = static_cast<int64_t>(step.plan.rows.size());
  record.tokens = step.plan.num_tokens;
  record.decode_rows = step.plan.num_decode_rows;
  record.predicted_ns = step.plan.predicted_ns;
  watch_.add(record);
}

bool StepLoop::fail_oldest(InFlightStep& step, int64_t now) {
  const std::string why = executor_->error();
  outbox_.filling().step_error += "step " + std::to_string(step.plan.step) + ": " + why + "\n";
  ++failed_steps_;
  draining_ = true;
  late_launch_.failed();
  limit_.restart(now);
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
    life_.fail(std::to_string(kMostFailedSteps) + " steps failed one after another, the last one with: " + why);
  }
  return true;
}

bool StepLoop::launch_next(int64_t now) {
  if (life_.failed() || next_step_ - oldest_step_ == ring_.size()) return false;
  draining_ = draining_ && !none_in_flight();
  if (draining_ || late_launch_.hold_back(now)) return false;
  const int64_t begun = now_ns();
  late_launch_.begin(now, begun);
  const auto i = static_cast<int>(next_step_ % ring_.size());
  InFlightStep& step = ring_[static_cast<size_t>(i)];
  assert(!step.leased);
  step.plan.step = next_step_;
  scheduler_.schedule(step.plan, now);
  if (step.plan.empty()) return false;
  step.leased = true;
  const size_t bytes = pack_step(step.plan, scheduler_.tables(), executor_->staging(i));
  const int64_t launching = now_ns();
  late_launch_.launching(executor_->kind(i), step.plan.attended, launching);
  if (none_in_flight()) limit_.restart(launching);
  ++next_step_;
  const LaunchStatus status = executor_->launch(i, bytes);
  step.refused = draining_ = status == LaunchStatus::kRefused;
  if (status == LaunchStatus::kFailed) life_.fail(executor_->error());
  const int64_t launched = now_ns();
  late_launch_.launched(launched);
  step.times.begun_ns = begun;
  step.times.packed_ns = launching;
  step.times.launched_ns = launched;
  return true;
}

nanoseconds StepLoop::patience() const {
  const int64_t now = now_ns();
  const nanoseconds moves_look((now - moved_ns_) / kMovesLate);
  if (none_in_flight()) return scheduler_.moves_blocks() ? std::clamp(moves_look, kMovesLook, LifeCycle::kIdle) : LifeCycle::kIdle;
  nanoseconds look = std::max(executor_->poll_interval(), late_launch_.until_news(now));
  if (scheduler_.copies_blocks()) look = std::min(look, std::max(moves_look, kMovesLookInStep));
  return std::clamp(std::min({look, limit_.until_look(now), late_launch_.until_due(now)}), nanoseconds(0), LifeCycle::kIdle);
}

void StepLoop::publish_stats() {
  Stats& stats = scheduler_.stats();  // a copy of what was just written would cost 8 ns a round
  stats.num_steps = static_cast<int64_t>(next_step_ - 1);
  stats.num_steps_in_flight = static_cast<int64_t>(next_step_ - oldest_step_);
  stats.num_late_launches = late_launch_.count();
  stats.failed_steps = failed_steps_;
  const StepCosts::Factors& factors = scheduler_.costs().factors();
  stats.decode_cost_ppm = static_cast<int64_t>(1e6 * factors.decode);
  stats.rest_cost_ppm = static_cast<int64_t>(1e6 * factors.rest);
  stats.attention_cost_ppm = static_cast<int64_t>(1e6 * factors.attention);
  stats.hybrid_cost_ppm = static_cast<int64_t>(1e6 * factors.hybrid);
  stats_.store(stats);
  quiescent_.store(none_in_flight() && scheduler_.idle(), std::memory_order_release);
}

Stats StepLoop::stats() const {
  Stats stats = stats_.load();
  stats.queued_requests = registry_.queued_requests();
  stats.queued_tokens = registry_.queued_tokens();
  stats.live_requests = registry_.live_requests();
  // The scheduler has not heard of those that were submitted since the last round.
  stats.num_requests_waiting = std::max(stats.num_requests_waiting, stats.queued_requests);
  return stats;
}

std::pair<std::vector<BlockCell>, int32_t> StepLoop::block_map() {
  std::pair map{watch_.cells(), watch_.blocks_per_cell()};
  watch_.ask_for_sweep();
  notifier_->notify();
  return map;
}

}  // namespace asyncengine
