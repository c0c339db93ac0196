#include "platform/cuda/simulated_device.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace asyncengine {
namespace {

// Ordinals of live devices; a slot is reused when its device is gone.
std::mutex registry_mutex;
std::vector<SimulatedDevice*> registry;
thread_local int current_device = -1;
thread_local std::vector<int> pushed_devices;
std::atomic<int64_t> num_wrong_device_calls{0};

// The current device of the calling thread; null, and counted, if there is none.
SimulatedDevice* device() {
  std::lock_guard lock(registry_mutex);
  if (current_device >= 0) return registry.at(static_cast<size_t>(current_device));
  ++num_wrong_device_calls;
  return nullptr;
}

constexpr size_t kAllocationHeader = 64;  // keeps the payload aligned and remembers the device
constexpr int kPoison = 0xA5;             // fresh device memory is garbage, as on the real device

}  // namespace

struct CudaEventHandle {
  SimulatedDevice* device;
  std::atomic<int64_t> recorded{0}, done{0};
};
struct CudaStreamHandle {
  SimulatedDevice* device;
  std::deque<SimulatedDevice::Operation> queue{};  // guarded by the device
  int64_t enqueued = 0, executed = 0;
};
struct CudaGraphExecHandle {
  SimulatedDevice* device;
  std::function<void()> body;
  std::chrono::nanoseconds latency;
};

struct SimulatedRuntime {
  using Call = SimulatedDevice::Call;
  static constexpr int kWrongDevice = SimulatedDevice::kWrongDevice;

