// Parts of the device's bindings that the engine's bindings use.
#pragma once

#include <memory>
#include <vector>

#include "bindings/bindings.h"
#include "platform/process_owned.h"
#include "step_loop/graph_executor.h"
#include "step_loop/simulated_model.h"
#include "step_loop/step_loop.h"

namespace asyncengine {

// Destroying what joins threads: they may be waiting for the GIL.
struct WithoutGil {
  template <class T>
  void operator()(T* object) const {
    py::gil_scoped_release release;
    delete object;
  }
};

// A step loop whose thread hangs is leaked: waiting for it would take for ever.
struct DisposeWithoutGil {
  void operator()(StepLoop* loop) const {
    py::gil_scoped_release release;
    StepLoop::dispose(loop, std::chrono::seconds(5));
  }
};
using OwnedStepLoop = std::unique_ptr<StepLoop, FreedInItsProcess<DisposeWithoutGil>>;

// A simulated device and the model that runs on it. Its thread stops before anything that its graphs use is freed.
struct Simulation {
  explicit Simulation(const SimulatedModelConfig& model_config) : config(model_config) {}
  ~Simulation() { device.stop(); }

  SimulatedModelConfig config;
  SimulatedDevice device;
  std::unique_ptr<SimulatedModel> model;
};
using OwnedSimulation = std::unique_ptr<Simulation, FreedInItsProcess<WithoutGil>>;

// Graphs instantiated from what torch captured; whoever captured keeps the originals, which own the memory.
class CudaGraphs {
 public:
  explicit CudaGraphs(const CudaDevice& device) : device_(device) {}
  ~CudaGraphs();
  CudaGraphs(const CudaGraphs&) = delete;
  CudaGraphs& operator=(const CudaGraphs&) = delete;

  CudaGraphExec instantiate(Address graph);
  void add_bucket(int32_t max_rows, int32_t max_tokens, bool single_token_rows, int32_t max_context,
                  const std::vector<std::pair<Needs, Address>>& variants, int32_t lanes);
  void upload(Address cuda_stream);
  void launch(size_t bucket, Needs needs, Address cuda_stream) const;

  std::vector<GraphBucket> buckets;
  CudaGraphExec copy_blocks = nullptr;
  std::shared_ptr<HostPool> host_pool;  // of a host tier, or none
  GraphMover::Graphs moves{};       // its transfers'

 private:
  CudaDevice device_;
  std::vector<CudaGraphExec> execs_;
};

// The graphs as an executor takes them; `eager` is None or a callable of bucket, needs and CUDA stream that runs in
// their place.
GraphExecutor::Graphs executor_graphs(const CudaDevice& device, std::shared_ptr<CudaGraphs> graphs, py::object eager,
                                      Address cuda_stream);

}  // namespace asyncengine
