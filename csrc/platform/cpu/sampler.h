// The end of a step on the CPU: a token, and where they are wanted records, from each row of logits.
#pragma once

#include <cstdint>
#include <vector>

#include "core/step_batch.h"
#include "platform/cpu/isa.h"
#include "platform/cpu/logit_edits.h"

namespace asyncengine {

struct SamplerScratch {
  void reserve(int64_t vocab);  // draw() of this vocabulary then allocates nothing

  std::vector<float> mass;
  std::vector<double> sums;
  std::vector<uint16_t> bins;
  std::vector<int32_t> candidates;
  std::vector<float> edited;  // logits
};

// Serves one step loop, whose slots it may keep state of from step to step.
class CpuSampler {
 public:
  static constexpr Needs kNeeds = kSamplingNeeds | kEditNeeds | kNeedLogprobs | kNeedLogits;  // draw() serves them

  CpuSampler(const CpuIsa& isa, int num_threads) : isa_(isa), scratch_(static_cast<size_t>(num_threads)) {}

  // Once a step, before its samples, of which there may be none. The batch's entries begin new lives of their slots.
  // All allocations are made here, in the caller: draw() must not throw.
  void begin(const StepBatch& batch, int64_t vocab);

  // The token of a sample, whose row of logits has `count` elements; -1 if NaN or +inf is among them, or none is finite.
  // Temperature 0 takes the maximum (lowest index of equals). Otherwise temperature, then top-k, top-p and min-p in this
  // order, each on what the one before left; equal logits rank by index, so top-k keeps exactly k. One uniform number,
  // Philox4x32-10 keyed by the seed at counter `position`, picks by inverse cumulative mass in index order. The token
  // depends on nothing but the logits, the sample and the history of its slot. A logit of -inf has no mass. Threads draw at
  // the same time, and a slot has one sample at most that appends. A sample that appends no token gives kNoToken.
  int32_t draw(const Sample& sample, const float* logits, int64_t count, int thread);

 private:
  int32_t draw_plain(const Sample& sample, const float* logits, int64_t count, SamplerScratch& scratch) const;
  int32_t draw_edited(const Sample& sample, const float* logits, int64_t count, SamplerScratch& scratch);

  const CpuIsa& isa_;
  std::vector<SamplerScratch> scratch_;  // by thread
  std::vector<SlotEdits> slots_;         // as many as have had entries
};

// Uniform in [0, 1) with 53 bits: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
double philox_uniform(uint64_t seed, uint64_t position);

}  // namespace asyncengine
