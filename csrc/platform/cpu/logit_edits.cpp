#include "platform/cpu/logit_edits.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>

namespace asyncengine {
namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();

void ban(std::span<float> logits, int32_t token) {
  if (static_cast<size_t>(token) < logits.size()) logits[static_cast<size_t>(token)] = kNever;
}

}  // namespace

void apply_mask(std::span<float> logits, const int32_t* mask) {
  for (size_t i = 0; i < logits.size(); ++i) {
    if ((static_cast<uint32_t>(mask[i / 32]) >> (i % 32) & 1u) == 0) logits[i] = kNever;
  }
}

void SlotEdits::begin(std::span<const int32_t> entries, int64_t vocab) {
  *this = {};
  for_each_entry(entries, [&](uint32_t kind, std::span<const int32_t> words) {
    const auto keep = [&](std::vector<int32_t>& list) { list.assign(words.begin(), words.end()); };
    if (kind == kParameters && words.size_bytes() == sizeof parameters) {
      std::memcpy(static_cast<void*>(&parameters), words.data(), sizeof parameters);
    }
    if (kind == kTokenHistory) keep(history);
    if (kind == kBias) keep(bias);
    if (kind == kBannedWords) keep(banned);
    if (kind == kEndTokens) keep(ends);
    if (kind == kAllowedTokens) keep(allowed);
    if (kind == kNamedTokens) keep(named);
  });
  const SlotParameters& p = parameters;
  if (p.presence_penalty == 0.f && p.frequency_penalty == 0.f && p.repetition_penalty == 1.f) return;
  counts.resize(static_cast<size_t>(vocab));
  for (size_t i = 0; i < history.size(); ++i) {
    if (static_cast<size_t>(history[i]) >= counts.size()) continue;
    int32_t& count = counts[static_cast<size_t>(history[i])];
    count = i < static_cast<size_t>(parameters.prompt_len) ? count | 1 : count + 2;
  }
}

void SlotEdits::make_room() {
  if (history.size() == history.capacity()) history.reserve(2 * history.size() + 16);
}

void SlotEdits::append(int32_t token) {
  history.push_back(token);
  if (static_cast<size_t>(token) < counts.size()) counts[static_cast<size_t>(token)] += 2;
}

void SlotEdits::penalize(std::span<float> logits) const {
  const SlotParameters& p = parameters;
  for (size_t i = 0; i < std::min(logits.size(), counts.size()); ++i) {
    if (counts[i] == 0) continue;
    float& l = logits[i];
    if (p.repetition_penalty != 1.f) l = l > 0.f ? l / p.repetition_penalty : l * p.repetition_penalty;
    if (counts[i] > 1) l -= p.frequency_penalty * static_cast<float>(counts[i] / 2) + p.presence_penalty;
  }
}

void SlotEdits::ban_ngrams(std::span<float> logits) const {
  const auto n = static_cast<size_t>(std::max(0, parameters.no_repeat_ngram));
  if (n == 0 || history.size() < n) return;
  const int32_t* prefix = history.data() + (history.size() - (n - 1));
  for (size_t i = 0; i + n <= history.size(); ++i) {
    if (std::equal(prefix, prefix + (n - 1), history.data() + i)) ban(logits, history[i + n - 1]);
  }
}

void SlotEdits::ban_words(std::span<float> logits) const {
  for (size_t k = 0; k < banned.size();) {
    const auto length = static_cast<size_t>(banned[k]);
    const int32_t* word = banned.data() + k + 1;
    k += 1 + length;
    if (length == 0 || k > banned.size() || length - 1 > history.size()) continue;
    if (std::equal(word, word + (length - 1), history.data() + (history.size() - (length - 1)))) ban(logits, word[length - 1]);
  }
}

void SlotEdits::apply(std::span<float> logits, Needs needs, int64_t position) const {
  if (needs & kNeedPenalties) penalize(logits);
  for (size_t i = 0; i + 1 < bias.size(); i += 2) {
    const auto token = static_cast<size_t>(bias[i]);
    if (token < logits.size()) logits[token] += std::bit_cast<float>(bias[i + 1]);
  }
  if (needs & kNeedPenalties) {
    ban_ngrams(logits);
    ban_words(logits);
  }
  if (position - parameters.prompt_len < parameters.min_tokens) {
    for (const int32_t token : ends) ban(logits, token);
  }
  if (allowed.size() * 32 >= logits.size()) apply_mask(logits, allowed.data());
}

}  // namespace asyncengine
