// Several devices in a process: every call of the runtime is made where its device is current, and errors name the device.
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "engine_fixture.h"
#include "platform/cuda/cuda_device.h"
#include "platform/cuda/simulated_device.h"
#include "scheduler_fixture.h"

namespace {

using namespace asyncengine;
using namespace asyncengine::testing;

int current_device() {
  int index = -1;
  SimulatedDevice::runtime().get_device(&index);
  return index;
}

// Runs requests, then frees all, in a thread that has a device of its own choice.
void run_beside(const SimulatedDevice& others, Options options) {
  const int64_t wrong = SimulatedDevice::wrong_device_calls();
  CHECK_EQ(SimulatedDevice::runtime().set_device(others.cuda().index()), kCudaSuccess);
  {
    Engine engine(options);
    CHECK(engine.device.cuda().index() != others.cuda().index());
    for (int32_t i = 0; i < 6; ++i) CHECK(engine.submit(make_spec(0, 40, 12, 1, i)) == SubmitResult::kAccepted);
    CHECK(engine.run());
    CHECK(engine.loop->stop(5s));
    CHECK_EQ(current_device(), others.cuda().index());
  }
  CHECK_EQ(current_device(), others.cuda().index());
  CHECK_EQ(others.live_objects(), 0);
  CHECK_EQ(SimulatedDevice::wrong_device_calls(), wrong);
}

}  // namespace

TEST(an_engine_makes_every_call_where_its_device_is_current) {
  const SimulatedDevice others;
  for (const StagingMode staging : {StagingMode::kPageable, StagingMode::kPinned, StagingMode::kMapped, StagingMode::kAhead}) {
    Options options;
    options.staging = staging;
    options.num_host_blocks = 32;
    options.num_blocks = 20;  // so that blocks move
    run_beside(others, options);
  }
}

TEST(a_thread_without_a_device_stays_without) {
  const int64_t wrong = SimulatedDevice::wrong_device_calls();
  std::thread([] {
    const SimulatedDevice device;
    {
      const PinnedBuffer memory = allocate_pinned(device.cuda(), 64);
      CHECK_EQ(current_device(), -1);
    }
    CHECK_EQ(device.live_objects(), 0);
    CHECK_EQ(current_device(), -1);
  }).join();
  CHECK_EQ(SimulatedDevice::wrong_device_calls(), wrong);
}

TEST(a_step_loop_without_a_thread_gives_the_device_back_after_each_round) {
  const SimulatedDevice others;
  SimulatedDevice device;
  SimulatedModel model(device, {}, StepLoop::limits(Options{}.loop()), 64, 16, 17);
  StepLoop loop(Options{}.loop(), model.make_executor(2, 20us));
  CHECK_EQ(SimulatedDevice::runtime().set_device(others.cuda().index()), kCudaSuccess);
  const int64_t wrong = SimulatedDevice::wrong_device_calls();
  CHECK(loop.submit(make_spec(1, 20, 5)) == SubmitResult::kAccepted);
  bool ended = false;
  while (!ended) {
    loop.advance();
    CHECK_EQ(current_device(), others.cuda().index());
    loop.drain([&](const StepLoop::News& news) { ended = ended || news.finish != FinishReason::kNone; });
  }
  CHECK(loop.stop(5s));
  CHECK_EQ(SimulatedDevice::wrong_device_calls(), wrong);
}

TEST(a_call_on_another_device_fails_and_is_counted) {
  const SimulatedDevice one, other;
  const PinnedBuffer memory = allocate_pinned(one.cuda(), 64);
  const CudaRuntime& cuda = SimulatedDevice::runtime();
  CHECK_EQ(cuda.set_device(other.cuda().index()), kCudaSuccess);
  const int64_t wrong = SimulatedDevice::wrong_device_calls();
  CHECK_EQ(cuda.free_host(memory.data()), SimulatedDevice::kWrongDevice);
  CHECK_EQ(SimulatedDevice::wrong_device_calls(), wrong + 1);
  CHECK_EQ(one.live_objects(), 1);
}

TEST(an_error_names_the_device_the_call_and_the_error) {
  const SimulatedDevice others;
  Engine engine({});
  CHECK_EQ(engine.device.cuda().index(), 1);
  engine.device.fail_call(SimulatedDevice::Call::kGraphLaunch, 0, 700);
  CHECK(engine.submit(make_spec(0, 20, 5)) == SubmitResult::kAccepted);
  CHECK(!engine.run());
  CHECK(engine.loop->error().find("cudaGraphLaunch on cuda:1: an illegal memory access was encountered (700)") !=
        std::string::npos);
  std::string refused;
  SimulatedDevice poor;
  poor.refuse_pinning();
  try {
    allocate_pinned(poor.cuda(), 64);
  } catch (const CudaError& error) {
    refused = error.what();
  }
  CHECK_EQ(refused, std::string("cudaHostAlloc on cuda:2: out of memory (2)"));
}
