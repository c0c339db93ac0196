// Order in which blocks leave the device and the host, and the amount of reads from a disk.
#include <algorithm>
#include <utility>
#include <vector>

#include "check.h"
#include "core/tier/disk_tier.h"
#include "hybrid_fixture.h"

namespace {

using namespace asyncengine;
using namespace asyncengine::testing;

// A pool whose blocks are published, and released in the order of their numbers.
struct CachedPool {
  CachedPool(int32_t num_blocks, int32_t num_cached, int32_t num_host) : blocks(num_blocks, 16, true, num_host) {
    for (int32_t i = 0; i < num_cached; ++i) ids.push_back(blocks.allocate());
    for (const int32_t block : ids) {
      const std::vector<int32_t> tokens(16, block);
      const Chain root{5, true};
      blocks.publish(block, root, tokens.data(), blocks.prefetch(block, root, tokens.data()));
    }
    for (const int32_t block : ids) blocks.release(block);
  }
  int32_t copy_out(int32_t block) {
    const int32_t host = blocks.take_host_block();
    blocks.retain(block);
    blocks.copied_out(block, host);
    blocks.release_moved(block);
    CHECK(blocks.consistent());
    return host;
  }
  BlockManager blocks;
  std::vector<int32_t> ids;
};

// A copied block goes behind blocks that hold nothing and blocks that were copied before it, ahead of all that only the
// device has.
TEST(a_block_that_was_copied_out_is_evicted_where_its_turn_was) {
  for (size_t copied = 1; copied <= 4; ++copied) {
    CachedPool pool(6, 4, 8);
    for (size_t i = 0; i < copied; ++i) {
      CHECK_EQ(pool.blocks.next_without_copy(), pool.ids[i]);
      pool.copy_out(pool.ids[i]);
    }
    std::vector<int32_t> taken;
    while (pool.blocks.num_free() > 0) taken.push_back(pool.blocks.allocate());
    CHECK(std::ranges::find(pool.ids, taken[0]) == pool.ids.end());
    CHECK(std::ranges::find(pool.ids, taken[1]) == pool.ids.end());
    CHECK(std::vector<int32_t>(taken.begin() + 2, taken.end()) == pool.ids);
  }
}

TEST(the_host_evicts_what_came_to_it_first) {
  CachedPool pool(4, 4, 3);
  std::vector<int32_t> hosts;
  for (size_t i = 0; i < 2; ++i) hosts.push_back(pool.copy_out(pool.ids[i]));
  const int32_t unused = pool.blocks.take_host_block(/*even_copies=*/true);
  CHECK(std::ranges::find(hosts, unused) == hosts.end());
  CHECK_EQ(pool.blocks.take_host_block(/*even_copies=*/true), hosts[0]);
  CHECK_EQ(pool.blocks.take_host_block(/*even_copies=*/true), hosts[1]);
  CHECK_EQ(pool.blocks.take_host_block(/*even_copies=*/true), -1);
}

// Has every block, and reads two at a time.
class FullDisk final : public BlockDisk {
 public:
  BlockKey root(uint64_t salt) const override { return root_key("", salt); }
  bool contains(const BlockKey&) const override { return true; }
  bool put(const BlockName&, std::span<const int32_t>, const std::byte*, uint64_t) override { return false; }
  bool get(const BlockName&, std::span<const int32_t>, std::byte*, uint64_t ticket) override {
    if (over_.size() == 2) return false;
    ++reads;
    over_.push_back(ticket);
    return true;
  }
  void leave_alone(DiskCalls) override { CHECK(false); }
  void take_completions(const Visit& visit) override {
    for (const uint64_t ticket : std::exchange(over_, {})) visit(ticket, true);
  }
  int reads = 0;

 private:
  std::vector<uint64_t> over_;
};

// A read beyond the host's room would evict the blocks that were read first, and all reads would be in vain.
TEST(the_disk_is_read_for_what_the_host_has_room_for) {
  for (const int32_t held : {0, 1, 2}) {  // host blocks that are pinned
    DoneMover mover(5);
    BlockManager blocks(16, 16, true, mover.num_host_blocks());
    blocks.keep_names();
    for (int32_t i = 0; i < held; ++i) CHECK(blocks.take_host_block() >= 0);
    FullDisk disk;
    DiskTier tier(blocks, mover, disk, 16);
    const auto request = make_request(make_spec(1, 200, 1), 0, 0, 16);
    Sequence& sequence = request->sequences[0];
    CHECK(tier.read(sequence, {}, 12));
    int ended = 0;
    for (int i = 0; i < 20 && ended == 0; ++i) tier.advance(i + 1, [&](Sequence&) { ++ended; });
    CHECK_EQ(ended, 1);
    CHECK_EQ(disk.reads, 5 - held);
    std::vector<int32_t> found(12);
    const auto tokens_at = [&](int32_t position) { return sequence.tokens.at(position); };
    CHECK_EQ(blocks.match_prefix(tokens_at, 12, 0, found.data(), /*with_host=*/true), 5 - held);
    CHECK(blocks.consistent());
  }
}

}  // namespace
