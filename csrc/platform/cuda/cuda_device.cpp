#include "platform/cuda/cuda_device.h"

namespace asyncengine {

CudaDevice::Scope::Scope(const CudaDevice& device) : runtime_(device.runtime()) {
  int current = -1;
  error_ = runtime_.get_device(&current);
  if (error_ != kCudaSuccess || current == device.index()) return;
  error_ = runtime_.push_device(device.index());
  pushed_ = error_ == kCudaSuccess;
}

CudaDevice::Scope::~Scope() {
  if (pushed_) runtime_.pop_device();
}

}  // namespace asyncengine
