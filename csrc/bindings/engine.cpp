// The step loop on its executors.
#include "bindings/device.h"
#include "bindings/host_rows.h"
#include "bindings/records.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "platform/cpu/kernels.h"
#include "platform/cpu/lanes.h"
#include "step_loop/callback_executor.h"

namespace asyncengine {
namespace {

int32_t max_blocks(const SchedulerConfig& config) { return (config.max_model_len + config.block_size - 1) / config.block_size; }

std::chrono::nanoseconds microseconds(double us) { return std::chrono::nanoseconds(static_cast<int64_t>(us * 1000)); }

OwnedStepLoop make_simulated_loop(const StepLoopConfig& config, Simulation& simulation, double poll_interval_us) {
  require(simulation.model == nullptr, "a simulated device runs one step loop in its life");
  const SchedulerConfig& s = config.scheduler;
  simulation.model = std::make_unique<SimulatedModel>(simulation.device, simulation.config, StepLoop::limits(config), s.num_blocks,
                                                      s.block_size, max_blocks(s));
  auto executor = simulation.model->make_executor(config.steps_in_flight, microseconds(poll_interval_us), StagingMode::kAhead,
                                                  s.num_host_blocks);
  return OwnedStepLoop(new StepLoop(config, std::move(executor)));
}

// The last bucket with so many lanes must fit every step that has them.
void require_buckets(const std::vector<GraphBucket>& buckets, int32_t lanes, const StepLimits& limits) {
  const auto largest = std::find_if(buckets.rbegin(), buckets.rend(), [=](const GraphBucket& b) { return b.lanes == lanes; });
  require(largest != buckets.rend() && !largest->single_token_rows && largest->max_rows >= limits.max_rows &&
              largest->max_tokens >= limits.max_tokens && largest->max_context == kAnyContext,
          "the last bucket must fit every step");
}

// Device, staging, graphs and CUDA stream of a rank beside the first.
using OtherRank = std::tuple<CudaDevice, std::shared_ptr<Staging>, std::shared_ptr<CudaGraphs>, Address>;

OwnedStepLoop make_cuda_loop(const StepLoopConfig& config, const CudaDevice& device, std::shared_ptr<Staging> staging,
                             std::shared_ptr<CudaGraphs> graphs, py::object eager, Address cuda_stream, double poll_interval_us,
                             std::shared_ptr<HostWorkers> host_workers, const std::vector<OtherRank>& others) {
  require(staging->num_steps() == config.steps_in_flight, "staging is for another number of steps in flight");
  require(!graphs->buckets.empty(), "there is no bucket");
  const int32_t host_blocks = graphs->host_pool != nullptr ? graphs->host_pool->num_blocks() : 0;
  require(config.scheduler.num_host_blocks == host_blocks, "num_host_blocks must be those of the graphs' host pool");
  const bool has_states = graphs->host_pool != nullptr && graphs->host_pool->states() != nullptr;
  require(config.scheduler.num_host_states == (has_states ? graphs->host_pool->states()->num_states() : 0),
          "num_host_states must be those of the graphs' host pool");
  const HybridConfig& hybrid = config.scheduler.hybrid;
  require(!hybrid.any() || (host_workers != nullptr && host_workers->num_layers() == hybrid.layers),
          "host rows need host_workers that attend in as many layers");
  require_buckets(graphs->buckets, 0, StepLoop::limits(config));
  if (hybrid.any()) require_buckets(graphs->buckets, hybrid.lanes, StepLoop::limits(config));
  GraphExecutor::Graphs all = executor_graphs(device, std::move(graphs), std::move(eager), cuda_stream);
  all.host_attention = std::move(host_workers);
  for (const auto& [other, its_staging, its_graphs, its_stream] : others) {
    require(its_staging->follows() && its_staging->mode() != StagingMode::kPageable &&
                its_graphs->buckets.size() == all.buckets.size() && host_blocks == 0 && !hybrid.any(),
            "ranks follow the pinned staging of the first, with as many buckets, and without a host pool");
    all.others.push_back({other, its_staging, executor_graphs(other, its_graphs, py::none(), its_stream)});
  }
  auto executor = std::make_unique<GraphExecutor>(device, std::move(staging), std::move(all), microseconds(poll_interval_us));
  return OwnedStepLoop(new StepLoop(config, std::move(executor)));
}

// Measures for how long Python could not run: while one call of C holds the GIL, a forward in Python stands still and
// is not hung.
class GilProbe : public std::enable_shared_from_this<GilProbe> {
 public:
  // The time in all, up to `now`. Each call that finds no probe under way sends one: a thread that asks for the GIL.
  int64_t held_up_ns(int64_t now) {
    if (!asking_.exchange(true, std::memory_order_acq_rel)) {
      asked_ns_.store(now, std::memory_order_relaxed);
      std::thread([self = shared_from_this()] { self->ask(); }).detach();
      return total_ns_.load(std::memory_order_relaxed);
    }
    return total_ns_.load(std::memory_order_relaxed) + std::max<int64_t>(0, now - asked_ns_.load(std::memory_order_relaxed));
  }

