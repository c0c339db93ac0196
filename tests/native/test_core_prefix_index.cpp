// The prefix index against std::map: runs of probing, backward shift, and chains that are never used again.
#include <map>
#include <random>
#include <set>
#include <vector>

#include "check.h"
#include "core/prefix_index.h"

namespace {

using namespace asyncengine;

constexpr int32_t kBlockSize = 16;
using Tokens = std::vector<int32_t>;
using Key = std::pair<Chain, Tokens>;

Chain root(uint64_t salt) { return {salt, /*root=*/true}; }

Tokens tokens_of(int32_t kind) {
  Tokens tokens(kBlockSize, kind / 16);
  tokens[static_cast<size_t>(kind % kBlockSize)] += 1;  // kinds differ in one position
  return tokens;
}

int32_t insert(PrefixIndex& index, int32_t block, Chain parent, const Tokens& tokens) {
  return index.find_or_insert(block, parent, tokens.data(), index.prefetch(block, parent, tokens.data()));
}

void fuzz(int32_t num_blocks, int32_t num_kinds, int operations, unsigned seed) {
  std::mt19937 rng(seed);
  const auto pick = [&](int32_t n) { return static_cast<int32_t>(rng() % static_cast<uint32_t>(n)); };
  PrefixIndex index(num_blocks, kBlockSize);
  std::map<Key, int32_t> model;
  std::map<int32_t, Key> key_of;
  std::set<uint64_t> chains;
  std::vector<Chain> parents = {root(0), root(1)};

  for (int i = 0; i < operations; ++i) {
    const int32_t block = pick(num_blocks);
    const Key key{parents[static_cast<size_t>(pick(static_cast<int32_t>(parents.size())))], tokens_of(pick(num_kinds))};
    const auto known = model.find(key);
    CHECK_EQ(index.find(key.first, key.second.data()), known == model.end() ? -1 : known->second);
    CHECK_EQ(index.contains(block), key_of.contains(block));
    if (key_of.contains(block)) {
      index.erase(block);
      model.erase(key_of[block]);
      key_of.erase(block);
    } else if (known == model.end()) {
      CHECK_EQ(insert(index, block, key.first, key.second), block);
      model[key] = block;
      key_of[block] = key;
      const Chain chain = index.chain_of(block);
      CHECK(chain.id != 0 && !chain.root && chains.insert(chain.id).second);
      if (parents.size() < 6) {
        parents.push_back(chain);
      } else {
        parents[static_cast<size_t>(2 + pick(4))] = chain;  // chains of erased blocks stay in use as parents
      }
    } else {
      CHECK_EQ(insert(index, block, key.first, key.second), known->second);
      CHECK(!index.contains(block));
    }
    if (i % 64 == 0) CHECK(index.consistent());
  }
  for (const auto& [key, block] : model) CHECK_EQ(index.find(key.first, key.second.data()), block);
  for (const auto& [block, key] : key_of) index.erase(block);
  CHECK(index.consistent());
  for (const auto& [key, block] : model) CHECK_EQ(index.find(key.first, key.second.data()), -1);
}

}  // namespace

TEST(prefix_index_agrees_with_a_map) {
  fuzz(1, 3, 1'000, 1);
  fuzz(2, 5, 2'000, 2);
  for (unsigned seed = 0; seed < 8; ++seed) fuzz(37, 200, 10'000, seed);  // 76 entries in 128 cells: long runs
  fuzz(500, 64, 20'000, 3);
}

TEST(prefix_index_tells_roots_from_entries_and_salts_from_each_other) {
  // Salts that differ in their highest bit alone, and one that is the chain id of an entry.
  PrefixIndex index(8, kBlockSize);
  const Tokens tokens(kBlockSize, 5);
  const uint64_t high = uint64_t{1} << 63;
  CHECK_EQ(insert(index, 0, root(3), tokens), 0);
  CHECK_EQ(index.find(root(3 | high), tokens.data()), -1);
  CHECK_EQ(insert(index, 1, root(3 | high), tokens), 1);
  const Chain entry = index.chain_of(0);
  CHECK_EQ(insert(index, 2, entry, tokens), 2);
  CHECK_EQ(index.find(root(entry.id), tokens.data()), -1);
  CHECK_EQ(insert(index, 3, root(entry.id), tokens), 3);
  CHECK_EQ(index.find(entry, tokens.data()), 2);
  CHECK_EQ(index.find(root(3), tokens.data()), 0);
  CHECK(index.consistent());
}

TEST(prefix_index_compares_every_token) {
  PrefixIndex index(4, kBlockSize);
  const Chain chain = root(7);
  const Tokens tokens(kBlockSize, 5);
  CHECK_EQ(insert(index, 2, chain, tokens), 2);
  CHECK_EQ(index.find(chain, tokens.data()), 2);
  CHECK_EQ(index.find(root(8), tokens.data()), -1);
  for (size_t i = 0; i < tokens.size(); ++i) {
    Tokens other = tokens;
    other[i] ^= 1;
    CHECK_EQ(index.find(chain, other.data()), -1);
  }
}

// Two blocks with the same hash, made by solving for it: after four tokens the state of the first lane is
// fold(fold(start ^ w0) ^ w1), so any w0 can be made up for by w1. Constants and lanes are those of prefix_index.cpp.
TEST(prefix_index_survives_equal_hashes) {
  __extension__ using uint128 = unsigned __int128;
  const auto fold = [](uint64_t a) {
    const uint128 product = uint128{a} * 0x9E3779B97F4A7C15;
    return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
  };
  const Chain chain = root(3);
  const uint64_t start = chain.id ^ 0xD1B54A32D192ED03;
  const auto with_words = [](uint64_t w0, uint64_t w1) {
    Tokens tokens(kBlockSize, 9);
    for (const auto& [place, word] : {std::pair{0, w0}, std::pair{4, w1}}) {
      tokens[static_cast<size_t>(place)] = static_cast<int32_t>(word & 0xFFFFFFFF);
      tokens[static_cast<size_t>(place) + 1] = static_cast<int32_t>(word >> 32);
    }
    return tokens;
  };
  std::vector<Tokens> colliding;
  const uint64_t after = fold(start ^ 1) ^ 1;
  for (uint64_t w0 = 1; w0 <= 8; ++w0) colliding.push_back(with_words(w0, after ^ fold(start ^ w0)));

  PrefixIndex index(16, kBlockSize);
  for (int32_t block = 0; block < 8; ++block) {
    for (int32_t other = 0; other < 8; ++other) {
      CHECK_EQ(index.find(chain, colliding[static_cast<size_t>(other)].data()), other < block ? other : -1);
    }
    CHECK_EQ(insert(index, block, chain, colliding[static_cast<size_t>(block)]), block);
  }
  CHECK(index.consistent());
  for (const int32_t gone : {3, 0, 7}) {
    index.erase(gone);
    CHECK_EQ(index.find(chain, colliding[static_cast<size_t>(gone)].data()), -1);
  }
  for (const int32_t left : {1, 2, 4, 5, 6}) CHECK_EQ(index.find(chain, colliding[static_cast<size_t>(left)].data()), left);
}
