#include "platform/cpu_isa.h"

#include <stdexcept>

namespace asyncengine {
namespace {

std::vector<const CpuIsa*> runnable_isas() {
  std::vector<const CpuIsa*> isas;
#if defined(__x86_64__) || defined(__i386__)
  __builtin_cpu_init();
  if (cpu_isa_avx512() != nullptr && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma")) {
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
  throw std::invalid_argument("instruction set \"" + std::string(name) + "\" is not available here; there are: auto, " +
                              known);
}

}  // namespace asyncengine
