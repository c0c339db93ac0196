// Products with blocks of GGUF's types under sanitizers: buffers have exactly the size that kernels may touch.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "check.h"
#include "platform/cpu/kernels.h"

using namespace asyncengine;

namespace {

constexpr BlockType kTypes[] = {BlockType::kQ4_0, BlockType::kQ4_1, BlockType::kQ5_0,   BlockType::kQ5_1,
                                BlockType::kQ8_0, BlockType::kQ2_K, BlockType::kQ3_K,   BlockType::kQ4_K,
                                BlockType::kQ5_K, BlockType::kQ6_K, BlockType::kIQ4_NL, BlockType::kIQ4_XS};

// Random codes; every half is 2^-10, whichever bytes of a block the scales are in.
std::vector<uint8_t> random_blocks(BlockType type, int64_t rows, int64_t k) {
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

}  // namespace

TEST(cpu_blocks_are_the_same_for_any_rows_and_near_for_any_instructions) {
  constexpr int64_t kRows = 11, kOutputs = 19;
  for (const BlockType type : kTypes) {
    const int64_t k = block_form(type).columns == 32 ? 352 : 512;
    const std::vector<uint8_t> blocks = random_blocks(type, kOutputs, k);
    const std::unique_ptr<float[]> x(new float[static_cast<size_t>(kRows * k)]);
    std::mt19937 generator(1);
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < kRows * k; ++i) x[static_cast<size_t>(i)] = normal(generator);
    CpuLinear weights{{{blocks.data(), nullptr, kOutputs}}, k, Dtype::kFloat32, false};
    weights.matrices[0].block_type = type;

    std::vector<float> plain(static_cast<size_t>(kRows * kOutputs)), found(plain), one(static_cast<size_t>(kOutputs));
    CpuKernels(1, "portable").linear(weights, x.get(), k, kRows, plain.data(), true);
    float largest = 0;
    for (const float value : plain) largest = std::max(largest, std::fabs(value));
    for (const std::string& isa : available_cpu_isas()) {
      CpuKernels kernels(2, isa);
      kernels.linear(weights, x.get(), k, kRows, found.data(), true);
      for (size_t i = 0; i < found.size(); ++i) CHECK(std::fabs(found[i] - plain[i]) <= 1e-4f * largest);
      for (int64_t row = 0; row < kRows; ++row) {
        kernels.linear(weights, x.get() + row * k, k, 1, one.data(), true);
        CHECK(std::memcmp(one.data(), &found[static_cast<size_t>(row * kOutputs)], one.size() * sizeof(float)) == 0);
      }
    }
  }
}
