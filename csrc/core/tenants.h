// Tenants: who waits, who has which share of slots and blocks, and whose sequence is admitted next.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "core/sequence.h"
#include "core/waiting_queue.h"

namespace asyncengine {

// One for whom requests are submitted. The step thread has all of it but `live`.
struct Tenant {
  // Each of k sequences that share a block holds kBlock / k of it.
  static constexpr int64_t kBlock = 1 << 16;

  uint64_t id = 0;
  int64_t live = 0;      // requests in memory: for the thread that makes and frees them
  WaitingQueue waiting;  // its sequences that wait for a slot
  size_t sequences = 0;  // of its requests in the scheduler
  int32_t requests = 0;  // in the scheduler
  int32_t held = 0;      // slots
  int64_t blocks = 0;    // that its running sequences held when they were last measured, in kBlock, less those given back
  int64_t wanted = 0;    // it steps back until so many more blocks are within its share; 0: it does not
  bool above = false;    // it holds more slots than its share
  bool within = true;    // which of the two heaps it is in
  bool queued = false;   // it is in one of them
  size_t heap_place = 0, list_place = 0;
};

inline bool waits_before(const Tenant* a, const Tenant* b) { return runs_before(&a->waiting.front(), &b->waiting.front()); }

// The tenants with requests in memory, by number: 0 is none. For the thread that makes and frees requests.
class Tenants {
 public:
  // The tenant stays until leave() has been called as often as enter().
  Tenant* find(uint64_t id);
  static void enter(Tenant* tenant) {
    if (tenant != nullptr) ++tenant->live;
  }
  void leave(Tenant* tenant) {
    if (tenant != nullptr && --tenant->live == 0) tenants_.erase(tenant->id);
  }
  size_t size() const { return tenants_.size(); }

 private:
  std::unordered_map<uint64_t, Tenant> tenants_;
};

// The queue of sequences that wait for a slot. While several tenants have requests, each has an equal share of the slots
// and of the blocks. Next is the first in order of the tenants that hold less than their share. Where there is none, next is
// the first in order of all. A more urgent class of priority goes first whatever its tenant holds. Sequences without a
// tenant are served as if their tenant held nothing.
class FairQueue {
 public:
  FairQueue(int32_t num_slots, int32_t num_blocks) : num_slots_(num_slots), num_blocks_(num_blocks), share_(num_slots) {
    make_room(16);
  }

  bool empty() const { return size_ == 0; }
  size_t size() const { return size_; }
  Sequence& front() const;
  // The front, if its tenant holds less than its share; or null.
  const Sequence* first_within() const;
  void push(Sequence* sequence);
  void remove(const Sequence* sequence);

  // A request comes to the scheduler, or is done with. Only the former allocates.
  void enter(const Request& request);
  void leave(const Request& request);
  // A sequence gets a slot, or begins to give it back together with so many blocks.
  void took_slot(const Sequence& sequence);
  void gives_slot(const Sequence& sequence, int32_t blocks);

  // Several tenants have requests.
  bool shared() const { return tenants_.size() > 1; }
  // Slots that sequences hold and do not give back.
  int32_t held() const { return held_; }
  bool any_above() const { return num_above_ > 0; }
  // Tenants that hold less than their share, and wait with a sequence of the class of the first of them or of a more urgent
  // one; at most `most` are counted.
  int32_t count_waiting(int32_t most) const;

  int64_t block_share() const { return Tenant::kBlock * num_blocks_ / std::max<int64_t>(1, std::ssize(tenants_)); }
  // The tenant waits behind those within their share until so many blocks more are within its own.
  void step_back(Tenant& tenant, int64_t blocks);
  const std::vector<Tenant*>& tenants() const { return tenants_; }

 private:
  using Heap = PlacedHeap<Tenant, &Tenant::heap_place, &waits_before>;
  Tenant& tenant_of(const Sequence& sequence) { return tenant_of(*sequence.request); }
  Tenant& tenant_of(const Request& request) { return request.tenant != nullptr ? *request.tenant : nobody_; }
  Heap& heap(const Tenant& tenant) { return tenant.within ? within_ : rest_; }
  void make_room(size_t count) {
    within_.make_room(count);
    rest_.make_room(count);
  }
  void place(Tenant& tenant);
  void share_again();

  int32_t num_slots_, num_blocks_, share_;
  int32_t held_ = 0, num_above_ = 0;
  size_t size_ = 0;
  Heap within_, rest_;             // the tenants that wait
  std::vector<Tenant*> tenants_;   // all with requests, in no order
  Tenant nobody_;                  // of sequences without a tenant
};

}  // namespace asyncengine
