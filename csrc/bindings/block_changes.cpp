// Changes of the prefix cache, in Python.
#include "bindings/bindings.h"
#include "bindings/records.h"
#include "core/block_events.h"

namespace asyncengine {
namespace {

struct BlockChange {
#define RECORD BlockChange
#define FIELDS "bindings/block_change.inl"
#include "core/record.inl"
};

NamedTuple<BlockChange> block_change;

const char* name_of(BlockEvent::Kind kind) {
  switch (kind) {
    case BlockEvent::kStored: return "stored";
    case BlockEvent::kRemoved: return "removed";
    case BlockEvent::kMoved: return "moved";
    case BlockEvent::kCleared: return "cleared";
  }
  return "";
}

}  // namespace

py::list block_changes(BlockEvents& events, size_t most) {
  py::list all;
  const size_t bytes = events.block_size() * sizeof(int32_t);
  events.drain(most, [&](const BlockEvent& event, const int32_t* tokens) {
    const bool has_tokens = event.kind == BlockEvent::kStored || event.kind == BlockEvent::kMoved;
    all.append(block_change({py::str(name_of(event.kind)), event.on_host, event.chain, event.parent.id, event.parent.root,
                             has_tokens ? py::bytes(reinterpret_cast<const char*>(tokens), bytes) : py::bytes(), event.group}));
  });
  return all;
}

void bind_block_changes(py::module_& m) { block_change.bind(m, "BlockChange"); }

}  // namespace asyncengine
