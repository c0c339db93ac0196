// Slot: what a step needs to know of a running sequence, apart from the rest of it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "core/prefix_index.h"
#include "core/sequence.h"

namespace asyncengine {

// Counts of tokens, in order:  computed <= total = num_tokens() + pending;  published_end <= what retired steps computed.
// If a step may append several tokens, pending, total and computed are upper bounds until it is committed.
//
// Slots lie side by side, and a decode step touches nothing else of a sequence: the first cache line to schedule it, both
// to commit its token. The Sequence, somewhere in the heap, is needed when it ends or leaves its slot, and when the tail is
// full but is not a block that the prefix cache takes.
struct alignas(64) Slot {
  Sequence* sequence = nullptr;
  uint64_t chain = 0;         // prefix chain of its published blocks, or its salt while it has none
  int32_t computed = 0;       // tokens whose KV a launched step writes
  int32_t max_total = 0;      // prompt and output tokens at most
  int32_t capacity = 0;       // tokens that the blocks it holds have room for
  int32_t published_end = 0;  // tokens in blocks that the prefix cache knows
  int32_t stops[Sequence::kInlineStops] = {-1, -1, -1, -1};  // the first few, or -1
  uint32_t planned_step = 0;  // the last step that has a row of this sequence, its low half
  int8_t pending = 0;         // tokens being sampled by steps in flight: placeholders, as many as there can be
  uint8_t needs = 0;          // Need bits, those below 256
  uint8_t in_flight : 4 = 0;    // rows of this sequence in steps in flight
  uint8_t step_tokens : 4 = 1;  // that a decode step may append
  SequenceState state : 3 = SequenceState::kRunning;  // the sequence's, kept here too
  bool on_device : 1 = false;   // last_token[slot] is, or will be, this sequence's latest token
  bool forked : 1 = false;      // the block it writes next may be shared with a sibling
  bool more_stops : 1 = false;  // than there is room for here
  bool extras : 1 = false;      // its request has RequestExtras beyond needs and entries
  bool results : 1 = false;     // and among them records
  Tokens::Tail tail;            // the newest tokens

  Slot() = default;
  explicit Slot(Sequence& owner)
      : sequence(&owner),
        max_total(owner.max_total),
        needs(static_cast<uint8_t>(owner.needs)),
        step_tokens(static_cast<uint8_t>(owner.request->extras.tokens_per_step & 15)),
        more_stops(owner.num_stops > Sequence::kInlineStops),
        extras(owner.request->extras.any()),
        results(owner.request->extras.result_words > 0),
        tail(owner.tokens) {
    std::copy_n(owner.stops, std::min(owner.num_stops, Sequence::kInlineStops), stops);
  }

  Chain prefix() const { return {chain, published_end == 0}; }
  // True while the results of steps in flight count for it.
  bool alive() const {
    return state == SequenceState::kRunning || state == SequenceState::kPreempting || state == SequenceState::kHosted;
  }
  int32_t num_tokens() const { return tail.num_tokens(); }  // known: prompt and output
  int32_t total() const { return num_tokens() + pending; }
  bool decodes() const { return on_device && total() - computed == 1; }
  bool wants_more() const { return computed < total() && total() < max_total; }
  // Its next row decodes one token, needs no block, and its request wants nothing but the token.
  bool is_plain() const {
    return static_cast<int>(state == SequenceState::kRunning) & static_cast<int>(on_device) & static_cast<int>(!forked) &
           static_cast<int>(!extras) & static_cast<int>(total() - computed == 1) & static_cast<int>(total() < max_total) &
           static_cast<int>(computed < capacity);
  }
  // False: the token is one, and by itself does not end the sequence. True: stops_at() decides, or there is no token.
  bool may_stop_at(int32_t token) const {
    const int stop = static_cast<int>(stops[0] == token) | static_cast<int>(stops[1] == token) |
                     static_cast<int>(stops[2] == token) | static_cast<int>(stops[3] == token);
    return (stop | static_cast<int>(token < 0) | static_cast<int>(more_stops)) != 0;
  }
  bool stops_at(int32_t token) const {
    bool found = false;
    for (const int32_t stop : stops) found |= stop == token;
    if (found || !more_stops) return found;
    const auto& all = sequence->request->stop_tokens;
    return std::find(all.begin(), all.end(), token) != all.end();
  }
};
static_assert(sizeof(Slot) == 128 && offsetof(Slot, tail) + sizeof(Tokens::Tail) == sizeof(Slot));

}  // namespace asyncengine
