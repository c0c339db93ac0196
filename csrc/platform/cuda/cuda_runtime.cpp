#include "platform/cuda/cuda_runtime.h"

#include <dlfcn.h>

#include <map>
#include <mutex>

namespace asyncengine {
namespace {

template <class Function>
void find(void* library, const char* symbol, Function& into) {
  void* address = dlsym(library, symbol);
  if (address == nullptr) throw CudaError(std::string("the CUDA runtime or driver has no ") + symbol);
  into = reinterpret_cast<Function>(address);
}

// The functions of the driver by which a thread goes to a device and back. The runtime makes its calls on the device of
// the context that is current by the driver, and has no way back itself: cudaSetDevice takes memory of its device, also
// of one that the thread has not used.
struct Driver {
  int (*retain)(void** context, int device);
  int (*push)(void* context);
  int (*pop)(void** context);
};

const Driver& driver() {
  static const Driver table = [] {
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) throw CudaError("the CUDA driver libcuda.so.1 cannot be loaded");
    Driver functions{};
    find(library, "cuDevicePrimaryCtxRetain", functions.retain);
    find(library, "cuCtxPushCurrent_v2", functions.push);
    find(library, "cuCtxPopCurrent_v2", functions.pop);
    return functions;
  }();
  return table;
}

// Keeps the primary context of each device once for this process, as the runtime does: memory in it outlives the scope.
int push_device(int device) {
  static std::mutex mutex;
  static std::map<int, void*> contexts;
  std::lock_guard lock(mutex);
  void*& context = contexts[device];
  if (context == nullptr) {
    if (const int error = driver().retain(&context, device); error != kCudaSuccess) return error;
  }
  return driver().push(context);
}

int pop_device() {
  void* context = nullptr;
  return driver().pop(&context);
}

CudaRuntime fill(const std::string& path) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
  if (library == nullptr) throw CudaError("no CUDA runtime is loaded from " + path);
  CudaRuntime cuda{};
  find(library, "cudaSetDevice", cuda.set_device);
  find(library, "cudaGetDevice", cuda.get_device);
  cuda.push_device = &push_device;
  cuda.pop_device = &pop_device;
  find(library, "cudaGetErrorString", cuda.get_error_string);
  find(library, "cudaMalloc", cuda.malloc);
  find(library, "cudaFree", cuda.free);
  find(library, "cudaHostAlloc", cuda.host_alloc);
  find(library, "cudaFreeHost", cuda.free_host);
  find(library, "cudaHostRegister", cuda.host_register);
  find(library, "cudaHostUnregister", cuda.host_unregister);
  find(library, "cudaMemcpyAsync", cuda.memcpy_async);
  find(library, "cudaStreamCreateWithFlags", cuda.stream_create);
  find(library, "cudaStreamDestroy", cuda.stream_destroy);
  find(library, "cudaStreamWaitEvent", cuda.stream_wait_event);
  find(library, "cudaEventCreateWithFlags", cuda.event_create);
  find(library, "cudaEventDestroy", cuda.event_destroy);
  find(library, "cudaEventRecord", cuda.event_record);
  find(library, "cudaEventQuery", cuda.event_query);
  find(library, "cudaGraphInstantiateWithFlags", cuda.graph_instantiate);  // one signature in all versions
  find(library, "cudaGraphUpload", cuda.graph_upload);
  find(library, "cudaGraphExecDestroy", cuda.graph_exec_destroy);
  find(library, "cudaGraphLaunch", cuda.graph_launch);
  return cuda;
}

}  // namespace

const CudaRuntime& loaded_cuda_runtime(const std::string& path) {
  static const CudaRuntime table = fill(path);  // torch loads one runtime, and keeps it
  return table;
}

}  // namespace asyncengine
