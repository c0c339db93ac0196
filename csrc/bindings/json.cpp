// JSON texts: their extent and their outermost members, without the GIL.
#include "bindings/bindings.h"

#include "platform/json_scan.h"

namespace asyncengine {

void bind_json(py::module_& m) {
  m.def(
      "json_extent",
      [](const py::buffer& document) {
        const py::buffer_info bytes = document.request();  // while it is held, a bytearray cannot be resized
        require(bytes.itemsize == 1 && bytes.ndim == 1, "bytes are needed");
        JsonExtent extent;
        {
          py::gil_scoped_release unlocked;
          extent = scan_json(static_cast<const char*>(bytes.ptr), static_cast<size_t>(bytes.size));
        }
        return std::make_pair(extent.values, extent.depth);
      },
      py::arg("document"), py::pos_only());

  m.def(
      "json_shape",
      [](const py::buffer& document, size_t long_size) {
        const py::buffer_info bytes = document.request();
        require(bytes.itemsize == 1 && bytes.ndim == 1, "bytes are needed");
        require(long_size > 0, "long_size must be positive");
        const char* data = static_cast<const char*>(bytes.ptr);
        JsonExtent extent;
        {
          py::gil_scoped_release unlocked;
          extent = scan_json(data, static_cast<size_t>(bytes.size), long_size);
        }
        py::list members;
        for (const JsonMember& member : extent.long_members) {
          members.append(py::make_tuple(py::bytes(data + member.name, member.name_size), member.size));
        }
        return py::make_tuple(extent.values, extent.depth, members);
      },
      py::arg("document"), py::arg("long_size"), py::pos_only());
}

}  // namespace asyncengine
