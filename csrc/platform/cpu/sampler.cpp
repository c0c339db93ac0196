#include "platform/cpu/sampler.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <numeric>

#include "core/mask_board.h"
#include "platform/cpu/logprobs.h"

namespace asyncengine {
namespace {

// Elements rank by logit, descending, then by index, and a filter keeps a prefix of this order. Bins of equal width in
// logits, highest first, find the neighbourhood of its end; only that bin is looked at element by element.
class Ranking {
 public:
  static constexpr int kBins = 2048;
  static constexpr int64_t kGatherBlock = 256;

  Ranking(const float* logits, int64_t count, const LogitStats& stats, float temperature, SamplerScratch& scratch)
      : logits_(logits), count_(count), mass_(scratch.mass.data()), bins_(scratch.bins), candidates_(scratch.candidates) {
    // Past 30 temperatures below the maximum (e^-30) all share the last bin.
    const float range = std::min(stats.max - stats.min, 30.f * temperature);
    float scale = range > 0.f ? static_cast<float>(kBins - 1) / range : 0.f;
    if (!std::isfinite(scale)) scale = 0.f;
    bins_.resize(static_cast<size_t>(count));
    uint16_t* bins = bins_.data();
    for (int64_t i = 0; i < count; ++i) {
      const float distance = (stats.max - logits[i]) * scale;  // NaN for -inf if scale is 0: the last bin
      bins[i] = static_cast<uint16_t>(static_cast<int32_t>(distance < kBins - 1 ? distance : kBins - 1));
    }
    for (int64_t i = 0; i < count; ++i) {
      ++counts_[bins[i]];
      masses_[bins[i]] += static_cast<double>(mass_[i]);
    }
  }

  double total_mass() const { return std::accumulate(masses_.begin(), masses_.end(), 0.); }

  // Keeps the first k of the ranking, 1 ≤ k ≤ count, and returns their mass.
  double keep_top_k(int64_t k) {
    double kept = 0.;
    size_t bin = 0;
    for (; k > counts_[bin]; ++bin) {
      k -= counts_[bin];
      kept += masses_[bin];
    }
    gather(bin);
    std::nth_element(candidates_.begin(), candidates_.begin() + (k - 1), candidates_.end(), ByRank{logits_});
    for (int64_t i = 0; i < k; ++i) kept += mass_at(i);
    drop_after(k - 1);
    return kept;
  }

  // Keeps the shortest prefix whose mass reaches `wanted`, at least one element.
  void keep_top_p(double wanted) {
    double passed = 0.;
    size_t bin = 0;
    while (bin + 1 < kBins && passed + masses_[bin] < wanted) passed += masses_[bin++];
    while (counts_[bin] == 0) --bin;  // rounding left nothing at the end of the last bin
    gather(bin);
    std::sort(candidates_.begin(), candidates_.end(), ByRank{logits_});
    int64_t last = 0;
    for (; last + 1 < counts_[bin]; ++last) {
      passed += mass_at(last);
      if (passed >= wanted) break;
    }
    drop_after(last);
  }

 private:
  struct ByRank {
    const float* logits;
    bool operator()(int32_t a, int32_t b) const { return logits[a] > logits[b] || (logits[a] == logits[b] && a < b); }
  };

  void gather(size_t bin) {
    candidates_.clear();
    const uint16_t* bins = bins_.data();
    const uint16_t wanted = static_cast<uint16_t>(bin);
    for (int64_t begin = 0; begin < count_; begin += kGatherBlock) {
      const int64_t end = std::min(count_, begin + kGatherBlock);
      // This test has no branches, hence it runs in vectors; few blocks hold any.
      uint16_t found = 0;
      for (int64_t i = begin; i < end; ++i) found = static_cast<uint16_t>(found | (bins[i] == wanted ? 1 : 0));
      if (found == 0) continue;
      for (int64_t i = begin; i < end; ++i) {
        if (bins[i] == wanted) candidates_.push_back(static_cast<int32_t>(i));
      }
    }
  }

  double mass_at(int64_t i) const { return static_cast<double>(mass_[candidates_[static_cast<size_t>(i)]]); }

  // Takes the mass from all that ranks behind the candidate; its equals are candidates, too.
  void drop_after(int64_t last_candidate) {
    const int32_t last = candidates_[static_cast<size_t>(last_candidate)];
    const float limit = logits_[last];
    for (int64_t i = 0; i < count_; ++i) mass_[i] = logits_[i] < limit ? 0.f : mass_[i];
    for (const int32_t i : candidates_) {
      if (logits_[i] == limit && i > last) mass_[i] = 0.f;
    }
  }

