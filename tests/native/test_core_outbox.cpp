// The outbox between two threads: nothing lost, order kept, and one wake-up is enough.
#include <poll.h>

#include <atomic>
#include <random>
#include <thread>

#include "check.h"
#include "core/outbox.h"
#include "step_loop/request_registry.h"

namespace {

using namespace asyncengine;

bool readable(int fd, int limit_ms) {
  pollfd p{fd, POLLIN, 0};
  return ::poll(&p, 1, limit_ms) == 1;
}

// The producer publishes `count` numbered events, and as many released requests, in deliveries of random size; the
// consumer looks only when the descriptor is readable. A lost wake-up is a time-out here, not a wait for ever.
void hammer(int count, unsigned seed, bool slow_consumer) {
  Outbox outbox(16);
  std::atomic<bool> failed{false};
  std::thread producer([&] {
    std::mt19937 rng(seed);
    for (int i = 0; i < count && !failed;) {
      for (int n = static_cast<int>(rng() % 5); n >= 0 && i < count; --n, ++i) {
        outbox.filling().events.push_back({nullptr, i, FinishReason::kNone});
        outbox.filling().released.push_back(reinterpret_cast<Request*>(static_cast<uintptr_t>(i) * 8 + 8));
      }
      outbox.publish();
      if (rng() % 64 == 0) std::this_thread::yield();
    }
  });
  int next_event = 0, next_released = 0, largest = 0;
  while (next_event < count) {
    if (!readable(outbox.wake_fd(), 20'000)) break;
    const Delivery* delivery = outbox.take();
    if (delivery == nullptr) continue;
    CHECK(!delivery->empty());
    largest = std::max(largest, static_cast<int>(delivery->events.size()));
    for (const OutputEvent& event : delivery->events) next_event += event.token == next_event;
    for (const Request* request : delivery->released) {
      next_released += reinterpret_cast<uintptr_t>(request) == static_cast<uintptr_t>(next_released) * 8 + 8;
    }
    CHECK_EQ(next_event, next_released);
    if (slow_consumer) std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  failed = true;
  producer.join();
  CHECK_EQ(next_event, count);
  CHECK(outbox.take() == nullptr);
  if (slow_consumer) CHECK(largest > 5);  // it fell behind, so deliveries grew
}

}  // namespace

TEST(outbox_loses_nothing_and_keeps_the_order) {
  for (unsigned seed = 0; seed < 4; ++seed) hammer(100'000, seed, false);
}

TEST(outbox_gives_a_slow_consumer_bigger_deliveries) { hammer(20'000, 9, true); }

TEST(outbox_is_quiet_when_nothing_happens) {
  Outbox outbox(4);
  outbox.publish();
  CHECK(!readable(outbox.wake_fd(), 0));
  CHECK(outbox.take() == nullptr);
  CHECK(outbox.take() == nullptr);
}

TEST(outbox_wakes_once_for_many_deliveries) {
  Outbox outbox(4);
  for (int i = 0; i < 10; ++i) {
    outbox.filling().events.push_back({nullptr, i, FinishReason::kNone});
    outbox.publish();
  }
  CHECK(readable(outbox.wake_fd(), 0));
  const Delivery* delivery = outbox.take();
  CHECK(delivery != nullptr && delivery->events.size() == 10);
  CHECK(!readable(outbox.wake_fd(), 0));
  outbox.filling().engine_failed = true;  // news without an event
  outbox.publish();
  CHECK(readable(outbox.wake_fd(), 0));
  delivery = outbox.take();
  CHECK(delivery != nullptr && delivery->engine_failed && delivery->events.empty());
}

TEST(outbox_keeps_a_delivery_until_the_next_take) {
  Outbox outbox(4);
  const auto publish = [&](int token) {
    outbox.filling().events.push_back({nullptr, token, FinishReason::kNone});
    outbox.publish();
  };
  publish(1);
  const Delivery* taken = outbox.take();
  for (int token = 2; token < 8; ++token) publish(token);
  CHECK(taken->events.size() == 1 && taken->events[0].token == 1);
  taken = outbox.take();
  CHECK_EQ(taken->events.size(), size_t{6});
}

TEST(a_failure_reaches_a_consumer_that_is_behind) {
  Outbox outbox(4);
  outbox.filling().events.push_back({nullptr, 1, FinishReason::kNone});
  outbox.publish();
  outbox.filling().engine_failed = true;
  outbox.publish();
  const Delivery* delivery = outbox.take();
  CHECK(delivery != nullptr && delivery->events.size() == 1 && delivery->engine_failed);
}

TEST(news_count_the_tokens_of_host_rows) {
  RequestRegistry registry({.block_size = 16});
  Outbox outbox(4);
  const auto request = make_request({}, 0, 0, 16);
  Sequence* sequence = &request->sequences.at(0);
  const auto drain = [&] {
    std::vector<int32_t> counts;
    registry.drain(outbox, [&](const RequestRegistry::News& news) {
      counts.push_back(static_cast<int32_t>(news.tokens.size()));
      counts.push_back(news.host_tokens);
    });
    return counts;
  };
  for (const bool on_host : {true, false, true}) {
    outbox.filling().events.push_back({sequence, 7, FinishReason::kNone, on_host});
    outbox.publish();
  }
  CHECK(drain() == std::vector<int32_t>({3, 2}));
  outbox.filling().events.push_back({sequence, 7, FinishReason::kLength});
  outbox.publish();
  CHECK(drain() == std::vector<int32_t>({1, 0}));
}
