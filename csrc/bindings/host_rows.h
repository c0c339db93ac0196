// Functions of the bindings that make workers for host rows.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "bindings/bindings.h"
#include "platform/host/host_workers.h"

namespace asyncengine {

std::shared_ptr<HostWorkers> make_host_workers(std::shared_ptr<HostExchange> exchange, HostBlocks blocks,
                                               std::vector<HostLayer> layers, int num_workers, const std::string& isa,
                                               std::shared_ptr<LinkAttention> link = {});

}  // namespace asyncengine