  // False, and counted, if the calling thread has another current device.
  static bool is_current(const SimulatedDevice* owner) {
    if (current_device == owner->ordinal_) return true;
    ++num_wrong_device_calls;
    return false;
  }
  static int set_device(int ordinal) {
    std::lock_guard lock(registry_mutex);
    if (ordinal < 0 || static_cast<size_t>(ordinal) >= registry.size() || registry[static_cast<size_t>(ordinal)] == nullptr) {
      return 101;  // cudaErrorInvalidDevice
    }
    current_device = ordinal;
    return kCudaSuccess;
  }
  static int get_device(int* ordinal) {
    *ordinal = current_device;
    return kCudaSuccess;
  }
  static int push_device(int ordinal) {
    pushed_devices.push_back(current_device);
    const int error = set_device(ordinal);
    if (error != kCudaSuccess) pushed_devices.pop_back();
    return error;
  }
  static int pop_device() {
    current_device = pushed_devices.back();
    pushed_devices.pop_back();
    return kCudaSuccess;
  }
  static const char* get_error_string(int error) {
    switch (error) {
      case kCudaSuccess: return "no error";
      case kCudaErrorNotReady: return "device not ready";
      case 2: return "out of memory";
      case 101: return "invalid device ordinal";
      case kWrongDevice: return "invalid resource handle";
      case 700: return "an illegal memory access was encountered";
      default: return "unknown error";
    }
  }
  static int allocate(void** pointer, size_t bytes) {
    SimulatedDevice* owner = device();
    if (owner == nullptr) return kWrongDevice;
    auto* base = static_cast<std::byte*>(std::malloc(bytes + kAllocationHeader));
    if (base == nullptr) return 2;
    std::memcpy(base, &owner, sizeof(owner));
    std::memset(base + kAllocationHeader, kPoison, bytes);
    ++owner->live_objects_;
    *pointer = base + kAllocationHeader;
    return kCudaSuccess;
  }
  static int allocate_host(void** pointer, size_t bytes, unsigned) {
    SimulatedDevice* owner = device();
    if (owner == nullptr) return kWrongDevice;
    if (owner->pinning_fails_) return kCudaErrorMemoryAllocation;
    const int error = allocate(pointer, bytes);
    std::lock_guard lock(owner->mutex_);
    if (error == kCudaSuccess) owner->pinned_.insert({static_cast<std::byte*>(*pointer), bytes});
    return error;
  }
  static int release_host(void* pointer) {
    SimulatedDevice* owner = nullptr;
    std::memcpy(&owner, static_cast<std::byte*>(pointer) - kAllocationHeader, sizeof(owner));
    if (!is_current(owner)) return kWrongDevice;
    {
      std::lock_guard lock(owner->mutex_);
      std::erase_if(owner->pinned_, [&](const auto& range) { return range.first == pointer; });
    }
    return release(pointer);
  }
  static int register_host(void* pointer, size_t bytes, unsigned) {
    SimulatedDevice* owner = device();
    if (owner == nullptr) return kWrongDevice;
    if (owner->pinning_fails_ || owner->registering_fails_) return kCudaErrorMemoryAllocation;
    std::lock_guard lock(owner->mutex_);
    owner->pinned_.insert({static_cast<std::byte*>(pointer), bytes});
    ++owner->live_objects_;
    return kCudaSuccess;
  }
  static int unregister_host(void* pointer) {
    std::lock_guard lock(registry_mutex);
    for (SimulatedDevice* owner : registry) {
      if (owner == nullptr) continue;
      std::lock_guard own_lock(owner->mutex_);
      const auto found = std::ranges::find_if(owner->pinned_, [&](const auto& range) { return range.first == pointer; });
      if (found == owner->pinned_.end()) continue;
      if (!is_current(owner)) return kWrongDevice;
      owner->pinned_.erase(found);
      --owner->live_objects_;
    }
    return kCudaSuccess;
  }
  static int release(void* pointer) {
    auto* base = static_cast<std::byte*>(pointer) - kAllocationHeader;
    SimulatedDevice* owner = nullptr;
    std::memcpy(&owner, base, sizeof(owner));
    if (!is_current(owner)) return kWrongDevice;
    {  // as with CUDA, a copy that is under way ends first
      std::unique_lock lock(owner->mutex_);
      owner->changed_.wait(lock, [owner] { return !owner->copying_; });
    }
    --owner->live_objects_;
    std::free(base);
    return kCudaSuccess;
  }
  static int memcpy_async(void* target, const void* source, size_t bytes, int kind, CudaStream cuda_stream) {
    SimulatedDevice& device = *cuda_stream->device;
    if (!is_current(&device)) return kWrongDevice;
    const int error = device.enqueue(cuda_stream, {SimulatedDevice::Operation::kCopy, target, source, bytes}, Call::kCopy);
    const bool waits = !is_pinned(kind == kCudaMemcpyHostToDevice ? source : target);
    std::unique_lock lock(device.mutex_);
    if (error == kCudaSuccess && waits) device.wait_until_run(cuda_stream, cuda_stream->enqueued, lock);
    return error;
  }
  // Memory that one device has pinned is pinned for all.
  static bool is_pinned(const void* address) {
    std::lock_guard lock(registry_mutex);
    return std::ranges::any_of(registry, [address](SimulatedDevice* owner) {
      if (owner == nullptr) return false;
      std::lock_guard own_lock(owner->mutex_);
      return owner->is_pinned(address);
    });
  }
  static int stream_create(CudaStream* cuda_stream, unsigned) {
    SimulatedDevice* owner = device();
    if (owner == nullptr) return kWrongDevice;
    *cuda_stream = new CudaStreamHandle{owner};
    ++(*cuda_stream)->device->live_objects_;
    std::lock_guard lock((*cuda_stream)->device->mutex_);
    (*cuda_stream)->device->cuda_streams_.push_back(*cuda_stream);
    return kCudaSuccess;
  }
  static int stream_destroy(CudaStream cuda_stream) {
    if (!is_current(cuda_stream->device)) return kWrongDevice;
    {
      std::lock_guard lock(cuda_stream->device->mutex_);
      std::erase(cuda_stream->device->cuda_streams_, cuda_stream);
    }
    --cuda_stream->device->live_objects_;
    delete cuda_stream;
    return kCudaSuccess;
  }
  static int stream_wait_event(CudaStream cuda_stream, CudaEvent event, unsigned) {
    if (!is_current(cuda_stream->device)) return kWrongDevice;
    const auto records = static_cast<size_t>(event->recorded.load(std::memory_order_relaxed));
    return cuda_stream->device->enqueue(cuda_stream, {SimulatedDevice::Operation::kWait, event, nullptr, records},
                                        Call::kWaitEvent);
  }
  static int event_create(CudaEvent* event, unsigned) {
    SimulatedDevice* owner = device();
    if (owner == nullptr) return kWrongDevice;
    *event = new CudaEventHandle{owner};
    ++(*event)->device->live_objects_;
    return kCudaSuccess;
  }
  static int event_destroy(CudaEvent event) {
    if (!is_current(event->device)) return kWrongDevice;
    --event->device->live_objects_;
    std::lock_guard lock(event->device->mutex_);  // of a device that failed the thread may still look at the event
    delete event;
    return kCudaSuccess;
  }
  static int event_record(CudaEvent event, CudaStream cuda_stream) {
    if (!is_current(cuda_stream->device) || event->device != cuda_stream->device) return kWrongDevice;
    event->recorded.fetch_add(1, std::memory_order_relaxed);
    const int error = cuda_stream->device->enqueue(cuda_stream, {SimulatedDevice::Operation::kRecord, event, nullptr, 0},
                                                   Call::kEventRecord);
    if (error != kCudaSuccess) event->recorded.fetch_sub(1, std::memory_order_relaxed);
    return error;
  }
  static int event_query(CudaEvent event) {
    if (!is_current(event->device)) return kWrongDevice;
    {
      std::lock_guard lock(event->device->mutex_);
      if (event->device->error_ != kCudaSuccess) return event->device->error_;
    }
    const bool done = event->done.load(std::memory_order_acquire) == event->recorded.load(std::memory_order_relaxed);
    return done ? kCudaSuccess : kCudaErrorNotReady;
  }
  // A simulated graph is executable from the start: add_graph().
  static int graph_instantiate(CudaGraphExec* exec, CudaGraph graph, unsigned long long) {
    *exec = reinterpret_cast<CudaGraphExec>(graph);
    return is_current((*exec)->device) ? kCudaSuccess : kWrongDevice;
  }
  static int graph_upload(CudaGraphExec graph, CudaStream) { return is_current(graph->device) ? kCudaSuccess : kWrongDevice; }
  // The device owns the graph.
  static int graph_exec_destroy(CudaGraphExec graph) { return is_current(graph->device) ? kCudaSuccess : kWrongDevice; }
  static int graph_launch(CudaGraphExec graph, CudaStream cuda_stream) {
    if (!is_current(cuda_stream->device) || graph->device != cuda_stream->device) return kWrongDevice;
    return cuda_stream->device->enqueue(cuda_stream, {SimulatedDevice::Operation::kGraph, graph, nullptr, 0}, Call::kGraphLaunch);
  }
};

