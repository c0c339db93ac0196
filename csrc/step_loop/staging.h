// Buffers in which the host and the device hand each other a step: StepInputs one way, results the other.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <span>

#include "core/mask_board.h"
#include "core/step_input.h"
#include "platform/cuda/pinned_memory.h"

namespace asyncengine {

// Ways in which a StepInput reaches the device.
//   kPageable  one asynchronous copy from plain memory: CUDA stages it, and the launching thread waits for that
//   kPinned    one asynchronous copy from page-locked memory
//   kMapped    no copy: the step's first kernel reads page-locked memory, and its last ones write results there
//   kAhead     one copy from page-locked memory on a CUDA stream of its own, while the step before still runs; results as mapped
// Memory that is sent once, before the first step, is not staged: weights, tables and the kernels' own state may be pageable.
enum class StagingMode { kPageable, kPinned, kMapped, kAhead };

// One pair of buffers per step in flight, in one allocation each, page-aligned, made once. Buffer i is leased from the
// pack of its step until that step's event has fired.
//
// What a graph sees keeps its address: where copies are ordered with the steps, one input and one output on the device,
// given by the caller; in the mapped mode the rings themselves, at the host's addresses (they are the device's, too), of
// which the graphs take the next place at every launch.
// Copies ahead go to a ring of inputs on the device, since the step before may not have read its own.
class Staging {
 public:
  struct DeviceBuffers {
    std::byte* input = nullptr;   // StepLimits::max_bytes(); of kAhead num_steps() of them, input_stride() apart
    int64_t* output = nullptr;    // output_words(); unused where the device writes results to the host
  };

  // Throws CudaError where nothing can be had. Memory that cannot be pinned is replaced by plain memory, and the mode
  // becomes kPageable: see mode().
  Staging(const CudaDevice& device, const StepLimits& limits, int num_steps, StagingMode mode);
  // For another device that runs the same steps: the buffers of `first`, of which it only reads the inputs, with device
  // buffers of its own. Its results go to these alone.
  explicit Staging(std::shared_ptr<Staging> first);
  ~Staging() { std::free(plain_); }
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  StagingMode mode() const { return mode_; }
  int num_steps() const { return num_steps_; }
  // True if the device writes results to output(i) itself.
  bool writes_output() const { return mode_ == StagingMode::kMapped || mode_ == StagingMode::kAhead; }
  // True if this is for another device than the first, whose results nobody reads.
  bool follows() const { return first_ != nullptr; }
  // Word that devices read which wait for each other: not 0 once nobody is to wait any more.
  int32_t* released() const { return released_; }
  // Needed in the modes that copy, before the first step.
  void set_device_buffers(const DeviceBuffers& buffers) { device_ = buffers; }
  const DeviceBuffers& device_buffers() const { return device_; }
  // Memory in which the step of buffer i finds its input, in the modes that copy.
  std::byte* device_input(int i) const {
    return device_.input + (mode_ == StagingMode::kAhead ? static_cast<size_t>(i) * input_stride_ : 0);
  }

  std::span<std::byte> input(int i) const { return {memory_ + static_cast<size_t>(i) * input_stride_, input_stride_}; }
  // Heads and records: step_output.h.
  int64_t* output(int i) const {
    return reinterpret_cast<int64_t*>(memory_ + static_cast<size_t>(num_steps_) * input_stride_ +
                                      static_cast<size_t>(i) * output_stride_);
  }
  size_t output_words() const { return output_words_; }
  // The first word of the records.
  size_t records_begin() const { return records_begin_; }
  // Masks of the rows of all slots, in memory that the device reads while steps run.
  MaskBoard masks() const { return masks_; }
  // Bytes from one buffer of a ring to the next.
  size_t input_stride() const { return input_stride_; }
  size_t output_stride() const { return output_stride_; }

 private:
  StagingMode mode_;
  int num_steps_;
  size_t output_words_, records_begin_;
  size_t input_stride_, output_stride_;
  PinnedBuffer pinned_;
  void* plain_ = nullptr;
  std::byte* memory_ = nullptr;
  MaskBoard masks_;
  int32_t* released_ = nullptr;
  std::shared_ptr<Staging> first_;
  DeviceBuffers device_;
};

}  // namespace asyncengine
