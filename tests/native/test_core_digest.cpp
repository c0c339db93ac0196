// Digests against published vectors; keys of blocks against another implementation.
#include "check.h"
#include "core/digest.h"

#include <numeric>
#include <vector>

namespace {

using namespace asyncengine;

std::string sha256(std::string_view text, size_t piece) {
  Sha256 hash;
  for (size_t i = 0; i < text.size(); i += piece) hash.update(text.data() + i, std::min(piece, text.size() - i));
  return hex(hash.finish());
}

}  // namespace

TEST(sha256_gives_the_digests_of_the_standard) {
  const std::pair<std::string, const char*> vectors[] = {
      {"", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"},
      {"abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"},
      {"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq",
       "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"},
      {"abcdefghbcdefghicdefghijdefghijkefghijklfghijklmghijklmnhijklmnoijklmnopjklmnopqklmnopqrlmnopqrsmnopqrstnopqrstu",
       "cf5b16a778af8380036ce59e7b0492370b249b11e8f07a51afac45037afee9d1"},
      {std::string(1'000'000, 'a'), "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0"},
  };
  for (const auto& [text, digest] : vectors) {
    for (const size_t piece : {size_t{1}, size_t{63}, size_t{64}, size_t{1000}}) CHECK_EQ(sha256(text, piece), digest);
  }
}

TEST(checksum64_is_xxh64) {
  std::vector<uint8_t> data(1000);
  for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<uint8_t>(i * 7 % 251);
  struct Vector {
    size_t bytes;
    uint64_t seed_0, seed_12345;  // by the xxhash package
  };
  constexpr Vector kVectors[] = {
      {0, 0xef46db3751d8e999, 0x95584af7701f808d},   {1, 0xe934a84adb052768, 0x18b81924b59e1047},
      {3, 0x9ff70a635a6209ab, 0x3df1cac951961c9b},   {4, 0xae5acdc00a55ac41, 0xd8650ba0e07c8dbe},
      {7, 0xd734a6b26f3da63e, 0x8d60ffd61dfbdcf6},   {8, 0x87116b3365b924eb, 0x07be9dcc0c0f8926},
      {31, 0x0f187c62b1e722b7, 0xcd8e81d282319634},  {32, 0x91b0cb0931a8c629, 0x1c0b4b43c9e3dd6d},
      {33, 0x931b043cf8d65b94, 0xe73d613b6256de65},  {63, 0x575186c12dcebcfd, 0xbb109a76b9bd3104},
      {100, 0xb7fe1d84b2f23a05, 0x5fe18e4476d58389}, {1000, 0x023fd2ed1ff957d5, 0xf91698f761c39c92},
  };
  for (const Vector& vector : kVectors) {
    CHECK_EQ(checksum64(data.data(), vector.bytes, 0), vector.seed_0);
    CHECK_EQ(checksum64(data.data(), vector.bytes, 12345), vector.seed_12345);
  }
}

TEST(block_keys_chain_all_that_a_block_depends_on) {
  std::vector<int32_t> tokens(16);
  std::iota(tokens.begin(), tokens.end(), 0);
  const BlockKey root = root_key("model", 7);
  // Digests by hashlib: sha256(b"R" + salt + fingerprint), sha256(b"N" + parent + tokens).
  CHECK_EQ(hex(root.bytes), "a4453805758b242d174634fb4bf66637730c839671bc3c8d15bd997c7be46593");
  const BlockKey key = next_key(root, tokens);
  CHECK_EQ(hex(key.bytes), "96f7aa9e4d6316e0c93f1c253572f19e1ce951d822534098edad15d1bd7fa5a1");
  CHECK(next_key(root_key("model", 8), tokens) != key);
  CHECK(next_key(root_key("other", 7), tokens) != key);
  CHECK(next_key(key, tokens) != key);
  tokens[15] = -1;
  CHECK(next_key(root, tokens) != key);
}
