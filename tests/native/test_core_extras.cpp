// Extras of few requests beyond a token a step: records, scored prompts, several tokens, entries of a slot update.
// Budgets hold back one row and nobody else.
#include <algorithm>
#include <cstring>
#include <set>
#include <thread>

#include "check.h"
#include "engine_fixture.h"
#include "scheduler_fixture.h"

namespace {

using namespace asyncengine;
using namespace asyncengine::testing;

SchedulerConfig with_budgets(int32_t max_samples, int32_t max_update_words, int32_t max_result_words) {
  return {64, 16, 8, 64, 0, 256, true, {}, max_samples, max_update_words, max_result_words};
}

std::set<uint64_t> ids_of(const StepPlan& plan) {
  std::set<uint64_t> ids;
  for (const PlanRow& row : plan.rows) ids.insert(row.sequence->request->id);
  return ids;
}

RequestSpec with_entries(uint64_t id, size_t words) {
  RequestSpec spec = make_spec(id, 5, 8);
  spec.extras.entries = {entry_header(kParameters, words - 1)};
  spec.extras.entries.resize(words, static_cast<int32_t>(id));
  return spec;
}

}  // namespace

TEST(a_slot_update_that_does_not_fit_waits_and_nobody_else) {
  Bench bench(with_budgets(0, 10, 0), 4);
  bench.add(with_entries(1, 8), 1);
  bench.add(with_entries(2, 8), 2);
  bench.add(make_spec(3, 5, 8), 3);
  bench.add(with_entries(4, 2), 4);
  const StepPlan* plan = bench.launch();
  CHECK(ids_of(*plan) == std::set<uint64_t>({1, 3, 4}));
  CHECK_EQ(plan->num_update_words, 10);
  bench.pack();
  const StepInputView input(bench.staging.data());
  CHECK_EQ(input.slot_updates().size(), size_t{3});
  for (const SlotUpdate& update : input.slot_updates()) {
    const auto id = static_cast<size_t>(update.top_k);  // make_spec's
    CHECK_EQ(input.entries(update).size(), id == 1 ? size_t{8} : id == 4 ? size_t{2} : size_t{0});
    for_each_entry(input.entries(update), [&](uint32_t kind, std::span<const int32_t> words) {
      CHECK_EQ(kind, uint32_t{kParameters});
      for (const int32_t word : words) CHECK_EQ(static_cast<size_t>(word), id);
    });
  }
  plan = bench.launch();
  CHECK(ids_of(*plan) == std::set<uint64_t>({1, 2, 3, 4}));
  bench.pack();
  while (bench.commit(1)) {
  }
}

TEST(sequences_that_want_records_take_turns) {
  Bench bench(with_budgets(0, 0, 10), 1);
  for (uint64_t id = 1; id <= 3; ++id) {
    RequestSpec spec = make_spec(id, 5, 9);
    spec.extras.result_words = 4;  // two of three fit
    bench.add(spec, static_cast<int64_t>(id));
  }
  bench.add(make_spec(4, 5, 9), 4);
  std::map<uint64_t, int> rows;
  for (int step = 0; step < 9; ++step) {
    const StepPlan* plan = bench.launch();
    CHECK(plan->num_result_words <= 10);
    CHECK(ids_of(*plan).contains(4));  // it waits for nobody
    CHECK_EQ(plan->rows.size(), size_t{3});
    for (const uint64_t id : ids_of(*plan)) ++rows[id];
    bench.pack();
    bench.commit(1);
  }
  for (uint64_t id = 1; id <= 3; ++id) CHECK_EQ(rows[id], 6);
}

TEST(what_can_never_fit_is_refused) {
  Options options;
  options.max_update_words = 20;
  options.max_result_words = 4;
  options.max_samples = 2 * options.max_num_seqs;
  Engine engine(options);
  RequestSpec spec;
  spec.prompt = {1, 2, 3};
  spec.max_tokens = 4;
  const auto refused = [&](auto&& change) {
    RequestSpec one = spec;
    change(one.extras);
    return engine.submit(one) == SubmitResult::kTooLarge;
  };
  CHECK(refused([](RequestExtras& e) { e.entries.resize(21); }));
  CHECK(refused([](RequestExtras& e) {
    e.history = true;
    e.entries.resize(13);
  }));
  CHECK(refused([](RequestExtras& e) { e.result_words = 5; }));
  CHECK(refused([](RequestExtras& e) { e.tokens_per_step = 3; }));
  CHECK(refused([](RequestExtras& e) {
    e.tokens_per_step = 2;
    e.result_words = 3;
  }));
  CHECK(refused([](RequestExtras& e) { e.score_from = 3; }));
  CHECK(!refused([](RequestExtras& e) {
    e.history = true;
    e.needs = kNeedLogprobs;
    e.result_words = 2;
    e.tokens_per_step = 2;
    e.score_from = 2;
  }));
  CHECK(engine.run());
  CHECK_EQ(engine.mismatches(), 0);
  CHECK(engine.settles());
}

