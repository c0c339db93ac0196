// Tenants share slots and blocks: whoever holds more than its share gives some back to those that wait, and nobody else does.
#include <algorithm>
#include <memory>
#include <vector>

#include "check.h"
#include "engine_fixture.h"
#include "scheduler_fixture.h"

namespace {

using namespace asyncengine;
using namespace asyncengine::testing;

RequestSpec of_tenant(uint64_t tenant, uint64_t id, int32_t prompt_len, int32_t max_tokens, int32_t n = 1) {
  RequestSpec spec = make_spec(id, prompt_len, max_tokens, n, static_cast<int32_t>(7 * id));
  spec.tenant = tenant;
  return spec;
}

class TenantBench : public Bench {
 public:
  using Bench::Bench;
  void round() {
    while (launch() != nullptr) pack();
    commit(1);
    collect();
  }
  void rounds(int count) {
    for (int i = 0; i < count; ++i) round();
  }
  // Rounds until the request has ended; -1: more than `most`.
  int rounds_of(uint64_t id, int most) {
    for (int i = 0; i <= most; ++i) {
      if (!requests.contains(id)) return i;
      round();
    }
    return -1;
  }
  int held(uint64_t tenant) const {
    int count = 0;
    for (const auto& [id, request] : requests) {
      if (request->tenant == nullptr || request->tenant->id != tenant) continue;
      count += static_cast<int>(std::ranges::count(request->sequences, SequenceState::kRunning, &Sequence::state));
    }
    return count;
  }
  int64_t preemptions() { return scheduler.stats().num_preemptions; }
  void finish() {
    for (int i = 0; i < 5000 && !requests.empty(); ++i) round();
    CHECK(requests.empty());
    CHECK_EQ(tenants.size(), size_t{0});
    CHECK(scheduler.quiescent());
  }
};

std::unique_ptr<Request> request_of(Tenant* tenant, uint64_t number) {
  auto request = std::make_unique<Request>();
  request->tenant = tenant;
  request->sequence_number = number;
  request->sequences = std::vector<Sequence>(1);
  request->sequences[0].request = request.get();
  return request;
}

}  // namespace

TEST(a_tenant_that_is_alone_again_steps_back_no_more) {
  for (const int32_t slots : {1, 6}) {  // the share of one slot stays as it is
    Tenants tenants;
    FairQueue queue(slots, 9);
    Tenant& tenant = *tenants.find(1);
    const auto first = request_of(&tenant, 1), other = request_of(tenants.find(2), 2), later = request_of(nullptr, 3);
    for (const auto* request : {&first, &other, &later}) queue.enter(**request);
    queue.push(&first->sequences[0]);
    queue.push(&later->sequences[0]);
    queue.step_back(tenant, 100 * Tenant::kBlock);
    CHECK(&queue.front() == &later->sequences[0]);
    queue.leave(*other);
    CHECK(&queue.front() == &first->sequences[0]);
    queue.remove(&first->sequences[0]);
    queue.remove(&later->sequences[0]);
    queue.leave(*later);
    queue.leave(*first);
  }
}

TEST(a_tenant_that_holds_all_slots_gives_one_to_a_short_request) {
  for (const int depth : {1, 2, 3}) {
    TenantBench bench({256, 16, 8, 64, 0, 256, true}, depth);
    bench.add(of_tenant(1, 1, 20, 200, 4));
    bench.add(of_tenant(1, 2, 20, 200, 8));
    bench.rounds(20);
    CHECK_EQ(bench.held(1), 8);
    for (uint64_t id = 10; id < 14; ++id) {  // one after the other
      const int64_t before = bench.preemptions();
      bench.add(of_tenant(2, id, 20, 1), 1000);
      const int rounds = bench.rounds_of(id, 100);
      CHECK(rounds >= 0 && rounds <= 2 * depth + 1);
      CHECK(bench.preemptions() - before <= 1);
      CHECK(bench.held(1) >= 7);
    }
    bench.finish();
  }
}

TEST(tenants_come_to_hold_equal_shares_and_keep_them) {
  TenantBench bench({512, 16, 12, 128, 0, 256, true}, 2);
  for (uint64_t id = 1; id <= 6; ++id) bench.add(of_tenant(1, id, 20, 230, 4));
  bench.rounds(20);
  CHECK_EQ(bench.held(1), 12);
  bench.add(of_tenant(2, 10, 20, 230, 20), 1000);
  bench.rounds(40);
  CHECK_EQ(bench.held(1), 6);
  CHECK_EQ(bench.held(2), 6);
  CHECK_EQ(bench.preemptions(), 6);
  bench.rounds(60);
  CHECK_EQ(bench.preemptions(), 6);  // nobody takes a slot back
  for (uint64_t id = 20; id < 24; ++id) bench.add(of_tenant(3, id, 20, 230), 2000);
  bench.rounds(20);
  for (const uint64_t tenant : {1, 2, 3}) CHECK_EQ(bench.held(tenant), 4);
  CHECK_EQ(bench.preemptions(), 10);
  bench.finish();
}

