// Cases of the scheduler that the random walks of tests/core do not pin down.
#include <new>

#include "check.h"
#include "scheduler_fixture.h"

namespace {

using namespace asyncengine;
using namespace asyncengine::testing;

}  // namespace

TEST(a_sequence_at_the_address_of_a_blocked_one_is_not_blocked) {
  Bench bench({8, 16, 4, 64, 0, 128, true}, 1);
  bench.add(make_spec(1, 60, 60), 0);
  CHECK(bench.launch() != nullptr);  // holds four blocks and wants more, now and then
  bench.commit(1);
  Request& large = bench.add(make_spec(2, 100, 20, 1, 25), 1);
  CHECK(bench.launch() != nullptr);
  CHECK(large.sequences[0].state == SequenceState::kWaiting);  // seven blocks, four are free
  bench.commit(1);

  // The large request goes, and the memory of its only sequence becomes that of another one.
  for (Sequence& sequence : large.sequences) sequence.abort_requested = true;
  bench.scheduler.abort(&large, bench.outbox);
  bench.scheduler.after_aborts();
  CHECK_EQ(bench.outbox.filling().released.size(), size_t{1});
  bench.outbox.filling().clear();
  Sequence& sequence = large.sequences[0];
  std::destroy_at(&sequence);
  ::new (&sequence) Sequence;
  sequence.request = &large;
  sequence.tokens = Tokens(std::vector<int32_t>(10, 7), 12);
  large.prompt_len = 10;
  sequence.max_total = 12;
  large.unreleased = 1;
  bench.scheduler.add(&large);
  const StepPlan* plan = bench.launch();
  CHECK(plan != nullptr && plan->rows.size() == 2);  // one block is enough, and three are free
}

TEST(a_request_leaves_the_queue_once) {
  struct Observer final : QueueObserver {
    void left_queue(const Request& request) override { ++left[request.id]; }
    std::map<uint64_t, int> left;
  } observer;
  Bench bench({20, 16, 4, 64, 0, 256, true}, 2);
  bench.scheduler.observe(&observer);
  for (uint64_t id = 1; id <= 8; ++id) bench.add(make_spec(id, 30, 60, id % 3 == 0 ? 3 : 1));
  bench.abort(*bench.requests.at(8));  // never scheduled
  CHECK_EQ(observer.left[8], 1);
  do {
    while (bench.launch() != nullptr) bench.pack();
  } while (bench.commit(1));
  CHECK(bench.scheduler.stats().num_preemptions > 0);
  for (uint64_t id = 1; id <= 8; ++id) CHECK_EQ(observer.left[id], 1);
}

TEST(order_is_class_then_arrival) {
  Bench bench({64, 16, 1, 64, 0, 256, true}, 1);
  const std::vector<int64_t> orders = {5, 5, -3, 9, -3};
  for (size_t i = 0; i < orders.size(); ++i) bench.add(make_spec(i + 1, 5, 2), orders[i]);
  std::vector<uint64_t> ran;
  while (const StepPlan* plan = bench.launch()) {
    const uint64_t id = plan->rows[0].sequence->request->id;
    if (ran.empty() || ran.back() != id) ran.push_back(id);
    bench.pack();
    bench.commit(1);
  }
  CHECK(ran == (std::vector<uint64_t>{3, 5, 1, 2, 4}));
}

TEST(a_preempted_sequence_knows_all_its_tokens) {
  for (const int32_t block_size : {16, 32}) {  // as many tokens as a slot's tail holds, and more
    for (const bool prefix_caching : {true, false}) {
      Bench bench({160 / block_size, block_size, 4, 64, 0, 160, prefix_caching}, 2);
      std::map<const Sequence*, std::vector<int32_t>> said;
      // Equal prompts and tokens: who publishes a block second finds it known already, in a block of the other's.
      for (uint64_t id = 1; id <= 3; ++id) {
        const RequestSpec spec = make_spec(id, 21, 100);
        said[&bench.add(spec).sequences[0]] = spec.prompt;
      }
      int32_t token = 100, checked = 0;
      for (bool more = true; more;) {
        while (bench.launch() != nullptr) bench.pack();
        for (const auto& [id, request] : bench.requests) {
          const Sequence& sequence = request->sequences[0];
          if (sequence.state != SequenceState::kWaiting) continue;
          std::vector<int32_t> tokens(static_cast<size_t>(sequence.tokens.size()));
          sequence.tokens.copy(0, sequence.tokens.size(), tokens.data());
          CHECK(tokens == said[&sequence]);
          checked += sequence.tokens.size() > request->prompt_len + block_size;
        }
        more = bench.commit(++token);
        for (const OutputEvent& event : bench.outbox.filling().events) said[event.sequence].push_back(event.token);
        bench.outbox.filling().events.clear();
      }
      CHECK(checked > 0);
      for (const auto& [id, request] : bench.requests) CHECK(request->sequences[0].state == SequenceState::kReleased);
    }
  }
}

