#include "platform/cpu/mixer.h"

#include <algorithm>

#include "platform/cpu/kernels.h"

namespace asyncengine {
namespace {

constexpr int64_t kTokensPerItem = 8;

}  // namespace

void CpuKernels::mix(Dtype dtype, const CpuMixer& mixer, const void* x, int64_t x_stride, void* out, std::byte* states,
                     int64_t slot_bytes, const StepBatch& batch) {
  const int64_t tokens = batch.num_tokens, heads = mixer.heads;
  const int64_t steps_at = tokens * mixer.channels(), results_at = steps_at + tokens * 2 * heads;
  float* memory = mixed_.reserve(results_at + tokens * mixer.inner());
  const MixerTask task{&mixer, x, x_stride, out, memory, memory + steps_at, memory + results_at};
  mixer_rows_.clear();
  mixer_items_.clear();
  for (int32_t r = 0; r < batch.num_rows; ++r) {
    const auto row = static_cast<size_t>(r);
    mixer_rows_.push_back({batch.query_start[row], batch.query_start[row + 1], states + batch.slots[row] * slot_bytes});
    for (int64_t begin = mixer_rows_.back().begin; begin < mixer_rows_.back().end; begin += kTokensPerItem) {
      mixer_items_.push_back({r, begin, std::min(mixer_rows_.back().end, begin + kTokensPerItem)});
    }
  }
  pool_.parallel_for(static_cast<int64_t>(mixer_items_.size()), [&](int64_t i, int) {
    const MixerItem& item = mixer_items_[static_cast<size_t>(i)];
    isa_.mix_tokens(dtype, task, mixer_rows_[static_cast<size_t>(item.row)], item.begin, item.end);
  });
  pool_.parallel_for(batch.num_rows * heads, [&](int64_t i, int) {
    const MixerRow& row = mixer_rows_[static_cast<size_t>(i / heads)];
    if (i % heads == 0) isa_.keep_inputs(dtype, task, row);
    isa_.scan_head(task, row, i % heads);
  });
  pool_.parallel_for((tokens + kTokensPerItem - 1) / kTokensPerItem, [&](int64_t i, int) {
    isa_.finish_tokens(dtype, task, i * kTokensPerItem, std::min(tokens, (i + 1) * kTokensPerItem));
  });
}

}  // namespace asyncengine
