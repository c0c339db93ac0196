// Edits of logits that requests ask for before a token is drawn: penalties, biases and tokens that may not come.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/step_batch.h"
#include "core/step_input.h"

namespace asyncengine {

constexpr Needs kEditNeeds = kNeedPenalties | kNeedBias | kNeedMask;

// `mask`: a bit per token, 32 a word from the lowest. Tokens without it lose their logits.
void apply_mask(std::span<float> logits, const int32_t* mask);

// Edits of a slot's sequence, for as long as it has the slot.
struct SlotEdits {
  void begin(std::span<const int32_t> entries, int64_t vocab);
  void make_room();  // for another token: append() allocates nothing
  void append(int32_t token);
  // Edits the logits in place. `position` is of the token that is to be drawn.
  void apply(std::span<float> logits, Needs needs, int64_t position) const;

  SlotParameters parameters;
  std::vector<int32_t> history;  // prompt and output
  std::vector<int32_t> counts;   // by token: 2 * times in the output, + 1 if it is in the prompt
  std::vector<int32_t> bias, banned, ends, allowed, named;

 private:
  void penalize(std::span<float> logits) const;
  void ban_ngrams(std::span<float> logits) const;
  void ban_words(std::span<float> logits) const;
};

}  // namespace asyncengine
