#include "platform/cuda/cuda_runtime.h"

#include <dlfcn.h>

namespace asyncengine {
namespace {

template <class Function>
void find(void* library, const char* symbol, Function& into) {
  void* address = dlsym(library, symbol);
  if (address == nullptr) throw CudaError(std::string("the CUDA runtime has no ") + symbol);
  into = reinterpret_cast<Function>(address);
}

// By the driver, which the runtime has loaded; the runtime itself cannot tell.
bool has_primary_context(int device) {
  using GetState = int (*)(int device, unsigned* flags, int* active);
  static const auto get_state = [] {
    void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
    return driver == nullptr ? nullptr : reinterpret_cast<GetState>(dlsym(driver, "cuDevicePrimaryCtxGetState"));
  }();
  unsigned flags = 0;
  int active = 0;
  return get_state != nullptr && get_state(device, &flags, &active) == kCudaSuccess && active != 0;
}

CudaRuntime fill(const std::string& path) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
  if (library == nullptr) throw CudaError("no CUDA runtime is loaded from " + path);
  CudaRuntime cuda{};
  find(library, "cudaSetDevice", cuda.set_device);
  find(library, "cudaGetDevice", cuda.get_device);
  cuda.is_in_use = &has_primary_context;
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