TEST(records_that_no_kernel_writes_are_refused) {
  Options options;
  options.max_result_words = 4;
  Engine engine(options);
  RequestSpec spec;
  spec.prompt = {1, 2, 3};
  spec.max_tokens = 4;
  spec.extras.result_words = 2;
  CHECK(engine.submit(spec) == SubmitResult::kUnserved);
  spec.extras.needs = kNeedPenalties | kNeedDrafts;
  CHECK(engine.submit(spec) == SubmitResult::kUnserved);
  for (const Needs needs : {kNeedLogprobs, kNeedVector}) {
    spec.extras.needs = needs;
    CHECK(engine.submit(spec) == SubmitResult::kAccepted);
  }
  CHECK(engine.run());
  CHECK_EQ(engine.mismatches(), 0);
  CHECK(engine.settles());
}

TEST(a_torn_or_stale_record_is_found) {
  SimulatedDevice device;
  StepLimits limits{4, 64, 16};
  limits.max_result_words = 8;
  const auto staging = std::make_shared<Staging>(device.cuda(), limits, 2, StagingMode::kMapped);
  // Words that the graph leaves: the head, then a region of five words.
  std::vector<int64_t> words;
  GraphExecutor::Graphs graphs;
  graphs.buckets.push_back({4, 64, false, kAnyContext, {}});
  graphs.buckets[0].variants.push_back({0, device.add_graph(
                                               [&] {
                                                 staging->output(0)[0] = words[0];
                                                 std::copy(words.begin() + 1, words.end(),
                                                           staging->output(0) + staging->records_begin() + 1);
                                               },
                                               0ns)});
  GraphExecutor executor(device.cuda(), staging, graphs, 20us);
  const auto word = [](int64_t step, int32_t payload) { return step << 32 | static_cast<uint32_t>(payload); };
  const auto run = [&](std::vector<int64_t> left) {
    words = std::move(left);
    StepInputHeader header{};
    header.step = 7;
    header.num_rows = header.num_tokens = header.num_samples = header.num_heads = 1;
    header.num_result_words = 6;
    StepInputRow row{};
    row.query_len = row.num_samples = row.num_appends = 1;
    row.result_offset = 1;
    row.result_words = 5;
    std::memcpy(executor.staging(0).data(), &header, sizeof(header));
    std::memcpy(executor.staging(0).data() + sizeof(header), &row, sizeof(row));
    CHECK(executor.launch(0, sizeof(header) + sizeof(row)) == LaunchStatus::kLaunched);
    StepStatus status;
    while ((status = executor.poll(0)) == StepStatus::kPending) std::this_thread::sleep_for(100us);
    return status == StepStatus::kReady;
  };
  const int32_t two = entry_header(kLogprobs, 2), one = entry_header(kVector, 1), four = entry_header(kVector, 4);
  // A chain that ends before the region does: what is behind it may be anything.
  CHECK(run({word(7, 3), word(7, two), word(7, 1), word(7, 2), word(7, kEndOfRecords), word(6, 9)}));
  CHECK_EQ(executor.results(0).tokens[0], 3);
  CHECK_EQ(executor.results(0).records[3], 2);
  CHECK(run({word(7, 3), word(7, two), word(7, 1), word(7, 2), word(7, one), word(7, 9)}) == true);
  CHECK(run({word(7, kNotFinite), word(6, two), word(6, 1), word(6, 2), word(6, 0), word(6, 9)}));  // it has no records
  CHECK(run({word(7, kNoToken), word(7, four), word(7, 1), word(7, 2), word(7, 3), word(7, 4)}));
  CHECK(!run({word(7, 3), word(7, two), word(7, 1), word(6, 2), word(7, kEndOfRecords), word(7, 9)}));  // torn
  CHECK(executor.error().find("step 7 left no whole records") != std::string::npos);
  CHECK(!run({word(7, 3), word(6, two), word(6, 1), word(6, 2), word(6, kEndOfRecords), word(6, 9)}));  // stale
  CHECK(!run({word(7, 3), word(7, two), word(7, 1), word(7, 2), word(7, two), word(7, 9)}));  // past the region's end
}

