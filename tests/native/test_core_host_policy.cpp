// Choice and order of the sequences that decode on the host, for a scheduler without threads.
#include <algorithm>
#include <map>
#include <random>
#include <vector>

#include "check.h"
#include "hybrid_fixture.h"

namespace {

using namespace asyncengine;
using namespace asyncengine::testing;

// Steps of decode rows take a microsecond, however many there are.
StepCosts flat_costs() { return {{{1, 1000, 0}, {64, 1000, 0}}, {{1, 1000, 0}, {64, 1000, 0}}, {}, {}, {}}; }

SchedulerConfig small(const HybridConfig& hybrid, const StepCosts& costs = {}) {
  SchedulerConfig config{.num_blocks = 8, .max_num_seqs = 6, .max_num_batched_tokens = 64, .max_model_len = 128};
  config.num_host_blocks = 60;
  config.hybrid = hybrid;
  config.costs = costs;
  return config;
}

// Two run, in six of eight blocks, and a third waits for three.
void crowd(HybridBench& bench, RequestSpec first = make_spec(1, 40, 60), RequestSpec second = make_spec(2, 40, 60)) {
  bench.add(first, 1);
  bench.add(second, 2);
  bench.rounds(3);
  bench.add(make_spec(3, 40, 60, 1, 9), 3);
  bench.rounds(6);
}

int64_t num_moved(const SchedulerConfig& config, RequestSpec second = make_spec(2, 40, 60)) {
  HybridBench bench(config);
  crowd(bench, make_spec(1, 40, 60), second);
  return bench.stats().moved_to_host;
}

TEST(a_sequence_moves_where_that_is_predicted_to_pay) {
  HybridConfig hybrid{.lanes = 2, .layers = 2};
  CHECK_EQ(num_moved(small({})), 0);
  CHECK_EQ(num_moved(small(hybrid)), 1);  // nothing is known
  CHECK_EQ(num_moved(small(hybrid, flat_costs())), 1);
  hybrid.attend_ns = 1;  // two tokens a step beside two
  CHECK_EQ(num_moved(small(hybrid, flat_costs())), 1);
  hybrid.exchange_ns = 2000;  // in steps three times as long
  CHECK_EQ(num_moved(small(hybrid, flat_costs())), 0);
  CHECK_EQ(num_moved(small(hybrid)), 1);
  hybrid.exchange_ns = 0;
  hybrid.attend_ns = 1000;  // a token in 80 steps
  CHECK_EQ(num_moved(small(hybrid, flat_costs())), 0);
  hybrid.workers = 16;  // in five
  CHECK_EQ(num_moved(small(hybrid, flat_costs())), 1);
  hybrid.min_gain = 0.2;
  CHECK_EQ(num_moved(small(hybrid, flat_costs())), 0);
  hybrid.attend_ns = 1;
  CHECK_EQ(num_moved(small(hybrid, flat_costs())), 1);
  hybrid.host_tokens = 40;  // of one row, whose token takes five steps
  CHECK_EQ(num_moved(small(hybrid, flat_costs())), 0);
  hybrid.host_tokens = 400;
  CHECK_EQ(num_moved(small(hybrid, flat_costs())), 1);
}

TEST(a_class_with_a_target_stays_on_the_device) {
  const HybridConfig hybrid{.lanes = 2, .layers = 2};  // three steps a token, of a microsecond
  SchedulerConfig config = small(hybrid, flat_costs());
  config.targets.ns = 2500;
  CHECK_EQ(num_moved(config), 0);
  config.targets.ns = 3500;
  CHECK_EQ(num_moved(config), 1);
  config.targets = {0, {{7, 2500}}};
  RequestSpec second = make_spec(2, 40, 60);
  second.priority = 7;
  HybridBench bench(config);
  RequestSpec first = make_spec(1, 40, 60);
  crowd(bench, first, second);
  CHECK_EQ(bench.stats().moved_to_host, 1);  // the one before it
  CHECK(bench.requests.at(2)->sequences[0].state == SequenceState::kRunning);
}

// A host row takes one token at a time, which needs no mask and scores nothing.
TEST(rows_with_masks_drafts_or_scores_stay_on_the_device) {
  for (const int kind : {0, 1, 2, 3}) {
    SchedulerConfig config = small({.lanes = 2, .layers = 2});
    config.mask_words = 2;
    config.max_samples = 4 * config.max_num_seqs;
    RequestSpec second = make_spec(2, 40, 60);
    if (kind == 1) second.extras.masks = {std::make_shared<MaskChannel>(config.mask_words)};
    if (kind == 2) second.extras.tokens_per_step = 2;
    if (kind == 3) second.extras.score_from = 30;
    std::vector<int32_t> board(MaskBoard::stride(config.mask_words) * static_cast<size_t>(config.max_num_seqs));
    HybridBench bench(config);
    bench.scheduler.write_masks_to({board.data(), config.mask_words});
    crowd(bench, make_spec(1, 40, 60), second);
    CHECK_EQ(bench.stats().moved_to_host, 1);
    const auto state = [&](uint64_t id) { return bench.requests.at(id)->sequences[0].state; };
    CHECK(state(2) == (kind == 0 ? SequenceState::kHosted : SequenceState::kRunning));
    CHECK(state(1) == (kind == 0 ? SequenceState::kRunning : SequenceState::kHosted));
  }
}

TEST(a_sequence_that_ends_soon_stays_where_it_is) {
  const SchedulerConfig config = small({.lanes = 2, .layers = 2});
  HybridBench bench(config);
  crowd(bench, make_spec(1, 40, 10), make_spec(2, 40, 10));
  CHECK_EQ(bench.stats().moved_to_host, 0);
}

TEST(only_so_many_are_on_the_host) {
  for (const int32_t most : {1, 2}) {
    HybridBench bench(small({.lanes = 2, .layers = 2, .max_rows = most}));
    crowd(bench);
    for (uint64_t id = 4; id < 6; ++id) bench.add(make_spec(id, 40, 60, 1, static_cast<int32_t>(id)), static_cast<int64_t>(id));
    bench.rounds(12);
    CHECK_EQ(bench.stats().num_host_rows, most);
  }
}

// Two stages of one and a half steps are three, and a quarter more; where attention takes a step or longer, five or more.
TEST(the_longer_attention_takes_the_more_are_on_the_host) {
  const auto most_hosted = [](double attend_ns) {
    HybridConfig hybrid{.lanes = 1, .layers = 1, .workers = 1, .attend_ns = attend_ns, .min_gain = -1};
    SchedulerConfig config = small(hybrid, flat_costs());
    config.max_num_seqs = 16;
    config.num_host_blocks = 200;
    HybridBench bench(config);
    for (uint64_t id = 1; id <= 14; ++id) bench.add(make_spec(id, 40, 60, 1, static_cast<int32_t>(id)), static_cast<int64_t>(id));
    int64_t most = 0;
    for (int i = 0; i < 60; ++i) {
      bench.round();
      most = std::max(most, bench.stats().num_host_rows);
    }
    return most;
  };
  CHECK_EQ(most_hosted(0.001), 4);
  CHECK_EQ(most_hosted(20), 7);
}

TEST(steps_beside_attention_on_the_host_teach_nothing_of_others) {
  HybridBench bench(small({.lanes = 2, .layers = 2}, flat_costs()));
  StepPlan plan;
  plan.predicted_ns = 1000;
  bench.scheduler.took(plan, 1100);
  const double before = bench.scheduler.costs().factors().decode;
  CHECK(before > 1);
  crowd(bench);
  CHECK_EQ(bench.stats().num_host_rows, 1);
  bench.scheduler.took(plan, 2000);
  CHECK(bench.scheduler.costs().factors().decode == before);
}

// The host has room for all to which a moved sequence may grow: with less it would have to leave.
TEST(the_host_has_room_for_all_that_moves_there) {
  SchedulerConfig config = small({.lanes = 2, .layers = 2});
  config.num_host_blocks = 6;  // seven are promised
  CHECK_EQ(num_moved(config), 0);
  config.num_host_blocks = 7;
  CHECK_EQ(num_moved(config), 1);
}

TEST(a_host_row_goes_back_when_there_is_room) {
  HybridBench bench(small({.lanes = 2, .layers = 2}), 2);
  crowd(bench);
  CHECK_EQ(bench.stats().num_host_rows, 1);
  bench.rounds(20);
  CHECK_EQ(bench.stats().moved_from_host, 0);
  bench.abort(*bench.requests.at(1));
  bench.abort(*bench.requests.at(3));
  bench.rounds(10);
  CHECK_EQ(bench.stats().moved_from_host, 1);
  CHECK_EQ(bench.stats().num_host_rows, 0);
  CHECK(bench.requests.at(2)->sequences[0].state == SequenceState::kRunning);
  CHECK(bench.stats().host_row_tokens > 0);
  bench.rounds(80);
  bench.collect();
  CHECK(bench.requests.empty());
  CHECK(bench.scheduler.quiescent());
}

TEST(a_row_that_hangs_keeps_nobody_else_on_the_host) {
  HybridBench bench(small({.lanes = 2, .layers = 2}));
  crowd(bench);
  bench.add(make_spec(4, 40, 60, 1, 3), 4);
  bench.rounds(6);
  CHECK_EQ(bench.stats().num_host_rows, 2);
  bench.attention.hangs = bench.requests.at(2)->sequences[0].slot;
  bench.rounds(4);
  bench.round(int64_t{1} << 60);
  CHECK(bench.requests.at(2)->sequences[0].state == SequenceState::kFinished);
  CHECK_EQ(bench.stats().failed_host_rows, 1);
  for (const uint64_t id : {1, 4}) bench.abort(*bench.requests.at(id));
  bench.rounds(10);
  CHECK_EQ(bench.stats().moved_from_host, 1);
  CHECK(bench.requests.at(3)->sequences[0].state == SequenceState::kRunning);
  CHECK_EQ(bench.stats().num_host_rows, 1);
  CHECK(!bench.scheduler.moves_blocks());
  CHECK(!bench.scheduler.idle());
  bench.rounds(60);
  bench.attention.hangs = -1;
  bench.rounds(1);
  bench.collect();
  CHECK(bench.requests.empty());
  CHECK(bench.scheduler.quiescent());
}

// A request fails while no step is committed: its sequences that ran are gone before the next step is planned.
TEST(nobody_runs_twice_in_the_slot_of_one_that_failed) {
  HybridBench bench(small({.lanes = 2, .layers = 2, .max_rows = 1}));
  crowd(bench, make_spec(1, 40, 60), make_spec(2, 40, 60, 2, 20));
  const auto& siblings = bench.requests.at(2)->sequences;
  CHECK(siblings[0].state == SequenceState::kRunning);
  CHECK(siblings[1].state == SequenceState::kHosted);
  bench.attention.hangs = siblings[1].slot;
  bench.rounds(4);
  bench.scheduler.move_blocks(bench.outbox, int64_t{1} << 60, int64_t{1} << 60);
  CHECK(siblings[0].state == SequenceState::kReleased);
  bench.add(make_spec(4, 10, 20, 1, 30), 4);
  const StepPlan* plan = bench.launch();
  CHECK(plan != nullptr);
  std::vector<int32_t> slots;
  for (const PlanRow& row : plan->rows) slots.push_back(row.slot);
  std::ranges::sort(slots);
  CHECK(std::ranges::adjacent_find(slots) == slots.end());
  CHECK_EQ(slots.size(), size_t{3});
  bench.pack();
  bench.commit(2);
  bench.attention.hangs = -1;
  bench.rounds(150);
  bench.collect();
  CHECK(bench.requests.empty());
  CHECK(bench.scheduler.quiescent());
}

// Rather than to begin again and again what comes to nothing. After a pause it is tried once more.
TEST(nobody_drains_for_a_host_tier_that_pauses) {
  HybridBench bench(small({.lanes = 2, .layers = 2}));
  bench.mover.refuses = true;
  crowd(bench);
  bench.rounds(30);
  CHECK(bench.stats().failed_transfers >= 8);
  const int64_t failed = bench.stats().failed_transfers;
  for (int i = 0; i < 10; ++i) {
    bench.round();
    CHECK_EQ(bench.stats().num_host_rows, 0);
  }
  CHECK_EQ(bench.stats().failed_transfers, failed);
  const int64_t later = 1 + Backoff::kFirstPauseNs;
  for (int i = 0; i < 10; ++i) bench.round(later);
  CHECK_EQ(bench.stats().failed_transfers, failed + 1);
  bench.mover.refuses = false;
  for (int i = 0; i < 10; ++i) bench.round(later + 2 * Backoff::kFirstPauseNs);
  CHECK_EQ(bench.stats().num_host_rows, 1);
}

// More of them than lanes can serve: they take turns.
TEST(every_host_row_gets_its_turn) {
  SchedulerConfig config = small({.lanes = 1, .layers = 1, .max_rows = 5});
  config.max_num_seqs = 8;
  config.max_model_len = 256;
  config.num_host_blocks = 200;
  HybridBench bench(config);
  const auto spec = [](uint64_t id) { return make_spec(id, 40, 200, 1, static_cast<int32_t>(11 * id)); };
  crowd(bench, spec(1), spec(2));
  for (uint64_t id = 4; id < 9; ++id) bench.add(spec(id), static_cast<int64_t>(id));
  bench.rounds(40);
  CHECK_EQ(bench.stats().num_host_rows, 5);
  std::map<const Slot*, int32_t> before;
  for (const HostRowView& view : bench.scheduler.host_rows()) before[view.slot] = view.slot->num_tokens();
  bench.rounds(60);  // as many tokens, of five
  for (const HostRowView& view : bench.scheduler.host_rows()) CHECK(view.slot->num_tokens() >= before[view.slot] + 8);
}

// A block that is copied out because it is old is found by a sequence, which moves out before that copy is over.
TEST(two_copies_of_a_block_may_be_under_way) {
  BlockManager blocks(3, 16, true, 4);
  DoneMover mover(4);
  HostTier tier({3, 3}, blocks, mover);
  const auto ended = [](Sequence&) {};
  std::vector<int32_t> hosts;
  const auto stored = [&](Sequence&, std::span<const int32_t> taken) { hosts.assign(taken.begin(), taken.end()); };
  const std::vector<int32_t> tokens(16, 3);
  const Chain root{5, true};
  const int32_t block = blocks.allocate();
  blocks.publish(block, root, tokens.data(), blocks.prefetch(block, root, tokens.data()));
  blocks.release(block);
  mover.slow = 0;
  tier.advance(1, ended, stored);
  CHECK_EQ(tier.blocks_coming(), 1);
  blocks.retain(block);
  Sequence sequence;
  CHECK(tier.store(sequence, std::span(&block, 1)));
  for (int i = 0; i < 3; ++i) tier.advance(1, ended, stored);
  CHECK_EQ(hosts.size(), size_t{1});
  mover.slow = -1;
  for (int i = 0; i < 3; ++i) tier.advance(1, ended, stored);
  CHECK(blocks.consistent());
  CHECK_EQ(blocks.num_host_cached(), 1);
  CHECK_EQ(blocks.host_copy_of(block), hosts.at(0));
  blocks.release(block);
  blocks.drop_host_block(hosts.at(0));
  CHECK(blocks.consistent());
  CHECK_EQ(blocks.num_host_pinned(), 0);
}

// Device rows with records fill every step's room for them.
TEST(a_host_row_with_records_gets_room_for_them) {
  SchedulerConfig config = small({.lanes = 2, .layers = 2});
  config.max_result_words = 4;
  HybridBench bench(config);
  const auto with_records = [](uint64_t id) {
    RequestSpec spec = make_spec(id, 40, 60, 1, static_cast<int32_t>(20 * id));
    spec.extras.needs = kNeedLogprobs;
    spec.extras.result_words = 4;
    return spec;
  };
  crowd(bench, with_records(1), with_records(2));
  CHECK_EQ(bench.stats().num_host_rows, 1);
  int64_t before = bench.stats().host_row_tokens;
  for (int i = 0; i < 4; ++i) {  // a token takes three steps, or one more for want of room
    bench.rounds(4);
    CHECK(bench.stats().host_row_tokens > before);
    before = bench.stats().host_row_tokens;
  }
}

// If nobody may decode on the host, steps are the same as without lanes, to the byte.
TEST(lanes_that_nobody_takes_change_nothing) {
  HybridConfig hybrid{.lanes = 3, .layers = 2, .attend_ns = 1, .exchange_ns = 1e9};
  SchedulerConfig with = small(hybrid, flat_costs()), without = small({}, flat_costs());
  HybridBench a(with, 2), b(without, 2);
  std::mt19937 rng(5);
  int launched = 0;
  for (uint64_t id = 1; id <= 300; ++id) {
    const RequestSpec spec = make_spec(id, 1 + static_cast<int32_t>(rng() % 60), 1 + static_cast<int32_t>(rng() % 40),
                                       1 + static_cast<int32_t>(rng() % 2), static_cast<int32_t>(rng() % 3));
    a.add(spec, static_cast<int64_t>(id));
    b.add(spec, static_cast<int64_t>(id));
    for (int i = 0; i < 8; ++i) {
      a.scheduler.move_blocks(a.outbox, 1, 1);
      b.scheduler.move_blocks(b.outbox, 1, 1);
      const bool planned = a.launch() != nullptr;
      CHECK_EQ(planned, b.launch() != nullptr);
      if (planned) {
        const size_t bytes = a.pack();
        CHECK_EQ(bytes, b.pack());
        CHECK(std::equal(a.staging.begin(), a.staging.begin() + static_cast<ptrdiff_t>(bytes), b.staging.begin()));
        ++launched;
      }
      if (i % 2 == 1) {
        a.commit(2);
        b.commit(2);
        a.collect();
        b.collect();
      }
    }
  }
  CHECK(launched > 1000);
  CHECK(a.stats().num_preemptions > 0);
  CHECK_EQ(a.attention.posted, 0);
}

}  // namespace
