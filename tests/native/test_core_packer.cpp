// StepPlan -> bytes -> StepInputView: what an executor reads is what the scheduler planned.
#include <algorithm>
#include <random>

#include "check.h"
#include "scheduler_fixture.h"

namespace {

using namespace asyncengine;
using namespace asyncengine::testing;

// State that an executor keeps per slot, updated from the packed bytes only.
struct Device {
  std::map<int32_t, std::vector<int32_t>> tables;
  std::map<int32_t, SlotUpdate> sampling;

  void ingest(const StepInputView& input) {
    for (const SlotUpdate& update : input.slot_updates()) sampling[update.slot] = update;
    for (const StepInputRow& row : input.rows()) {
      if (row.delta_count == 0) continue;
      auto& table = tables[row.slot];
      CHECK(row.delta_first <= static_cast<int32_t>(table.size()));  // no gaps
      table.resize(static_cast<size_t>(row.delta_first));
      const auto blocks = input.delta_blocks(row);
      table.insert(table.end(), blocks.begin(), blocks.end());
    }
  }
};

void check_row(const StepInputRow& row, const PlanRow& planned, const StepInputView& input, const Device& device,
               BlockTables& tables) {
  const Sequence& sequence = *planned.sequence;
  CHECK_EQ(row.slot, planned.slot);
  CHECK_EQ(row.query_len, planned.query_len);
  CHECK_EQ(row.context_len, planned.context_len);
  CHECK_EQ(row.num_samples, planned.num_samples);
  CHECK_EQ(row.num_appends, planned.num_appends);
  CHECK_EQ((row.flags & kRowFromDevice) != 0, planned.from_device);
  if (!planned.from_device) {
    const auto ids = input.prompt_ids().subspan(static_cast<size_t>(row.prompt_start), static_cast<size_t>(row.query_len));
    std::vector<int32_t> tokens(ids.size());
    sequence.tokens.copy(row.context_len, row.query_len, tokens.data());
    CHECK(std::ranges::equal(ids, tokens));
  }
  // A table may be longer on the device: entries of the slot's last sequence, which this one never reads.
  const auto blocks = tables.blocks(row.slot);
  const auto& table = device.tables.at(row.slot);
  CHECK(table.size() >= blocks.size() && std::equal(blocks.begin(), blocks.end(), table.begin()));
  const SlotUpdate& sampling = device.sampling.at(row.slot);
  CHECK_EQ(sampling.temperature, sequence.sampling.temperature);
  CHECK_EQ(sampling.top_p, sequence.sampling.top_p);
  CHECK_EQ(sampling.min_p, sequence.sampling.min_p);
  CHECK_EQ(sampling.top_k, sequence.sampling.top_k);
  CHECK_EQ(uint64_t{sampling.seed_high} << 32 | sampling.seed_low, sequence.sampling.seed);
}

void check_step(Bench& bench, const StepPlan& plan, Device& device) {
  const StepLimits limits = bench.scheduler.limits();
  CHECK(plan.num_delta_blocks <= limits.max_delta_blocks);
  const size_t bytes = bench.pack();
  CHECK(bytes <= limits.max_bytes());
  const StepInputView input(bench.staging.data());
  const StepInputHeader& header = input.header();
  CHECK_EQ(header.magic, StepInputView::kMagic);
  CHECK_EQ(size_t{header.total_words} * 4, bytes);
  CHECK_EQ(header.step, plan.step);
  CHECK_EQ(header.num_decode_rows, plan.num_decode_rows);
  CHECK_EQ(input.rows().size(), plan.rows.size());
  CHECK_EQ(input.copies().size(), plan.copies.size());
  CHECK(reinterpret_cast<const std::byte*>(input.delta_blocks().data() + input.delta_blocks().size()) ==
        bench.staging.data() + bytes);
  for (size_t i = 0; i < plan.copies.size(); ++i) {
    CHECK(input.copies()[i].source == plan.copies[i].source && input.copies()[i].target == plan.copies[i].target);
  }
  device.ingest(input);
  int32_t tokens = 0, samples = 0, prompt_ids = 0, max_context = 0;
  for (size_t i = 0; i < plan.rows.size(); ++i) {
    const StepInputRow& row = input.rows()[i];
    CHECK_EQ(row.query_start, tokens);
    CHECK_EQ(row.sample_row, plan.rows[i].num_samples > 0 ? samples : -1);
    if (!plan.rows[i].from_device) CHECK_EQ(row.prompt_start, prompt_ids);
    check_row(row, plan.rows[i], input, device, bench.scheduler.tables());
    CHECK_EQ(bench.scheduler.tables().dirty_begin(row.slot), bench.scheduler.tables().length(row.slot));
    tokens += row.query_len;
    samples += plan.rows[i].num_samples;
    max_context = std::max(max_context, plan.rows[i].context_len);
    prompt_ids += plan.rows[i].from_device ? 0 : row.query_len;
  }
  CHECK_EQ(header.num_tokens, tokens);
  CHECK_EQ(header.num_samples, samples);
  CHECK_EQ(header.num_prompt_ids, prompt_ids);
  CHECK_EQ(header.max_context, max_context);
}

void random_walk(const SchedulerConfig& config, int steps_in_flight, unsigned seed) {
  std::mt19937 rng(seed);
  const auto pick = [&](int32_t low, int32_t high) { return std::uniform_int_distribution<int32_t>(low, high)(rng); };
  Bench bench(config, steps_in_flight);
  Device device;
  uint64_t id = 0;
  int launched = 0;
  for (int i = 0; i < 3000; ++i) {
    if (bench.requests.size() < 20 && pick(0, 3) == 0) {
      const int32_t prompt = pick(1, 80);
      bench.add(make_spec(++id, prompt, pick(1, 30), pick(0, 2) == 0 ? pick(2, 4) : 1, pick(0, 1)), pick(0, 5));
    }
    if (!bench.requests.empty() && pick(0, 40) == 0) bench.abort(*bench.requests.begin()->second);
    if (const StepPlan* plan = bench.launch()) {
      check_step(bench, *plan, device);
      ++launched;
    }
    if (pick(0, 1)) bench.commit(pick(0, 49));
    bench.collect();
  }
  CHECK(launched > 500);
  do {
    while (const StepPlan* plan = bench.launch()) check_step(bench, *plan, device);
  } while (bench.commit(1));
  bench.collect();
  CHECK(bench.requests.empty());
  CHECK(bench.scheduler.quiescent());
}

}  // namespace

