#include "platform/cpu/isa.h"

#if defined(__AVX2__) && defined(__FMA__)
#define ASYNCENGINE_VECTOR_BYTES 32
#include "platform/cpu/isa_table.inl"

namespace asyncengine {

const CpuIsa* cpu_isa_avx2() {
  static constexpr CpuIsa kIsa = make_isa("avx2");
  return &kIsa;
}

}  // namespace asyncengine
#else
const asyncengine::CpuIsa* asyncengine::cpu_isa_avx2() { return nullptr; }
#endif