TEST(every_stop_token_stops) {
  const std::vector<int32_t> stops = {60, 61, 62, 63, 64, 65};  // more than a slot has room for
  for (const int32_t stop : stops) {
    Bench bench({64, 16, 4, 64, 0, 256, true}, 1);
    RequestSpec spec = make_spec(1, 5, 50);
    spec.stop_tokens = stops;
    bench.add(spec);
    for (const int32_t token : {1, 59, 66, stop}) {
      CHECK(bench.launch() != nullptr);
      bench.pack();
      bench.commit(token);
    }
    const auto& events = bench.outbox.filling().events;
    CHECK_EQ(events.size(), size_t{4});
    CHECK(events[2].finish == FinishReason::kNone && events[3].finish == FinishReason::kStop);
  }
}

TEST(nobody_is_preempted_for_blocks_that_are_on_their_way) {
  Bench bench({6, 16, 4, 64, 0, 128, true}, 2);
  for (uint64_t id = 1; id <= 3; ++id) bench.add(make_spec(id, 31, 60, 1, static_cast<int32_t>(id)), static_cast<int64_t>(id));
  // Two blocks each, none left: the first to need a third one takes the last sequence's, which a step in flight still uses.
  while (true) {
    while (bench.launch() != nullptr) bench.pack();
    if (bench.scheduler.stats().num_preemptions > 0) break;
    CHECK(bench.commit(1));
  }
  CHECK_EQ(bench.scheduler.stats().num_preemptions, 1);
  CHECK(bench.requests.at(3)->sequences[0].state == SequenceState::kPreempting);
}

TEST(what_a_sequence_said_is_cached) {
  Bench bench({64, 16, 4, 64, 0, 256, true}, 2);
  RequestSpec spec = make_spec(1, 21, 60);
  bench.add(spec);
  int32_t token = 0;
  do {
    while (bench.launch() != nullptr) bench.pack();
  } while (bench.commit(++token));
  for (const OutputEvent& event : bench.outbox.filling().events) spec.prompt.push_back(event.token);
  CHECK_EQ(spec.prompt.size(), size_t{81});
  bench.collect();
  spec.id = 2;
  Request& again = bench.add(spec);
  CHECK(bench.launch() != nullptr);
  CHECK_EQ(again.cached_tokens, 80);
}

TEST(chunks_fill_buckets) {
  // Three short prompts decode; a long one comes. Its chunks end where a step is of a bucket's size, but for the last.
  SchedulerConfig config{64, 16, 4, 100, 70, 400, true, {8, 16, 32, 64, 100}};
  Bench bench(config, 2);
  for (uint64_t id = 1; id <= 3; ++id) bench.add(make_spec(id, 1, 40));
  CHECK(bench.launch() != nullptr);
  bench.pack();
  bench.add(make_spec(4, 200, 5));
  std::vector<int32_t> sizes, chunks;
  while (const StepPlan* plan = bench.launch()) {
    bench.pack();
    sizes.push_back(plan->num_tokens);
    chunks.push_back(plan->rows.back().query_len);
    CHECK(bench.commit(1));
    if (plan->rows.back().num_samples > 0 && plan->rows.size() == 4) break;
  }
  // 3 decode rows and at most 70 tokens of prompt: 64 in all, three times; the last 17 of the prompt need not fill any.
  CHECK((sizes == std::vector<int32_t>{64, 64, 64, 20}));
  CHECK((chunks == std::vector<int32_t>{61, 61, 61, 17}));
}
