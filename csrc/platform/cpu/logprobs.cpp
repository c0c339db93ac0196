#include "platform/cpu/logprobs.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>

#include "core/step_output.h"

namespace asyncengine {

void write_logprobs(std::span<const float> logits, float temperature, int32_t token, const SlotEdits& slot,
                    std::span<int32_t> region, std::vector<int32_t>& candidates) {
  const auto vocab = static_cast<int32_t>(logits.size());
  const int32_t top = std::clamp(slot.parameters.top_logprobs, 0, vocab);
  const size_t words = 1 + 2 * (1 + static_cast<size_t>(top) + slot.named.size());
  if (region.size() < 1 + words || token < 0 || token >= vocab) return;
  const auto at = [&](int32_t index) { return logits[static_cast<size_t>(index)]; };
  const float highest = *std::max_element(logits.begin(), logits.end());
  double sum = 0.;
  int32_t rank = 1;
  for (const float logit : logits) {
    sum += std::exp(static_cast<double>(logit - highest) / static_cast<double>(temperature));
    rank += logit > at(token);
  }
  const double total = std::log(sum);
  auto payload = RecordWriter(region).add(kLogprobs, words);
  size_t k = 0;
  payload[k++] = rank;
  const auto put = [&](int32_t index) {
    double value = -std::numeric_limits<double>::infinity();
    if (index < vocab) value = static_cast<double>(at(index) - highest) / static_cast<double>(temperature) - total;
    payload[k++] = index;
    payload[k++] = std::bit_cast<int32_t>(static_cast<float>(value));
  };
  put(token);
  if (top > 0) {
    candidates.resize(logits.size());
    std::iota(candidates.begin(), candidates.end(), 0);
    std::partial_sort(candidates.begin(), candidates.begin() + top, candidates.end(),
                      [&](int32_t a, int32_t b) { return at(a) > at(b) || (at(a) == at(b) && a < b); });
    for (int32_t i = 0; i < top; ++i) put(candidates[static_cast<size_t>(i)]);
  }
  for (const int32_t named : slot.named) put(named);
}

}  // namespace asyncengine
