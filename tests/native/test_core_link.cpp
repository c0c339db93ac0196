// Attention over the link: what its thread does with jobs, and the graph that computes them.
#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "check.h"
#include "platform/cuda/simulated_device.h"
#include "platform/host/host_workers.h"
#include "step_loop/graph_link.h"

using namespace asyncengine;

namespace {

constexpr int32_t kSlots = 12, kBlockSize = 16, kMaxJobs = 4, kMaxBlocks = 5;
constexpr HostShape kShape{Dtype::kFloat32, kSlots, 1, 1, 2};

// A simulated device whose graph answers a job with its slot, layer, position and blocks, folded into a number.
struct World {
  // A link by the graph that counts the batches that were started.
  struct Watched final : LinkAttention {
    int32_t max_jobs() const override { return link->max_jobs(); }
    bool start(std::span<const HostAttentionJob> some) override {
      const bool started = link->start(some);
      ++batches;
      return started;
    }
    MoveStatus poll() override { return link->poll(); }
    std::shared_ptr<LinkAttention> link;
    std::atomic<int> batches{0};
  };
  explicit World(int num_workers = 0) {
    exchange = std::make_shared<HostExchange>(kShape);
    jobs = std::make_shared<LinkJobs>(device.cuda(), kMaxJobs, kMaxBlocks);
    const CudaGraphExec graph = device.add_graph([this] { answer(); }, std::chrono::microseconds(300));
    link = std::make_shared<Watched>();
    link->link = std::make_shared<GraphLink>(device.cuda(), jobs, kBlockSize, graph, nullptr);
    memory.resize(64 * kBlockSize * 2 * 2 * 3);  // floats: 64 blocks, 3 layers
    const size_t block_bytes = kBlockSize * 2 * 2 * 3 * sizeof(float);
    workers = std::make_unique<HostWorkers>(
        select_cpu_isa("auto"),
        HostWorkers::Config{.exchange = exchange,
                            .blocks = {reinterpret_cast<std::byte*>(memory.data()), block_bytes, kBlockSize, false, {}},
                            .layers = std::vector<HostLayer>(3),
                            .num_workers = num_workers,
                            .link = link});
  }

  static float expected(const HostAttentionJob& job) {
    float value = static_cast<float>(job.slot + 100 * job.layer + 1000 * job.position);
    for (int32_t b = 0; b <= job.position / kBlockSize; ++b) value += static_cast<float>(b + 1) * static_cast<float>(job.blocks[b]);
    return value;
  }
  void answer() {
    const int32_t* word = jobs->data();
    const int32_t count = *word++;
    most_jobs = std::max(most_jobs.load(), count);
    for (int32_t j = 0; j < count; ++j, word += LinkJobs::kJobWords + kMaxBlocks) {
      const float value = expected({.slot = word[0], .layer = word[1], .step = 0, .position = word[2], .blocks = word + 3});
      std::memcpy(exchange->result(word[0]), &value, sizeof value);
    }
  }
  void fill_mailbox(int32_t slot, uint32_t step) {
    for (size_t w = 0; w < kShape.mailbox_words(); ++w) {
      std::atomic_ref(exchange->mailbox(slot)[w]).store(uint64_t{step} << 32, std::memory_order_relaxed);
    }
  }
  HostAttentionStatus wait(int32_t slot) {
    for (int i = 0; i < 200'000 && workers->poll(slot) == HostAttentionStatus::kPending; ++i) {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    return workers->poll(slot);
  }
  float result(int32_t slot) const {
    float value = 0;
    std::memcpy(&value, exchange->result(slot), sizeof value);
    return value;
  }

  SimulatedDevice device;
  std::shared_ptr<HostExchange> exchange;
  std::shared_ptr<LinkJobs> jobs;
  std::vector<float> memory;
  std::shared_ptr<Watched> link;
  std::atomic<int32_t> most_jobs{0};
  std::unique_ptr<HostWorkers> workers;  // first to go
};

const int32_t kBlocks[] = {7, 3, 21, 40, 5};

HostAttentionJob job_of(int32_t slot, uint32_t step) {
  return {.slot = slot, .layer = slot % 3, .step = step, .position = (slot * 7) % (kMaxBlocks * kBlockSize), .blocks = kBlocks};
}

}  // namespace

TEST(link_computes_what_has_come_together) {
  World world;
  for (int32_t slot = 0; slot < kSlots; ++slot) {
    world.fill_mailbox(slot, 9);
    world.workers->post(job_of(slot, 9));
  }
  for (int32_t slot = 0; slot < kSlots; ++slot) {
    CHECK(world.wait(slot) == HostAttentionStatus::kDone);
    CHECK_EQ(world.result(slot), World::expected(job_of(slot, 9)));
  }
  CHECK_EQ(world.most_jobs.load(), kMaxJobs);
}

TEST(link_waits_for_mailboxes_and_for_those_that_are_cancelled_it_does_not) {
  World world;
  world.fill_mailbox(1, 4);  // of an older step
  world.workers->post(job_of(1, 5));
  world.workers->post(job_of(2, 5));
  world.fill_mailbox(2, 5);
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  CHECK(world.workers->poll(1) == HostAttentionStatus::kPending);
  CHECK(world.workers->poll(2) == HostAttentionStatus::kPending);  // jobs are taken in their order
  world.workers->cancel(1);
  CHECK(world.wait(1) == HostAttentionStatus::kFailed);
  CHECK(world.wait(2) == HostAttentionStatus::kDone);
  world.workers->post(job_of(3, 5));
  CHECK(world.workers->close(std::chrono::seconds(20)));
  CHECK(world.workers->poll(3) == HostAttentionStatus::kFailed);
}

TEST(link_whose_graph_is_not_launched_fails_its_jobs_alone) {
  World world;
  world.device.fail_call(SimulatedDevice::Call::kGraphLaunch, 0, kCudaErrorMemoryAllocation);
  world.fill_mailbox(0, 1);
  world.workers->post(job_of(0, 1));
  CHECK(world.wait(0) == HostAttentionStatus::kFailed);
  world.device.fail_call(SimulatedDevice::Call::kEventRecord, 0, kCudaErrorMemoryAllocation);
  for (const uint32_t step : {2u, 3u}) {
    world.fill_mailbox(0, step);
    world.workers->post(job_of(0, step));
    CHECK(world.wait(0) == HostAttentionStatus::kDone);
    CHECK_EQ(world.result(0), World::expected(job_of(0, step)));
  }
  world.device.fail_at(0);
  world.fill_mailbox(0, 4);
  world.workers->post(job_of(0, 4));
  CHECK(world.wait(0) == HostAttentionStatus::kFailed);
}

TEST(link_that_hangs_is_left_to_itself) {
  World world;
  world.device.hang_at(0);
  world.fill_mailbox(0, 1);
  world.workers->post(job_of(0, 1));
  for (int i = 0; i < 200'000 && world.link->batches == 0; ++i) std::this_thread::sleep_for(std::chrono::microseconds(50));
  CHECK(!world.workers->close(std::chrono::milliseconds(50)));
  world.device.resume();
  CHECK(world.workers->close(std::chrono::seconds(20)));
}