TEST(packed_steps_say_what_was_planned) {
  random_walk({64, 16, 8, 64, 0, 256, true}, 2, 1);
  random_walk({12, 16, 8, 64, 0, 160, true}, 3, 2);  // preemption
  random_walk({40, 16, 4, 20, 7, 160, false}, 1, 3);
}

TEST(the_largest_step_fits_its_buffer) {
  // Every slot filled in one step by a sequence with a long cached prefix: all of the table is delta.
  constexpr int32_t kSeqs = 64, kBlocks = 256, kPromptLen = kBlocks * 16;
  Bench bench({kBlocks + 4 * kSeqs, 16, kSeqs, 1024, 0, kPromptLen + 32, true}, 1);
  Device device;
  uint64_t id = 0;
  bench.add(make_spec(++id, kPromptLen, 1));
  do {
    while (const StepPlan* plan = bench.launch()) check_step(bench, *plan, device);
  } while (bench.commit(1));
  bench.collect();
  for (int32_t i = 0; i < kSeqs; ++i) bench.add(make_spec(++id, kPromptLen, 20));
  int32_t most = 0;
  size_t most_rows = 0;
  do {
    while (const StepPlan* plan = bench.launch()) {
      most = std::max(most, plan->num_delta_blocks);
      most_rows = std::max(most_rows, plan->rows.size());
      check_step(bench, *plan, device);
    }
  } while (bench.commit(1));
  bench.collect();
  CHECK(bench.requests.empty());
  CHECK(most > bench.scheduler.limits().max_delta_blocks - 2 * kBlocks);  // the limit was what stopped admission
  CHECK_EQ(most_rows, size_t{kSeqs});
}

TEST(a_step_needs_what_its_samples_need) {
  for (const uint64_t hot : {0, 1, 2, 3}) {  // which of three requests has a temperature, if any
    Bench bench({64, 16, 8, 64, 0, 256, true}, 1);
    for (uint64_t id = 1; id <= 3; ++id) {
      RequestSpec spec = make_spec(id, 5, 3);
      spec.sampling.temperature = id == hot ? 0.5f : 0.f;
      bench.add(spec, static_cast<int64_t>(id));
    }
    for (int step = 0; step < 3; ++step) {
      CHECK(bench.launch() != nullptr);
      bench.pack();
      CHECK_EQ(StepInputView(bench.staging.data()).header().needs, hot == 0 ? Needs{0} : kSamplingNeeds);
      bench.commit(1);
    }
  }
}

TEST(a_step_needs_a_mean_where_any_of_its_rows_does) {
  SchedulerConfig config{64, 16, 8, 64, 4, 256, true};
  config.max_result_words = 8;
  Bench bench(config, 1);
  RequestSpec spec = make_spec(1, 10, 1);
  spec.sampling.temperature = 0.f;
  spec.extras.needs = kNeedVector | kNeedMean;
  spec.extras.result_words = 3;
  bench.add(spec, 1);
  spec = make_spec(2, 3, 4);
  spec.sampling.temperature = 0.f;
  bench.add(spec, 2);
  for (const Needs needs : {Needs{kNeedMean}, Needs{kNeedMean}, kNeedVector | kNeedMean, Needs{0}}) {
    CHECK(bench.launch() != nullptr);
    bench.pack();
    CHECK_EQ(StepInputView(bench.staging.data()).header().needs, needs);
    bench.commit(1);
  }
}
