// Sequences that wait for a slot, and which of them is next.
#pragma once

#include <cassert>
#include <cstddef>
#include <vector>

#include "core/sequence.h"

namespace asyncengine {

// A binary heap by order of service. Each sequence knows its place in it, so any one can leave: 65,536 arrivals and as
// many aborts take time in proportion to their number, times its logarithm.
class WaitingQueue {
 public:
  bool empty() const { return heap_.empty(); }
  size_t size() const { return heap_.size(); }
  Sequence& front() const { return *heap_.front(); }

  void push(Sequence* sequence) {
    heap_.push_back(sequence);
    rise(heap_.size() - 1, sequence);
  }
  // Precondition: the sequence is here.
  void remove(const Sequence* sequence) {
    const size_t hole = sequence->queue_place;
    assert(heap_[hole] == sequence);
    Sequence* last = heap_.back();
    heap_.pop_back();
    if (last == sequence) return;
    if (hole > 0 && runs_before(last, heap_[parent(hole)])) {
      rise(hole, last);
    } else {
      sink(hole, last);
    }
  }

 private:
  static size_t parent(size_t place) { return (place - 1) / 2; }
  void put(size_t place, Sequence* sequence) {
    heap_[place] = sequence;
    sequence->queue_place = place;
  }
  void rise(size_t place, Sequence* sequence) {
    for (; place > 0 && runs_before(sequence, heap_[parent(place)]); place = parent(place)) put(place, heap_[parent(place)]);
    put(place, sequence);
  }
  void sink(size_t place, Sequence* sequence) {
    for (size_t child; (child = 2 * place + 1) < heap_.size(); place = child) {
      if (child + 1 < heap_.size() && runs_before(heap_[child + 1], heap_[child])) ++child;
      if (!runs_before(heap_[child], sequence)) break;
      put(place, heap_[child]);
    }
    put(place, sequence);
  }

  std::vector<Sequence*> heap_;
};

}  // namespace asyncengine
