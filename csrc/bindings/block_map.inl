// The blocks in order, in cells. A byte of a cell is a share of its blocks, 0 to 255 for none to all.
FIELD(int32_t, blocks_per_cell, 1)
FIELD(py::bytes, held, py::bytes())    // by one sequence
FIELD(py::bytes, shared, py::bytes())  // by several
FIELD(py::bytes, cached, py::bytes())  // by nobody, but a prompt may find them
