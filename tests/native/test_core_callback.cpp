// The host executor: steps in order on its own thread, block copies, exceptions, and a forward that never returns.
#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "check.h"
#include "engine_fixture.h"
#include "step_loop/callback_executor.h"

namespace {

using namespace asyncengine;
using namespace asyncengine::testing;

// The simulated model once more, through the flat arrays that a host forward gets. Tokens live in `kv`, as in a cache.
struct HostModel {
  explicit HostModel(const Options& options)
      : block_size(options.block_size), kv(static_cast<size_t>(options.num_blocks * options.block_size), -1) {
    config.vocab_size = options.vocab_size;
  }
  void forward(const StepBatch& batch, int32_t* tokens) {
    for (size_t t = 0; t < static_cast<size_t>(batch.num_tokens); ++t) {
      kv[static_cast<size_t>(batch.slot_mapping[t])] = static_cast<int32_t>(batch.input_ids[t]);
    }
    size_t sampled = 0;
    for (size_t r = 0; r < static_cast<size_t>(batch.num_rows); ++r) {
      const int32_t last = batch.query_start[r + 1] - 1;
      if (sampled == batch.sample_index.size() || batch.sample_index[sampled] != last) continue;
      std::vector<int32_t> context;
      for (int32_t p = 0; p <= batch.positions[static_cast<size_t>(last)]; ++p) {
        context.push_back(kv[static_cast<size_t>(batch.block_tables[r][p / block_size] * block_size + p % block_size)]);
      }
      CHECK_EQ(batch.samples[sampled].position, static_cast<int64_t>(context.size()));
      tokens[sampled] = SimulatedModel::next_token(config, context, *batch.samples[sampled].state);
      ++sampled;
    }
    CHECK_EQ(sampled, static_cast<size_t>(batch.num_samples));
  }
  int32_t block_size;
  SimulatedModelConfig config;
  std::vector<int32_t> kv;
};

std::unique_ptr<StepLoop> make_loop(const Options& options, std::vector<CallbackExecutor::BlockRegion> regions,
                                    CallbackExecutor::Forward forward) {
  const auto config = options.loop();
  return std::make_unique<StepLoop>(
      config, std::make_unique<CallbackExecutor>(StepLoop::limits(config), options.max_model_len / options.block_size + 1,
                                                 options.block_size, options.steps_in_flight, std::move(regions),
                                                 kSamplingNeeds | kRecordNeeds, std::move(forward)));
}

template <typename Condition>
bool eventually(StepLoop& loop, Condition condition) {
  for (int i = 0; i < 3000; ++i) {
    if (condition()) return true;
    pollfd fd{loop.wake_fd(), POLLIN, 0};
    ::poll(&fd, 1, 10);
  }
  return false;
}

}  // namespace

TEST(the_host_executor_computes_what_the_device_does) {
  for (const int depth : {1, 2, 3}) {
    Options options;
    options.steps_in_flight = depth;
    options.num_blocks = 20;
    HostModel model(options);
    const auto bytes = static_cast<size_t>(options.block_size) * sizeof(int32_t);
    auto loop = make_loop(options, {{reinterpret_cast<std::byte*>(model.kv.data()), bytes}},
                          [&](const StepBatch& batch, int32_t* tokens) { model.forward(batch, tokens); });
    loop->start();
    std::mt19937 rng(static_cast<unsigned>(depth));
    check_random_requests(*loop, model.config, options, rng, 150, 60, 30);
    CHECK(loop->stop(5s));
  }
}

TEST(a_sample_says_all_that_its_slot_and_its_row_do) {
  Options options;
  options.prefill_chunk_size = 4;
  options.max_samples = 2 * options.max_num_seqs;
  options.max_update_words = options.max_result_words = 8;
  int steps = 0;
  auto loop = make_loop(options, {}, [&](const StepBatch& batch, int32_t* tokens) {
    ++steps;
    if (batch.num_tokens == 4) {  // the prompt's beginning: its slot is filled, and nothing is sampled
      CHECK(batch.samples.empty() && batch.entries.size() == 1);
      CHECK_EQ(batch.entries[0].words.back(), 77);
      return;
    }
    CHECK(batch.entries.empty());
    CHECK_EQ(batch.samples.size(), static_cast<size_t>(batch.num_samples));
    const bool scores = batch.num_tokens == 2;
    for (size_t i = 0; i < batch.samples.size(); ++i) {
      const Sample& sample = batch.samples[i];
      CHECK_EQ(sample.appends, !scores || i == 1);
      CHECK_EQ(sample.position, batch.positions[i] + 1);
      CHECK_EQ(sample.needs, kNeedLogprobs | kNeedTemperature);
      CHECK_EQ(sample.state->temperature, 0.5f);
      CHECK_EQ(sample.records.size(), size_t{2});
      RecordWriter(sample.records).add(kLogprobs, 1)[0] = static_cast<int32_t>(sample.position);
      tokens[i] = 9;
    }
  });
  loop->start();
  RequestSpec spec{1, {1, 2, 3, 4, 5, 6}, 1, 2, 0, 0, {.temperature = 0.5f}, {}};
  spec.extras.needs = kNeedLogprobs;
  spec.extras.entries = {entry_header(kParameters, 1), 77};
  spec.extras.score_from = 4;
  spec.extras.result_words = 2;
  CHECK(loop->submit(spec) == SubmitResult::kAccepted);
  std::vector<int32_t> positions;
  CHECK(eventually(*loop, [&] {
    bool ended = false;
    loop->drain([&](const StepLoop::News& news) {
      for (const auto& record : news.records) positions.push_back(news.payload(record)[0]);
      ended = news.finish == FinishReason::kLength;
    });
    return ended;
  }));
  CHECK(positions == std::vector<int32_t>({5, 6, 7}));
  CHECK_EQ(steps, 3);
  CHECK(loop->stop(5s));
}

