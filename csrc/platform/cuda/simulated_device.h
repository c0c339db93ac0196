// A device in software behind the CUDA function table: latency, faults and hangs on any machine.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "platform/cuda/cuda_device.h"

namespace asyncengine {

// Executes copies and graphs on a thread of its own, each graph taking at least its latency. A CUDA stream's work runs in order.
// The oldest of several CUDA streams goes first whenever it can, so that what should have waited for another meets what
// is old. As on a real device, work is enqueued and forgotten: the caller learns of completion, and of errors, from
// events only; and a copy from or to host memory that is not pinned makes its caller wait until the device has made it.
class SimulatedDevice {
 public:
  SimulatedDevice();
  ~SimulatedDevice();
  SimulatedDevice(const SimulatedDevice&) = delete;
  SimulatedDevice& operator=(const SimulatedDevice&) = delete;

  // Ends the device's thread; what is enqueued then never runs. The destructor does it too.
  void stop();
  // The device by the index under which the function table knows it. Other than on a real device, a thread has no device
  // at first, and a call with another one's memory, CUDA stream, event or graph fails: kWrongDevice.
  CudaDevice cuda() const { return {runtime(), ordinal_}; }
  static const CudaRuntime& runtime();
  static constexpr int kWrongDevice = 400;  // cudaErrorInvalidResourceHandle
  // Calls that were answered so, on all devices since the process began.
  static int64_t wrong_device_calls();

  // Makes a graph, as cudaGraphInstantiate does on the real device. The body runs on the device's thread.
  CudaGraphExec add_graph(std::function<void()> body, std::chrono::nanoseconds latency);

  // Faults take effect when the device reaches the n-th graph launch from now (0: the next one).
  void fail_at(int64_t nth_launch, int error = 700);  // cudaErrorIllegalAddress; sticky, as on the real device
  void hang_at(int64_t nth_launch);
  void resume();  // ends a hang
  void fault(int error = 700);  // as from fail_at, at once; for a graph's body that cannot do its work
  // The n-th call of this kind from now (0: the next one) does nothing but answer `error`.
  enum class Call : uint8_t { kCopy, kGraphLaunch, kEventRecord, kWaitEvent };
  void fail_call(Call call, int64_t nth, int error);
  void refuse_pinning() { pinning_fails_ = true; }  // cudaHostAlloc and cudaHostRegister answer out of memory from now on
  void refuse_registering() { registering_fails_ = true; }  // cudaHostRegister alone does

  // Allocations, CUDA streams and events that are still alive: leak check.
  int64_t live_objects() const { return live_objects_; }

 private:
  friend struct SimulatedRuntime;
  friend struct CudaStreamHandle;
  struct Operation {
    enum Kind { kCopy, kGraph, kRecord, kWait } kind;
    void* target;
    const void* source;
    size_t bytes;  // of a wait: how often its event must have been recorded
  };
  int enqueue(CudaStream cuda_stream, const Operation& operation, Call call);
  void wait_until_run(CudaStream cuda_stream, int64_t ticket, std::unique_lock<std::mutex>& lock);
  bool is_pinned(const void* address) const;
  CudaStream runnable() const;
  void run();
  void run_operation(const Operation& operation, std::unique_lock<std::mutex>& lock);
  void run_graph(CudaGraphExec graph, std::unique_lock<std::mutex>& lock);

  int ordinal_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<CudaStream> cuda_streams_;
  std::vector<CudaGraphExec> graphs_;
  int64_t launches_ = 0, fail_launch_ = -1, hang_launch_ = -1;
  bool copying_ = false;
  int fault_ = kCudaSuccess, error_ = kCudaSuccess;
  struct {
    int64_t in = -1;  // calls before it
    int error = kCudaSuccess;
  } failing_[4];      // by Call
  std::set<std::pair<const std::byte*, size_t>> pinned_;  // ranges
  bool closing_ = false;
  std::atomic<bool> pinning_fails_{false}, registering_fails_{false};
  std::atomic<int64_t> live_objects_{0};
  std::thread thread_;
};

}  // namespace asyncengine
