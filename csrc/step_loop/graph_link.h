// Attention for host rows by one graph, on a CUDA stream of its own beside the steps.
#pragma once

#include <algorithm>
#include <memory>
#include <span>

#include "platform/cuda/link_attention.h"
#include "platform/host/host_pool.h"

namespace asyncengine {

// Jobs of the graph: int32 words that the device can read. The number of jobs, then of each its slot, layer and
// position, and max_blocks() host blocks.
class LinkJobs {
 public:
  static constexpr size_t kJobWords = 3;
  LinkJobs(const CudaDevice& device, int32_t max_jobs, int32_t max_blocks) : max_jobs_(max_jobs), max_blocks_(max_blocks) {
    memory_ = allocate_pinned(device, words() * sizeof(int32_t));
    std::fill_n(data(), words(), 0);
  }

  int32_t max_jobs() const { return max_jobs_; }
  int32_t max_blocks() const { return max_blocks_; }
  size_t words() const { return 1 + static_cast<size_t>(max_jobs_) * (kJobWords + static_cast<size_t>(max_blocks_)); }
  int32_t* data() const { return reinterpret_cast<int32_t*>(memory_.data()); }

  void write(std::span<const HostAttentionJob> jobs, int32_t block_size) const {
    int32_t* word = data();
    *word++ = static_cast<int32_t>(jobs.size());
    for (const HostAttentionJob& job : jobs) {
      *word++ = job.slot;
      *word++ = job.layer;
      *word++ = job.position;
      std::copy_n(job.blocks, job.position / block_size + 1, word);
      word += max_blocks_;
    }
  }

 private:
  int32_t max_jobs_, max_blocks_;
  PinnedBuffer memory_;
};

class GraphLink final : public LinkAttention {
 public:
  // `keep_alive`: whatever owns the graph and what it reads.
  GraphLink(const CudaDevice& device, std::shared_ptr<LinkJobs> jobs, int32_t block_size, CudaGraphExec graph,
            std::shared_ptr<void> keep_alive)
      : device_(device), jobs_(std::move(jobs)), block_size_(block_size), graph_(graph), keep_alive_(std::move(keep_alive)) {
    device_.check<&CudaRuntime::stream_create>("cudaStreamCreateWithFlags", &cuda_stream_, kCudaStreamNonBlocking);
    device_.check<&CudaRuntime::event_create>("cudaEventCreateWithFlags", &done_, kCudaEventDisableTiming);
  }
  ~GraphLink() override {
    if (done_ != nullptr) device_.call<&CudaRuntime::event_destroy>(done_);
    if (cuda_stream_ != nullptr) device_.call<&CudaRuntime::stream_destroy>(cuda_stream_);
  }
  GraphLink(const GraphLink&) = delete;
  GraphLink& operator=(const GraphLink&) = delete;

  int32_t max_jobs() const override { return jobs_->max_jobs(); }

  bool start(std::span<const HostAttentionJob> jobs) override {
    const CudaDevice::Scope scope(device_);
    if (scope.error() != kCudaSuccess) return false;
    jobs_->write(jobs, block_size_);
    failed_ = device_.runtime().graph_launch(graph_, cuda_stream_) != kCudaSuccess;
    recorded_ = device_.runtime().event_record(done_, cuda_stream_) == kCudaSuccess;
    return true;
  }

  MoveStatus poll() override {
    // Work that was enqueued for a batch that failed may still write: the event tells its end, too.
    recorded_ = recorded_ || device_.call<&CudaRuntime::event_record>(done_, cuda_stream_) == kCudaSuccess;
    const int error = device_.call<&CudaRuntime::event_query>(done_);
    if (error == kCudaErrorNotReady || (error == kCudaSuccess && !recorded_)) return MoveStatus::kPending;
    return error == kCudaSuccess && !failed_ ? MoveStatus::kDone : MoveStatus::kFailed;
  }

 private:
  CudaDevice device_;
  std::shared_ptr<LinkJobs> jobs_;
  int32_t block_size_;
  CudaGraphExec graph_;
  std::shared_ptr<void> keep_alive_;
  CudaStream cuda_stream_ = nullptr;
  CudaEvent done_ = nullptr;
  bool failed_ = false, recorded_ = false;
};

}  // namespace asyncengine
