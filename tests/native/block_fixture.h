// Weights in blocks of GGUF's types, for tests.
#pragma once

#include <cstring>
#include <random>
#include <vector>

#include "platform/cpu/blocks.h"

namespace block_fixture {

using namespace asyncengine;

inline constexpr BlockType kTypes[] = {BlockType::kQ4_0, BlockType::kQ4_1, BlockType::kQ5_0,   BlockType::kQ5_1,
                                       BlockType::kQ8_0, BlockType::kQ2_K, BlockType::kQ3_K,   BlockType::kQ4_K,
                                       BlockType::kQ5_K, BlockType::kQ6_K, BlockType::kIQ4_NL, BlockType::kIQ4_XS};

// Random codes; every half is 2^-10, whichever bytes of a block the scales are in.
inline std::vector<uint8_t> random_blocks(BlockType type, int64_t rows, int64_t k) {
  const BlockForm form = block_form(type);
  std::mt19937 generator(static_cast<unsigned>(type));
  std::vector<uint8_t> blocks(static_cast<size_t>(rows * k / form.columns * form.bytes));
  for (uint8_t& byte : blocks) byte = static_cast<uint8_t>(generator());
  for (size_t at = 0; at < blocks.size(); at += static_cast<size_t>(form.bytes)) {
    for (const int64_t place : {int64_t{0}, int64_t{2}, form.bytes - 4, form.bytes - 2}) {
      const uint16_t half = 0x1400;
      std::memcpy(&blocks[at + static_cast<size_t>(place)], &half, sizeof(half));
    }
  }
  return blocks;
}

inline std::vector<float> normal_numbers(int64_t count) {
  std::mt19937 generator(1);
  std::normal_distribution<float> normal;
  std::vector<float> numbers(static_cast<size_t>(count));
  for (float& number : numbers) number = normal(generator);
  return numbers;
}

}  // namespace block_fixture
