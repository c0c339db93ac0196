#include "core/batch_packer.h"

#include <algorithm>
#include <cassert>

namespace asyncengine {
namespace {

// Hands out consecutive sections of the buffer.
class Cursor {
 public:
  explicit Cursor(std::span<std::byte> buffer) : base_(buffer.data()), end_(base_ + buffer.size()), next_(base_) {}

  template <typename T>
  T* take(size_t count) {
    T* section = reinterpret_cast<T*>(next_);
    next_ += count * sizeof(T);
    assert(next_ <= end_);
    return section;
  }
  size_t used() const { return static_cast<size_t>(next_ - base_); }

 private:
  std::byte *base_, *end_, *next_;
};

SlotUpdate slot_update(const Sequence& sequence, size_t entries) {
  const SamplingState& s = sequence.sampling;
  SlotUpdate update{sequence.slot,
                    s.temperature,
                    s.top_p,
                    s.min_p,
                    s.top_k,
                    static_cast<uint32_t>(s.seed),
                    static_cast<uint32_t>(s.seed >> 32),
                    sequence.needs,
                    {},
                    static_cast<int32_t>(entries),
                    sequence.update_words()};
  for (int i = 0; i < Sequence::kInlineStops; ++i) update.stops[i] = i < sequence.num_stops ? sequence.stops[i] : -1;
  return update;
}

// Returns the end of the entries.
int32_t* write_entries(const Sequence& sequence, int32_t* out) {
  const RequestExtras& extras = sequence.request->extras;
  if (extras.history) {
    *out++ = entry_header(kTokenHistory, static_cast<size_t>(sequence.tokens.size()));
    sequence.tokens.copy(0, sequence.tokens.size(), out);
    out += sequence.tokens.size();
  }
  return std::copy(extras.entries.begin(), extras.entries.end(), out);
}

int32_t row_flags(const PlanRow& row) {
  int32_t flags = row.from_device ? kRowFromDevice : 0;
  if (row.extras && row.sequence->request->extras.tokens_per_step > 1) flags |= kRowDeviceLength;
  if (row.host_place >= 0) flags |= kRowOnHost;
  return flags;
}

}  // namespace

size_t pack_step(const StepPlan& plan, BlockTables& tables, std::span<std::byte> buffer) {
  // Rows that bring their tokens come after the decode rows, so their ids follow each other.
  const int32_t num_prompt_ids = plan.num_tokens - plan.num_decode_rows;
  Cursor cursor(buffer);
  auto* header = cursor.take<StepInputHeader>(1);
  auto* rows = cursor.take<StepInputRow>(plan.rows.size());
  auto* prompt_ids = cursor.take<int32_t>(static_cast<size_t>(num_prompt_ids));
  auto* copies = cursor.take<BlockCopy>(plan.copies.size());
  auto* updates = cursor.take<SlotUpdate>(plan.filled_slots.size());
  auto* delta_blocks = cursor.take<int32_t>(static_cast<size_t>(plan.num_delta_blocks));
  auto* host_rows = cursor.take<HostRowEntry>(plan.host_rows.entries.size());
  auto* entries = cursor.take<int32_t>(static_cast<size_t>(plan.num_update_words));
  auto* state_copies = cursor.take<BlockCopy>(plan.state_copies.size());

  std::copy(plan.copies.begin(), plan.copies.end(), copies);
  std::copy(plan.state_copies.begin(), plan.state_copies.end(), state_copies);
  std::copy(plan.host_rows.entries.begin(), plan.host_rows.entries.end(), host_rows);
  auto filled = plan.filled_slots.begin();
  int32_t query_start = 0, prompt_start = 0, sample_row = 0, num_updates = 0, offset = 0, max_context = 0;
  for (const PlanRow& row : plan.rows) {
    if (row.plain) {
      assert(tables.dirty_begin(row.slot) >= tables.length(row.slot));
      *rows++ = {row.slot, query_start++, 1, row.context_len, kRowFromDevice, 0, sample_row++, -1, 0, 0, 0, 1, 1, 0, 0, 0};
      max_context = std::max(max_context, row.context_len);
      continue;
    }
    const bool fills = filled != plan.filled_slots.end() && *filled == row.slot;  // filled_slots is in row order
    const int32_t first = tables.dirty_begin(row.slot), dirty = std::max(0, tables.length(row.slot) - first);
    *rows++ = {row.slot,
               row.host_place >= 0 ? row.host_place : query_start,
               row.query_len,
               row.context_len,
               row_flags(row),
               prompt_start,
               row.num_samples > 0 ? sample_row : -1,
               fills ? num_updates : -1,
               first,
               dirty,
               offset,
               row.num_samples,
               row.num_appends,
               row.result_offset,
               row.extras ? row.sequence->request->extras.result_words : 0,
               0};
    if (row.host_place < 0) {
      query_start += row.query_len;
      max_context = std::max(max_context, row.context_len);
    }
    sample_row += row.num_samples;
    if (!row.from_device) {
      row.sequence->tokens.copy(row.context_len, row.query_len, prompt_ids + prompt_start);
      prompt_start += row.query_len;
    }
    if (fills) {
      const auto* start = reinterpret_cast<const int32_t*>(buffer.data());
      updates[num_updates++] = slot_update(*row.sequence, static_cast<size_t>(entries - start));
      entries = write_entries(*row.sequence, entries);
      ++filled;
    }
    if (dirty > 0) {
      std::copy_n(tables.blocks(row.slot).begin() + first, dirty, delta_blocks + offset);
      offset += dirty;
      const WindowTables& windows = tables.windows();
      for (int32_t group = 0; group < windows.num_groups(); ++group) {
        std::copy_n(windows.row(group, row.slot) + first, dirty, delta_blocks + offset);
        offset += dirty;
      }
      tables.mark_clean(row.slot);
    }
  }
  assert(offset == plan.num_delta_blocks && filled == plan.filled_slots.end());

  *header = {StepInputView::kMagic,
             static_cast<uint32_t>(cursor.used() / sizeof(int32_t)),
             plan.step,
             static_cast<int32_t>(plan.rows.size()),
             plan.num_decode_rows,
             plan.num_tokens,
             sample_row,
             num_prompt_ids,
             static_cast<int32_t>(plan.copies.size()),
             num_updates,
             plan.num_delta_blocks,
             plan.needs,
             max_context,
             sample_row - plan.num_scored,
             plan.num_result_words,
             plan.host_rows.header(),
             static_cast<int32_t>(plan.state_copies.size())};
  return cursor.used();
}

}  // namespace asyncengine