namespace {

RequestSpec random_extras(RequestSpec spec, std::mt19937& rng, int32_t id) {
  const auto pick = [&](int32_t low, int32_t high) { return std::uniform_int_distribution<int32_t>(low, high)(rng); };
  RequestExtras& e = spec.extras;
  if (pick(0, 2) == 0) {
    e.needs = kNeedVector;
    e.result_words = pick(1, 5);
  }
  if (pick(0, 2) == 0) e.score_from = pick(0, static_cast<int32_t>(spec.prompt.size()) - 1);
  if (pick(0, 1) == 0) e.tokens_per_step = pick(1, 4);
  if (pick(0, 1) == 0) {
    e.entries = {entry_header(kParameters, 1), id};
    e.history = true;
  }
  return spec;
}

// Every sequence gets what plain decode of the same model gives, and its records; histories are its tokens at the time.
int run_extras(const Options& options, unsigned seed, int requests) {
  std::mt19937 rng(seed);
  Engine engine(options);
  std::vector<RequestSpec> specs;
  for (int32_t i = 0; i < requests; ++i) {
    specs.push_back(random_extras(random_spec(rng, options, 60, 40), rng, i));
    CHECK(engine.submit(specs.back()) == SubmitResult::kAccepted);
    if (rng() % 8 == 0) engine.abort(engine.last_id());
    if (rng() % 4 == 0) engine.receive(1ms);
  }
  CHECK(engine.run());
  CHECK_EQ(engine.mismatches(), 0);
  CHECK(engine.settles());
  int longer = 0;
  for (const std::vector<int32_t>& words : engine.model().entries()) {
    std::vector<int32_t> history;
    const RequestSpec* spec = nullptr;
    for_each_entry(words, [&](uint32_t kind, std::span<const int32_t> data) {
      if (kind == kTokenHistory) history.assign(data.begin(), data.end());
      if (kind == kParameters) spec = &specs[static_cast<size_t>(data[0])];
    });
    CHECK(spec != nullptr && history.size() >= spec->prompt.size());
    longer += history.size() > spec->prompt.size();
    bool found = false;  // the sequence of the request that it is of
    for (int32_t i = 0; i < spec->n; ++i) {
      std::vector<int32_t> tokens = spec->prompt;
      const Result expected = engine.expected(*spec, i);
      tokens.insert(tokens.end(), expected.tokens.begin(), expected.tokens.end());
      found |= history.size() <= tokens.size() && std::equal(history.begin(), history.end(), tokens.begin());
    }
    CHECK(found);
  }
  return longer;
}

}  // namespace

TEST(extras_change_no_token) {
  Options options;
  options.max_samples = 6 * options.max_num_seqs;
  options.max_update_words = 400;
  options.max_result_words = 40;
  int longer = 0;
  for (unsigned seed = 0; seed < 6; ++seed) {
    options.steps_in_flight = 1 + static_cast<int>(seed % 3);
    options.num_blocks = seed % 2 == 0 ? 64 : 14;  // 14: preemption
    options.prefix_caching = seed < 4;
    options.prefill_chunk_size = seed == 2 ? 5 : 0;
    options.staging = seed == 1   ? StagingMode::kPageable
                      : seed == 3 ? StagingMode::kPinned
                      : seed == 5 ? StagingMode::kMapped
                                  : StagingMode::kAhead;
    longer += run_extras(options, seed, 60);
  }
  CHECK(longer > 0);  // some were preempted, and their slots filled again
}

TEST(a_row_without_a_token_ends_its_sequence_with_its_records) {
  Bench bench(with_budgets(0, 0, 16), 1);
  RequestSpec spec = make_spec(1, 5, 1);
  spec.extras.result_words = 4;
  bench.add(spec);
  StepPlan plan;
  plan.reserve(8);
  plan.step = 1;
  bench.scheduler.schedule(plan, 1);
  CHECK_EQ(plan.num_result_words, 4);
  const int32_t token = kNoToken, records[] = {entry_header(kVector, 3), 7, 8, 9};
  bench.scheduler.commit(plan, {&token, records}, bench.outbox, 2);
  const Delivery& told = bench.outbox.filling();
  CHECK_EQ(told.events.size(), size_t{1});
  CHECK(told.events[0].token < 0 && told.events[0].finish == FinishReason::kStop);
  CHECK(told.records.size() == 1 && told.records[0].event == 0);
  CHECK(told.record_words == std::vector<int32_t>(std::begin(records), std::end(records)));
  bench.collect();
  CHECK(bench.scheduler.quiescent());
}
