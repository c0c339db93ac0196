// Functions of the bindings that make workers for host rows.
#pragma once

#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/bindings.h"
#include "platform/host/host_workers.h"

namespace asyncengine {

// (scale, window, softcap, address of KVScales or 0) of each layer.
using HostLayerTuples = std::vector<std::tuple<float, int64_t, float, Address>>;

// Becomes a ValueError if there is no such shape.
HostShape host_shape(Dtype dtype, int32_t num_slots, int32_t num_q_heads, int32_t num_kv_heads, int32_t head_dim);

std::shared_ptr<HostWorkers> make_host_workers(std::shared_ptr<HostExchange> exchange, HostBlocks blocks,
                                               const HostLayerTuples& layers, int num_workers, const std::string& isa,
                                               std::shared_ptr<LinkAttention> link = {});

}  // namespace asyncengine
