// States of sequences: the pool of snapshots against a plain model, and a model that lives of its state alone.
#include <algorithm>
#include <cstring>
#include <map>
#include <random>
#include <vector>

#include "check.h"
#include "core/state_pool.h"
#include "engine_fixture.h"
#include "scheduler_fixture.h"
#include "step_loop/callback_executor.h"

namespace {

using namespace asyncengine;
using namespace asyncengine::testing;

// A pool of snapshots as a plain map and a plain queue.
struct PlainPool {
  struct Snapshot {
    uint64_t chain = 0, step = 0;
    int32_t pins = 0;
  };
  std::map<int32_t, Snapshot> snapshots;
  std::vector<int32_t> queue;  // not pinned: free ones first, then least recently used

  int32_t find(uint64_t chain) const {
    for (const auto& [state, s] : snapshots) {
      if (s.chain == chain) return state;
    }
    return -1;
  }
  void leave_queue(int32_t state) { std::erase(queue, state); }
  void enter_queue(int32_t state) { queue.insert(snapshots.at(state).chain != 0 ? queue.end() : queue.begin(), state); }
};

void walk(int32_t num_snapshots, unsigned seed) {
  constexpr int32_t kSlots = 3;
  StatePool pool(kSlots, kSlots + num_snapshots);
  PlainPool plain;
  for (int32_t i = num_snapshots; i-- > 0;) {
    plain.snapshots[kSlots + i];
    plain.enter_queue(kSlots + i);
  }
  std::mt19937 rng(seed);
  const auto pick = [&](uint64_t below) { return rng() % below; };
  std::vector<int32_t> pinned;  // one entry for each pin
  uint64_t step = 1;
  for (int i = 0; i < 20'000; ++i) {
    const uint64_t chain = 1 + pick(40);
    switch (pick(8)) {
      case 0:
      case 1: {
        const int32_t state = pool.take(step);
        const bool none = plain.queue.empty() || plain.snapshots.at(plain.queue.front()).step == step;
        CHECK_EQ(state, none ? -1 : plain.queue.front());
        if (none) break;
        plain.leave_queue(state);
        plain.snapshots.at(state).chain = 0;
        plain.snapshots.at(state).pins = 1;
        pinned.push_back(state);
        break;
      }
      case 2:
        if (pinned.empty()) break;
        pinned.push_back(pinned[pick(pinned.size())]);
        pool.pin(pinned.back());
        ++plain.snapshots.at(pinned.back()).pins;
        break;
      case 3:
        if (pinned.empty() || plain.snapshots.at(pinned.back()).chain != 0) break;
        pool.enter(pinned.back(), chain);
        if (plain.find(chain) < 0) plain.snapshots.at(pinned.back()).chain = chain;
        break;
      case 4: {
        if (pinned.empty()) break;
        std::swap(pinned[pick(pinned.size())], pinned.back());
        const int32_t state = pinned.back();
        pinned.pop_back();
        pool.unpin(state);
        if (--plain.snapshots.at(state).pins == 0) plain.enter_queue(state);
        break;
      }
      case 5: {
        pool.forget(chain);
        const int32_t state = plain.find(chain);
        if (state < 0) break;
        plain.snapshots.at(state).chain = 0;
        if (plain.snapshots.at(state).pins > 0) break;
        plain.leave_queue(state);
        plain.enter_queue(state);
        break;
      }
      case 6: {
        const int32_t state = plain.find(chain);
        if (state < 0) break;
        pool.use(state, step);
        plain.snapshots.at(state).step = step;
        if (plain.snapshots.at(state).pins > 0) break;
        plain.leave_queue(state);
        plain.enter_queue(state);
        break;
      }
      default: ++step;
    }
    CHECK_EQ(pool.find(chain), plain.find(chain));
    CHECK_EQ(pool.num_pinned(), std::ranges::count_if(plain.snapshots, [](const auto& s) { return s.second.pins > 0; }));
    CHECK_EQ(pool.num_cached(), std::ranges::count_if(plain.snapshots, [](const auto& s) { return s.second.chain != 0; }));
    CHECK(pool.consistent());
  }
}

// Its state is all tokens so far; it keeps nothing else. A state that is not what it must be fails the test.
struct StateModel {
  explicit StateModel(const Options& options, int32_t num_states) : words(static_cast<size_t>(options.max_model_len) + 1) {
    config.vocab_size = options.vocab_size;
    states.assign(words * static_cast<size_t>(num_states), -1);  // a count that no sequence has
  }
  void forward(const StepBatch& batch, int32_t* tokens) {
    size_t sampled = 0;
    for (size_t r = 0; r < static_cast<size_t>(batch.num_rows); ++r) {
      int32_t* state = states.data() + words * static_cast<size_t>(batch.slots[r]);
      CHECK_EQ(state[0], batch.context_len[r]);
      for (int32_t t = batch.query_start[r]; t < batch.query_start[r + 1]; ++t) {
        state[++state[0]] = static_cast<int32_t>(batch.input_ids[static_cast<size_t>(t)]);
      }
      const int32_t last = batch.query_start[r + 1] - 1;
      if (sampled == batch.sample_index.size() || batch.sample_index[sampled] != last) continue;
      const std::span all(state + 1, static_cast<size_t>(state[0]));
      tokens[sampled] = SimulatedModel::next_token(config, all, *batch.samples[sampled].state);
      ++sampled;
    }
  }
  size_t words;
  SimulatedModelConfig config;
  std::vector<int32_t> states;
};

void run_loop(const Options& options, int32_t num_snapshots, unsigned seed) {
  const int32_t num_states = options.max_num_seqs + num_snapshots;
  StateModel model(options, num_states);
  StepLoopConfig config = options.loop();
  config.scheduler.num_state_slots = num_states;
  config.scheduler.state_snapshot_tokens = 2 * options.block_size;
  config.scheduler.answer_snapshot_tokens = options.block_size;
  const CallbackExecutor::BlockRegion region{reinterpret_cast<std::byte*>(model.states.data()), model.words * sizeof(int32_t)};
  auto executor = std::make_unique<CallbackExecutor>(
      StepLoop::limits(config), options.max_model_len / options.block_size + 1, options.block_size, options.steps_in_flight,
      std::vector<CallbackExecutor::BlockRegion>{}, ~Needs{0},
      [&](const StepBatch& batch, int32_t* tokens) { model.forward(batch, tokens); }, CallbackExecutor::HeldUp{}, 0,
      std::vector{region});
  StepLoop loop(config, std::move(executor));
  loop.start();
  std::mt19937 rng(seed);
  RequestSpec masked = random_spec(rng, options, 100, 40);
  masked.id = 1000;
  masked.extras.needs = kNeedMask;
  CHECK(loop.submit(masked) == SubmitResult::kUnserved);
  check_random_requests(loop, model.config, options, rng, 120, 100, 40);
  CHECK(loop.stop(5s));
}

}  // namespace

