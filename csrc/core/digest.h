// Names of KV blocks (SHA-256) and checksums of what is stored under them (XXH64).
#pragma once

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>

namespace asyncengine {

using Digest = std::array<uint8_t, 32>;

// SHA-256 (FIPS 180-4) of what update() was given, piece by piece.
class Sha256 {
 public:
  void update(const void* data, size_t bytes);
  Digest finish();  // once

 private:
  void compress(const uint8_t* block);

  std::array<uint32_t, 8> state_ = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<uint8_t, 64> block_{};
  uint64_t bytes_ = 0;
};

// XXH64 (Yann Collet, public specification). Each step of an accumulator is a bijection of its 8 bytes of input, so damage within
// one such word never goes unnoticed. It guards against accidents, not against a forger.
uint64_t checksum64(const void* data, size_t bytes, uint64_t seed);

// 256 bits that name a block of KV wherever it is stored: the digest of model and layout, of the salt that keeps tenants
// apart, of all tokens ahead of the block and of its own.
struct BlockKey {
  Digest bytes{};

  auto operator<=>(const BlockKey&) const = default;
  // The bits of a digest are as good as any hash of them.
  uint64_t hash() const {
    uint64_t value;
    std::memcpy(&value, bytes.data(), sizeof(value));
    return value;
  }
};

// The chain that the first block of a prompt follows.
BlockKey root_key(std::string_view fingerprint, uint64_t salt);
BlockKey next_key(const BlockKey& parent, std::span<const int32_t> tokens);

std::string hex(std::span<const uint8_t> bytes);

}  // namespace asyncengine