TEST(an_exception_in_the_forward_fails_the_requests_of_its_step) {
  Options options;
  options.max_num_seqs = 2;
  std::atomic<bool> poisoned{false};
  auto loop = make_loop(options, {}, [&](const StepBatch& batch, int32_t* tokens) {
    for (const int64_t id : batch.input_ids) {
      if (id == 49 && !poisoned.exchange(true)) throw std::runtime_error("the weights melted");
    }
    std::fill_n(tokens, batch.num_samples, 1);
  });
  loop->start();
  // Two run: the poison, of which a sibling waits, and one beside it. The third comes when they have failed.
  CHECK(loop->submit({1, {1, 2, 49}, 2, 50, 0, 0, {}, {}}) == SubmitResult::kAccepted);
  CHECK(loop->submit({2, {1, 2, 3}, 1, 50, 0, 0, {}, {}}) == SubmitResult::kAccepted);
  CHECK(loop->submit({3, {1, 2, 4}, 1, 50, 0, 0, {}, {}}) == SubmitResult::kAccepted);
  std::map<std::pair<uint64_t, int32_t>, FinishReason> ends;
  std::string why;
  CHECK(eventually(*loop, [&] {
    CHECK(loop->drain([&](const StepLoop::News& news) {
      if (news.finish != FinishReason::kNone) ends[{news.sequence->request->id, news.sequence->index}] = news.finish;
    }));
    why += loop->take_step_error();
    return ends.size() == 4;
  }));
  CHECK((ends[{1, 0}] == FinishReason::kStepFailed));
  CHECK((ends[{1, 1}] == FinishReason::kStepFailed));
  CHECK((ends[{3, 0}] == FinishReason::kLength));
  CHECK(why.find("the weights melted") != std::string::npos);
  CHECK_EQ(loop->stats().failed_steps, 1);
  CHECK_EQ(loop->error(), std::string());
  CHECK(eventually(*loop, [&] {
    loop->drain([](const StepLoop::News&) {});
    return loop->stats().live_requests == 0 && loop->stats().num_free_blocks == options.num_blocks && loop->quiescent();
  }));
  CHECK(loop->stop(5s));
}

TEST(a_forward_that_always_throws_ends_the_engine) {
  Options options;
  auto loop = make_loop(options, {}, [](const StepBatch&, int32_t*) { throw 7; });
  loop->start();
  uint64_t id = 0;
  CHECK(eventually(*loop, [&] {
    loop->submit({++id, {1, 2, 3}, 1, 50, 0, 0, {}, {}});
    return !loop->drain([](const StepLoop::News&) {});
  }));
  CHECK(loop->error().find("steps failed one after another") != std::string::npos);
  CHECK(loop->stop(5s));
}

// The row of the failed sequence that was launched behind it runs, and reads its token back as an index.
TEST(no_row_is_fed_a_negative_token) {
  Options options;
  std::atomic<int64_t> least{0};
  std::atomic<int> calls{0};
  auto loop = make_loop(options, {}, [&](const StepBatch& batch, int32_t* tokens) {
    for (const int64_t id : batch.input_ids) least = std::min(least.load(), id);
    ++calls;
    std::this_thread::sleep_for(5ms);  // the next step is launched meanwhile
    std::fill_n(tokens, batch.num_samples, -1);
  });
  loop->start();
  for (uint64_t id = 1; id <= 3; ++id) CHECK(loop->submit({id, {1, 2, 3}, 1, 20, 0, 0, {}, {}}) == SubmitResult::kAccepted);
  size_t ends = 0;
  CHECK(eventually(*loop, [&] {
    loop->drain([&](const StepLoop::News& news) { ends += news.finish == FinishReason::kFailed; });
    return ends == 3 && loop->quiescent();
  }));
  CHECK(calls >= 2);  // there was such a row
  CHECK_EQ(least.load(), 0);
  CHECK(loop->stop(5s));
}

