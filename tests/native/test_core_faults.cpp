// Faults of the core, of its callers and of the device: each costs what it must, and nothing else.
#include <atomic>
#include <cstring>
#include <stdexcept>
#include <thread>

#include "check.h"
#include "engine_fixture.h"
#include "scheduler_fixture.h"
#include "scripted_executor.h"

namespace {

using namespace asyncengine;
using namespace asyncengine::testing;

// Runs a bench until nothing is left.
void run_out(Bench& bench) {
  do {
    while (bench.launch() != nullptr) bench.pack();
    bench.collect();
  } while (bench.commit(1));
  bench.collect();
}

int64_t test_clock_ns = 0;

}  // namespace

TEST(aborting_one_dormant_sibling_leaves_the_others) {
  for (const int32_t index : {1, 2, 3}) {
    Bench bench({64, 16, 8, 64, 0, 256, true}, 2);
    Request& request = bench.add(make_spec(1, 20, 5, 4));
    bench.abort(request, index);
    size_t rows = 0;
    std::set<int32_t> seen;
    while (true) {
      while (const StepPlan* plan = bench.launch()) {
        rows += plan->rows.size();
        for (const PlanRow& row : plan->rows) seen.insert(row.sequence->index);
        bench.pack();
      }
      bench.collect();
      if (!bench.commit(1)) break;
    }
    CHECK_EQ(seen.size(), size_t{3});
    CHECK(!seen.contains(index));
    bench.collect();
    CHECK(bench.requests.empty());
    CHECK(bench.scheduler.quiescent());
  }
}

// A sequence that has ended keeps a row in the next step, which computes past the end of its tokens.
TEST(surplus_rows_at_the_end_of_a_block_are_not_published) {
  for (int32_t prompt = 14; prompt <= 18; ++prompt) {
    for (int32_t max_tokens = 1; max_tokens <= 20; ++max_tokens) {
      Bench bench({64, 16, 8, 64, 0, 64, true}, 3);
      RequestSpec spec = make_spec(1, prompt, max_tokens);
      spec.stop_tokens = {1};
      spec.max_tokens = 40;
      bench.add(spec);
      for (int32_t i = 0; i < max_tokens - 1; ++i) {
        while (bench.launch() != nullptr) bench.pack();
        bench.commit(2);
        bench.collect();
      }
      run_out(bench);  // token 1: the end
      CHECK(bench.requests.empty());
      CHECK(bench.scheduler.quiescent());
    }
  }
}

// The first in order writes to a block that it shares with a sibling, which has to give way for the copy: then the block is
// its own, and there is nothing to copy.
TEST(a_shared_block_may_become_writable_while_room_is_made) {
  for (int32_t num_blocks = 3; num_blocks <= 9; ++num_blocks) {
    for (int32_t prompt = 17; prompt <= 33; ++prompt) {
      for (const int32_t n : {2, 3, 4}) {
        const int32_t longest = std::min(64, num_blocks * 16);
        if (prompt + 2 > longest) continue;
        Bench bench({num_blocks, 16, 4, 64, 0, longest, prompt % 2 == 0}, 1);
        bench.add(make_spec(1, prompt, longest - prompt, n));
        run_out(bench);
        CHECK(bench.requests.empty());
        CHECK(bench.scheduler.quiescent());
      }
    }
  }
}

