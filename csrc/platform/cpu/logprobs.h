// The record of a token's log probabilities (RecordKind::kLogprobs in core/step_output.h).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "platform/cpu/logit_edits.h"

namespace asyncengine {

// Writes elements of log-softmax(logits / temperature): the token's own, and those that the slot asks for. Sums are in
// double. Nothing is written where the region has no room. `candidates` is scratch, with a capacity of the vocabulary.
void write_logprobs(std::span<const float> logits, float temperature, int32_t token, const SlotEdits& slot,
                    std::span<int32_t> region, std::vector<int32_t>& candidates);

}  // namespace asyncengine
