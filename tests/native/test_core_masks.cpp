// Sequences whose tokens have masks: a row without its mask gives no token and is run again, whatever else is in flight.
#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "check.h"
#include "engine_fixture.h"
#include "scheduler_fixture.h"
#include "step_loop/callback_executor.h"

namespace {

using namespace asyncengine;
using namespace asyncengine::testing;

constexpr int32_t kVocab = 50;

// Tokens that are allowed at `position`, and those that come there without being sampled.
bool is_allowed(int32_t position, int32_t token) { return (token + position) % 3 == 0; }
bool allows_all(int32_t position) { return position % 11 == 3; }
std::vector<int32_t> forced_at(int32_t position) {
  if (position % 7 != 0) return {};
  return {position % kVocab, (position + 1) % kVocab, (2 * position) % kVocab};
}
int32_t constrained(int32_t token, int32_t position) {
  while (!allows_all(position) && !is_allowed(position, token)) token = (token + 1) % kVocab;
  return token;
}

// The simulated model with masks, from the flat arrays that a host forward gets.
struct MaskedModel {
  explicit MaskedModel(const Options& options)
      : block_size(options.block_size), kv(static_cast<size_t>(options.num_blocks * options.block_size), -1) {
    config.vocab_size = kVocab;
  }
  void forward(const StepBatch& batch, int32_t* tokens) {
    for (size_t t = 0; t < static_cast<size_t>(batch.num_tokens); ++t) {
      kv[static_cast<size_t>(batch.slot_mapping[t])] = static_cast<int32_t>(batch.input_ids[t]);
    }
    if (latency > 0us) std::this_thread::sleep_for(latency);
    size_t sampled = 0;
    for (size_t r = 0; r < static_cast<size_t>(batch.num_rows); ++r) {
      const int32_t last = batch.query_start[r + 1] - 1;
      if (sampled == batch.sample_index.size() || batch.sample_index[sampled] != last) continue;
      std::vector<int32_t> context;
      for (int32_t p = 0; p <= batch.positions[static_cast<size_t>(last)]; ++p) {
        context.push_back(kv[static_cast<size_t>(batch.block_tables[r][p / block_size] * block_size + p % block_size)]);
      }
      tokens[sampled] = sample(batch.samples[sampled], context);
      ++sampled;
    }
  }
  int32_t sample(const Sample& sample, const std::vector<int32_t>& context) {
    int32_t token = SimulatedModel::next_token(config, context, *sample.state);
    if (sample.mask == nullptr) return token;
    const auto found = MaskBoard::find(sample.mask, sample.position);
    if (found == MaskBoard::Found::kMissing) {
      ++missing;
      return kNoMask;
    }
    if (found == MaskBoard::Found::kAllowsAll) return token;
    const int32_t* mask = sample.mask + MaskBoard::kHeadWords;
    while ((static_cast<uint32_t>(mask[token / 32]) >> (token % 32) & 1u) == 0) token = (token + 1) % kVocab;
    return token;
  }
  int32_t block_size;
  SimulatedModelConfig config;
  std::vector<int32_t> kv;
  std::chrono::microseconds latency{0};
  std::atomic<int> missing{0};
};

std::unique_ptr<StepLoop> make_loop(const Options& options, MaskedModel& model) {
  auto config = options.loop();
  config.scheduler.mask_words = (kVocab + 31) / 32;
  const auto bytes = static_cast<size_t>(options.block_size) * sizeof(int32_t);
  return std::make_unique<StepLoop>(
      config,
      std::make_unique<CallbackExecutor>(
          StepLoop::limits(config), options.max_model_len / options.block_size + 1, options.block_size, options.steps_in_flight,
          std::vector<CallbackExecutor::BlockRegion>{{reinterpret_cast<std::byte*>(model.kv.data()), bytes}},
          kSamplingNeeds | kNeedMask, [&model](const StepBatch& b, int32_t* tokens) { model.forward(b, tokens); }));
}

void write_mask(MaskChannel& channel, int32_t position, bool with_forced) {
  channel.position = position;
  channel.forced = with_forced ? forced_at(position) : std::vector<int32_t>{};
  const int32_t sampled = position + static_cast<int32_t>(channel.forced.size());
  channel.allows_all = allows_all(sampled);
  std::ranges::fill(channel.words, 0);
  for (int32_t t = 0; t < kVocab; ++t) {
    if (is_allowed(sampled, t)) channel.words[static_cast<size_t>(t / 32)] |= static_cast<int32_t>(1u << (t % 32));
  }
}

// Computes masks on a thread of its own, some of them late.
class Worker {
 public:
  explicit Worker(unsigned seed) : rng_(seed), thread_([this] { run(); }) {}
  ~Worker() {
    {
      std::lock_guard lock(mutex_);
      closing_ = true;
    }
    work_.notify_one();
    thread_.join();
  }
  void push(std::shared_ptr<MaskChannel> channel, int32_t position) {
    {
      std::lock_guard lock(mutex_);
      queue_.emplace_back(std::move(channel), position);
    }
    work_.notify_one();
  }

