// The result of a step: tokens in head words, and typed records of variable length.
//
//   heads: a word per sample | records: max_result_words words
//
// A word has 64 bits: the number of its step (its low half) << 32 | a payload. So it says for itself whether it belongs to
// the step: a word left over from another step, or one that is not there yet, is found. Only words that the step asked for
// are looked at.
//
// The payload of a head is a token, or one of the negative numbers below. Where a row may give several tokens and only the
// device knows how many, they are the heads of the row's first samples, and the next one has kNoToken.
//
// A sample whose row wants records has a region of the record section. It is a chain of records, each a header (kind and
// count) and so many payload words, up to the region's end or to kEndOfRecords. asyncengine/kernels/cuda/sampling/results.py
// writes the same.
#pragma once

#include <cassert>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace asyncengine {

constexpr int32_t kNotFinite = -1;  // instead of a token: the logits of the row were not finite
constexpr int32_t kNoToken = -2;    // instead of a token: none was sampled here
constexpr int32_t kNoMask = -3;     // instead of a token: its mask has not come (mask_board.h)
constexpr int32_t kDeferred = -4;   // likewise, and the mask is made of the logits, which are in the records

enum RecordKind : uint32_t {
  kEndOfRecords = 0,
  // Rank of the chosen token, from 1; then pairs of a token and the bits of its log probability: the chosen one, the most
  // probable ones in order, the named ones in theirs.
  kLogprobs = 1,
  kVector = 2,    // bits of floats
  // Bits of floats: the logits of a kDeferred head, a number per token of the vocabulary, after penalties, biases and bans.
  kLogits = 3,
};

// The head of a record, and of an entry of a slot update (step_input.h): kind in 8 bits, count of the words that follow in 24.
constexpr uint32_t kMaxEntryWords = (1u << 24) - 1;
constexpr int32_t entry_header(uint32_t kind, size_t count) {
  return static_cast<int32_t>(kind << 24 | static_cast<uint32_t>(count));
}
constexpr uint32_t entry_kind(int32_t header) { return static_cast<uint32_t>(header) >> 24; }
constexpr size_t entry_count(int32_t header) { return static_cast<uint32_t>(header) & kMaxEntryWords; }

// Words that the entries in `words` take, up to kEndOfRecords.
inline size_t entries_length(std::span<const int32_t> words) {
  size_t k = 0;
  while (k < words.size() && entry_kind(words[k]) != kEndOfRecords) k += 1 + entry_count(words[k]);
  assert(k <= words.size());
  return k;
}

// Calls visit(kind, payload) for each.
template <typename Visit>
void for_each_entry(std::span<const int32_t> words, Visit&& visit) {
  for (size_t k = 0; k < words.size() && entry_kind(words[k]) != kEndOfRecords; k += 1 + entry_count(words[k])) {
    visit(entry_kind(words[k]), words.subspan(k + 1, entry_count(words[k])));
  }
}

// Results without step numbers: a token per sample, and the record section.
struct StepResults {
  const int32_t* tokens = nullptr;
  const int32_t* records = nullptr;
};

// True if sample `i` of a row has records. `tokens` are the row's: the first samples may be scored only and have no head,
// the others give tokens until one does not. A row that gives no token at all has the records of its first head.
inline bool has_records(int32_t i, int32_t num_samples, int32_t num_appends, const int32_t* tokens) {
  const int32_t first = num_samples - num_appends;
  if (i < first) return true;
  for (int32_t k = first; k < i; ++k) {
    if (tokens[k] < 0) return false;
  }
  return tokens[i] >= 0 || (i == first && (tokens[i] == kNoToken || tokens[i] == kDeferred));
}

// Fills the region of a sample. The region is empty to begin with: words of 0 end it.
class RecordWriter {
 public:
  explicit RecordWriter(std::span<int32_t> region) : region_(region) {}

  // Returns the place of the payload. Precondition: there is room for it and its header.
  std::span<int32_t> add(RecordKind kind, size_t count) {
    assert(used_ + 1 + count <= region_.size());
    region_[used_] = entry_header(kind, count);
    const auto payload = region_.subspan(used_ + 1, count);
    used_ += 1 + count;
    return payload;
  }

 private:
  std::span<int32_t> region_;
  size_t used_ = 0;
};

}  // namespace asyncengine
