// Host rows: the memory through which they cross, and the workers that attend for them.
#include "bindings/host_rows.h"

#include "bindings/device.h"
#include "bindings/records.h"
#include "platform/host/host_pool.h"
#include "platform/host/host_timing.h"
#include "step_loop/graph_link.h"

namespace asyncengine {

namespace {

void check_shape(const HostShape& shape) {
  require(shape.num_slots >= 1 && shape.num_kv_heads >= 1 && shape.num_q_heads >= shape.num_kv_heads &&
              shape.num_q_heads % shape.num_kv_heads == 0,
          "a host row needs slots, and query heads that are a multiple of KV heads");
  require(shape.head_dim >= 2 && shape.head_dim % 2 == 0, "head_dim must be even");
}

std::shared_ptr<HostExchange> make_exchange(const HostShape& shape, const CudaDevice* device) {
  if (device == nullptr) return make_process_owned<HostExchange>(shape);
  return make_process_owned<HostExchange>(*device, shape);
}

std::shared_ptr<HostWorkers> make_pool_workers(std::shared_ptr<HostExchange> exchange, std::shared_ptr<HostPool> pool,
                                               int32_t block_size, bool transposed_keys, std::vector<HostLayer> layers,
                                               int num_workers, const std::string& isa, std::shared_ptr<GraphLink> link) {
  HostBlocks blocks{pool->block(0), pool->block_bytes(), block_size, transposed_keys, pool};
  return make_host_workers(std::move(exchange), std::move(blocks), std::move(layers), num_workers, isa, std::move(link));
}

std::shared_ptr<GraphLink> make_link(const CudaDevice& device, std::shared_ptr<LinkJobs> jobs, int32_t block_size,
                                     std::shared_ptr<CudaGraphs> graphs, Address graph) {
  const CudaGraphExec exec = graphs->instantiate(graph);
  return make_process_owned<GraphLink>(device, std::move(jobs), block_size, exec, std::move(graphs));
}

double time_attention(const HostShape& shape, int32_t block_size, bool transposed_keys, int num_workers, int32_t tokens,
                      bool float8, const std::string& isa, const HostPool* pool, int32_t num_layers) {
  require(num_workers >= 1 && tokens >= 1 && num_layers >= 1, "at least one worker, one token and one layer");
  require(block_size >= 16 && block_size % 16 == 0, "block_size must be a multiple of 16");
  HostTiming timing{.shape = shape,
                    .block_size = block_size,
                    .transposed_keys = transposed_keys,
                    .float8 = float8,
                    .num_workers = num_workers,
                    .tokens = tokens};
  // Blocks of a model that cannot decode on the host may have other planes.
  if (pool != nullptr && pool->num_blocks() > timing.num_slots() &&
      pool->block_bytes() == static_cast<size_t>(num_layers) * timing.layer_bytes()) {
    timing.pool = pool->block(0);
    timing.num_pool_blocks = pool->num_blocks();
    timing.num_layers = num_layers;
  }
  return time_host_attention(select_cpu_isa(isa), timing);
}

}  // namespace

std::shared_ptr<HostWorkers> make_host_workers(std::shared_ptr<HostExchange> exchange, HostBlocks blocks,
                                               std::vector<HostLayer> layers, int num_workers, const std::string& isa,
                                               std::shared_ptr<LinkAttention> link) {
  HostWorkers::Config config{.exchange = std::move(exchange),
                             .blocks = std::move(blocks),
                             .layers = std::move(layers),
                             .num_workers = num_workers,
                             .link = std::move(link)};
  return make_process_owned<HostWorkers>(select_cpu_isa(isa), std::move(config));  // whose last owner may have no GIL to release
}

void bind_host_rows(py::module_& m) {
  auto shape = bind_record<HostShape>(m, "HostShape", check_shape);
  make_readable(shape);
  auto layer = bind_record<HostLayer>(m, "HostLayer", [](const HostLayer&) {});
  make_readable(layer);
  py::class_<HostExchange, std::shared_ptr<HostExchange>>(m, "HostExchange")
      .def(py::init(&make_exchange), py::arg("shape"), py::arg("device").none(true), py::keep_alive<1, 3>())
      .def_property_readonly("mailboxes", [](const HostExchange& self) { return reinterpret_cast<Address>(self.mailbox(0)); })
      .def_property_readonly("results", [](const HostExchange& self) { return reinterpret_cast<Address>(self.result(0)); })
      .def_property_readonly("mailbox_words", [](const HostExchange& self) { return self.shape().mailbox_words(); })
      .def_property_readonly("result_bytes", [](const HostExchange& self) { return self.shape().result_bytes(); });

  py::class_<LinkJobs, std::shared_ptr<LinkJobs>>(m, "LinkJobs")
      .def(py::init([](const CudaDevice& device, int32_t max_jobs, int32_t max_blocks) {
             require(max_jobs >= 1 && max_blocks >= 1, "a job and a block at least");
             return make_process_owned<LinkJobs>(device, max_jobs, max_blocks);
           }),
           py::arg("device"), py::arg("max_jobs"), py::arg("max_blocks"), py::keep_alive<1, 2>())
      .def_property_readonly("words", &LinkJobs::words)
      .def_property_readonly("address", [](const LinkJobs& self) { return reinterpret_cast<Address>(self.data()); });

  py::class_<GraphLink, std::shared_ptr<GraphLink>>(m, "GraphLink")
      .def(py::init(&make_link), py::arg("device"), py::arg("jobs"), py::arg("block_size"), py::arg("graphs"), py::arg("graph"),
           py::keep_alive<1, 2>());

  py::class_<HostWorkers, std::shared_ptr<HostWorkers>>(m, "HostWorkers")
      .def(py::init(&make_pool_workers), py::arg("exchange"), py::kw_only(), py::arg("pool"), py::arg("block_size"),
           py::arg("transposed_keys"), py::arg("layers"), py::arg("num_workers"), py::arg("isa") = "auto",
           py::arg("link") = py::none())
      .def(
          "close",
          [](HostWorkers& self, double limit_s) {
            return self.close(std::chrono::nanoseconds(static_cast<int64_t>(limit_s * 1e9)));
          },
          py::arg("limit_s"), NoGil());

  m.def("time_host_attention", &time_attention, py::arg("shape"), py::arg("block_size"), py::arg("transposed_keys"),
        py::arg("num_workers"), py::arg("tokens"), py::arg("float8") = false, py::arg("isa") = "auto", py::arg("pool") = py::none(),
        py::arg("num_layers") = 1, NoGil());
}

}  // namespace asyncengine
