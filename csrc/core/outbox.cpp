#include "core/outbox.h"

#include <fcntl.h>
#include <unistd.h>

#include <cassert>
#include <cerrno>
#include <system_error>
#include <utility>

#ifdef __linux__
#include <sys/eventfd.h>
#endif

namespace asyncengine {

WakeUp::WakeUp() {
#ifdef __linux__
  read_fd_ = write_fd_ = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  if (read_fd_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
#else
  int fds[2];
  if (pipe(fds) != 0) throw std::system_error(errno, std::generic_category(), "pipe");
  read_fd_ = fds[0];
  write_fd_ = fds[1];
  for (const int fd : fds) {
    fcntl(fd, F_SETFL, O_NONBLOCK);
    fcntl(fd, F_SETFD, FD_CLOEXEC);
  }
#endif
}

WakeUp::~WakeUp() {
  close(read_fd_);
  if (write_fd_ != read_fd_) close(write_fd_);
}

void WakeUp::signal() {
  const uint64_t one = 1;
  // EAGAIN means that it is readable already, which is all that is wanted.
  [[maybe_unused]] const ssize_t written = write(write_fd_, &one, sizeof(one));
}

void WakeUp::clear() {
  uint64_t count[8];
  while (read(read_fd_, count, sizeof(count)) == static_cast<ssize_t>(sizeof(count))) {
  }
}

void Delivery::append(const Delivery& later) {
  // Room first: an append that fails leaves the delivery whole.
  const auto make_room = [](auto& list, size_t more) {
    if (list.size() + more > list.capacity()) list.reserve(2 * (list.size() + more));
  };
  make_room(events, later.events.size());
  make_room(records, later.records.size());
  make_room(record_words, later.record_words.size());
  make_room(released, later.released.size());
  make_room(step_error, later.step_error.size());
  for (const EventRecords& r : later.records) records.push_back({events.size() + r.event, r.words});
  record_words.insert(record_words.end(), later.record_words.begin(), later.record_words.end());
  events.insert(events.end(), later.events.begin(), later.events.end());
  released.insert(released.end(), later.released.begin(), later.released.end());
  step_error += later.step_error;
  engine_failed |= later.engine_failed;
}

Outbox::Outbox(size_t capacity_hint) {
  for (auto& buffer : buffers_) {
    buffer = std::make_unique<Delivery>();
    buffer->events.reserve(capacity_hint);
    buffer->released.reserve(capacity_hint);
  }
  filling_ = buffers_[0].get();
  spare_ = buffers_[1].get();
  taken_ = buffers_[2].get();
}

// Every access to the three atomics is sequentially consistent. take() may then conclude from a spare buffer that was not
// its own that nothing is on offer, and publish() from a signal that was not taken back that take() will still look.
void Outbox::publish() {
  if (filling_->empty()) return;
  if (Delivery* behind = offered_.exchange(nullptr, std::memory_order_seq_cst)) {
    try {
      behind->append(*filling_);
    } catch (...) {
      offered_.store(behind, std::memory_order_seq_cst);
      throw;
    }
    filling_->clear();
    offered_.store(behind, std::memory_order_seq_cst);
  } else {
    // Three buffers: this one is being filled, nothing is on offer, and take() gives the consumer's old buffer back
    // before it takes a new one. So there is a spare.
    Delivery* spare = spare_.exchange(nullptr, std::memory_order_seq_cst);
    assert(spare != nullptr);
    offered_.store(std::exchange(filling_, spare), std::memory_order_seq_cst);
  }
  if (!signalled_.exchange(true, std::memory_order_seq_cst)) wake_.signal();
}

Delivery* Outbox::take() {
  wake_.clear();
  // Cleared before the exchange: a delivery published after it signals again, one published before it is taken now.
  signalled_.store(false, std::memory_order_seq_cst);
  if (taken_ != nullptr) {
    taken_->clear();
    Delivery* none = nullptr;
    // With one buffer here, one being filled and one spare, nothing can be on offer.
    if (!spare_.compare_exchange_strong(none, taken_, std::memory_order_seq_cst)) return nullptr;
    taken_ = nullptr;
  }
  return taken_ = offered_.exchange(nullptr, std::memory_order_seq_cst);
}

}  // namespace asyncengine
