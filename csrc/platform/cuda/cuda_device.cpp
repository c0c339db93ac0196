#include "platform/cuda/cuda_device.h"

namespace asyncengine {

CudaDevice::Scope::Scope(const CudaDevice& device) : runtime_(device.runtime()) {
  int current = -1;
  error_ = runtime_.get_device(&current);
  if (error_ != kCudaSuccess || current == device.index()) return;
  error_ = runtime_.set_device(device.index());
  // To make a device current takes memory of the device: one that nobody uses is not gone back to.
  if (error_ == kCudaSuccess && runtime_.is_in_use(current)) before_ = current;
}

CudaDevice::Scope::~Scope() {
  if (before_ >= 0) runtime_.set_device(before_);
}

}  // namespace asyncengine