 private:
  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      work_.wait(lock, [this] { return closing_ || !queue_.empty(); });
      if (closing_) return;
      auto [channel, position] = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      if (rng_() % 3 == 0) std::this_thread::sleep_for(std::chrono::microseconds(rng_() % 300));
      write_mask(*channel, position, /*with_forced=*/true);
      channel->post();
      lock.lock();
    }
  }
  std::mt19937 rng_;
  std::mutex mutex_;
  std::condition_variable work_;
  std::deque<std::pair<std::shared_ptr<MaskChannel>, int32_t>> queue_;
  bool closing_ = false;
  std::thread thread_;
};

struct Masked {
  RequestSpec spec;
  bool masked = false;
  std::vector<int32_t> next_mask;            // of each sequence: the position that its last message is for
  std::vector<std::vector<int32_t>> tokens;  // of each
  std::vector<FinishReason> finish;
};

std::vector<int32_t> expected(const MaskedModel& model, const Masked& request, int32_t index) {
  std::vector<int32_t> tokens = request.spec.prompt, out;
  SamplingState sampling = request.spec.sampling;
  sampling.seed += static_cast<uint64_t>(index);
  std::vector<int32_t> forced;
  bool first = true;
  while (static_cast<int32_t>(out.size()) < request.spec.max_tokens) {
    const auto position = static_cast<int32_t>(tokens.size());
    if (request.masked && !first && forced.empty()) {
      forced = forced_at(position);
      forced.push_back(-1);
    }
    int32_t token = SimulatedModel::next_token(model.config, tokens, sampling);
    if (request.masked) token = !first && forced.front() >= 0 ? forced.front() : constrained(token, position);
    if (!forced.empty()) forced.erase(forced.begin());
    first = false;
    tokens.push_back(token);
    out.push_back(token);
    if (std::ranges::find(request.spec.stop_tokens, token) != request.spec.stop_tokens.end()) break;
  }
  return out;
}

