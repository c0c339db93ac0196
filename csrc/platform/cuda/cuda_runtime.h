// The part of the CUDA runtime that the step path uses, as a table of function pointers.
//
// Nothing here links or includes CUDA: the table is filled from the libcudart that torch loaded, or by the simulated
// device (simulated_device.h), with the runtime API's own signatures and error codes (CUDA Runtime API 12 and 13).
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>

namespace asyncengine {

using CudaStream = struct CudaStreamHandle*;
using CudaEvent = struct CudaEventHandle*;
using CudaGraph = struct CudaGraphHandle*;
using CudaGraphExec = struct CudaGraphExecHandle*;

// Values of cudaError_t that the step path tells apart.
inline constexpr int kCudaSuccess = 0;
inline constexpr int kCudaErrorMemoryAllocation = 2;  // not sticky: the call did nothing, the device goes on
inline constexpr int kCudaErrorNotReady = 600;

// cudaMemcpyKind, cudaEventCreateWithFlags, cudaStreamCreateWithFlags, cudaHostAlloc, cudaHostRegister.
inline constexpr int kCudaMemcpyHostToDevice = 1;
inline constexpr int kCudaMemcpyDeviceToHost = 2;
inline constexpr unsigned kCudaEventDisableTiming = 2;
inline constexpr unsigned kCudaStreamNonBlocking = 1;
// Mapped, and portable: pinned for all devices.
inline constexpr unsigned kCudaHostAllocMapped = 3;
inline constexpr unsigned kCudaHostRegisterMapped = 3;

struct CudaRuntime {
  int (*set_device)(int device);
  int (*get_device)(int* device);
  int (*push_device)(int device);  // makes it current in this thread until pop_device, by the driver
  int (*pop_device)();             // back to the device before, which nothing is allocated on
  const char* (*get_error_string)(int error);
  int (*malloc)(void** pointer, size_t bytes);
  int (*free)(void* pointer);
  int (*host_alloc)(void** pointer, size_t bytes, unsigned flags);
  int (*free_host)(void* pointer);
  int (*host_register)(void* pointer, size_t bytes, unsigned flags);
  int (*host_unregister)(void* pointer);
  int (*memcpy_async)(void* target, const void* source, size_t bytes, int kind, CudaStream cuda_stream);
  int (*stream_create)(CudaStream* cuda_stream, unsigned flags);
  int (*stream_destroy)(CudaStream cuda_stream);
  int (*stream_wait_event)(CudaStream cuda_stream, CudaEvent event, unsigned flags);
  int (*event_create)(CudaEvent* event, unsigned flags);
  int (*event_destroy)(CudaEvent event);
  int (*event_record)(CudaEvent event, CudaStream cuda_stream);
  int (*event_query)(CudaEvent event);
  int (*graph_instantiate)(CudaGraphExec* exec, CudaGraph graph, unsigned long long flags);
  int (*graph_upload)(CudaGraphExec exec, CudaStream cuda_stream);
  int (*graph_exec_destroy)(CudaGraphExec exec);
  int (*graph_launch)(CudaGraphExec exec, CudaStream cuda_stream);
};

struct CudaError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The table of a libcudart that this process has already loaded from `path`; it is never loaded anew, because a second
// copy would know nothing of the first one's graphs. Throws CudaError naming what is missing.
const CudaRuntime& loaded_cuda_runtime(const std::string& path);

}  // namespace asyncengine