const CudaRuntime& SimulatedDevice::runtime() {
  using R = SimulatedRuntime;
  static constexpr CudaRuntime table = {.set_device = R::set_device,
                                        .get_device = R::get_device,
                                        .push_device = R::push_device,
                                        .pop_device = R::pop_device,
                                        .get_error_string = R::get_error_string,
                                        .malloc = R::allocate,
                                        .free = R::release,
                                        .host_alloc = R::allocate_host,
                                        .free_host = R::release_host,
                                        .host_register = R::register_host,
                                        .host_unregister = R::unregister_host,
                                        .memcpy_async = R::memcpy_async,
                                        .stream_create = R::stream_create,
                                        .stream_destroy = R::stream_destroy,
                                        .stream_wait_event = R::stream_wait_event,
                                        .event_create = R::event_create,
                                        .event_destroy = R::event_destroy,
                                        .event_record = R::event_record,
                                        .event_query = R::event_query,
                                        .graph_instantiate = R::graph_instantiate,
                                        .graph_upload = R::graph_upload,
                                        .graph_exec_destroy = R::graph_exec_destroy,
                                        .graph_launch = R::graph_launch};
  return table;
}

int64_t SimulatedDevice::wrong_device_calls() { return num_wrong_device_calls; }

SimulatedDevice::SimulatedDevice() {
  std::lock_guard lock(registry_mutex);
  auto place = std::find(registry.begin(), registry.end(), nullptr);
  ordinal_ = static_cast<int>(place - registry.begin());
  if (place == registry.end()) {
    registry.push_back(this);
  } else {
    *place = this;
  }
  thread_ = std::thread([this] { run(); });
}

