// The step path allocates nothing once it is warm.
#include <cstdlib>
#include <new>

#include "check.h"
#include "disk_fixture.h"
#include "engine_fixture.h"
#include "scheduler_fixture.h"
#include "scripted_executor.h"

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

TEST(steps_with_a_target_allocate_nothing) {
  SchedulerConfig config{512, 16, 32, 256, 0, 512, true};
  config.costs = StepCosts({{1, 100, 1}}, {{1, 100, 1}}, {}, {}, {});
  config.targets = {2000, {{0, 1500}}};
  Bench bench(config, 2);
  for (int round = 0; round < 2; ++round) {
    for (uint64_t i = 0; i < 48; ++i) bench.add(make_spec(i + 1, 40 + static_cast<int32_t>(i), 100));
    const int64_t counted = run_counted(bench);
    if (round > 0) CHECK_EQ(counted, 0);
  }
}

TEST(giving_way_to_other_tenants_allocates_nothing) {
  Bench bench({60, 16, 8, 64, 0, 256, true}, 2);
  for (int round = 0; round < 3; ++round) {
    for (uint64_t i = 0; i < 24; ++i) {
      RequestSpec spec = make_spec(i + 1, 30, 60, i % 4 == 0 ? 3 : 1, static_cast<int32_t>(i));
      spec.tenant = 1 + i / 8;
      bench.add(spec, static_cast<int64_t>(i));
    }
    const int64_t before = bench.scheduler.stats().num_preemptions;
    const int64_t counted = run_counted(bench);
    CHECK(bench.scheduler.stats().num_preemptions > before);
    if (round > 0) CHECK_EQ(counted, 0);
    CHECK(bench.scheduler.quiescent());
  }
}

TEST(preemption_allocates_nothing) {
  Bench bench({20, 16, 8, 64, 0, 256, true}, 2);
  for (int round = 0; round < 2; ++round) {
    for (uint64_t i = 0; i < 12; ++i) bench.add(make_spec(i + 1, 30, 100, 1, static_cast<int32_t>(i)));
    const int64_t before = bench.scheduler.stats().num_preemptions;
    const int64_t counted = run_counted(bench);
    CHECK(bench.scheduler.stats().num_preemptions > before);
    if (round > 0) CHECK_EQ(counted, 0);
  }
}

TEST(the_step_thread_allocates_nothing) {
  Options options;
  options.num_blocks = 512;
  options.max_num_seqs = 32;
  options.max_model_len = 1024;
  Scripted scripted(options.loop());
  ScriptedExecutor& executor = *scripted.executor;
  StepLoop& loop = *scripted.loop;
  // A step is over as soon as the consumer has kept up. At each launch the test looks at what the thread has allocated.
  std::atomic<int64_t> allowed{0}, counted{-1};
  int64_t warm = 0;
  executor.on_launch = [&] {
    if (executor.launches == 100) warm = allocations;
    if (executor.launches == 400) counted = allocations - warm;
  };
  executor.on_poll = [&] { executor.pending = executor.launches > allowed; };
  for (uint64_t i = 1; i <= 8; ++i) CHECK(loop.submit(make_spec(i, 20, 600)) == SubmitResult::kAccepted);
  loop.start();
  for (int i = 0; i < 100'000 && counted < 0; ++i) {
    loop.drain([](const StepLoop::News&) {});
    allowed = executor.launches + 1;
    std::this_thread::sleep_for(100us);
  }
  // The consumer keeps up. For one that does not, deliveries grow.
  CHECK_EQ(counted.load(), 0);
  CHECK(loop.stop(1s));
}

TEST(the_users_of_a_disk_store_allocate_nothing) {
  Folder folder;
  Notifier notifier;
  DiskStore store(disk_config(folder, 8), [&notifier] { notifier.notify(); });
  std::vector<Block> blocks;
  for (uint32_t id = 0; id < 16; ++id) blocks.emplace_back(id);
  std::vector<std::byte> target(kBlockBytes);
  int64_t counted = 0;
  for (int i = 0; i < 200; ++i) {
    const Block& block = blocks[static_cast<size_t>(i * 7 % 16)];
    bool completed = false;
    const int64_t before = allocations;
    const bool taken = store.contains(block.key) ? store.get(block.key, block.parent, block.tokens, target.data(), 0)
                                                 : store.put(block.key, block.parent, block.tokens, block.data.data(), 0);
    while (taken && !completed) {
      notifier.wait(1s);
      store.take_completions([&completed](uint64_t, DiskResult) { completed = true; });
    }
    counted += allocations - before;
    CHECK(taken);
  }
  CHECK_EQ(counted, 0);
}