 private:
  void ask() {
    {
      py::gil_scoped_acquire gil;
    }
    const int64_t waited = steady_now_ns() - asked_ns_.load(std::memory_order_relaxed);
    if (waited > kContention) total_ns_.fetch_add(waited, std::memory_order_relaxed);
    asking_.store(false, std::memory_order_release);
  }
  static constexpr int64_t kContention = 100'000'000;  // others that run Python as well hand the GIL over sooner

  std::atomic<bool> asking_{false};
  std::atomic<int64_t> asked_ns_{0}, total_ns_{0};
};

// Parts of host rows where the CPU computes the steps: lanes, attention of each layer, and workers.
struct CpuHostRows {
  std::shared_ptr<CpuLanes> lanes;
  std::vector<HostLayer> layers;
  int num_workers;
  std::string isa;
};

std::shared_ptr<HostAttention> make_workers(const CpuHostRows& rows, const HostMover& mover, int32_t block_size) {
  HostBlocks blocks{mover.memory().get(), mover.block_bytes(), block_size, /*transposed_keys=*/true, mover.memory()};
  return make_host_workers(rows.lanes->memory(), std::move(blocks), rows.layers, rows.num_workers, rows.isa);
}

// `forward(batch)` returns the address of float32 logits [num_samples, vocab_size], then the address and the width of
// float32 vectors [num_samples, width], for samples that need one. It is the only Python that a step runs, on the
// executor's thread; sampling follows without the GIL.
OwnedStepLoop make_cpu_loop(const StepLoopConfig& config, py::function forward, std::shared_ptr<CpuKernels> kernels,
                            int64_t vocab_size, const std::vector<std::pair<Address, size_t>>& kv_regions,
                            std::optional<CpuHostRows> host_rows, const std::vector<std::pair<Address, size_t>>& state_regions) {
  auto step = [run = callback(std::move(forward)), kernels = std::move(kernels), vocab_size](const StepBatch& batch,
                                                                                             int32_t* tokens) {
    std::tuple<Address, Address, size_t> answer;
    {
      py::gil_scoped_acquire gil;
      try {
        answer = (*run)(py::cast(&batch, py::return_value_policy::reference)).cast<decltype(answer)>();
      } catch (const py::error_already_set& error) {
        throw std::runtime_error(error.what());  // a plain string: the Python error may not leave the GIL's scope
      }
    }
    const auto [logits, vectors, width] = answer;
    kernels->sample(pointer<const float>(logits), vocab_size, batch, tokens);
    if (batch.needs & kNeedVector) give_vectors(batch, pointer<const float>(vectors), width, tokens);
  };
  require(state_regions.empty() || config.scheduler.num_state_slots > 0, "state_regions need num_state_slots");
  std::vector<CallbackExecutor::BlockRegion> regions, states;
  for (const auto& [base, bytes_per_block] : kv_regions) regions.push_back({pointer<std::byte>(base), bytes_per_block});
  for (const auto& [base, bytes_per_slot] : state_regions) states.push_back({pointer<std::byte>(base), bytes_per_slot});
  auto executor = std::make_unique<CallbackExecutor>(
      StepLoop::limits(config), max_blocks(config.scheduler), config.scheduler.block_size, config.steps_in_flight,
      std::move(regions), CpuSampler::kNeeds | kNeedVector | kNeedMean, std::move(step),
      [probe = std::make_shared<GilProbe>()](int64_t now) { return probe->held_up_ns(now); }, config.scheduler.num_host_blocks,
      std::move(states), config.scheduler.num_host_states);
  if (config.scheduler.hybrid.any()) {
    require(host_rows.has_value(), "lanes need host_rows");
    executor->attend_on_host_with(make_workers(*host_rows, *executor->mover(), config.scheduler.block_size));
  }
  return OwnedStepLoop(new StepLoop(config, std::move(executor)));
}

struct SequenceNews {
#define RECORD SequenceNews
#define FIELDS "bindings/sequence_news.inl"
#include "core/record.inl"
};
struct SequenceRecord {
#define RECORD SequenceRecord
#define FIELDS "bindings/sequence_record.inl"
#include "core/record.inl"
};
struct BlockMap {
#define RECORD BlockMap
#define FIELDS "bindings/block_map.inl"
#include "core/record.inl"
};
struct TokensOfSteps {
#define RECORD TokensOfSteps
#define FIELDS "bindings/step_tokens.inl"
#include "core/record.inl"
};

FastNamedTuple<SequenceNews> sequence_news;
FastNamedTuple<SequenceRecord> sequence_record;
NamedTuple<StepRecord> step_record;
NamedTuple<BlockMap> block_map_of;
NamedTuple<TokensOfSteps> tokens_of_steps;

bool is_of_token(const StepLoop::News::Record& record) { return record.kind == kLogprobs && record.token >= 0; }

py::bytes payload_of(const StepLoop::News& news, const StepLoop::News::Record& record) {
  const auto payload = std::as_bytes(news.payload(record));
  return {reinterpret_cast<const char*>(payload.data()), payload.size()};
}

// Records of tokens, then all other records. Every token of a request that wants records has some, so they get no
// object around each. Both tuples are mostly the empty one, of which there is one.
std::pair<py::tuple, py::tuple> records_of(const StepLoop::News& news) {
  const auto of_tokens = static_cast<size_t>(std::ranges::count_if(news.records, is_of_token));
  std::pair<py::tuple, py::tuple> all(of_tokens, news.records.size() - of_tokens);
  Py_ssize_t logprobs = 0, others = 0;
  for (const StepLoop::News::Record& r : news.records) {
    py::bytes payload = payload_of(news, r);
    if (is_of_token(r)) {
      PyTuple_SET_ITEM(all.first.ptr(), logprobs++, payload.release().ptr());
      continue;
    }
    const auto kind = py::reinterpret_borrow<py::object>(record_kind(r.kind));
    py::object record = sequence_record({.kind = kind, .token = r.token, .payload = std::move(payload)});
    PyTuple_SET_ITEM(all.second.ptr(), others++, record.release().ptr());
  }
  return all;
}

py::object to_python(const StepLoop::News& news) {
  const Request& request = *news.sequence->request;
  auto [logprobs, records] = records_of(news);
  return sequence_news({.request = request.id,
                        .index = news.sequence->index,
                        .tokens = py::cast(news.tokens),
                        .finish = news.finish,
                        .first_ns = news.first_ns,
                        .last_ns = news.last_ns,
                        .scheduled_ns = request.scheduled_ns,
                        .cached_tokens = request.cached_tokens,
                        .logprobs = std::move(logprobs),
                        .records = std::move(records),
                        .host_tokens = news.host_tokens});
}

// A SequenceNews per sequence that has some.
// If memory runs out, this is what there was memory for, and another wake-up brings the rest.
std::pair<py::list, bool> drain(StepLoop& loop) {
  py::list news;
  bool alive = true;
  try {
    alive = loop.drain([&](const StepLoop::News& n) { news.append(to_python(n)); });
  } catch (...) {
    loop.wake();
    if (news.empty()) throw;
  }
  return {std::move(news), alive};
}

// Every statistic by its name (core/stats.inl).
py::dict snapshot(const StepLoop& loop) {
  py::dict values;
  visit_stats(loop.stats(), [&](const char* name, int64_t value) { values[name] = value; });
  return values;
}

py::object step_tokens(const StepLoop& loop) {
  const StepTokens& tokens = loop.step_tokens();
  return tokens_of_steps({py::tuple(py::cast(StepTokens::kBounds)), py::tuple(py::cast(tokens.counts())), tokens.sum()});
}

py::list last_steps(const StepLoop& loop, size_t most) {
  py::list all;
  for (const StepRecord& record : loop.last_steps(most)) all.append(step_record(record));
  return all;
}

py::object block_map(StepLoop& loop) {
  const auto [cells, blocks_per_cell] = loop.block_map();
  std::string held, shared, cached;
  for (const BlockCell& cell : cells) {
    held.push_back(static_cast<char>(cell.held));
    shared.push_back(static_cast<char>(cell.shared));
    cached.push_back(static_cast<char>(cell.cached));
  }
  return block_map_of({blocks_per_cell, held, shared, cached});
}

void check_loop(const StepLoopConfig& config) {
  require(config.scheduler.num_blocks >= 1, "a step loop needs a scheduler's settings");
  require(config.steps_in_flight >= 1 && config.steps_in_flight <= SchedulerConfig::kMostStepsInFlight,
          "steps_in_flight must be 1 to 8");
}

}  // namespace

void bind_engine(py::module_& m) {
  sequence_news.bind(m, "SequenceNews");
  sequence_record.bind(m, "Record");
  step_record.bind(m, "StepRecord");
  block_map_of.bind(m, "BlockMap");
  tokens_of_steps.bind(m, "StepTokens");
  py::class_<CpuLanes, std::shared_ptr<CpuLanes>>(m, "CpuLanes")
      .def(py::init<const HostShape&, int32_t>(), py::arg("shape"), py::arg("hidden_size"))
      .def(
          "exchange",
          [](CpuLanes& self, StepBatch& batch, int32_t layer, Address heads, Address x, Address residual) {
            self.exchange(batch, layer, pointer<std::byte>(heads), pointer<std::byte>(x), pointer<std::byte>(residual));
          },
          py::arg("batch"), py::arg("layer"), py::arg("heads"), py::arg("x"), py::arg("residual"), NoGil());
  py::class_<CpuHostRows>(m, "CpuHostRows")
      .def(py::init([](std::shared_ptr<CpuLanes> lanes, std::vector<HostLayer> layers, int num_workers, std::string isa) {
             require(num_workers >= 1 && !layers.empty(), "a worker and a layer at least");
             return CpuHostRows{std::move(lanes), std::move(layers), num_workers, std::move(isa)};
           }),
           py::kw_only(), py::arg("lanes"), py::arg("layers"), py::arg("num_workers"), py::arg("isa"));
  py::enum_<SubmitResult>(m, "SubmitResult")
      .value("accepted", SubmitResult::kAccepted)
      .value("queue_full", SubmitResult::kQueueFull)
      .value("too_large", SubmitResult::kTooLarge)
      .value("closed", SubmitResult::kClosed)
      .value("duplicate", SubmitResult::kDuplicate)
      .value("unserved", SubmitResult::kUnserved);

  bind_record<StepLoopConfig>(m, "StepLoopConfig", check_loop);

  py::class_<StepLoop, OwnedStepLoop>(m, "StepLoop")
      .def_static("on_simulated_device", &make_simulated_loop, py::arg("config"), py::arg("device"), py::arg("poll_interval_us"),
                  py::keep_alive<0, 2>())
      .def_static("on_cpu", &make_cpu_loop, py::arg("config"), py::arg("forward"), py::arg("kernels"), py::arg("vocab_size"),
                  py::arg("kv_regions"), py::arg("host_rows") = py::none(),
                  py::arg("state_regions") = std::vector<std::pair<Address, size_t>>())
      .def_static("on_cuda", &make_cuda_loop, py::arg("config"), py::arg("device"), py::arg("staging"), py::arg("graphs"),
                  py::arg("eager"), py::arg("cuda_stream"), py::arg("poll_interval_us"), py::arg("host_workers") = nullptr,
                  py::arg("others") = std::vector<OtherRank>{}, py::keep_alive<0, 2>())
      .def("start", &StepLoop::start, py::arg("cpu") = -1)
      .def("advance", &StepLoop::advance, NoGil())
      .def(
          "stop",
          [](StepLoop& self, double limit_s) { return self.stop(std::chrono::nanoseconds(static_cast<int64_t>(limit_s * 1e9))); },
          py::arg("limit_s"), NoGil())
      .def("submit", &StepLoop::submit, py::arg("spec"))
      .def("check", &StepLoop::check, py::arg("spec"))
      .def("abort", &StepLoop::abort, py::arg("id"), py::arg("index") = -1)
      .def("drain", &drain)
      .def("take_step_error", &StepLoop::take_step_error)
      .def("stats", &snapshot)
      .def("load",
           [](const StepLoop& self) {
             const Stats stats = self.stats();
             return std::tuple(stats.num_requests_running, stats.num_requests_waiting, stats.queued_requests, stats.queued_tokens,
                               stats.num_free_blocks);
           })
      .def("step_tokens", &step_tokens)
      .def("watch", &StepLoop::watch, py::arg("on"))
      .def("last_steps", &last_steps, py::arg("most"))
      .def("block_map", &block_map)
      .def(
          "block_changes", [](StepLoop& self, size_t most) { return block_changes(self.block_events(), most); }, py::arg("most"))
      .def_property_readonly("wake_fd", &StepLoop::wake_fd)
      .def_property_readonly("error", &StepLoop::error)
      .def_property_readonly("quiescent", &StepLoop::quiescent);
}

}  // namespace asyncengine
