#include "platform/cpu_sampler.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>

namespace asyncengine {
namespace {

// Ranking is by logit, descending, then by index; a filter keeps a prefix of the ranking, named by its last element.
struct Cut {
  float logit;
  int32_t index;

  bool keeps(float other, int32_t at) const { return other > logit || (other == logit && at <= index); }
};

// Bins of equal width in logits, highest first, find the neighbourhood of a cut; only that bin is sorted.
class Ranking {
 public:
  static constexpr int kBins = 2048;

  Ranking(const float* logits, int64_t count, const float* mass, const LogitStats& stats, float temperature,
          std::vector<int32_t>& candidates)
      : logits_(logits), count_(count), mass_(mass), max_(stats.max), candidates_(candidates) {
    // Past 30 temperatures below the maximum (e^-30) all share the last bin.
    const float range = std::min(stats.max - stats.min, 30.f * temperature);
    scale_ = range > 0.f ? static_cast<float>(kBins - 1) / range : 0.f;
    if (!std::isfinite(scale_)) scale_ = 0.f;
    for (int64_t i = 0; i < count; ++i) {
      const size_t bin = bin_of(logits[i]);
      ++counts_[bin];
      masses_[bin] += static_cast<double>(mass[i]);
    }
  }

  double total_mass() const { return std::accumulate(masses_.begin(), masses_.end(), 0.); }

  // The first k of the ranking, and their mass. k in [1, count].
  Cut top_k(int64_t k, double& kept_mass) {
    kept_mass = 0.;
    size_t bin = 0;
    for (; k > counts_[bin]; ++bin) {
      k -= counts_[bin];
      kept_mass += masses_[bin];
    }
    gather_bin(bin);
    std::nth_element(candidates_.begin(), candidates_.begin() + (k - 1), candidates_.end(), ByRank{logits_});
    for (int64_t i = 0; i < k; ++i) kept_mass += mass_at(i);
    return cut_at(k - 1);
  }

  // The shortest prefix whose mass reaches `wanted`, at least one element.
  Cut top_p(double wanted) {
    double passed = 0.;
    size_t bin = 0;
    while (bin + 1 < kBins && passed + masses_[bin] < wanted) passed += masses_[bin++];
    while (counts_[bin] == 0) --bin;  // rounding left nothing at the end of the last bin
    gather_bin(bin);
    std::sort(candidates_.begin(), candidates_.end(), ByRank{logits_});
    int64_t i = 0;
    for (; i + 1 < counts_[bin]; ++i) {
      passed += mass_at(i);
      if (passed >= wanted) break;
    }
    return cut_at(i);
  }

 private:
  struct ByRank {
    const float* logits;
    bool operator()(int32_t a, int32_t b) const {
      return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
    }
  };

  double mass_at(int64_t i) const { return static_cast<double>(mass_[candidates_[static_cast<size_t>(i)]]); }
  Cut cut_at(int64_t i) const {
    const int32_t index = candidates_[static_cast<size_t>(i)];
    return {logits_[index], index};
  }

  size_t bin_of(float logit) const {
    const float distance = (max_ - logit) * scale_;
    return distance < static_cast<float>(kBins - 1) ? static_cast<size_t>(distance) : kBins - 1;
  }

  void gather_bin(size_t bin) {
    candidates_.clear();
    for (int64_t i = 0; i < count_; ++i) {
      if (bin_of(logits_[i]) == bin) candidates_.push_back(static_cast<int32_t>(i));
    }
  }

  const float* logits_;
  int64_t count_;
  const float* mass_;
  float max_, scale_;
  std::vector<int32_t>& candidates_;
  std::array<int64_t, kBins> counts_{};
  std::array<double, kBins> masses_{};
};

void drop_filtered(const float* logits, int64_t count, const SamplingState& state, const LogitStats& stats,
                   SamplerScratch& scratch) {
  float* mass = scratch.mass.data();
  const bool limit_k = state.top_k > 0 && state.top_k < count, limit_p = state.top_p < 1.f;
  if (limit_k || limit_p) {
    Ranking ranking(logits, count, mass, stats, state.temperature, scratch.candidates);
    double kept_mass = ranking.total_mass();
    Cut cut{-std::numeric_limits<float>::infinity(), std::numeric_limits<int32_t>::max()};
    if (limit_k) cut = ranking.top_k(state.top_k, kept_mass);
    if (limit_p) {
      const Cut nucleus = ranking.top_p(static_cast<double>(state.top_p) * kept_mass);
      if (cut.keeps(nucleus.logit, nucleus.index)) cut = nucleus;
    }
    for (int64_t i = 0; i < count; ++i) {
      if (!cut.keeps(logits[i], static_cast<int32_t>(i))) mass[i] = 0.f;
    }
  }
  if (state.min_p > 0.f) {  // the largest mass is exactly 1
    for (int64_t i = 0; i < count; ++i) mass[i] = mass[i] < state.min_p ? 0.f : mass[i];
  }
}

// The first element at which the running mass exceeds `target`; the last one with mass if rounding leaves none.
int32_t pick(const float* mass, int64_t count, const std::vector<double>& sums, double target) {
  size_t block = 0;
  double passed = 0.;
  size_t last_block = 0;
  for (; block < sums.size(); ++block) {
    if (sums[block] > 0.) last_block = block;
    if (passed + sums[block] > target) break;
    passed += sums[block];
  }
  if (block == sums.size()) block = last_block;
  const int64_t begin = static_cast<int64_t>(block) * kMassBlock, end = std::min(count, begin + kMassBlock);
  int64_t last = begin;
  for (int64_t i = begin; i < end; ++i) {
    if (mass[i] == 0.f) continue;
    last = i;
    passed += static_cast<double>(mass[i]);
    if (passed > target) break;
  }
  return static_cast<int32_t>(last);
}

}  // namespace

double philox_uniform(uint64_t seed, uint64_t position) {
  uint32_t c0 = static_cast<uint32_t>(position), c1 = static_cast<uint32_t>(position >> 32), c2 = 0, c3 = 0;
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53u} * c0, p1 = uint64_t{0xCD9E8D57u} * c2;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c1 = static_cast<uint32_t>(p1);
    c3 = static_cast<uint32_t>(p0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  const uint64_t bits = (uint64_t{c0} << 32 | c1) >> 11;
  return static_cast<double>(bits) * 0x1p-53;
}

int32_t sample_token(const CpuIsa& isa, const float* logits, int64_t count, const SamplingState& state,
                     int64_t position, SamplerScratch& scratch) {
  const LogitStats stats = isa.logit_stats(logits, count);
  if (!stats.valid) return -1;
  if (state.temperature == 0.f) return static_cast<int32_t>(stats.argmax);

  scratch.mass.resize(static_cast<size_t>(count));
  scratch.sums.resize(static_cast<size_t>((count + kMassBlock - 1) / kMassBlock));
  isa.sampling_mass(logits, count, stats.max, state.temperature, scratch.mass.data());
  drop_filtered(logits, count, state, stats, scratch);
  isa.block_sums(scratch.mass.data(), count, scratch.sums.data());
  double total = 0.;
  for (const double sum : scratch.sums) total += sum;
  const double uniform = philox_uniform(state.seed, static_cast<uint64_t>(position));
  return pick(scratch.mass.data(), count, scratch.sums, uniform * total);
}

}  // namespace asyncengine