TEST(state_pool_agrees_with_a_plain_model) {
  for (const int32_t num_snapshots : {0, 1, 2, 7, 20}) walk(num_snapshots, static_cast<unsigned>(num_snapshots));
}

TEST(a_model_of_states_alone_generates_what_it_must) {
  for (const int depth : {1, 2, 3}) {
    Options options;
    options.steps_in_flight = depth;
    options.num_blocks = 20;
    run_loop(options, 5, static_cast<unsigned>(depth));
  }
  Options options;
  options.prefill_chunk_size = 5;
  run_loop(options, 0, 7);
  options.prefix_caching = false;
  run_loop(options, 3, 8);
}

TEST(states_on_a_device_are_copied_before_the_steps_that_read_them) {
  for (const StagingMode staging : {StagingMode::kPageable, StagingMode::kPinned, StagingMode::kMapped, StagingMode::kAhead}) {
    for (const int depth : {1, 2, 3}) {
      Options options;
      options.staging = staging;
      options.steps_in_flight = depth;
      options.num_blocks = 20;  // so that sequences are preempted
      options.num_state_slots = options.max_num_seqs + 5;
      Engine engine(options);
      std::mt19937 rng(static_cast<unsigned>(depth));
      for (int i = 0; i < 40; ++i) CHECK(engine.submit(random_spec(rng, options, 60, 30)) == SubmitResult::kAccepted);
      CHECK(engine.run());
      CHECK_EQ(engine.mismatches(), 0);
      CHECK(engine.loop->stats().cached_snapshots > 0);
      CHECK(engine.loop->stats().num_preemptions > 0);
      CHECK(engine.settles());
      CHECK(engine.loop->stop(5s));
    }
  }
}

TEST(copies_of_states_are_packed_behind_everything_else) {
  SchedulerConfig config;
  config.num_blocks = 20;
  config.max_num_seqs = 2;
  config.max_num_batched_tokens = 64;
  config.max_model_len = 128;
  config.num_state_slots = 4;
  config.max_update_words = 8;
  Bench bench(config, 1);
  RequestSpec spec;
  spec.id = 1;
  spec.prompt.assign(40, 3);
  spec.max_tokens = 4;
  spec.extras.entries = {entry_header(kBias, 2), 5, 6};
  bench.add(spec);
  const auto copies = [&] {
    bench.pack();
    const StepInputView input(bench.staging.data());
    std::vector<std::pair<int32_t, int32_t>> all;
    for (const BlockCopy& copy : input.state_copies()) all.emplace_back(copy.source, copy.target);
    return all;
  };
  using Copies = std::vector<std::pair<int32_t, int32_t>>;
  CHECK(bench.launch() != nullptr);  // up to the last whole block before the last token
  CHECK(copies() == Copies({{-1, 0}}));
  CHECK_EQ(StepInputView(bench.staging.data()).entries(StepInputView(bench.staging.data()).slot_updates()[0]).size(), size_t{3});
  bench.commit(1);
  CHECK(bench.launch() != nullptr);  // the rest, before which the state is kept
  CHECK(copies() == Copies({{0, 2}}));
  CHECK_EQ(bench.scheduler.stats().pinned_snapshots, 1);
  bench.commit(1);
  CHECK_EQ(bench.scheduler.stats().pinned_snapshots, 0);
  CHECK_EQ(bench.scheduler.stats().cached_snapshots, 1);
  spec.id = 2;
  bench.add(spec);
  CHECK(bench.launch() != nullptr);
  CHECK(copies() == Copies({{2, 1}}));
  bench.commit(1);
}
