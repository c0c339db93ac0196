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

  // It goes, and the memory of its only sequence becomes that of another one.
  for (Sequence& sequence : large.sequences) sequence.abort_requested = true;
  bench.scheduler.abort(&large, bench.outbox);
  CHECK_EQ(bench.outbox.filling().released.size(), size_t{1});
  bench.outbox.filling().clear();
  Sequence& sequence = large.sequences[0];
  std::destroy_at(&sequence);
  ::new (&sequence) Sequence;
  sequence.request = &large;
  sequence.tokens.assign(10, 7);
  large.prompt_len = 10;
  sequence.max_total = 12;
  large.unreleased = 1;
  bench.scheduler.add(&large);
  const StepPlan* plan = bench.launch();
  CHECK(plan != nullptr && plan->rows.size() == 2);  // one block is enough, and three are free
}

TEST(a_request_leaves_the_queue_once) {
  struct Observer final : Scheduler::QueueObserver {
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
  CHECK(bench.scheduler.stats().preemptions > 0);
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