TEST(time_for_which_the_executor_was_held_up_does_not_count) {
  Options options;
  options.step_timeout = 400ms;
  std::atomic<bool> held{true};
  std::atomic<int64_t> released_ns{0};
  const int64_t start_ns = steady_now_ns();
  const auto config = options.loop();
  StepLoop loop(
      config, std::make_unique<CallbackExecutor>(
                  StepLoop::limits(config), 17, options.block_size, 2, std::vector<CallbackExecutor::BlockRegion>{}, kSamplingNeeds,
                  [&](const StepBatch& batch, int32_t* tokens) {
                    while (held) std::this_thread::sleep_for(1ms);
                    std::fill_n(tokens, batch.num_samples, 1);
                  },
                  [&](int64_t now) { return (released_ns ? released_ns.load() : now) - start_ns; }));
  loop.start();
  CHECK(loop.submit({1, {1, 2, 3}, 1, 3, 0, 0, {}, {}}) == SubmitResult::kAccepted);
  std::this_thread::sleep_for(1200ms);
  CHECK(loop.drain([](const StepLoop::News&) {}));
  held = false;
  released_ns = steady_now_ns();
  bool ended = false;
  CHECK(eventually(loop, [&] {
    const bool alive = loop.drain([&](const StepLoop::News& news) { ended |= news.finish == FinishReason::kLength; });
    return ended || !alive;
  }));
  CHECK_EQ(loop.error(), std::string());
  CHECK(loop.stop(5s));
}

TEST(a_negative_token_fails_its_request_only) {
  Options options;
  auto loop = make_loop(options, {}, [&](const StepBatch& batch, int32_t* tokens) {
    std::fill_n(tokens, batch.num_samples, 1);
    for (size_t s = 0; s < static_cast<size_t>(batch.num_samples); ++s) {
      if (batch.samples[s].state->seed == 77 && batch.samples[s].position == 8) tokens[s] = -1;
    }
  });
  loop->start();
  RequestSpec good{1, {1, 2, 3}, 1, 20, 0, 0, {}, {}}, bad{2, {1, 2, 3}, 2, 20, 0, 0, {}, {}};
  bad.sampling.seed = 77;
  CHECK(loop->submit(good) == SubmitResult::kAccepted);
  CHECK(loop->submit(bad) == SubmitResult::kAccepted);
  std::map<std::pair<uint64_t, int32_t>, FinishReason> ends;
  CHECK(eventually(*loop, [&] {
    CHECK(loop->drain([&](const StepLoop::News& news) {
      if (news.finish != FinishReason::kNone) ends[{news.sequence->request->id, news.sequence->index}] = news.finish;
    }));
    return ends.size() == 3;
  }));
  CHECK((ends[{1, 0}] == FinishReason::kLength));
  CHECK((ends[{2, 0}] == FinishReason::kFailed));
  CHECK((ends[{2, 1}] == FinishReason::kFailed));
  CHECK(eventually(*loop, [&] {
    loop->drain([](const StepLoop::News&) {});
    return loop->stats().live_requests == 0 && loop->stats().num_free_blocks == options.num_blocks;
  }));
  CHECK(loop->stop(5s));
}

TEST(a_forward_that_hangs_is_a_failure_and_stop_does_not_wait_for_it) {
  Options options;
  options.step_timeout = 100ms;
  std::atomic<bool> hang{true};
  auto loop = make_loop(options, {}, [&](const StepBatch&, int32_t*) {
    while (hang) std::this_thread::sleep_for(1ms);
  });
  loop->start();
  CHECK(loop->submit({1, {1, 2, 3}, 1, 100, 0, 0, {}, {}}) == SubmitResult::kAccepted);
  CHECK(eventually(*loop, [&] { return !loop->drain([](const StepLoop::News&) {}); }));
  CHECK(loop->error().find("did not finish within") != std::string::npos);
  CHECK(!loop->stop(10ms));
  hang = false;
  CHECK(loop->stop(5s));
}

TEST(a_sample_that_needs_a_vector_gives_a_record_and_no_token) {
  constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> vectors = {1.f, 2.f, 3.f, 4.f, 5.f, 6.f, 7.f, kNaN};  // four samples
  StepBatch batch;
  std::vector<int32_t> records(10, 0);
  const std::span<int32_t> all(records);
  batch.num_samples = 4;
  batch.needs = kNeedVector;
  batch.samples = {{.records = all.first(4), .needs = kNeedVector},
                   {.records = {}, .needs = 0},
                   {.records = all.subspan(4, 2), .needs = kNeedVector},
                   {.records = all.subspan(6, 3), .needs = kNeedVector}};
  std::vector<int32_t> tokens = {10, 11, 12, 13};
  give_vectors(batch, vectors.data(), 2, tokens.data());
  CHECK(tokens == std::vector<int32_t>({kNoToken, 11, kNotFinite, kNotFinite}));  // the third has no room
  CHECK_EQ(records[0], entry_header(kVector, 2));
  CHECK(std::memcmp(&records[1], vectors.data(), 2 * sizeof(float)) == 0);
  CHECK_EQ(std::ranges::count(records, 0), int64_t{7});
  tokens.assign(4, 10);
  give_vectors(batch, nullptr, 0, tokens.data());
  CHECK(tokens == std::vector<int32_t>({kNotFinite, 10, kNotFinite, kNotFinite}));
}
