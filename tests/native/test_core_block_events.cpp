// Changes of the prefix cache: their order, the tokens with them, and losses, also with a reader on another thread.
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "check.h"
#include "core/block_events.h"
#include "core/block_manager.h"

namespace {

using namespace asyncengine;

constexpr int32_t kBlockSize = 4;

struct Seen {
  std::vector<BlockEvent> events;
  std::vector<std::vector<int32_t>> tokens;

  void read(BlockEvents& ring, size_t most) {
    ring.drain(most, [&](const BlockEvent& event, const int32_t* first) {
      events.push_back(event);
      tokens.push_back(first == nullptr ? std::vector<int32_t>() : std::vector<int32_t>(first, first + kBlockSize));
    });
  }
};

// Stores a block of four equal tokens under `parent`.
Chain store(BlockManager& blocks, int32_t block, Chain parent, int32_t token) {
  const std::vector<int32_t> tokens(kBlockSize, token);
  return blocks.publish(block, parent, tokens.data(), blocks.prefetch(block, parent, tokens.data()));
}

TEST(block_events_follow_a_block_through_its_life) {
  BlockManager blocks(2, kBlockSize, true, 0, 16);
  const Chain root{7, true};
  const int32_t first = blocks.allocate(), second = blocks.allocate();
  const Chain chain = store(blocks, first, root, 1);
  store(blocks, second, chain, 2);
  store(blocks, second, chain, 2);  // known already: no change
  blocks.release(second);
  blocks.release(first);
  blocks.allocate();  // evicts the block that was released first
  Seen seen;
  seen.read(blocks.events(), 2);
  CHECK_EQ(seen.events.size(), 2u);
  seen.read(blocks.events(), 16);
  CHECK_EQ(seen.events.size(), 3u);
  CHECK(seen.events[0].kind == BlockEvent::kStored && seen.events[0].parent == root);
  CHECK(seen.events[1].kind == BlockEvent::kStored && seen.events[1].parent == chain);
  CHECK(seen.tokens[0] == std::vector<int32_t>(kBlockSize, 1) && seen.tokens[1] == std::vector<int32_t>(kBlockSize, 2));
  CHECK(seen.events[2].kind == BlockEvent::kRemoved);
  CHECK_EQ(seen.events[2].chain, seen.events[1].chain);
  CHECK_EQ(blocks.events().num_lost(), 0);
}

TEST(block_events_follow_the_blocks_of_window_groups) {
  BlockManager blocks(3, kBlockSize, true, 0, 16, 2);
  const int32_t entry = blocks.allocate(), window = blocks.allocate(), taken = blocks.allocate();
  store(blocks, entry, {7, true}, 1);
  blocks.accompany(entry, 1, window);
  blocks.accompany(entry, 1, taken);  // the group has one: no change
  blocks.release(window);
  blocks.release(entry);
  blocks.allocate();  // evicts the block of the window group, which was released first
  blocks.accompany(entry, 0, taken);
  blocks.allocate();  // evicts the entry, and the other block goes with it, untold
  Seen seen;
  seen.read(blocks.events(), 16);
  CHECK_EQ(seen.events.size(), 5u);
  const BlockEvent::Kind kinds[] = {BlockEvent::kStored, BlockEvent::kStored, BlockEvent::kRemoved, BlockEvent::kStored,
                                    BlockEvent::kRemoved};
  const int32_t groups[] = {0, 2, 2, 1, 0};
  for (size_t i = 0; i < 5; ++i) {
    CHECK(seen.events[i].kind == kinds[i]);
    CHECK_EQ(seen.events[i].group, groups[i]);
    CHECK_EQ(seen.events[i].chain, seen.events[0].chain);
  }
  CHECK(seen.tokens[1] == std::vector<int32_t>(kBlockSize, 1));
  CHECK(seen.events[1].parent == seen.events[0].parent);
}

TEST(block_events_that_find_no_room_are_counted_until_the_reader_knows) {
  BlockEvents ring(2, kBlockSize, 8);
  const int32_t tokens[kBlockSize] = {};
  for (uint64_t chain = 1; chain <= 5; ++chain) ring.add(BlockEvent::kStored, 0, chain, {}, tokens);
  CHECK_EQ(ring.num_lost(), 3);
  Seen seen;
  seen.read(ring, 1);
  ring.add(BlockEvent::kStored, 0, 6, {}, tokens);  // there is room, but what came before it was lost
  CHECK_EQ(ring.num_lost(), 4);
  seen.read(ring, 8);
  CHECK_EQ(seen.events.size(), 3u);
  CHECK(seen.events.back().kind == BlockEvent::kCleared);
  ring.add(BlockEvent::kStored, 9, 7, {}, tokens);
  seen.read(ring, 8);
  CHECK_EQ(seen.events.back().chain, 7u);
  CHECK(seen.events.back().on_host);
}

TEST(block_events_reach_another_thread_in_order) {
  constexpr uint64_t kCount = 20'000;
  BlockEvents ring(16, kBlockSize, 8);
  std::atomic<bool> done{false};
  std::thread writer([&] {
    for (uint64_t chain = 1; chain <= kCount; ++chain) {
      const std::vector<int32_t> tokens(kBlockSize, static_cast<int32_t>(chain));
      ring.add(BlockEvent::kStored, 0, chain, {}, tokens.data());
      if (chain % 64 == 0) std::this_thread::yield();
    }
    done = true;
  });
  uint64_t last = 0, read = 0;
  bool in_order = true, whole = true, cleared = true;
  for (bool more = true; more;) {
    more = !done;
    ring.drain(8, [&](const BlockEvent& event, const int32_t* tokens) {
      if (event.kind == BlockEvent::kCleared) {
        cleared = true;
        return;
      }
      in_order &= event.chain == last + 1 || (cleared && event.chain > last);
      whole &= tokens[0] == static_cast<int32_t>(event.chain) && tokens[kBlockSize - 1] == tokens[0];
      last = event.chain;
      cleared = false;
      ++read;
    });
  }
  writer.join();
  Seen seen;
  seen.read(ring, 16);
  for (const BlockEvent& event : seen.events) read += event.kind == BlockEvent::kStored;
  CHECK(in_order);
  CHECK(whole);
  CHECK_EQ(read + static_cast<uint64_t>(ring.num_lost()), kCount);
}

}  // namespace
