#include "bindings/bindings.h"

PYBIND11_MODULE(_core, m) {
  m.doc() = "The native core of asyncengine; see _core.pyi.";
  asyncengine::bind_wire(m);
  asyncengine::bind_cpu_kernels(m);
  asyncengine::bind_core(m);
  asyncengine::bind_json(m);
  asyncengine::bind_device(m);
  asyncengine::bind_host_rows(m);
  asyncengine::bind_engine(m);
}