TEST(a_tenant_alone_and_requests_without_one_give_nothing) {
  for (const uint64_t tenant : {0, 1}) {
    TenantBench bench({256, 16, 4, 64, 0, 256, true}, 2);
    bench.add(of_tenant(tenant, 1, 20, 100, 8));
    bench.rounds(10);
    bench.add(of_tenant(tenant, 2, 20, 1), 5);
    if (tenant == 0) bench.add(of_tenant(7, 3, 20, 1), 6);  // waits for its turn: nothing is shared with nobody
    bench.rounds(50);
    CHECK(bench.requests.contains(2));
    CHECK_EQ(bench.preemptions(), 0);
    bench.finish();
  }
}

// More tenants than slots: each has one, in the order in which they came.
TEST(many_tenants_have_a_slot_each) {
  TenantBench bench({256, 16, 4, 64, 0, 256, true}, 2);
  bench.add(of_tenant(1, 1, 20, 100, 4));
  bench.rounds(10);
  for (uint64_t id = 2; id <= 40; ++id) bench.add(of_tenant(id, id, 20, 30), static_cast<int64_t>(id));
  bench.rounds(20);
  CHECK_EQ(bench.held(1), 1);
  for (uint64_t id = 2; id <= 4; ++id) CHECK_EQ(bench.held(id), 1);
  CHECK_EQ(bench.preemptions(), 3);
  bench.rounds(40);
  CHECK(!bench.requests.contains(4));
  CHECK_EQ(bench.preemptions(), 3);
  bench.finish();
}

TEST(a_less_urgent_class_takes_no_slot) {
  for (const int32_t priority : {-1, 0, 1}) {
    TenantBench bench({256, 16, 4, 64, 0, 256, true}, 2);
    bench.add(of_tenant(1, 1, 20, 100, 4));
    bench.rounds(10);
    RequestSpec other = of_tenant(2, 2, 20, 1);
    other.priority = priority;
    bench.add(other, 1000);
    bench.rounds(20);
    CHECK_EQ(bench.requests.contains(2), priority > 0);
    bench.finish();
  }
}

// Four sequences hold all blocks. Another tenant needs one, then as many as its share.
TEST(a_tenant_that_holds_all_blocks_gives_some_back) {
  for (const int depth : {1, 2}) {
    for (const bool caching : {false, true}) {
      TenantBench bench({32, 16, 16, 256, 0, 256, caching}, depth);
      for (uint64_t id = 1; id <= 6; ++id) bench.add(of_tenant(1, id, 100, 100), static_cast<int64_t>(id));
      bench.rounds(12);
      const int before = bench.held(1);
      CHECK(before >= 4);
      bench.add(of_tenant(2, 10, 10, 4), 1000);
      const int rounds = bench.rounds_of(10, 200);
      CHECK(rounds >= 0 && rounds <= 2 * depth + 6);
      bench.add(of_tenant(2, 11, 100, 100), 2000);
      const int64_t preemptions = bench.preemptions();
      CHECK(bench.rounds_of(11, 115 + 4 * depth) >= 0);  // it is hardly ever held up
      CHECK(bench.preemptions() - preemptions <= 6);
      CHECK(bench.requests.empty() || bench.held(1) > 0);
      bench.finish();
    }
  }
}

// A request that is larger than its tenant's share comes in its turn, and keeps the others from nothing once it runs.
TEST(a_request_beyond_its_share_of_blocks_makes_progress) {
  TenantBench bench({16, 16, 8, 256, 0, 256, false}, 2);
  bench.add(of_tenant(1, 1, 200, 40), 1);  // 15 of 16 blocks
  bench.rounds(3);
  for (uint64_t id = 2; id <= 9; ++id) bench.add(of_tenant(2, id, 60, 20), static_cast<int64_t>(id));
  CHECK(bench.rounds_of(1, 60) >= 0);  // the first of its tenant gives nothing
  bench.add(of_tenant(1, 20, 200, 40), 5);
  CHECK(bench.rounds_of(20, 400) >= 0);
  bench.finish();
}

TEST(results_are_the_same_whoever_gives_way) {
  for (const int depth : {1, 2, 3}) {
    for (const int32_t host_blocks : {0, 60}) {
      Options options;
      options.steps_in_flight = depth;
      options.num_blocks = depth == 2 ? 24 : 100;
      options.num_host_blocks = host_blocks;
      options.latency = 600us;  // requests come faster than they end, however busy the machine is
      Engine engine(options);
      std::mt19937 rng(static_cast<unsigned>(depth));
      for (int i = 0; i < 200; ++i) {
        RequestSpec spec = random_spec(rng, options, 90, 60);
        spec.tenant = i < 40 ? 1 : rng() % 4;
        CHECK(engine.submit(spec) == SubmitResult::kAccepted);
        if (rng() % 8 == 0) engine.abort(engine.last_id());
        if (rng() % 4 == 0) engine.receive(1ms);
      }
      CHECK(engine.run());
      CHECK_EQ(engine.mismatches(), 0);
      CHECK(engine.loop->stats().num_preemptions > 0);
      CHECK(engine.settles());
    }
  }
}