  const float* logits_;
  int64_t count_;
  float* mass_;
  std::vector<uint16_t>& bins_;
  std::vector<int32_t>& candidates_;
  std::array<int64_t, kBins> counts_{};
  std::array<double, kBins> masses_{};
};

void drop_filtered(const float* logits, int64_t count, const SamplingState& state, const LogitStats& stats,
                   SamplerScratch& scratch) {
  const bool limit_k = state.top_k > 0 && state.top_k < count, limit_p = state.top_p < 1.f;
  if (limit_k || limit_p) {
    Ranking ranking(logits, count, stats, state.temperature, scratch);
    const double mass = limit_k ? ranking.keep_top_k(state.top_k) : ranking.total_mass();
    if (limit_p) ranking.keep_top_p(static_cast<double>(state.top_p) * mass);
  }
  if (state.min_p > 0.f) {  // the largest mass is exactly 1
    for (float& mass : scratch.mass) mass = mass < state.min_p ? 0.f : mass;
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

void SamplerScratch::reserve(int64_t vocab) {
  const size_t count = static_cast<size_t>(vocab);
  mass.reserve(count);
  sums.reserve(count / kMassBlock + 1);
  bins.reserve(count);
  candidates.reserve(count);
  edited.reserve(count);
}

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

void CpuSampler::begin(const StepBatch& batch, int64_t vocab) {
  for (SamplerScratch& buffers : scratch_) buffers.reserve(vocab);
  for (const SlotEntries& entries : batch.entries) {
    const auto slot = static_cast<size_t>(entries.slot);
    if (slot >= slots_.size()) slots_.resize(slot + 1);
    slots_[slot].begin(entries.words, vocab);
  }
  for (const Sample& sample : batch.samples) {
    if ((sample.needs & (kEditNeeds | kNeedLogprobs)) == 0) continue;
    const auto slot = static_cast<size_t>(sample.slot);
    if (slot >= slots_.size()) slots_.resize(slot + 1);
    slots_[slot].make_room();
  }
}

int32_t CpuSampler::draw(const Sample& sample, const float* logits, int64_t count, int thread) {
  SamplerScratch& scratch = scratch_[static_cast<size_t>(thread)];
  if ((sample.needs & (kEditNeeds | kNeedLogprobs)) == 0) return draw_plain(sample, logits, count, scratch);
  return draw_edited(sample, logits, count, scratch);
}

int32_t CpuSampler::draw_edited(const Sample& sample, const float* logits, int64_t count, SamplerScratch& scratch) {
  SlotEdits& slot = slots_[static_cast<size_t>(sample.slot)];
  const bool records = (sample.needs & kNeedLogprobs) != 0;
  if (!isa_.logit_stats(logits, count).valid) return kNotFinite;
  if (!sample.appends) {
    if (records && sample.position < slot.parameters.prompt_len) {
      write_logprobs({logits, static_cast<size_t>(count)}, 1.f, slot.history.data()[sample.position], slot, sample.records,
                     scratch.candidates);
    }
    return kNoToken;
  }
  if (slot.parameters.flags & kScoreOnly) return kNoToken;
  const auto mask = sample.mask == nullptr ? MaskBoard::Found::kAllowsAll : MaskBoard::find(sample.mask, sample.position);
  const bool missing = mask == MaskBoard::Found::kMissing;
  if (missing && (sample.needs & kNeedLogits) == 0) return kNoMask;
  const float* edited = logits;
  if (sample.needs & kEditNeeds) {
    scratch.edited.assign(logits, logits + count);
    slot.apply(scratch.edited, sample.needs, sample.position);
    if (mask == MaskBoard::Found::kMask) apply_mask(scratch.edited, sample.mask + MaskBoard::kHeadWords);
    edited = scratch.edited.data();
  }
  if (missing) {
    if (sample.records.size() < 1 + static_cast<size_t>(count)) return kNotFinite;
    std::memcpy(RecordWriter(sample.records).add(kLogits, static_cast<size_t>(count)).data(), edited,
                static_cast<size_t>(count) * sizeof(float));
    return kDeferred;
  }
  const int32_t token = draw_plain(sample, edited, count, scratch);
  if (token < 0) return token;
  if (records) {
    const bool processed = (slot.parameters.flags & kProcessedLogprobs) != 0;
    const float heat = processed && sample.state->temperature > 0.f ? sample.state->temperature : 1.f;
    write_logprobs({processed ? edited : logits, static_cast<size_t>(count)}, heat, token, slot, sample.records,
                   scratch.candidates);
  }
  if (sample.needs & kNeedPenalties) slot.append(token);
  return token;
}

int32_t CpuSampler::draw_plain(const Sample& sample, const float* logits, int64_t count, SamplerScratch& scratch) const {
  const SamplingState& state = *sample.state;
  const LogitStats stats = isa_.logit_stats(logits, count);
  if (!stats.valid) return -1;
  if (state.temperature == 0.f) return static_cast<int32_t>(stats.argmax);

  scratch.mass.resize(static_cast<size_t>(count));
  scratch.sums.resize(static_cast<size_t>((count + kMassBlock - 1) / kMassBlock));
  isa_.sampling_mass(logits, count, stats.max, state.temperature, scratch.mass.data());
  drop_filtered(logits, count, state, stats, scratch);
  isa_.block_sums(scratch.mass.data(), count, scratch.sums.data());
  double total = 0.;
  for (const double sum : scratch.sums) total += sum;
  const double uniform = philox_uniform(state.seed, static_cast<uint64_t>(sample.position));
  return pick(scratch.mass.data(), count, scratch.sums, uniform * total);
}

}  // namespace asyncengine
