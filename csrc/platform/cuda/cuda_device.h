// A device of the machine, by its index behind a table of CUDA functions.
#pragma once

#include <string>

#include "platform/cuda/cuda_runtime.h"

namespace asyncengine {

// The value says where memory, CUDA streams, events and graphs are made, used and freed. The runtime has a current device
// for each thread, and what it makes is made there: so each call of the runtime is made in a Scope.
class CudaDevice {
 public:
  CudaDevice(const CudaRuntime& runtime, int index) : runtime_(&runtime), index_(index) {}

  const CudaRuntime& runtime() const { return *runtime_; }
  int index() const { return index_; }

  // While it lives, the device is current in the calling thread; afterwards the one before is, and no memory of that one is
  // taken. Where the device is current already, as in the core's own threads, it costs some nanoseconds.
  class Scope {
   public:
    explicit Scope(const CudaDevice& device);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;
    int error() const { return error_; }  // the device cannot be current, and no call may be made

   private:
    const CudaRuntime& runtime_;
    bool pushed_ = false;
    int error_ = kCudaSuccess;
  };
  // Makes the device current in the calling thread for good: in a thread of the core's own.
  int adopt_thread() const { return runtime_->set_device(index_); }

  // Calls a function of the table in a Scope; the answer is CUDA's.
  template <auto Function, class... Arguments>
  int call(Arguments... arguments) const {
    const Scope scope(*this);
    return scope.error() != kCudaSuccess ? scope.error() : (runtime_->*Function)(arguments...);
  }
  // The same, and throws CudaError.
  template <auto Function, class... Arguments>
  void check(const char* name, Arguments... arguments) const {
    if (const int error = call<Function>(arguments...); error != kCudaSuccess) throw CudaError(describe(error, name));
  }
  // The failed call, the device and the error.
  std::string describe(int error, const char* call) const {
    return std::string(call) + " on cuda:" + std::to_string(index_) + ": " + runtime_->get_error_string(error) + " (" +
           std::to_string(error) + ")";
  }

 private:
  const CudaRuntime* runtime_;
  int index_;
};

}  // namespace asyncengine
