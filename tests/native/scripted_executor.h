// An executor that computes nothing: a test says when its steps are over.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "step_loop/step_loop.h"

namespace asyncengine::testing {

// Every sample is token 3. Launches and polls may throw, hang or count in their hooks.
class ScriptedExecutor : public Executor {
 public:
  ScriptedExecutor(const StepLimits& limits, int steps_in_flight)
      : tokens_(static_cast<size_t>(limits.max_rows), 3), staging_(static_cast<size_t>(steps_in_flight)) {
    for (auto& buffer : staging_) buffer.resize(limits.max_bytes());
  }
  int num_staging() const override { return static_cast<int>(staging_.size()); }
  std::span<std::byte> staging(int i) override { return staging_[static_cast<size_t>(i)]; }
  StepResults results(int) const override { return {tokens_.data(), nullptr}; }
  LaunchStatus launch(int, size_t) override {
    ++launches;
    if (on_launch) on_launch();
    return LaunchStatus::kLaunched;
  }
  StepStatus poll(int) override {
    if (on_poll) on_poll();
    return pending ? StepStatus::kPending : StepStatus::kReady;
  }
  std::string error() const override { return {}; }
  int num_kinds() const override { return 1; }
  std::chrono::nanoseconds poll_interval() const override { return std::chrono::microseconds(50); }
  bool close(std::chrono::nanoseconds) override { return true; }

  std::atomic<int> launches{0};
  std::atomic<bool> pending{false};
  std::function<void()> on_launch, on_poll;

 protected:
  std::vector<int32_t> tokens_;
  std::vector<std::vector<std::byte>> staging_;
};

// A loop on it. Its thread runs once the test starts it.
struct Scripted {
  explicit Scripted(const StepLoopConfig& config) {
    auto owned = std::make_unique<ScriptedExecutor>(StepLoop::limits(config), config.steps_in_flight);
    executor = owned.get();
    loop = std::make_unique<StepLoop>(config, std::move(owned));
  }
  bool dies() {
    for (int i = 0; i < 3000; ++i) {
      if (!loop->drain([](const StepLoop::News&) {})) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return false;
  }
  ScriptedExecutor* executor;
  std::unique_ptr<StepLoop> loop;
};

}  // namespace asyncengine::testing
