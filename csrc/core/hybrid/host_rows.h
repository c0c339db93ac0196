// Host rows: running sequences whose keys and values live in blocks of the host, and that decode there.
//
// The device computes everything of a host row but attention. Graphs for host rows have a few lanes, which are their last
// tokens. A host row passes a stage of the model in a step:
//
//   stage 0      its last token is embedded in the lane
//   stage s > 0  the lane takes in the result of attention of layer s - 1, and the residual that the row left on the device
//
// From there the lane's token goes on beside the others, through the rest of that layer and the beginning of the next one.
// Behind attention of layer s (kernels number layers from 0) a row that entered at stage s leaves: its rotated query, its key
// and its value go to its mailbox on the host, and its residual to its slot's place on the device. A row that enters at the
// last stage is sampled in the same step, and does not leave. So one lane serves a row at every stage, and a step advances
// (layers + 1) * lanes rows at most.
//
// A worker on the host waits for the mailbox, stores key and value in the row's blocks, attends and publishes the result. The
// row enters again with the next step that is planned after that. Nobody waits for anything: not the device, not the step thread.
//
// A mailbox is words of 64 bits, each the low half of its step's number << 32 | a payload, as results of steps are: a word
// says for itself whether it has come. For each head (queries, keys, values) the payloads are, of bfloat16, elements i and
// i + head_dim / 2 (the low and the high half of word i), and of float32 the elements one by one.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace asyncengine {

// The host row in a lane at a stage. A step's table of them is [stages][lanes].
struct HostRowEntry {
  int32_t slot = -1;  // -1: the lane is empty here
  int32_t position = 0;  // of the row's token
};

// Their part of a StepInput's header.
struct HostRowsHeader {
  int32_t num_lanes;   // 0: the step has none
  int32_t num_stages;
  int32_t num_rows;    // of the step's rows, the last so many: host rows that end a token

  // Tokens that lanes add to the step, behind those of its rows.
  int32_t num_tokens() const { return num_lanes; }
  int32_t num_entries() const { return num_lanes * num_stages; }
};

// Their part of a plan.
struct HostRowsPlan {
  std::vector<HostRowEntry> entries;  // [stages][lanes]; empty where the step has none
  int32_t num_lanes = 0;
  int32_t num_rows = 0;  // of the plan's rows, the last so many

  bool any() const { return num_lanes > 0; }
  int32_t num_tokens() const { return num_lanes; }
  HostRowsHeader header() const {
    return {num_lanes, num_lanes > 0 ? static_cast<int32_t>(entries.size()) / num_lanes : 0, num_rows};
  }
  void clear() {
    entries.clear();
    num_lanes = num_rows = 0;
  }
};

// The most of them in a step.
struct HostRowsLimits {
  int32_t max_lanes = 0;  // 0: there are none
  int32_t num_stages = 0;

  size_t num_entries() const { return static_cast<size_t>(max_lanes) * static_cast<size_t>(num_stages); }
};

// Attention of one row in one layer.
struct HostAttentionJob {
  int32_t slot = -1;
  int32_t layer = 0;
  uint32_t step = 0;      // low half of the step in which the row leaves with its query
  int32_t position = 0;   // of its token, which sees itself and all before it
  const int32_t* blocks = nullptr;  // of the host, by position / block_size: the same until the job is over
};

enum class HostAttentionStatus : uint8_t {
  kPending,
  kDone,
  kFailed,  // there is no result
};

// The time that the workers took for all jobs that are done, and the tokens of context that these jobs saw.
struct HostAttentionTimes {
  int64_t busy_ns = 0, tokens = 0;
};

// Attention for host rows. A slot has one job at a time. All calls come from the step thread, and none waits.
class HostAttention {
 public:
  virtual ~HostAttention() = default;

  virtual int32_t num_layers() const = 0;
  // Jobs are taken in the order in which they are posted, so that a worker waits for the mailbox that is filled next.
  virtual void post(const HostAttentionJob& job) = 0;
  // Status of the slot's last job. Once it is not kPending, nothing touches the job's blocks.
  virtual HostAttentionStatus poll(int32_t slot) = 0;
  // The slot's job has no use any more. It ends soon, unless a worker hangs in it.
  virtual void cancel(int32_t slot) = 0;
  virtual HostAttentionTimes times() const { return {}; }
  // No more jobs come. False: something still runs after `limit`, and goes on owning what it uses.
  virtual bool close(std::chrono::nanoseconds limit) = 0;
};

}  // namespace asyncengine