TEST(siblings_share_one_copy_of_the_prompt) {
  const RequestSpec spec = make_spec(1, 100'000, 100, 128);
  const auto request = make_request(spec, 0, 0, 16);
  for (const Sequence& sequence : request->sequences) {
    CHECK_EQ(sequence.tokens.size(), 100'000);
    for (const int32_t position : {0, 99'999 / 16 * 16 - 1}) {
      CHECK(sequence.tokens.at(position) == request->sequences[0].tokens.at(position));
    }
    std::vector<int32_t> prompt(100'000);
    sequence.tokens.copy(0, 100'000, prompt.data());
    CHECK(prompt == spec.prompt);
    CHECK_EQ(*sequence.tokens.at(99'999), spec.prompt.back());
  }
}

TEST(siblings_are_preempted_and_computed_again_from_the_shared_prompt) {
  for (const int32_t block_size : {16, 32}) {
    Options options;
    options.block_size = block_size;
    options.num_blocks = 256 / block_size;
    Engine engine(options);
    for (int32_t i = 0; i < 6; ++i) {
      RequestSpec spec = make_spec(0, 50 + 7 * i, 60, 4, i);
      spec.sampling.temperature = 1.f;
      CHECK(engine.submit(spec) == SubmitResult::kAccepted);
    }
    CHECK(engine.run());
    CHECK_EQ(engine.mismatches(), 0);
    CHECK(engine.loop->stats().num_preemptions > 0);
    CHECK(engine.settles());
  }
}

TEST(an_id_that_is_in_use_is_refused) {
  Options options;
  options.latency = 1ms;
  Engine engine(options);
  RequestSpec spec = make_spec(0, 20, 50);
  CHECK(engine.submit(spec) == SubmitResult::kAccepted);
  RequestSpec again = spec;
  again.id = engine.last_id();
  CHECK(engine.loop->submit(again) == SubmitResult::kDuplicate);
  CHECK(engine.run());
  CHECK_EQ(engine.mismatches(), 0);
  CHECK(engine.settles());
}

// News that a visit could not take come again, and what was released meanwhile is freed all the same.
TEST(a_visit_that_throws_loses_nothing) {
  Options options;
  options.vocab_size = 40;
  Engine engine(options);
  std::map<uint64_t, std::vector<int32_t>> tokens;
  for (int i = 0; i < 20; ++i) {
    RequestSpec spec = make_spec(100 + static_cast<uint64_t>(i), 10, 30);
    CHECK(engine.loop->submit(spec) == SubmitResult::kAccepted);
  }
  int visits = 0;
  size_t ends = 0;
  for (int i = 0; i < 2000 && ends < 20; ++i) {
    pollfd fd{engine.loop->wake_fd(), POLLIN, 0};
    ::poll(&fd, 1, 100);
    try {
      engine.loop->drain([&](const StepLoop::News& news) {
        if (++visits % 3 == 0) throw std::bad_alloc();
        auto& mine = tokens[news.sequence->request->id];
        mine.insert(mine.end(), news.tokens.begin(), news.tokens.end());
        ends += news.finish == FinishReason::kLength;
      });
    } catch (const std::bad_alloc&) {
      engine.loop->wake();
    }
  }
  CHECK_EQ(ends, size_t{20});
  for (const auto& [id, mine] : tokens) CHECK_EQ(mine.size(), size_t{30});
  CHECK(engine.settles());
}

TEST(an_exception_on_the_step_thread_ends_the_engine_and_not_the_process) {
  for (const bool out_of_memory : {false, true}) {
    Options options;
    Scripted scripted(options.loop());
    scripted.executor->on_launch = [&] {
      if (scripted.executor->launches < 3) return;
      if (out_of_memory) throw std::bad_alloc();
      throw std::runtime_error("no such graph");
    };
    scripted.loop->start();
    CHECK(scripted.loop->submit(make_spec(1, 20, 50)) == SubmitResult::kAccepted);
    CHECK(scripted.dies());
    CHECK(scripted.loop->error().find(out_of_memory ? "bad_alloc" : "no such graph") != std::string::npos);
    CHECK(scripted.loop->submit(make_spec(2, 20, 50)) == SubmitResult::kClosed);
    CHECK(scripted.loop->stop(1s));
  }
}

TEST(stop_does_not_wait_for_a_step_thread_that_hangs) {
  Options options;
  Scripted scripted(options.loop());
  std::atomic<bool> hang{true};
  scripted.executor->on_launch = [&] {
    while (hang) std::this_thread::sleep_for(1ms);
  };
  scripted.loop->start();
  CHECK(scripted.loop->submit(make_spec(1, 20, 50)) == SubmitResult::kAccepted);
  while (scripted.executor->launches == 0) std::this_thread::sleep_for(1ms);
  CHECK(!scripted.loop->stop(50ms));
  hang = false;
  CHECK(scripted.loop->stop(5s));
}

// The process is stopped for ten minutes while a step is under way: rounds are that far apart.
TEST(time_in_which_the_process_was_stopped_does_not_count) {
  Options options;
  options.step_timeout = 10s;
  StepLoopConfig config = options.loop();
  config.clock = [] { return test_clock_ns; };
  test_clock_ns = 1'000'000'000;
  Scripted scripted(config);
  scripted.executor->pending = true;
  CHECK(scripted.loop->submit(make_spec(1, 20, 50)) == SubmitResult::kAccepted);
  const auto pass = [&](std::chrono::nanoseconds step, int rounds) {
    for (int i = 0; i < rounds; ++i) {
      test_clock_ns += step.count();
      scripted.loop->advance();
    }
  };
  pass(100ms, 50);
  pass(600s, 1);
  CHECK(scripted.loop->drain([](const StepLoop::News&) {}));
  pass(100ms, 30);
  CHECK(scripted.loop->drain([](const StepLoop::News&) {}));
  pass(100ms, 40);  // twelve seconds in which it ran
  CHECK(!scripted.loop->drain([](const StepLoop::News&) {}));
  CHECK(scripted.loop->error().find("did not finish within") != std::string::npos);
}

TEST(a_launch_that_runs_out_of_memory_fails_its_step_alone) {
  using Call = SimulatedDevice::Call;
  using enum StagingMode;
  for (const StagingMode staging : {kPageable, kPinned, kMapped, kAhead}) {
    for (const Call call : {Call::kGraphLaunch, Call::kCopy, Call::kWaitEvent}) {
      if (call == Call::kCopy && staging == kMapped) continue;
      if (call == Call::kWaitEvent && staging != kAhead) continue;
      for (const int depth : {1, 2, 3}) {
        Options options;
        options.staging = staging;
        options.steps_in_flight = depth;
        options.latency = 200us;
        Engine engine(options);
        std::mt19937 rng(static_cast<unsigned>(depth));
        for (int wave = 0; wave < 12; ++wave) {
          for (int i = 0; i < 6; ++i) CHECK(engine.submit(random_spec(rng, options, 40, 20)) == SubmitResult::kAccepted);
          engine.device.fail_call(call, wave % 5, kCudaErrorMemoryAllocation);
          CHECK(engine.run());
        }
        int failed = 0, finished = 0;
        for (auto& [key, result] : engine.results) {
          failed += result.finish == FinishReason::kStepFailed;
          finished += result.finish == FinishReason::kStop || result.finish == FinishReason::kLength;
          if (result.finish == FinishReason::kStepFailed) result.finish = FinishReason::kNone;  // not compared below
        }
        CHECK(failed > 0);
        CHECK(finished > 0);
        CHECK_EQ(engine.mismatches(), 0);
        CHECK(engine.loop->take_step_error().find("out of memory") != std::string::npos);
        CHECK_EQ(engine.loop->error(), std::string());
        CHECK(engine.settles());
      }
    }
  }
}

// The graph runs, and no event says when it will be over: its buffers may not be freed. (Pageable staging has the thread
// that launches wait for the graph before the event: a_hung_kernel_becomes_an_error_within_the_time_limit.)
TEST(a_launch_that_fails_halfway_keeps_its_buffers) {
  using enum StagingMode;
  for (const StagingMode staging : {kPinned, kMapped, kAhead}) {
    Options options;
    options.staging = staging;
    Engine engine(options);
    engine.device.hang_at(0);
    engine.device.fail_call(SimulatedDevice::Call::kEventRecord, staging == kAhead ? 1 : 0, 999);
    CHECK(engine.submit(make_spec(0, 20, 5)) == SubmitResult::kAccepted);
    CHECK(!engine.run());
    CHECK(engine.loop->error().find("cudaEventRecord") != std::string::npos);
    CHECK(!engine.loop->stop(1ms));
    engine.device.resume();
    CHECK(engine.loop->stop(5s));
  }
}

TEST(requests_of_a_failed_step_leave_others_in_flight_alone) {
  Bench bench({64, 16, 8, 64, 0, 256, true}, 3);
  bench.add(make_spec(1, 40, 30, 3));
  for (int i = 0; i < 3; ++i) {
    while (bench.launch() != nullptr) bench.pack();
    bench.commit(2);
  }
  bench.add(make_spec(2, 40, 30, 1, 7));  // its first row is in the newest step only
  while (bench.launch() != nullptr) bench.pack();
  CHECK(bench.fail());
  size_t step_failed = 0;
  for (const OutputEvent& event : bench.outbox.filling().events) {
    step_failed += event.finish == FinishReason::kStepFailed;
    CHECK(event.finish != FinishReason::kStepFailed || event.sequence->request->id == 1);
  }
  CHECK_EQ(step_failed, size_t{3});
  bench.collect();
  CHECK_EQ(bench.requests.size(), size_t{2});  // the failed one has rows in flight
  run_out(bench);
  CHECK(bench.requests.empty());
  CHECK(bench.scheduler.quiescent());
}

// Times are of no interest here, orders of magnitude are: each of these took seconds when it was quadratic.
TEST(many_requests_take_time_in_proportion) {
  SchedulerConfig config{4096, 16, 4096, 4096, 0, 64, true, {}};
  Bench bench(config, 1);
  std::vector<Request*> all;
  for (uint64_t id = 1; id <= 65'536; ++id) {
    all.push_back(&bench.add(make_spec(id, 1, 5), static_cast<int64_t>((id * 7919) % 65'537)));
  }
  CHECK_EQ(bench.scheduler.stats().num_requests_waiting, 65'536);
  int64_t previous = -1;
  const StepPlan* plan = bench.launch();
  CHECK_EQ(plan->rows.size(), size_t{4096});
  for (const PlanRow& row : plan->rows) {
    CHECK(row.sequence->request->order > previous);
    previous = row.sequence->request->order;
  }
  bench.pack();
  bench.commit(1);
  for (Request* request : all) {
    for (Sequence& sequence : request->sequences) sequence.abort_requested = true;
    bench.scheduler.abort(request, bench.outbox);
  }
  bench.scheduler.after_aborts();
  bench.collect();
  CHECK(bench.requests.empty());
  CHECK(bench.scheduler.quiescent());
}

// Copies of a step run in any order, so none reads what another writes. The first sibling gets a copy of the block that the
// second one shares in the step before, and in this very step the third one joins.
TEST(siblings_copy_a_block_from_where_the_first_of_them_copies_it) {
  Bench bench({64, 16, 3, 64, 0, 256, true}, 2);
  bench.add(make_spec(1, 20, 30, 3));
  bench.add(make_spec(2, 20, 1, 1, 7), 1);  // holds the third slot for one step
  bench.launch();
  bench.pack();
  const StepPlan* plan = bench.launch();
  CHECK_EQ(plan->rows.size(), size_t{2});
  CHECK_EQ(plan->copies.size(), size_t{1});
  const int32_t shared = plan->copies[0].source;
  bench.pack();
  bench.commit(1);
  bench.collect();
  plan = bench.launch();
  CHECK_EQ(plan->rows.size(), size_t{3});
  CHECK_EQ(plan->copies.size(), size_t{2});
  for (const BlockCopy& copy : plan->copies) {
    CHECK_EQ(copy.source, shared);
    CHECK(copy.target != shared);
  }
  bench.pack();
  run_out(bench);
  CHECK(bench.requests.empty());
  CHECK(bench.scheduler.quiescent());
}

// The keys and values of a failed step may never have been written.
TEST(blocks_of_a_failed_step_are_not_shared) {
  for (const int depth : {1, 2}) {
    Bench bench({64, 16, 8, 256, 0, 256, true}, depth);
    const auto cached = [&](uint64_t id) {
      bench.add(make_spec(id, 100, 2));
      const StepPlan* plan = bench.launch();
      bench.pack();
      return plan->rows.back().context_len;
    };
    CHECK_EQ(cached(1), 0);
    CHECK(bench.fail());
    bench.collect();
    CHECK_EQ(bench.scheduler.stats().cached_blocks, 0);
    CHECK_EQ(cached(2), 0);
    run_out(bench);
    CHECK_EQ(cached(3), 96);
    run_out(bench);
    CHECK(bench.scheduler.quiescent());
  }
}

// The loop hears of the end while its abort is on the way: nothing else would have it look again.
TEST(an_abort_that_crosses_its_requests_end_leaves_nothing) {
  Options options;
  Scripted scripted(options.loop());
  StepLoop& loop = *scripted.loop;
  const auto asks_for_a_drain = [&] {
    pollfd fd{loop.wake_fd(), POLLIN, 0};
    return ::poll(&fd, 1, 0) == 1;
  };
  CHECK(loop.submit(make_spec(1, 20, 2)) == SubmitResult::kAccepted);
  for (int i = 0; i < 100; ++i) loop.advance();
  CHECK(loop.quiescent());
  loop.abort(1);
  CHECK(loop.drain([](const StepLoop::News&) {}));
  CHECK_EQ(loop.stats().live_requests, 1);  // a message names it
  CHECK(!asks_for_a_drain());
  loop.advance();
  CHECK(asks_for_a_drain());
  CHECK(loop.drain([](const StepLoop::News&) {}));
  CHECK_EQ(loop.stats().live_requests, 0);
  loop.advance();
  CHECK(!asks_for_a_drain());
}
