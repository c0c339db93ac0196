// Copies of whole KV blocks between a device's pool and the host's, as the host tier asks for them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace asyncengine {

struct BlockMove {
  int32_t block = -1;  // of the device's pool
  int32_t host = -1;   // block of the host's pool
};

enum class MoveStatus : uint8_t {
  kPending,
  kDone,
  kFailed,  // nothing was moved that counts; the device goes on
};

// Transfers have numbers: the first half of them take blocks out to the host, the others bring blocks in. One that is under
// way is not started again before poll() has told its end. They are in no order with steps: a block that moves belongs to
// nobody's step. All calls come from the step thread, and none waits.
class BlockMover {
 public:
  virtual ~BlockMover() = default;
  static constexpr int kTransfers = 4;
  static constexpr bool brings_in(int transfer) { return transfer >= kTransfers / 2; }

  virtual int32_t num_host_blocks() const = 0;
  virtual int32_t max_moves() const = 0;  // of one transfer
  virtual size_t block_bytes() const = 0;
  // Address in the pool; a host block is block_bytes() long.
  virtual std::byte* host_block(int32_t host) = 0;
  // False: the transfer was refused, and nothing happens.
  virtual bool start(int transfer, std::span<const BlockMove> moves) = 0;
  virtual MoveStatus poll(int transfer) = 0;
};

}  // namespace asyncengine
