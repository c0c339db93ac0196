#include "platform/cpu/isa.h"

#include <stdexcept>

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace asyncengine {
namespace {

[[maybe_unused]] constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24, kAmxInt8 = 1u << 25;

// Bits of leaf 7, edx.
[[maybe_unused]] bool has_features([[maybe_unused]] unsigned bits) {
#if defined(__x86_64__) && defined(__linux__)
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d & bits) == bits;
#else
  return false;
#endif
}

// Linux keeps the 8 KB of tiles only for processes that ask for them, and may refuse (before 5.16; or where a thread's
// signal stack is too small for them). The permission holds for all threads.
[[maybe_unused]] bool tiles_granted() {
#if defined(__x86_64__) && defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  if (!has_features(kAmxBf16 | kAmxTile)) return false;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

std::vector<const CpuIsa*> runnable_isas() {
  std::vector<const CpuIsa*> isas;
#if defined(__x86_64__) || defined(__i386__)
  __builtin_cpu_init();
  if (cpu_isa_avx512() != nullptr && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma")) {
    static const bool tiles = cpu_isa_amx() != nullptr && __builtin_cpu_supports("avx512bf16") && tiles_granted();
    if (tiles) isas.push_back(cpu_isa_amx());
    isas.push_back(cpu_isa_avx512());
  }
  if (cpu_isa_avx2() != nullptr && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    isas.push_back(cpu_isa_avx2());
  }
#endif
  isas.push_back(cpu_isa_portable());
  return isas;
}

}  // namespace

bool has_int8_tiles() { return has_features(kAmxTile | kAmxInt8); }

std::vector<std::string> available_cpu_isas() {
  std::vector<std::string> names;
  for (const CpuIsa* isa : runnable_isas()) names.emplace_back(isa->name);
  return names;
}

const CpuIsa& select_cpu_isa(std::string_view name) {
  const std::vector<const CpuIsa*> isas = runnable_isas();
  if (name == "auto") return *isas.front();
  std::string known;
  for (const CpuIsa* isa : isas) {
    if (name == isa->name) return *isa;
    known += std::string(known.empty() ? "" : ", ") + isa->name;
  }
  throw std::invalid_argument("instruction set \"" + std::string(name) + "\" is not available here; there are: auto, " + known);
}

}  // namespace asyncengine
