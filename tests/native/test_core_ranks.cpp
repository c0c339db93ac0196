// Devices that hold a model together: each step runs on all of them, and what happens to one of them ends no other way.
#include <chrono>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "engine_fixture.h"
#include "platform/cuda/simulated_device.h"
#include "scheduler_fixture.h"

namespace {

using namespace asyncengine;
using namespace asyncengine::testing;

Options of_ranks(int ranks, StagingMode staging = StagingMode::kAhead) {
  Options options;
  options.ranks = ranks;
  options.staging = staging;
  options.num_blocks = 24;  // so that sequences are preempted
  return options;
}

void submit_some(Engine& engine, int32_t count, uint32_t seed = 1) {
  std::mt19937 rng(seed);
  for (int32_t i = 0; i < count; ++i) (void)engine.submit(random_spec(rng, Options{}, 60, 20));  // refused once it is dead
}

SimulatedDevice& device_of(Engine& engine, int rank) { return rank == 0 ? engine.device : *engine.devices[0]; }

int64_t live_objects(const Engine& engine) {
  int64_t live = engine.device.live_objects();
  for (const auto& device : engine.devices) live += device->live_objects();
  return live;
}

}  // namespace

TEST(steps_on_several_devices_give_the_tokens_of_one) {
  for (const StagingMode staging : {StagingMode::kPinned, StagingMode::kMapped, StagingMode::kAhead}) {
    for (const int ranks : {2, 3}) {
      Engine engine(of_ranks(ranks, staging));
      submit_some(engine, 12);
      CHECK(engine.run());
      CHECK_EQ(engine.loop->error(), std::string());
      CHECK_EQ(engine.mismatches(), 0);
      CHECK(engine.settles());
      CHECK(engine.loop->stop(5s));
    }
  }
}

TEST(devices_may_be_late_in_turn) {
  for (const int slow : {0, 1}) {
    Options options = of_ranks(2);
    (slow == 0 ? options.latency : options.latency_of_others) = 2ms;
    Engine engine(options);
    submit_some(engine, 6);
    CHECK(engine.run());
    CHECK_EQ(engine.mismatches(), 0);
  }
}

// Nothing has begun on any device when the first one's launch, or a copy of the input, finds no memory.
TEST(a_launch_without_memory_on_the_first_device_fails_its_step_alone) {
  Engine engine(of_ranks(2));
  engine.device.fail_call(SimulatedDevice::Call::kGraphLaunch, 0, kCudaErrorMemoryAllocation);
  CHECK(engine.submit(make_spec(0, 20, 5)) == SubmitResult::kAccepted);
  CHECK(engine.run());
  CHECK(engine.submit(make_spec(0, 20, 5)) == SubmitResult::kAccepted);
  CHECK(engine.run());
  CHECK(engine.settles());
  CHECK(engine.loop->stop(5s));
}

// Any other failure leaves a device waiting for one that does not come: the engine ends at once, and frees all.
TEST(a_call_that_fails_on_one_device_ends_the_engine_and_releases_the_others) {
  using Call = SimulatedDevice::Call;
  for (const Call call : {Call::kCopy, Call::kGraphLaunch, Call::kEventRecord, Call::kWaitEvent}) {
    for (const int rank : {0, 1}) {
      for (const int64_t nth : {0, 3}) {
        const int error = rank == 0 || call != Call::kGraphLaunch ? 999 : kCudaErrorMemoryAllocation;
        Engine engine(of_ranks(2));
        device_of(engine, rank).fail_call(call, nth, error);
        submit_some(engine, 6);
        CHECK(!engine.run());
        CHECK(engine.loop->error().find("on cuda:" + std::to_string(device_of(engine, rank).cuda().index())) != std::string::npos);
        CHECK(engine.loop->stop(5s));
      }
    }
  }
}

TEST(a_device_that_faults_ends_the_engine_and_releases_the_others) {
  for (const int rank : {0, 1}) {
    for (const int64_t nth : {0, 1, 4}) {
      Engine engine(of_ranks(2));
      device_of(engine, rank).fail_at(nth);
      submit_some(engine, 6);
      CHECK(!engine.run());
      CHECK(engine.loop->error().find("illegal memory access") != std::string::npos);
      CHECK(engine.loop->stop(5s));
      engine.loop.reset();
      CHECK_EQ(live_objects(engine), int64_t{9});  // staging, and four buffers of each model, which go with the engine
    }
  }
}

TEST(a_device_that_hangs_ends_the_engine_within_the_limit) {
  for (const int rank : {0, 1}) {
    Options options = of_ranks(2);
    options.step_timeout = 150ms;
    Engine engine(options);
    device_of(engine, rank).hang_at(2);
    const auto start = std::chrono::steady_clock::now();
    submit_some(engine, 6);
    CHECK(!engine.run());
    CHECK(std::chrono::steady_clock::now() - start < 5s);
    CHECK(!engine.loop->stop(50ms));  // the device that hangs may still write
    device_of(engine, rank).resume();
    CHECK(engine.loop->stop(5s));
  }
}

TEST(requests_on_several_devices_may_be_aborted_at_any_point) {
  std::mt19937 rng(3);
  Options options = of_ranks(2);
  options.latency = 200us;
  Engine engine(options);
  for (int round = 0; round < 40; ++round) {
    submit_some(engine, 2, rng());
    std::this_thread::sleep_for(std::chrono::microseconds(rng() % 1500));
    engine.abort(engine.last_id() - rng() % 2);
    engine.receive(std::chrono::milliseconds(rng() % 2));
  }
  CHECK(engine.run());
  CHECK_EQ(engine.mismatches(), 0);
  CHECK(engine.settles());
}
