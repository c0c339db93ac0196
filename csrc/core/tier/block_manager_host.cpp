// The part of the block manager that knows of host memory: which host block holds what, and which is evicted next.
#include <cassert>
#include <utility>

#include "core/block_manager.h"

namespace asyncengine {

// It is unlinked. A copy on the host is known from now on in its place.
void BlockManager::evict(int32_t block) {
  if (!has_copy(block)) return erase(block);
  const int32_t host = std::exchange(copy_of(block), -1);
  host_state(host).block = -1;
  index_.rename(block, num_blocks() + host);
}

void BlockManager::erase(int32_t id) {
  if (snapshots_ != nullptr) snapshots_->forget(index_.chain_of(id).id);
  index_.erase(id);
  if (window_groups_ > 0) drop_companions(id);
}

void BlockManager::take_back(int32_t block) {
  assert(ref_count(block) == 1 && index_.contains(block));
  if (has_copy(block)) {
    const int32_t host = copy_of(block);
    set_copy(block, -1);
    host_state(host).cached = false;
    --num_host_cached_;
    if (host_state(host).pins == 0) {
      unlink_host(host);
      link_host(host, /*last=*/false);
    }
  }
  index_.erase(block);
}

void BlockManager::note_without_copy(int32_t block) {
  if (std::exchange(state(block).without_copy, true)) return;
  const size_t end = (without_copy_begin_ + without_copy_count_++) % without_copy_.size();
  without_copy_[end] = block;
}

int32_t BlockManager::next_without_copy() {
  while (without_copy_count_ > 0) {
    const int32_t block = without_copy_[without_copy_begin_];
    if (ref_count(block) == 0 && index_.contains(block) && !has_copy(block)) return block;
    without_copy_begin_ = (without_copy_begin_ + 1) % without_copy_.size();
    --without_copy_count_;
    state(block).without_copy = false;
  }
  return -1;
}

int32_t BlockManager::take_host_block(bool even_copies) {
  const int32_t host = host_.back().next;
  if (host == num_host_blocks()) return -1;
  HostState& s = host_state(host);
  // A copy of a block that may be evicted next stays: to copy that block again in place of another would go on for ever.
  if (s.block >= 0 && ref_count(s.block) == 0 && !even_copies) return -1;
  if (std::exchange(s.cached, false)) {
    --num_host_cached_;
    if (s.block >= 0) {
      set_copy(s.block, -1);
    } else {
      erase(num_blocks() + host);
    }
  }
  pin_host(host);
  return host;
}

// Both ways. The block may be in the free queue, whose counts follow.
void BlockManager::set_copy(int32_t block, int32_t host) {
  if (copy_of(block) >= 0) host_state(copy_of(block)).block = -1;
  const bool is_free = ref_count(block) == 0;
  num_clean_ += is_free * ((host >= 0) - has_copy(block));
  copy_of(block) = host;
  if (host >= 0) host_state(host).block = block;
}

void BlockManager::copied_out(int32_t block, int32_t host) {
  assert(index_.contains(block) && !has_copy(block));
  host_state(host).cached = true;
  ++num_host_cached_;
  set_copy(block, host);
  if (keeps_names()) name_of(num_blocks() + host) = name_of(block);
  unpin_host(host);
}

void BlockManager::give_back_host_block(int32_t host) {
  assert(!host_state(host).cached && host_state(host).pins == 1);
  --num_host_pinned_;
  host_state(host).pins = 0;
  link_host(host, /*last=*/false);
}

Chain BlockManager::enter_host(int32_t host, Chain parent, const int32_t* tokens, const BlockName& name) {
  const int32_t id = num_blocks() + host;
  const int32_t known = index_.find_or_insert(id, parent, tokens, index_.prefetch(id, parent, tokens));
  if (known == id) {
    if (keeps_names()) name_of(id) = name;
    host_state(host).cached = true;
    ++num_host_cached_;
    unpin_host(host);
  } else {
    give_back_host_block(host);
  }
  return index_.chain_of(known);
}

void BlockManager::pin_host(int32_t host) {
  if (host_state(host).pins++ > 0) return;
  unlink_host(host);
  ++num_host_pinned_;
}

void BlockManager::unpin_host(int32_t host) {
  assert(host_state(host).pins > 0);
  if (--host_state(host).pins > 0) return;
  --num_host_pinned_;
  link_host(host, /*last=*/true);
}

// Somebody else may have computed the same block meanwhile: then that one is known.
void BlockManager::moved_in(int32_t host, int32_t block) {
  if (!host_findable(host) || index_.contains(block)) return;
  const bool is_free = ref_count(block) == 0;
  index_.rename(num_blocks() + host, block);
  num_cached_ += is_free;
  set_copy(block, host);
  if (keeps_names()) name_of(block) = name_of(num_blocks() + host);
}

void BlockManager::release_moved(int32_t block) {
  if (ref_count(block) > 1 || !index_.contains(block)) return release(block);
  const int32_t later = next_without_copy(), next = later < 0 ? num_blocks() : later;
  --num_references_;
  state(block).ref_count = 0;
  link(block, state(next).prev, next);
}

void BlockManager::link_host(int32_t host, bool last) {
  const int32_t sentinel = num_host_blocks();
  const int32_t prev = last ? host_.back().prev : sentinel, next = last ? sentinel : host_.back().next;
  host_state(host).prev = prev;
  host_state(host).next = next;
  host_state(prev).next = host_state(next).prev = host;
}

void BlockManager::unlink_host(int32_t host) {
  const HostState& s = host_state(host);
  host_state(s.prev).next = s.next;
  host_state(s.next).prev = s.prev;
}

bool BlockManager::host_consistent() const {
  int32_t cached = 0, pinned = 0, queued = 0, clean = 0;
  for (int32_t h = 0; h < num_host_blocks(); ++h) {
    const HostState& s = host_state(h);
    cached += s.cached;
    pinned += s.pins > 0;
    if (s.block >= 0 && (!s.cached || copies_[static_cast<size_t>(s.block)] != h || !index_.contains(s.block))) return false;
    if (s.cached != (s.block >= 0 || host_findable(h)) || (s.block >= 0 && host_findable(h))) return false;
  }
  if (!host_.empty()) {
    for (int32_t h = host_.back().next; h != num_host_blocks(); h = host_state(h).next) {
      if (++queued > num_host_blocks() || host_state(h).pins > 0) return false;
    }
  }
  for (int32_t b = 0; b < num_blocks(); ++b) {
    if (has_copy(b) && host_state(copies_[static_cast<size_t>(b)]).block != b) return false;
    clean += has_copy(b) && ref_count(b) == 0;
  }
  return cached == num_host_cached_ && pinned == num_host_pinned_ && queued == num_host_blocks() - pinned && clean == num_clean_;
}

}  // namespace asyncengine
