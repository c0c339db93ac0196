#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "check.h"
#include "platform/cpu/sampler.h"

using namespace asyncengine;

namespace {

std::vector<int> draw(const std::vector<float>& logits, SamplingState state, int draws) {
  std::vector<int> counts(logits.size());
  CpuSampler sampler(select_cpu_isa("auto"), 1);
  sampler.begin({}, static_cast<int64_t>(logits.size()));
  for (int position = 0; position < draws; ++position) {
    const Sample sample{.position = position, .state = &state, .records = {}};
    const int32_t token = sampler.draw(sample, logits.data(), static_cast<int64_t>(logits.size()), 0);
    CHECK(token >= 0);
    ++counts[static_cast<size_t>(token)];
  }
  return counts;
}

int32_t draw_one(const std::vector<float>& logits, SamplingState state) {
  const Sample sample{.position = 0, .state = &state, .records = {}};
  int32_t token = -2;
  for (const std::string& name : available_cpu_isas()) {
    CpuSampler sampler(select_cpu_isa(name), 1);
    sampler.begin({}, static_cast<int64_t>(logits.size()));
    const int32_t now = sampler.draw(sample, logits.data(), static_cast<int64_t>(logits.size()), 0);
    CHECK(token == -2 || token == now);
    token = now;
  }
  return token;
}

}  // namespace

TEST(sampler_philox_known_answers) {
  // Philox4x32-10 of zero key and counter begins 6627e8d5 e169c58d (Random123's known-answer test).
  CHECK_EQ(philox_uniform(0, 0), static_cast<double>((uint64_t{0x6627e8d5u} << 32 | 0xe169c58du) >> 11) * 0x1p-53);
  CHECK(philox_uniform(0, 1) != philox_uniform(1, 0));
}

TEST(sampler_greedy_takes_the_lowest_index_of_equals) {
  std::vector<float> logits(100, -3.f);
  CHECK_EQ(draw_one(logits, {}), 0);
  logits[41] = logits[77] = 5.f;
  CHECK_EQ(draw_one(logits, {}), 41);
  logits[99] = 6.f;
  CHECK_EQ(draw_one(logits, {}), 99);
}

TEST(sampler_reports_broken_logits) {
  const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  for (const float temperature : {0.f, 1.f}) {
    SamplingState state{.temperature = temperature, .top_p = 0.9f, .top_k = 3};
    for (const size_t where : {size_t{0}, size_t{15}, size_t{36}}) {
      std::vector<float> logits(37, 1.f);
      logits[where] = nan;
      CHECK_EQ(draw_one(logits, state), -1);
      logits[where] = inf;
      CHECK_EQ(draw_one(logits, state), -1);
      logits[where] = -inf;
      CHECK(draw_one(logits, state) >= 0);
    }
    CHECK_EQ(draw_one(std::vector<float>(37, -inf), state), -1);
  }
}

TEST(sampler_filters_keep_what_they_should) {
  // Probabilities 0.4, 0.3, 0.2, 0.1 at scattered places, the rest nothing.
  std::vector<float> logits(64, -std::numeric_limits<float>::infinity());
  logits[50] = std::log(0.4f);
  logits[3] = std::log(0.3f);
  logits[20] = std::log(0.2f);
  logits[21] = std::log(0.1f);
  auto kept = [&](SamplingState state) {
    state.temperature = 1.f;
    std::string names;
    const std::vector<int> counts = draw(logits, state, 2000);
    for (const size_t i : {50, 3, 20, 21}) names += counts[i] > 0 ? 'x' : '.';
    return names;
  };
  CHECK_EQ(kept({}), "xxxx");
  CHECK_EQ(kept({.top_k = 2}), "xx..");
  CHECK_EQ(kept({.top_p = 0.69f}), "xx..");
  CHECK_EQ(kept({.top_p = 0.71f}), "xxx.");
  CHECK_EQ(kept({.min_p = 0.45f}), "xxx.");
  CHECK_EQ(kept({.min_p = 0.55f}), "xx..");
  CHECK_EQ(kept({.top_p = 0.6f, .top_k = 3}), "xx..");   // 0.4 / 0.9 < 0.6
  CHECK_EQ(kept({.top_p = 0.44f, .top_k = 3}), "x...");  // 0.4 / 0.9 > 0.44
  CHECK_EQ(kept({.top_p = 1e-6f}), "x...");
}

TEST(sampler_equal_logits_rank_by_index) {
  const std::vector<float> logits(1000, 0.25f);
  for (const int32_t k : {1, 7, 999}) {
    const std::vector<int> counts = draw(logits, {.temperature = 2.f, .top_k = k}, 1000);
    for (size_t i = 0; i < counts.size(); ++i) CHECK((counts[i] > 0) == (i < static_cast<size_t>(k)) || k == 999);
    CHECK_EQ(counts[999], 0);
  }
}

TEST(sampler_extreme_temperatures_are_defined) {
  std::vector<float> logits(300, 0.f);
  logits[123] = 1.f;
  CHECK_EQ(draw_one(logits, {.temperature = 1e-40f, .top_p = 0.5f, .top_k = 5}), 123);
  CHECK(draw_one(logits, {.temperature = 1e30f, .top_p = 0.5f, .top_k = 5}) >= 0);
  logits[7] = -3e38f;
  logits[8] = 3e38f;
  CHECK_EQ(draw_one(logits, {.temperature = 1.f, .top_p = 0.5f}), 8);
}
