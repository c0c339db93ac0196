// Mixers with a recurrence (asyncengine/kernels/states.py): Mamba-2 and gated DeltaNet, between their two projections.
#pragma once

#include <cstddef>
#include <cstdint>

namespace asyncengine {

// A mixer; points into memory that the caller keeps. Heads of values share the keys, of `size` numbers, of their group. A
// head's state is [size, dim], and a column of it depends on no other.
struct CpuMixer {
  bool delta;  // gated DeltaNet; else Mamba-2
  int64_t heads, groups, dim, size;
  int64_t conv_size;
  const float* conv_weight;  // [conv_size, channels]
  const float* conv_bias;    // [channels] or null
  const float* decay;        // [heads]
  const float* dt_bias;      // [heads]
  const float* skip;         // [heads], of Mamba-2
  const float* norm;         // of DeltaNet [dim], of Mamba-2 [heads * dim] or null
  float dt_low, dt_high, eps;
  bool norm_before_gate;
  bool half_states;  // bfloat16; else float32

  // Inlined everywhere, as files for several instruction sets include this.
  [[gnu::always_inline]] int64_t inner() const { return heads * dim; }
  [[gnu::always_inline]] int64_t keys() const { return groups * size; }
  [[gnu::always_inline]] int64_t channels() const { return inner() + 2 * keys(); }
  [[gnu::always_inline]] int64_t width() const { return inner() + channels() + (delta ? 2 : 1) * heads; }
  // Places in a token's inputs.
  [[gnu::always_inline]] int64_t gate_at() const { return delta ? channels() : 0; }
  [[gnu::always_inline]] int64_t mixed_at() const { return delta ? 0 : inner(); }
  [[gnu::always_inline]] int64_t steps_at() const { return inner() + channels() + (delta ? heads : 0); }
  [[gnu::always_inline]] int64_t rates_at() const { return inner() + channels(); }  // of DeltaNet
  // Places among the channels: keys are b or k, queries c or q.
  [[gnu::always_inline]] int64_t values_at() const { return delta ? 2 * keys() : 0; }
  [[gnu::always_inline]] int64_t keys_at() const { return delta ? keys() : inner(); }
  [[gnu::always_inline]] int64_t queries_at() const { return delta ? 0 : inner() + keys(); }
  // Bytes of a slot before the states of the heads: the last conv_size - 1 inputs of the convolution, in float32.
  [[gnu::always_inline]] int64_t conv_bytes() const { return ((conv_size - 1) * channels() * 4 + 15) / 16 * 16; }
  [[gnu::always_inline]] int64_t state_bytes() const {
    return conv_bytes() + (inner() * size * (half_states ? 2 : 4) + 15) / 16 * 16;
  }
};

struct MixerTask {
  const CpuMixer* mixer;
  const void* x;     // [tokens, width]
  int64_t x_stride;  // elements
  void* out;         // [tokens, inner]
  float* mixed;      // [tokens, channels]: behind the convolution
  float* steps;      // [tokens, 2, heads]: what a state keeps of itself, then time steps or rates
  float* results;    // [tokens, inner]
};

// Tokens [begin, end) of a step that are one sequence's, and its slot.
struct MixerRow {
  int64_t begin, end;
  std::byte* slot;
};

}  // namespace asyncengine