void run_masked(int depth, int32_t num_blocks, std::chrono::microseconds latency, bool any_missing) {
  Options options;
  options.steps_in_flight = depth;
  options.num_blocks = num_blocks;
  options.vocab_size = kVocab;
  MaskedModel model(options);
  model.latency = latency;
  auto loop = make_loop(options, model);
  loop->start();
  std::mt19937 rng(static_cast<unsigned>(depth * 100 + num_blocks));
  Worker worker(rng());
  std::map<uint64_t, Masked> requests;
  size_t open = 0;
  for (uint64_t id = 1; id <= 60; ++id) {
    Masked& r = requests[id];
    r.masked = id % 3 != 0;
    r.spec.id = id;
    for (auto k = 1 + rng() % 40; k > 0; --k) r.spec.prompt.push_back(static_cast<int32_t>(rng() % kVocab));
    r.spec.n = 1 + static_cast<int32_t>(rng() % 3);
    r.spec.max_tokens = 1 + static_cast<int32_t>(rng() % 60);
    r.spec.sampling = {1.f, 1.f, 0.f, 0, rng()};
    if (rng() % 2 == 0) r.spec.stop_tokens = {static_cast<int32_t>(rng() % kVocab)};
    for (int32_t i = 0; r.masked && i < r.spec.n; ++i) {
      r.spec.extras.masks.push_back(std::make_shared<MaskChannel>((kVocab + 31) / 32));
      write_mask(*r.spec.extras.masks.back(), static_cast<int32_t>(r.spec.prompt.size()), /*with_forced=*/false);
    }
    const auto n = static_cast<size_t>(r.spec.n);
    r.next_mask.assign(n, static_cast<int32_t>(r.spec.prompt.size()));
    r.tokens.resize(n);
    r.finish.resize(n, FinishReason::kNone);
    CHECK(loop->submit(r.spec) == SubmitResult::kAccepted);
    open += n;
  }
  bool aborted = false;
  for (int i = 0; i < 20000 && open > 0; ++i) {
    pollfd fd{loop->wake_fd(), POLLIN, 0};
    ::poll(&fd, 1, 10);
    loop->drain([&](const StepLoop::News& news) {
      Masked& r = requests.at(news.sequence->request->id);
      const auto k = static_cast<size_t>(news.sequence->index);
      r.tokens[k].insert(r.tokens[k].end(), news.tokens.begin(), news.tokens.end());
      if (news.finish != FinishReason::kNone) {
        r.finish[k] = news.finish;
        --open;
        return;
      }
      const auto known = static_cast<int32_t>(r.spec.prompt.size() + r.tokens[k].size());
      if (r.masked && known > r.next_mask[k]) {
        r.next_mask[k] = known + static_cast<int32_t>(forced_at(known).size());
        worker.push(r.spec.extras.masks[k], known);
      }
    });
    if (!std::exchange(aborted, true)) {  // one that may be frozen, and others
      for (uint64_t id = 58; id <= 60; ++id) {
        for (const FinishReason reason : requests[id].finish) open -= reason == FinishReason::kNone;
        requests[id].finish.assign(requests[id].finish.size(), FinishReason::kAborted);
        loop->abort(id);
      }
    }
  }
  CHECK_EQ(open, size_t{0});
  for (const auto& [id, r] : requests) {
    for (int32_t i = 0; id < 58 && i < r.spec.n; ++i) CHECK(r.tokens[static_cast<size_t>(i)] == expected(model, r, i));
  }
  CHECK(!any_missing || model.missing > 0);
  for (int i = 0; i < 1000 && !loop->quiescent(); ++i) std::this_thread::sleep_for(1ms);
  const Stats stats = loop->stats();
  CHECK_EQ(stats.num_free_blocks, static_cast<int64_t>(num_blocks));
  CHECK_EQ(stats.num_free_slots, int64_t{8});
  CHECK(num_blocks > 20 || stats.num_preemptions > 0);
}

}  // namespace

TEST(masks_are_kept_whatever_is_in_flight) {
  for (const int depth : {1, 2, 3}) {
    run_masked(depth, 64, 0us, /*any_missing=*/true);
    run_masked(depth, 14, 0us, /*any_missing=*/true);
    run_masked(depth, 64, 400us, /*any_missing=*/false);
  }
}

