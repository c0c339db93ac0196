// Masks of constrained sequences: which tokens may come next is found out while the device computes their logits.
//
// A mask is needed only where its token is sampled, a whole forward pass after the token before it is known. So it does not
// travel with the StepInput: whoever computes it fills a MaskChannel and posts it, the step thread writes it to the
// sequence's row of the MaskBoard, and the sampler looks there. A row whose mask is not there yet gives kNoMask in place of
// a token, and its sequence is scheduled again once the mask has come; the other rows know nothing of it.
#pragma once

#include <algorithm>
#include <atomic>
#include <cassert>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

namespace asyncengine {

struct Sequence;

// A row per slot, in memory that the device can read: a head, then a bit per token of the vocabulary, 32 a word from the
// lowest, 1: allowed. The head is 2 * the position that the mask is for, + 1 if it allows every token; or -1.
// asyncengine/kernels/cuda/sampling/edits.py reads the same.
class MaskBoard {
 public:
  static constexpr int32_t kHeadWords = 32;  // a cache line of its own

  MaskBoard() = default;
  MaskBoard(int32_t* rows, int32_t mask_words) : rows_(rows), mask_words_(mask_words) {}

  // Words of a row, which fills whole cache lines.
  static size_t stride(int32_t mask_words) {
    return mask_words == 0 ? 0 : static_cast<size_t>(kHeadWords + (mask_words + kHeadWords - 1) / kHeadWords * kHeadWords);
  }
  int32_t mask_words() const { return mask_words_; }
  int32_t* row(int32_t slot) const { return rows_ + static_cast<size_t>(slot) * stride(mask_words_); }

  void clear(int32_t slot) const { head(row(slot)).store(-1, std::memory_order_relaxed); }
  void put(int32_t slot, int32_t position, bool allows_all, std::span<const int32_t> words) const {
    int32_t* to = row(slot);
    // As an exchange that acquires, it stays before the words. ThreadSanitizer knows exchanges but no fences.
    head(to).exchange(-1, std::memory_order_acquire);
    if (!allows_all) std::copy(words.begin(), words.end(), to + kHeadWords);
    head(to).store(2 * position + int32_t{allows_all}, std::memory_order_release);
  }

  // A sampler's view of a row, for a token at `position`.
  enum class Found { kMissing, kMask, kAllowsAll };
  static Found find(int32_t* row, int64_t position) {
    const int32_t found = head(row).load(std::memory_order_acquire);
    if (found < 0 || found / 2 != position) return Found::kMissing;
    return found % 2 != 0 ? Found::kAllowsAll : Found::kMask;
  }

 private:
  static std::atomic_ref<int32_t> head(int32_t* row) { return std::atomic_ref<int32_t>(*row); }

  int32_t* rows_ = nullptr;
  int32_t mask_words_ = 0;
};

class MaskInbox;

// Between whoever computes the masks of a sequence and the step thread, one message at a time: the next one is written when
// a token that came of the last one is known. The first one, which forces no tokens, comes with the request.
class MaskChannel : public std::enable_shared_from_this<MaskChannel> {
 public:
  explicit MaskChannel(int32_t mask_words) : words(static_cast<size_t>(mask_words)) {}

  // The message. Its sender writes it before the request is submitted, or before post().
  std::vector<int32_t> words;   // the mask
  std::vector<int32_t> forced;  // tokens that come next without being sampled
  int32_t position = -1;        // of the first of them, or else of the token that the mask is for
  bool allows_all = false;      // the mask does

  inline void post();
  void attach(std::shared_ptr<MaskInbox> inbox) { inbox_ = std::move(inbox); }

  // The step thread's.
  Sequence* sequence = nullptr;  // while there is one
  bool arrived = true;  // the message is here and its token not sampled yet: until then nobody else touches it

 private:
  friend class MaskInbox;
  std::shared_ptr<MaskInbox> inbox_;
  std::shared_ptr<MaskChannel> self_;  // while it is in the inbox
  MaskChannel* next_ = nullptr;
};

// Posted channels wait here for the step thread: a stack that any thread pushes to.
class MaskInbox {
 public:
  explicit MaskInbox(std::function<void()> wake) : wake_(std::move(wake)) {}
  // Nobody takes any more: a channel that is posted from now on is let go of at once.
  void close() {
    closed_.store(true);
    take([](MaskChannel&) {});
  }

  // Calls visit(channel) for each that was posted since the last call.
  template <typename Visit>
  void take(Visit&& visit) {
    for (MaskChannel* channel = head_.exchange(nullptr); channel != nullptr;) {
      const std::shared_ptr<MaskChannel> held = std::move(channel->self_);
      channel = std::exchange(channel->next_, nullptr);
      visit(*held);
    }
  }

 private:
  friend class MaskChannel;
  void push(MaskChannel& channel) {
    MaskChannel* top = head_.load(std::memory_order_relaxed);
    do {
      channel.next_ = top;
    } while (!head_.compare_exchange_weak(top, &channel));
    if (!closed_.load()) return wake_();
    take([](MaskChannel&) {});
  }

  std::atomic<MaskChannel*> head_{nullptr};
  std::atomic<bool> closed_{false};
  std::function<void()> wake_;
};

inline void MaskChannel::post() {
  assert(inbox_ != nullptr && self_ == nullptr);
  self_ = shared_from_this();
  inbox_->push(*this);
}

}  // namespace asyncengine
