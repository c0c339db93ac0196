#define ASYNCENGINE_VECTOR_BYTES 16
#include "platform/cpu/isa_table.inl"

namespace asyncengine {

const CpuIsa* cpu_isa_portable() {
  static constexpr CpuIsa kIsa = make_isa("portable");
  return &kIsa;
}

}  // namespace asyncengine
