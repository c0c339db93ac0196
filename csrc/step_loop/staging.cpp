#include "step_loop/staging.h"

#include <algorithm>
#include <new>
#include <utility>

namespace asyncengine {
namespace {

constexpr size_t kPage = 4096;
size_t whole_pages(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

}  // namespace

Staging::Staging(const CudaDevice& device, const StepLimits& limits, int num_steps, StagingMode mode)
    : mode_(mode),
      num_steps_(num_steps),
      output_words_(limits.output_words()),
      records_begin_(static_cast<size_t>(limits.samples())),
      input_stride_(whole_pages(limits.max_bytes())),
      output_stride_(whole_pages(output_words_ * sizeof(int64_t))) {
  const size_t rings = static_cast<size_t>(num_steps) * (input_stride_ + output_stride_);
  const size_t board = static_cast<size_t>(limits.max_rows) * MaskBoard::stride(limits.mask_words);
  const size_t masks = whole_pages(board * sizeof(int32_t));
  const size_t bytes = rings + masks + kPage;
  if (mode_ != StagingMode::kPageable) {
    int error = kCudaSuccess;
    pinned_ = pin(device, bytes, error);
    memory_ = pinned_.data();
    if (error != kCudaSuccess) mode_ = StagingMode::kPageable;
  }
  if (mode_ == StagingMode::kPageable) {
    plain_ = std::aligned_alloc(kPage, bytes);
    if (plain_ == nullptr) throw std::bad_alloc();
    memory_ = static_cast<std::byte*>(plain_);
  }
  masks_ = MaskBoard(reinterpret_cast<int32_t*>(memory_ + rings), limits.mask_words);
  std::fill_n(masks_.row(0), board, -1);
  released_ = reinterpret_cast<int32_t*>(memory_ + rings + masks);
  *released_ = 0;
}

Staging::Staging(std::shared_ptr<Staging> first)
    : mode_(first->mode_),
      num_steps_(first->num_steps_),
      output_words_(first->output_words_),
      records_begin_(first->records_begin_),
      input_stride_(first->input_stride_),
      output_stride_(first->output_stride_),
      memory_(first->memory_),
      masks_(first->masks_),
      released_(first->released_),
      first_(std::move(first)) {}

}  // namespace asyncengine
