// StepPlan -> StepInput, in one pass over the plan and without allocation.
#pragma once

#include <cstddef>
#include <span>

#include "core/block_table.h"
#include "core/step_input.h"

namespace asyncengine {

// Writes the plan into `buffer` and marks the block tables of its rows clean. Returns the bytes written.
// Precondition: buffer.size() >= StepLimits::max_bytes() of the scheduler that made the plan, aligned to 8 bytes.
size_t pack_step(const StepPlan& plan, BlockTables& tables, std::span<std::byte> buffer);

}  // namespace asyncengine