// Behind a row that finds no mask another one has been launched: it writes KV of no token. Then tokens come that are not
// sampled, so that the sequence has tokens where that row wrote.
TEST(the_prefix_cache_never_gets_what_a_row_behind_a_missing_mask_wrote) {
  SchedulerConfig config{64, 4, 8, 64, 0, 256, true};
  config.mask_words = 2;
  Bench bench(config, 3);
  std::vector<int32_t> board(MaskBoard::stride(2) * 8);
  bench.scheduler.write_masks_to({board.data(), 2});
  const auto inbox = std::make_shared<MaskInbox>([] {});
  const auto channel = std::make_shared<MaskChannel>(2);
  channel->attach(inbox);
  RequestSpec spec = make_spec(1, 6, 40);
  spec.extras.masks = {channel};
  write_mask(*channel, 6, /*with_forced=*/false);
  bench.add(spec);
  for (int step = 0; step < 3; ++step) CHECK(bench.launch() != nullptr);  // what comes at 6, at 7, and at 8
  bench.commit(5);
  bench.commit(kNoMask);
  write_mask(*channel, 7, /*with_forced=*/true);
  RequestSpec same = make_spec(2, 6, 40);
  same.prompt.push_back(5);
  same.prompt.insert(same.prompt.end(), channel->forced.begin(), channel->forced.end());
  channel->post();
  bench.scheduler.take_masks(*inbox, bench.outbox, 3);
  bench.commit(kNoMask);  // the row that wrote at 7, the end of a block
  for (const int32_t cached : {4, 8}) {  // in the first of these steps, 7 is written again
    same.id += 1;
    bench.add(same, static_cast<int64_t>(same.id));
    const StepPlan* plan = bench.launch();
    CHECK_EQ(plan->rows.back().sequence->request->id, same.id);
    CHECK_EQ(plan->rows.back().context_len, cached);
    bench.commit(5);
  }
}

TEST(a_request_needs_a_mask_channel_for_each_sequence) {
  Options options;
  MaskedModel model(options);
  auto loop = make_loop(options, model);
  RequestSpec spec;
  spec.id = 1;
  spec.prompt = {1, 2};
  spec.max_tokens = 3;
  spec.n = 2;
  spec.extras.masks = {std::make_shared<MaskChannel>(2)};
  CHECK(loop->submit(spec) == SubmitResult::kTooLarge);
  spec.extras.masks.push_back(std::make_shared<MaskChannel>(3));
  CHECK(loop->submit(spec) == SubmitResult::kTooLarge);
  CHECK(loop->check(spec) == SubmitResult::kTooLarge);
  spec.extras.masks.back() = std::make_shared<MaskChannel>(2);
  CHECK(loop->check(spec) == SubmitResult::kAccepted);
  CHECK(loop->submit(spec) == SubmitResult::kAccepted);
  CHECK(loop->check(spec) == SubmitResult::kDuplicate);
  loop->stop(1s);
  CHECK(loop->check(spec) == SubmitResult::kClosed);
}

TEST(a_mask_for_a_sequence_that_is_gone_is_ignored) {
  auto channel = std::make_shared<MaskChannel>(2);
  {
    Options options;
    MaskedModel model(options);
    auto loop = make_loop(options, model);
    loop->start();
    RequestSpec spec;
    spec.id = 1;
    spec.prompt = {1, 2};
    spec.max_tokens = 1;
    spec.extras.masks = {channel};
    write_mask(*channel, 2, /*with_forced=*/false);
    CHECK(loop->submit(spec) == SubmitResult::kAccepted);
    for (int i = 0; i < 1000 && loop->stats().live_requests > 0; ++i) {
      pollfd fd{loop->wake_fd(), POLLIN, 0};
      ::poll(&fd, 1, 10);
      loop->drain([](const StepLoop::News&) {});
    }
    CHECK_EQ(loop->stats().live_requests, int64_t{0});
    write_mask(*channel, 3, /*with_forced=*/true);
    channel->post();
    std::this_thread::sleep_for(20ms);
    write_mask(*channel, 3, /*with_forced=*/true);
    loop->stop(1s);
    channel->post();  // nobody takes it any more
  }
  CHECK_EQ(channel.use_count(), 1L);
}
