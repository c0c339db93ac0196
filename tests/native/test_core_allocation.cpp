// The step path allocates nothing once it is warm.
#include <cstdlib>
#include <new>

#include "check.h"
#include "engine_fixture.h"
#include "scheduler_fixture.h"

namespace {
thread_local int64_t allocations = 0;  // by operator new, of this thread
}

void* operator new(size_t bytes) {
  ++allocations;
  if (void* memory = std::malloc(bytes != 0 ? bytes : 1)) return memory;
  throw std::bad_alloc();
}
// GCC 12 takes the inlined pair of malloc and free for a mismatch of new and free.
#pragma GCC diagnostic ignored "-Wmismatched-new-delete"
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace {

using namespace asyncengine;
using namespace asyncengine::testing;

// Runs until nothing is left; counts what schedule + pack + commit allocate.
int64_t run_counted(Bench& bench) {
  int64_t counted = 0;
  bool more = true;
  while (more) {
    const int64_t before = allocations;
    while (bench.launch() != nullptr) bench.pack();
    more = bench.commit(1);
    counted += allocations - before;
    bench.collect();
  }
  return counted;
}

// Answers as soon as the consumer has kept up; what the step thread has allocated is looked at whenever it launches.
class CountingExecutor final : public Executor {
 public:
  CountingExecutor(const StepLimits& limits, int steps_in_flight)
      : tokens_(static_cast<size_t>(limits.max_rows), 3), staging_(static_cast<size_t>(steps_in_flight)) {
    for (auto& buffer : staging_) buffer.resize(limits.max_bytes());
  }
  int num_staging() const override { return static_cast<int>(staging_.size()); }
  std::span<std::byte> staging(int i) override { return staging_[static_cast<size_t>(i)]; }
  StepResults results(int) const override { return {tokens_.data(), nullptr}; }
  LaunchStatus launch(int, size_t) override {
    const int64_t n = launches_.fetch_add(1) + 1;
    if (n == 100) warm_ = allocations;
    if (n == 400) counted_ = allocations - warm_;
    return LaunchStatus::kLaunched;
  }
  StepStatus poll(int) override { return launches_ <= allowed_ ? StepStatus::kReady : StepStatus::kPending; }
  std::string error() const override { return {}; }
  int num_kinds() const override { return 1; }
  std::chrono::nanoseconds poll_interval() const override { return std::chrono::microseconds(50); }
  bool close(std::chrono::nanoseconds) override { return true; }

  std::atomic<int64_t> launches_{0}, allowed_{0}, counted_{-1};

 private:
  int64_t warm_ = 0;
  std::vector<int32_t> tokens_;
  std::vector<std::vector<std::byte>> staging_;
};

}  // namespace

TEST(the_counter_counts) {
  const int64_t before = allocations;
  auto p = std::make_unique<int>(1);
  CHECK(allocations == before + 1);
}

TEST(schedule_pack_commit_allocate_nothing) {
  Bench bench({512, 16, 32, 256, 0, 512, true}, 2);
  for (int round = 0; round < 2; ++round) {  // the first one warms up
    for (uint64_t i = 0; i < 48; ++i) bench.add(make_spec(i + 1, 40 + static_cast<int32_t>(i), 100, i % 4 == 0 ? 3 : 1));
    const int64_t counted = run_counted(bench);
    if (round > 0) CHECK_EQ(counted, 0);
    CHECK(bench.scheduler.quiescent());
  }
}

TEST(preemption_allocates_nothing) {
  Bench bench({20, 16, 8, 64, 0, 256, true}, 2);
  for (int round = 0; round < 2; ++round) {
    for (uint64_t i = 0; i < 12; ++i) bench.add(make_spec(i + 1, 30, 100, 1, static_cast<int32_t>(i)));
    const int64_t before = bench.scheduler.stats().preemptions;
    const int64_t counted = run_counted(bench);
    CHECK(bench.scheduler.stats().preemptions > before);
    if (round > 0) CHECK_EQ(counted, 0);
  }
}

TEST(the_step_thread_allocates_nothing) {
  Options options;
  options.num_blocks = 512;
  options.max_num_seqs = 32;
  options.max_model_len = 1024;
  const auto config = options.loop();
  auto owned = std::make_unique<CountingExecutor>(StepLoop::limits(config), config.steps_in_flight);
  CountingExecutor& executor = *owned;
  StepLoop loop(config, std::move(owned));
  for (uint64_t i = 1; i <= 8; ++i) CHECK(loop.submit(make_spec(i, 20, 600)) == SubmitResult::kAccepted);
  loop.start();
  for (int i = 0; i < 100'000 && executor.counted_ < 0; ++i) {
    loop.drain([](const StepLoop::News&) {});
    executor.allowed_ = executor.launches_ + 1;
    std::this_thread::sleep_for(100us);
  }
  // The consumer keeps up. For one that does not, deliveries grow.
  CHECK_EQ(executor.counted_.load(), 0);
  CHECK(loop.stop(1s));
}
