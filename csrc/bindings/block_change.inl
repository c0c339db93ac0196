// A change of the prefix cache.
FIELD(py::str, kind, py::str("cleared"))     // stored, removed, moved, or cleared: changes before it were lost
FIELD(bool, on_host, false)              // the block is in the host's memory, or was
FIELD(uint64_t, chain, 0)                // names the block for ever
FIELD(uint64_t, parent, 0)               // the chain before it, or the salt of a first block
FIELD(bool, is_first, false)             // it begins a prompt
FIELD(py::bytes, tokens, py::bytes())    // of the block, as int32; empty of a removed one
FIELD(int32_t, group, 0)                 // 0: layers that see all; from 1 on window groups
