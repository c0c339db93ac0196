// Common parts of the binding files. csrc/bindings/ is the only place that knows Python: every call that computes or
// waits converts its arguments first and then releases the GIL (NoGil); code that runs without the GIL touches no
// Python object.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "core/block_events.h"
#include "core/sequence.h"

namespace asyncengine {

namespace py = pybind11;
using NoGil = py::call_guard<py::gil_scoped_release>;

// Tensors arrive as the integers of Tensor.data_ptr(); the Python side checks shapes and dtypes.
using Address = uintptr_t;

template <class T = void>
T* pointer(Address address) {
  return reinterpret_cast<T*>(address);
}

// A Python function that is called from threads without the GIL, and let go of there too.
inline std::shared_ptr<py::function> callback(py::function function) {
  return {new py::function(std::move(function)), [](py::function* f) {
            py::gil_scoped_acquire gil;
            delete f;
          }};
}

// Becomes a ValueError.
inline void require(bool condition, const char* message) {
  if (!condition) throw std::invalid_argument(message);
}

// A member of FinishReason, borrowed.
py::handle to_python(FinishReason reason);
// A member of RecordKind, borrowed.
py::handle record_kind(uint32_t kind);

// The oldest changes of the prefix cache, at most `most`, which leave the ring.
py::list block_changes(BlockEvents& events, size_t most);

void bind_block_changes(py::module_& m);
void bind_wire(py::module_& m);
void bind_cpu_kernels(py::module_& m);
void bind_core(py::module_& m);
void bind_json(py::module_& m);
void bind_device(py::module_& m);
void bind_engine(py::module_& m);
void bind_host_rows(py::module_& m);

}  // namespace asyncengine
