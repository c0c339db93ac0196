// The tokens of a sequence: prompt and output, in order of position.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/block_manager.h"
#include "core/block_table.h"

namespace asyncengine {

// The blocks of a running sequence that the prefix cache knows: their tokens are kept there.
struct PublishedBlocks {
  const BlockManager& blocks;
  const BlockTables& tables;
  int32_t slot;

  int32_t block_size() const { return blocks.block_size(); }
  // Tokens of the block that begins at `position`.
  const int32_t* at(int32_t position) const { return blocks.tokens_of(tables.at(slot, position / block_size())); }
};

// A decode step appends a token without touching the sequence, which lies somewhere in the heap: the newest tokens are in a
// Tail, which lies with the sequence's slot. A running sequence has its tokens in four places, in this order:
//
//   shared    whole blocks of the prompt, kept once by the first sibling
//   own       a vector, reserved for all there can be; of a sequence without a slot, all the rest
//   published blocks that went from the tail to the prefix cache
//   tail      the newest
//
// Only this class knows that.
class Tokens {
 public:
  class Tail {
   public:
    Tail() = default;
    explicit Tail(const Tokens& tokens) : begin_(tokens.size()), end_(begin_) {}

    // Prompt and output tokens, wherever they are.
    int32_t num_tokens() const { return end_; }
    bool full() const { return count() == kSize; }
    // Precondition: it is not full. Others go through Tokens::append().
    void append(int32_t token) { newest_[end_++ - begin_] = token; }
    void prefetch() const { __builtin_prefetch(newest_, /*write=*/1); }

   private:
    friend class Tokens;
    static constexpr int32_t kSize = 16;
    int32_t count() const { return end_ - begin_; }

    int32_t begin_ = 0, end_ = 0;  // positions of the first token here, and after the last one
    int32_t newest_[kSize];        // a cache line, where Slot puts it
  };

  Tokens() = default;
  // The first `shared` tokens of the prompt are those of `sibling`, which outlives this object. Room for `max_total` tokens
  // is reserved here: nothing is allocated later.
  Tokens(std::span<const int32_t> prompt, int32_t max_total, const Tokens* sibling = nullptr, int32_t shared = 0);

  // ---- of a sequence without a slot, or one that has just got it. Others have more tokens: Tail::num_tokens().

  int32_t size() const { return shared_ + static_cast<int32_t>(own_.size()); }
  // The token at `position` and those after it: to the end of its block at least.
  const int32_t* at(int32_t position) const {
    return position < shared_ ? sibling_->own_.data() + position : own_.data() + (position - shared_);
  }
  // All of them are copied with position 0 and count size().
  void copy(int32_t position, int32_t count, int32_t* out) const;

  // ---- of a running sequence: `tail` is its slot's

  // Call it once for each of several tokens.
  void append(Tail& tail, int32_t token, const PublishedBlocks& published) {
    if (tail.full()) settle(tail, published);
    tail.append(token);
  }
  // Tokens of the block that begins at `position`, the first that the prefix cache does not know. With blocks as large as a
  // tail it mostly is the tail.
  const int32_t* unpublished(Tail& tail, int32_t position, const PublishedBlocks& published) {
    if (position == tail.begin_ && tail.count() == published.block_size()) return tail.newest_;
    settle(tail, published);
    return at(position);
  }
  // The prefix cache keeps that block now: what unpublished() returned.
  void was_published(Tail& tail, const int32_t* tokens) {
    if (tokens == tail.newest_) tail.begin_ = tail.end_;
  }
  // Brings all tokens here, and empties the tail: before the slot or its blocks are given back.
  void settle(Tail& tail, const PublishedBlocks& published);

 private:
  const Tokens* sibling_ = nullptr;
  int32_t shared_ = 0;
  std::vector<int32_t> own_;
};

}  // namespace asyncengine
