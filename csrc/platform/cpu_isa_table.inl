// The body of a file that provides one instruction set. It defines ASYNCENGINE_VECTOR_BYTES before including this.
#include "platform/cpu_vec.inl"

#include "platform/cpu_attention.inl"
#include "platform/cpu_linear.inl"
#include "platform/cpu_rows.inl"
#include "platform/cpu_sampling.inl"

namespace asyncengine {
namespace {

constexpr CpuIsa make_isa(const char* name) {
  return {
      .name = name,
      .lanes = kLanes,
      .panel_columns = kPanelColumns,
      .few_rows = kFewRows,
      .tile_rows = isa_tile_rows,
      .packed_x_floats = isa_packed_x_floats,
      .linear_scratch_floats = isa_linear_scratch_floats,
      .pack_x = isa_pack_x,
      .linear = isa_linear,
      .norm = isa_norm,
      .activation = isa_activation,
      .rotary = isa_rotary,
      .attend = isa_attend,
      .combine = isa_combine,
      .logit_stats = isa_logit_stats,
      .sampling_mass = isa_sampling_mass,
      .block_sums = isa_block_sums,
  };
}

}  // namespace
}  // namespace asyncengine
