#include "core/digest.h"

#include <algorithm>
#include <bit>

namespace asyncengine {
namespace {

static_assert(std::endian::native == std::endian::little, "keys and checksums are of little-endian words");

constexpr std::array<uint32_t, 64> kSha256Constants = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01,
    0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc,
    0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147,
    0x06ca6351, 0x14292967, 0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08,
    0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208,
    0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

uint32_t big_endian(uint32_t value) { return __builtin_bswap32(value); }

uint64_t word_at(const uint8_t* data) {
  uint64_t value;
  std::memcpy(&value, data, sizeof(value));
  return value;
}

constexpr uint64_t kPrime1 = 0x9E3779B185EBCA87, kPrime2 = 0xC2B2AE3D27D4EB4F, kPrime3 = 0x165667B19E3779F9,
                   kPrime4 = 0x85EBCA77C2B2AE63, kPrime5 = 0x27D4EB2F165667C5;

uint64_t mix(uint64_t accumulator, uint64_t word) { return std::rotl(accumulator + word * kPrime2, 31) * kPrime1; }
uint64_t merge(uint64_t hash, uint64_t accumulator) { return (hash ^ mix(0, accumulator)) * kPrime1 + kPrime4; }

}  // namespace

void Sha256::compress(const uint8_t* block) {
  std::array<uint32_t, 64> w;
  for (size_t i = 0; i < 16; ++i) {
    uint32_t word;
    std::memcpy(&word, block + 4 * i, sizeof(word));
    w[i] = big_endian(word);
  }
  for (size_t i = 16; i < 64; ++i) {
    const uint32_t a = w[i - 15], b = w[i - 2];
    w[i] = w[i - 16] + w[i - 7] + (std::rotr(a, 7) ^ std::rotr(a, 18) ^ a >> 3) + (std::rotr(b, 17) ^ std::rotr(b, 19) ^ b >> 10);
  }
  auto [a, b, c, d, e, f, g, h] = state_;
  for (size_t i = 0; i < 64; ++i) {
    const uint32_t sum1 = std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25);
    const uint32_t sum0 = std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22);
    const uint32_t t1 = h + sum1 + ((e & f) ^ (~e & g)) + kSha256Constants[i] + w[i];
    const uint32_t t2 = sum0 + ((a & b) ^ (a & c) ^ (b & c));
    h = g, g = f, f = e, e = d + t1, d = c, c = b, b = a, a = t1 + t2;
  }
  const std::array<uint32_t, 8> mixed = {a, b, c, d, e, f, g, h};
  for (size_t i = 0; i < 8; ++i) state_[i] += mixed[i];
}

void Sha256::update(const void* data, size_t bytes) {
  const auto* from = static_cast<const uint8_t*>(data);
  while (bytes > 0) {
    const size_t filled = bytes_ % 64, taken = std::min(bytes, 64 - filled);
    std::memcpy(block_.data() + filled, from, taken);
    from += taken, bytes -= taken, bytes_ += taken;
    if (bytes_ % 64 == 0) compress(block_.data());
  }
}

Digest Sha256::finish() {
  const uint64_t bits = bytes_ * 8;
  constexpr std::array<uint8_t, 64> kPadding = {0x80};
  const size_t filled = bytes_ % 64;
  update(kPadding.data(), filled < 56 ? 56 - filled : 120 - filled);
  const std::array<uint32_t, 2> length = {big_endian(static_cast<uint32_t>(bits >> 32)), big_endian(static_cast<uint32_t>(bits))};
  update(length.data(), sizeof(length));
  Digest digest;
  for (size_t i = 0; i < 8; ++i) {
    const uint32_t word = big_endian(state_[i]);
    std::memcpy(digest.data() + 4 * i, &word, sizeof(word));
  }
  return digest;
}

uint64_t checksum64(const void* data, size_t bytes, uint64_t seed) {
  const auto* at = static_cast<const uint8_t*>(data);
  const uint8_t* const end = at + bytes;
  uint64_t hash = seed + kPrime5;
  if (bytes >= 32) {
    uint64_t a = seed + kPrime1 + kPrime2, b = seed + kPrime2, c = seed, d = seed - kPrime1;
    for (; end - at >= 32; at += 32) {
      a = mix(a, word_at(at));
      b = mix(b, word_at(at + 8));
      c = mix(c, word_at(at + 16));
      d = mix(d, word_at(at + 24));
    }
    hash = std::rotl(a, 1) + std::rotl(b, 7) + std::rotl(c, 12) + std::rotl(d, 18);
    for (const uint64_t accumulator : {a, b, c, d}) hash = merge(hash, accumulator);
  }
  hash += bytes;
  for (; end - at >= 8; at += 8) hash = std::rotl(hash ^ mix(0, word_at(at)), 27) * kPrime1 + kPrime4;
  if (end - at >= 4) {
    uint32_t word;
    std::memcpy(&word, at, sizeof(word));
    hash = std::rotl(hash ^ word * kPrime1, 23) * kPrime2 + kPrime3;
    at += 4;
  }
  for (; at < end; ++at) hash = std::rotl(hash ^ *at * kPrime5, 11) * kPrime1;
  hash = (hash ^ hash >> 33) * kPrime2;
  hash = (hash ^ hash >> 29) * kPrime3;
  return hash ^ hash >> 32;
}

// The first letter tells the two kinds apart, so that no fingerprint makes a root that is also a block's key.
BlockKey root_key(std::string_view fingerprint, uint64_t salt) {
  Sha256 hash;
  hash.update("R", 1);
  hash.update(&salt, sizeof(salt));
  hash.update(fingerprint.data(), fingerprint.size());
  return {hash.finish()};
}

BlockKey next_key(const BlockKey& parent, std::span<const int32_t> tokens) {
  Sha256 hash;
  hash.update("N", 1);
  hash.update(parent.bytes.data(), parent.bytes.size());
  hash.update(tokens.data(), tokens.size_bytes());
  return {hash.finish()};
}

std::string hex(std::span<const uint8_t> bytes) {
  std::string text;
  text.reserve(2 * bytes.size());
  for (const uint8_t byte : bytes) {
    text += "0123456789abcdef"[byte >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

}  // namespace asyncengine
