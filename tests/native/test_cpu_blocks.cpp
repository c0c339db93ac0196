// Products with blocks of GGUF's types under sanitizers: buffers have exactly the size that kernels may touch.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "block_fixture.h"
#include "check.h"
#include "platform/cpu/kernels.h"

using namespace asyncengine;
using namespace block_fixture;

TEST(cpu_blocks_are_the_same_for_any_rows_and_near_for_any_instructions) {
  constexpr int64_t kRows = 21, kOutputs = 83;
  for (const BlockType type : kTypes) {
    const int64_t k = block_form(type).columns == 32 ? 352 : 512;
    const std::vector<uint8_t> blocks = random_blocks(type, kOutputs, k);
    const std::vector<float> x = normal_numbers(kRows * k);
    CpuLinear weights{{{blocks.data(), nullptr, kOutputs}}, k, Dtype::kFloat32, false};
    weights.matrices[0].block_type = type;

    std::vector<float> plain(static_cast<size_t>(kRows * kOutputs)), found(plain), one(static_cast<size_t>(kOutputs));
    CpuKernels(1, "portable").linear(weights, x.data(), k, kRows, plain.data(), true);
    float largest = 0;
    for (const float value : plain) largest = std::max(largest, std::fabs(value));
    for (const std::string& isa : available_cpu_isas()) {
      CpuKernels kernels(2, isa);
      kernels.linear(weights, x.data(), k, kRows, found.data(), true);
      for (size_t i = 0; i < found.size(); ++i) CHECK(std::fabs(found[i] - plain[i]) <= 1e-4f * largest);
      for (int64_t row = 0; row < kRows; ++row) {
        kernels.linear(weights, x.data() + row * k, k, 1, one.data(), true);
        CHECK(std::memcmp(one.data(), &found[static_cast<size_t>(row * kOutputs)], one.size() * sizeof(float)) == 0);
      }
    }
  }
}
