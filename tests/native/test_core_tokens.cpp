// The tokens of a sequence, wherever they are.
#include <algorithm>
#include <random>
#include <vector>

#include "check.h"
#include "core/tokens.h"

using namespace asyncengine;

namespace {

std::vector<int32_t> copied(const Tokens& tokens, int32_t position, int32_t count) {
  std::vector<int32_t> out(static_cast<size_t>(count));
  tokens.copy(position, count, out.data());
  return out;
}

std::vector<int32_t> part(const std::vector<int32_t>& all, int32_t position, int32_t count) {
  return {all.begin() + position, all.begin() + position + count};
}

}  // namespace

// Bursts of tokens, as many steps commit at once, and blocks published in between: each block has the right tokens, and
// none is lost.
TEST(tokens_keep_their_order_whatever_is_published) {
  constexpr int32_t kTotal = 400;
  for (const int32_t block_size : {16, 32}) {
    for (int32_t burst = 1; burst <= 5; ++burst) {
      for (const int32_t prompt_len : {1, 16, 21, 40}) {
        std::mt19937 rng(static_cast<unsigned>(burst * 100 + prompt_len));
        BlockManager blocks(kTotal / block_size + 1, block_size, true);
        BlockTables tables(1, kTotal / block_size + 1);
        const PublishedBlocks published{blocks, tables, 0};
        std::vector<int32_t> said;
        for (int32_t i = 0; i < prompt_len; ++i) said.push_back(static_cast<int32_t>(rng() % 1000));
        Tokens tokens(said, kTotal);
        Tokens::Tail tail(tokens);
        Chain chain;
        int32_t published_end = 0;
        while (std::ssize(said) + burst <= kTotal) {
          while (published_end + block_size <= tail.num_tokens()) {
            tables.append(0, blocks.allocate());
            const int32_t* block = tokens.unpublished(tail, published_end, published);
            CHECK(std::equal(block, block + block_size, said.begin() + published_end));
            const int32_t id = tables.at(0, published_end / block_size);
            chain = blocks.publish(id, chain, block, blocks.prefetch(id, chain, block));
            tokens.was_published(tail, block);
            published_end += block_size;
          }
          for (int32_t i = static_cast<int32_t>(rng() % static_cast<unsigned>(burst)); i < burst; ++i) {
            said.push_back(static_cast<int32_t>(rng() % 1000));
            tokens.append(tail, said.back(), published);
          }
          CHECK_EQ(tail.num_tokens(), static_cast<int32_t>(said.size()));
        }
        tokens.settle(tail, published);
        CHECK_EQ(tokens.size(), static_cast<int32_t>(said.size()));
        CHECK(copied(tokens, 0, tokens.size()) == said);
      }
    }
  }
}

TEST(a_sibling_reads_the_shared_prompt_and_its_own_tokens) {
  std::vector<int32_t> prompt(40);
  for (size_t i = 0; i < prompt.size(); ++i) prompt[i] = static_cast<int32_t>(i);
  const Tokens first(prompt, 64);
  const Tokens second(prompt, 64, &first, 32);
  CHECK_EQ(second.size(), 40);
  for (const int32_t position : {0, 16, 31, 32, 39}) {
    CHECK(copied(second, position, 40 - position) == part(prompt, position, 40 - position));
  }
  CHECK(second.at(16) == first.at(16));
}
