// Draws one token from one row of logits.
#pragma once

#include <cstdint>
#include <vector>

#include "core/step_batch.h"
#include "platform/cpu_isa.h"

namespace asyncengine {

constexpr Needs kCpuSamplerNeeds = kSamplingNeeds;  // what sample_token serves

struct SamplerScratch {
  void reserve(int64_t vocab);  // sample_token of this vocabulary then allocates nothing

  std::vector<float> mass;
  std::vector<double> sums;
  std::vector<uint16_t> bins;
  std::vector<int32_t> candidates;
};

// Temperature 0 takes the maximum (lowest index of equals). Otherwise temperature, then top-k, top-p and min-p in this
// order, each on what the one before left; equal logits rank by index, so top-k keeps exactly k. One uniform number,
// Philox4x32-10 keyed by the seed at counter `position`, picks by inverse cumulative mass in index order. The result
// depends on nothing but the arguments. A logit of -inf has no mass. -1: NaN or +inf among the logits, or none finite.
int32_t sample_token(const CpuIsa& isa, const float* logits, int64_t count, const SamplingState& state,
                     int64_t position, SamplerScratch& scratch);

// Uniform in [0, 1) with 53 bits: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
double philox_uniform(uint64_t seed, uint64_t position);

}  // namespace asyncengine
