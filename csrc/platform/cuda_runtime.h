// The part of the CUDA runtime that the step path uses, as a table of function pointers.
//
// Nothing here links or includes CUDA: the table is filled from the libcudart that torch loaded, or by the simulated
// device (simulated_device.h), with the runtime API's own signatures and error codes.
#pragma once

#include <cstddef>

namespace asyncengine {

using CudaStream = struct CudaStreamHandle*;
using CudaEvent = struct CudaEventHandle*;
using CudaGraphExec = struct CudaGraphExecHandle*;

// Values of cudaError_t that the step path tells apart.
inline constexpr int kCudaSuccess = 0;
inline constexpr int kCudaErrorNotReady = 600;

// cudaMemcpyKind, cudaEventCreateWithFlags, cudaStreamCreateWithFlags, cudaHostAlloc.
inline constexpr int kCudaMemcpyHostToDevice = 1;
inline constexpr int kCudaMemcpyDeviceToHost = 2;
inline constexpr unsigned kCudaEventDisableTiming = 2;
inline constexpr unsigned kCudaStreamNonBlocking = 1;
inline constexpr unsigned kCudaHostAllocDefault = 0;

struct CudaRuntime {
  int (*set_device)(int device);
  const char* (*get_error_string)(int error);
  int (*malloc)(void** pointer, size_t bytes);
  int (*free)(void* pointer);
  int (*host_alloc)(void** pointer, size_t bytes, unsigned flags);
  int (*free_host)(void* pointer);
  int (*memcpy_async)(void* target, const void* source, size_t bytes, int kind, CudaStream stream);
  int (*stream_create)(CudaStream* stream, unsigned flags);
  int (*stream_destroy)(CudaStream stream);
  int (*event_create)(CudaEvent* event, unsigned flags);
  int (*event_destroy)(CudaEvent event);
  int (*event_record)(CudaEvent event, CudaStream stream);
  int (*event_query)(CudaEvent event);
  int (*graph_launch)(CudaGraphExec graph, CudaStream stream);
};

}  // namespace asyncengine
