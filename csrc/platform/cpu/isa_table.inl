// The body of a file that provides one instruction set. It defines ASYNCENGINE_VECTOR_BYTES before including this.
#include "platform/cpu/vec.inl"

#include "platform/cpu/units.inl"

#include "platform/cpu/attention.inl"
#include "platform/cpu/decode.inl"
#include "platform/cpu/linear.inl"

#include "platform/cpu/codes.inl"
#include "platform/cpu/rows.inl"

#include "platform/cpu/mixer.inl"
#include "platform/cpu/sampling.inl"

namespace asyncengine {
namespace {

constexpr CpuIsa make_isa(const char* name) {
  return {
      .name = name,
      .vector_width = kWidth,
      .linear_float32 = make_linear_kernels<float>(),
      .linear_bfloat16 = make_linear_kernels<BFloat16>(),
      .embed = isa_embed,
      .norm = isa_norm,
      .activation = isa_activation,
      .rotary = isa_rotary,
      .soft_cap = isa_soft_cap,
      .quantize = isa_quantize,
      .attend = isa_attend,
      .combine = isa_combine,
      .mix_tokens = isa_mix_tokens,
      .keep_inputs = isa_keep_inputs,
      .scan_head = isa_scan_head,
      .finish_tokens = isa_finish_tokens,
      .logit_stats = isa_logit_stats,
      .sampling_mass = isa_sampling_mass,
      .block_sums = isa_block_sums,
  };
}

}  // namespace
}  // namespace asyncengine
