// Heaps whose members know their place, and the queue of sequences that wait for a slot.
#pragma once

#include <algorithm>
#include <cassert>
#include <cstddef>
#include <vector>

#include "core/sequence.h"

namespace asyncengine {

// A binary heap by `Before`. Each member knows its place in it, so any one can leave: 65,536 arrivals and as many
// departures take time in proportion to their number, times its logarithm.
template <typename T, size_t T::* Place, bool (*Before)(const T*, const T*)>
class PlacedHeap {
 public:
  bool empty() const { return heap_.empty(); }
  size_t size() const { return heap_.size(); }
  T& front() const { return *heap_.front(); }
  // All members, the front first, the others in no order.
  const std::vector<T*>& members() const { return heap_; }
  // So many members fit without an allocation from now on.
  void make_room(size_t count) {
    if (count > heap_.capacity()) heap_.reserve(std::max(count, 2 * heap_.capacity()));
  }

  void push(T* member) {
    heap_.push_back(member);
    rise(heap_.size() - 1, member);
  }
  // Precondition: the member is here. What its order depends on may have changed.
  void remove(const T* member) {
    const size_t hole = member->*Place;
    assert(heap_[hole] == member);
    T* last = heap_.back();
    heap_.pop_back();
    if (last == member) return;
    if (hole > 0 && Before(last, heap_[parent(hole)])) {
      rise(hole, last);
    } else {
      sink(hole, last);
    }
  }

 private:
  static size_t parent(size_t place) { return (place - 1) / 2; }
  void put(size_t place, T* member) {
    heap_[place] = member;
    member->*Place = place;
  }
  void rise(size_t place, T* member) {
    for (; place > 0 && Before(member, heap_[parent(place)]); place = parent(place)) put(place, heap_[parent(place)]);
    put(place, member);
  }
  void sink(size_t place, T* member) {
    for (size_t child; (child = 2 * place + 1) < heap_.size(); place = child) {
      if (child + 1 < heap_.size() && Before(heap_[child + 1], heap_[child])) ++child;
      if (!Before(heap_[child], member)) break;
      put(place, heap_[child]);
    }
    put(place, member);
  }

  std::vector<T*> heap_;
};

using WaitingQueue = PlacedHeap<Sequence, &Sequence::queue_place, &runs_before>;

}  // namespace asyncengine
