// Groups of layers with a window beside layers that see all: every token that a row sees is there, in the blocks of its group.
#include <algorithm>
#include <map>
#include <random>
#include <vector>

#include "check.h"
#include "scheduler_fixture.h"
#include "step_loop/slot_state.h"

namespace {

using namespace asyncengine;
using namespace asyncengine::testing;

constexpr int32_t kBlock = 16, kToken = 7;

SchedulerConfig config_of(int32_t num_blocks, int32_t window, int32_t groups) {
  SchedulerConfig config;
  config.num_blocks = num_blocks;
  config.max_num_seqs = 4;
  config.max_num_batched_tokens = 24;
  config.max_model_len = 240;
  config.window_groups = groups;
  config.group_window = window;
  return config;
}

// A bench whose executor writes into every block what its tokens and all before them say, and reads it back.
class Reader {
 public:
  Reader(const SchedulerConfig& config, int steps_in_flight)
      : bench(config, steps_in_flight),
        config_(config),
        steps_(steps_in_flight),
        slots_(config.limits(), config.max_blocks_per_sequence(), config.block_size),
        kv_(static_cast<size_t>(config.num_blocks * config.block_size), 0) {}

  void add(const RequestSpec& spec) {
    prompts_[spec.id] = spec.prompt;
    bench.add(spec, static_cast<int64_t>(spec.id));
  }
  bool launch() {
    if (in_flight_ == steps_) return false;
    const StepPlan* plan = bench.launch();
    if (plan == nullptr) return false;
    ++in_flight_;
    copies += plan->copies.size();
    bench.pack();
    const StepInputView input(bench.staging.data());
    CHECK_EQ(input.rows().size(), plan->rows.size());
    for (const BlockCopy& copy : input.copies()) {
      std::copy_n(kv_.begin() + copy.source * kBlock, kBlock, kv_.begin() + copy.target * kBlock);
    }
    const StepBatch& batch = slots_.ingest(input);
    CHECK_EQ(batch.num_groups(), 1 + config_.window_groups);
    for (size_t r = 0; r < plan->rows.size(); ++r) write(*plan, batch, r);
    for (size_t r = 0; r < plan->rows.size(); ++r) read(*plan, batch, r);
    CHECK(bench.scheduler.blocks().consistent());
    return true;
  }
  void commit() {
    in_flight_ -= bench.commit(kToken);
    bench.collect();
    CHECK(bench.scheduler.blocks().consistent());
  }
  void finish() {
    for (int i = 0; i < 3000 && !bench.requests.empty(); ++i) {
      while (launch()) {
      }
      commit();
    }
    CHECK(bench.requests.empty());
    CHECK(bench.scheduler.quiescent());
    CHECK_EQ(bench.scheduler.blocks().num_free(), config_.num_blocks);
  }
  int32_t held() const { return config_.num_blocks - const_cast<Bench&>(bench).scheduler.blocks().num_free(); }

  Bench bench;
  size_t copies = 0;

 private:
  int64_t content(const Sequence& sequence, int32_t position, int32_t group) const {
    const std::vector<int32_t>& prompt = prompts_.at(sequence.request->id);
    int64_t hash = static_cast<int64_t>(sequence.request->salt) + 1000 * group + 1;
    for (int32_t p = 0; p <= position; ++p) {
      const int32_t token = p < static_cast<int32_t>(prompt.size()) ? prompt[static_cast<size_t>(p)] : kToken;
      hash = (hash * 1000003 + token) % 2147483647;
    }
    return hash;
  }
  void write(const StepPlan& plan, const StepBatch& batch, size_t r) {
    for (int32_t token = batch.query_start[r]; token < batch.query_start[r + 1]; ++token) {
      for (int32_t group = 0; group < batch.num_groups(); ++group) {
        const auto position = static_cast<int32_t>(batch.positions[static_cast<size_t>(token)]);
        kv_.at(static_cast<size_t>(batch.slots_of(group)[token])) = content(*plan.rows[r].sequence, position, group);
      }
    }
  }
  void read(const StepPlan& plan, const StepBatch& batch, size_t r) {
    const int32_t begin = batch.context_len[r], end = begin + batch.query_start[r + 1] - batch.query_start[r];
    int wrong = 0;
    for (int32_t group = 0; group < batch.num_groups(); ++group) {
      const int32_t first = group == 0 ? 0 : std::max(0, begin - config_.group_window + 1);
      for (int32_t p = first; p < end; ++p) {
        const int32_t block = batch.tables_of(group)[r][p / kBlock];
        wrong += kv_.at(static_cast<size_t>(block * kBlock + p % kBlock)) != content(*plan.rows[r].sequence, p, group);
      }
    }
    CHECK_EQ(wrong, 0);
  }

