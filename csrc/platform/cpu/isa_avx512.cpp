#include "platform/cpu/isa.h"

#if defined(__AVX512BW__) && defined(__FMA__)
#define ASYNCENGINE_VECTOR_BYTES 64
#include "platform/cpu/isa_table.inl"

namespace asyncengine {

const CpuIsa* cpu_isa_avx512() {
  static constexpr CpuIsa kIsa = make_isa("avx512");
  return &kIsa;
}

}  // namespace asyncengine
#else
const asyncengine::CpuIsa* asyncengine::cpu_isa_avx512() { return nullptr; }
#endif