void SimulatedDevice::stop() {
  {
    std::lock_guard lock(mutex_);
    closing_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

SimulatedDevice::~SimulatedDevice() {
  stop();
  for (CudaGraphExec graph : graphs_) delete graph;
  std::lock_guard lock(registry_mutex);
  registry[static_cast<size_t>(ordinal_)] = nullptr;
}

CudaGraphExec SimulatedDevice::add_graph(std::function<void()> body, std::chrono::nanoseconds latency) {
  graphs_.push_back(new CudaGraphExecHandle{this, std::move(body), latency});
  return graphs_.back();
}

void SimulatedDevice::fail_at(int64_t nth_launch, int error) {
  std::lock_guard lock(mutex_);
  fail_launch_ = launches_ + nth_launch;
  fault_ = error;
}

void SimulatedDevice::hang_at(int64_t nth_launch) {
  std::lock_guard lock(mutex_);
  hang_launch_ = launches_ + nth_launch;
}

void SimulatedDevice::resume() {
  {
    std::lock_guard lock(mutex_);
    hang_launch_ = -1;
  }
  changed_.notify_all();
}

void SimulatedDevice::fault(int error) {
  std::lock_guard lock(mutex_);
  if (error_ == kCudaSuccess) error_ = error;
}

void SimulatedDevice::fail_call(Call call, int64_t nth, int error) {
  std::lock_guard lock(mutex_);
  failing_[static_cast<size_t>(call)] = {nth, error};
}

int SimulatedDevice::enqueue(CudaStream cuda_stream, const Operation& operation, Call call) {
  {
    std::lock_guard lock(mutex_);
    if (error_ != kCudaSuccess) return error_;
    auto& failing = failing_[static_cast<size_t>(call)];
    if (failing.in >= 0 && failing.in-- == 0) return failing.error;
    cuda_stream->queue.push_back(operation);
    ++cuda_stream->enqueued;
  }
  changed_.notify_all();
  return kCudaSuccess;
}

void SimulatedDevice::wait_until_run(CudaStream cuda_stream, int64_t ticket, std::unique_lock<std::mutex>& lock) {
  changed_.wait(lock, [&] { return closing_ || error_ != kCudaSuccess || cuda_stream->executed >= ticket; });
}

bool SimulatedDevice::is_pinned(const void* address) const {
  const auto* byte = static_cast<const std::byte*>(address);
  return std::ranges::any_of(pinned_, [&](const auto& range) { return range.first <= byte && byte < range.first + range.second; });
}

// The oldest CUDA stream that waits for nothing, or none. After a sticky error nothing waits: events may be gone.
CudaStream SimulatedDevice::runnable() const {
  const auto found = std::find_if(cuda_streams_.begin(), cuda_streams_.end(), [this](CudaStream cuda_stream) {
    if (cuda_stream->queue.empty()) return false;
    const Operation& next = cuda_stream->queue.front();
    return next.kind != Operation::kWait || error_ != kCudaSuccess ||
           static_cast<CudaEvent>(next.target)->done.load(std::memory_order_acquire) >= static_cast<int64_t>(next.bytes);
  });
  return found == cuda_streams_.end() ? nullptr : *found;
}

void SimulatedDevice::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    CudaStream cuda_stream = nullptr;
    changed_.wait(lock, [&] { return closing_ || (cuda_stream = runnable()) != nullptr; });
    if (closing_) return;
    const Operation operation = cuda_stream->queue.front();
    cuda_stream->queue.pop_front();
    if (error_ == kCudaSuccess) run_operation(operation, lock);  // nothing runs after a sticky error
    // An event that has just been recorded may have been all that somebody waited for before destroying the CUDA stream.
    if (std::ranges::find(cuda_streams_, cuda_stream) != cuda_streams_.end()) ++cuda_stream->executed;
    changed_.notify_all();
  }
}

void SimulatedDevice::run_operation(const Operation& operation, std::unique_lock<std::mutex>& lock) {
  if (operation.kind == Operation::kGraph) return run_graph(static_cast<CudaGraphExec>(operation.target), lock);
  if (operation.kind == Operation::kRecord) static_cast<CudaEvent>(operation.target)->done.fetch_add(1, std::memory_order_release);
  if (operation.kind != Operation::kCopy) return;
  copying_ = true;
  lock.unlock();
  std::memcpy(operation.target, operation.source, operation.bytes);
  lock.lock();
  copying_ = false;  // run() notifies
}

void SimulatedDevice::run_graph(CudaGraphExec graph, std::unique_lock<std::mutex>& lock) {
  const int64_t launch = launches_++;
  changed_.wait(lock, [&] { return closing_ || launch != hang_launch_; });
  if (launch == fail_launch_) error_ = fault_;
  if (closing_ || error_ != kCudaSuccess) return;
  lock.unlock();
  const auto end = std::chrono::steady_clock::now() + graph->latency;
  graph->body();
  if (graph->latency.count() > 0) std::this_thread::sleep_until(end);
  lock.lock();
}

}  // namespace asyncengine