  SchedulerConfig config_;
  int steps_, in_flight_ = 0;
  SlotState slots_;
  std::vector<int64_t> kv_;  // by slot
  std::map<uint64_t, std::vector<int32_t>> prompts_;
};

void walk(const SchedulerConfig& config, int steps_in_flight, unsigned seed) {
  Reader reader(config, steps_in_flight);
  std::mt19937 rng(seed);
  uint64_t id = 0;
  for (int i = 0; i < 1500; ++i) {
    switch (rng() % 6) {
      case 0:
        if (reader.bench.requests.size() < 8) {
          const auto prompt = static_cast<int32_t>(1 + rng() % 150), first = static_cast<int32_t>(rng() % 3);
          const auto most = static_cast<int32_t>(1 + rng() % 60);
          reader.add(make_spec(++id, prompt, most, rng() % 3 == 0 ? 3 : 1, first));
        }
        break;
      case 1:
        if (!reader.bench.requests.empty() && rng() % 6 == 0) {
          auto chosen = reader.bench.requests.begin();
          std::advance(chosen, rng() % reader.bench.requests.size());
          reader.bench.abort(*chosen->second, rng() % 2 == 0 ? 0 : -1);
        }
        break;
      case 2:
      case 3: reader.launch(); break;
      default: reader.commit();
    }
  }
  reader.finish();
  CHECK(reader.copies > 0);
  CHECK(reader.bench.scheduler.stats().num_preemptions > 0 || config.num_blocks > 60);
  CHECK(reader.bench.scheduler.stats().prefix_cache_hits > 0 || !config.prefix_caching);
}

}  // namespace

TEST(every_token_that_a_row_of_window_groups_sees_is_in_its_blocks) {
  for (const int32_t window : check::sample_of<std::vector<int32_t>>({1, 16, 20, 33}, {1, 20})) {
    for (const int32_t groups : {1, 3}) {
      SchedulerConfig config = config_of(0, window, groups);
      config.num_blocks = config.blocks_for_sequence(config.max_model_len) + 4;
      walk(config, 2, 11);
      config.prefix_caching = false;
      walk(config, 3, 12);
      config.prefix_caching = true;
      config.num_blocks = 120;
      walk(config, 1, 13);
    }
  }
}

TEST(a_long_prompt_gives_back_the_blocks_of_windows_while_it_is_computed) {
  for (const bool caching : {false, true}) {
    SchedulerConfig config = config_of(60, 32, 2);
    config.prefix_caching = caching;
    Reader reader(config, 1);
    reader.add(make_spec(1, 230, 2));
    int32_t most = 0;
    for (int i = 0; i < 9; ++i) {
      CHECK(reader.launch());
      reader.commit();
      most = std::max(most, reader.held() - config.blocks_for(24 * (i + 1)));
    }
    // Of both groups: a window, the chunk behind it and the one before.
    CHECK(most <= 2 * (32 / kBlock + 2 * 24 / kBlock + 2));
    reader.finish();
  }
}

TEST(a_prefix_is_as_long_as_all_groups_have_it) {
  SchedulerConfig config = config_of(60, 32, 2);
  Reader reader(config, 1);
  reader.add(make_spec(1, 100, 1));
  reader.finish();
  reader.add(make_spec(2, 100, 1));
  reader.finish();
  CHECK_EQ(reader.bench.scheduler.stats().prefix_cache_hits, int64_t{96});
  BlockManager& blocks = reader.bench.scheduler.blocks();
  std::vector<int32_t> chain(6);
  std::vector<int32_t> tokens = make_spec(3, 100, 1).prompt;
  const auto tokens_at = [&](int32_t position) { return tokens.data() + position; };
  CHECK_EQ(blocks.match_prefix(tokens_at, 6, 0, chain.data()), 6);
  const auto first_seen = [&](int32_t n) { return config.unseen_in_groups(n * kBlock, n * kBlock); };
  CHECK_EQ(blocks.match_windows(chain.data(), 6, first_seen), 6);
  CHECK_EQ(blocks.match_windows(chain.data(), 3, first_seen), 3);
}

TEST(companions_go_with_the_block_through_which_they_are_found) {
  BlockManager blocks(4, kBlock, true, 0, 0, 1);
  const std::vector<int32_t> tokens(kBlock, 3);
  const Chain root{0, /*root=*/true};
  const int32_t full = blocks.allocate(), window = blocks.allocate();
  blocks.publish(full, root, tokens.data(), blocks.prefetch(full, root, tokens.data()));
  blocks.accompany(full, 0, window);
  CHECK(!blocks.writable(window));
  blocks.release(full);
  blocks.release(window);
  CHECK_EQ(blocks.num_cached(), 2);
  blocks.allocate();
  blocks.allocate();
  CHECK_EQ(blocks.companion(full, 0), window);
  CHECK_EQ(blocks.allocate(), full);  // released first: its companion is worthless now
  CHECK_EQ(blocks.companion(full, 0), -1);
  CHECK_EQ(blocks.num_cached(), 0);
  CHECK(blocks.consistent());
  CHECK_EQ(blocks.allocate(), window);
}
