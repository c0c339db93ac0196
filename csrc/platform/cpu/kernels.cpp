#include "platform/cpu/kernels.h"

#include <algorithm>
#include <new>
#include <stdexcept>

#include "platform/cpu/kv_cell.h"
#include "platform/cpu/tiling.h"

namespace asyncengine {
namespace {

// A write to a cache line that is far away costs as much as this many elements of a loop.
constexpr int64_t kElementsPerCacheMiss = 16;

// Panels that are packed together from a transposed matrix: neighbours in each of its lines.
constexpr int64_t kPackedPanels = 8;

constexpr std::align_val_t kCacheLine{64};

void* offset(void* p, int64_t elements, Dtype dtype) { return static_cast<char*>(p) + elements * dtype_size(dtype); }
const void* offset(const void* p, int64_t elements, Dtype dtype) {
  return static_cast<const char*>(p) + elements * dtype_size(dtype);
}

// Words of a row in panels.
int64_t panel_words(const LinearKernels& kernels, int64_t k, Dtype dtype) {
  return round_up(k, kernels.panel_steps) * dtype_size(dtype) / 4;
}

// Panels [begin, end) of those `words` long. `Element` is as wide as an element.
template <class Element>
void pack_panel_range(const Element* weight, bool transposed, int64_t rows, int64_t k, int64_t width, int64_t words, int64_t begin,
                      int64_t end, Element* panels) {
  constexpr int64_t kParts = 4 / static_cast<int64_t>(sizeof(Element));
  const int64_t first = begin * width, last = std::min(rows, end * width), panel = words * width * kParts;
  if (last < end * width || words * kParts > k) std::fill(panels + begin * panel, panels + end * panel, Element{});
  auto place = [&](int64_t row, int64_t step) {
    return panels + row / width * panel + (step / kParts * width + row % width) * kParts + step % kParts;
  };
  for (int64_t row = first; row < last && !transposed; ++row) {
    for (int64_t step = 0; step < k; ++step) *place(row, step) = weight[row * k + step];
  }
  for (int64_t step = 0; step < k && transposed; ++step) {
    for (int64_t row = first; row < last; row += width) {
      const int64_t count = std::min(width, last - row);
      Element* to = place(row, step);
      for (int64_t column = 0; column < count; ++column) to[column * kParts] = weight[step * rows + row + column];
    }
  }
}

}  // namespace

void ScratchBuffer::Free::operator()(float* p) const { ::operator delete(p, kCacheLine); }

float* ScratchBuffer::reserve(int64_t floats) {
  if (size_ < floats) {
    memory_.reset();
    size_ = 0;
    memory_.reset(static_cast<float*>(::operator new(static_cast<size_t>(floats) * sizeof(float), kCacheLine)));
    size_ = floats;
  }
  return memory_.get();
}

int64_t CpuLinear::total_rows() const {
  int64_t total = 0;
  for (const Matrix& matrix : matrices) total += matrix.rows;
  return total;
}

void CpuLinear::arrange(const void* x, void* to) const {
  auto gather = [&]<class Element>(const Element* from, Element* into) {
    for (int64_t i = 0; i < k; ++i) into[i] = from[order[i]];
  };
  if (dtype == Dtype::kFloat32) {
    gather(static_cast<const uint32_t*>(x), static_cast<uint32_t*>(to));
  } else {
    gather(static_cast<const uint16_t*>(x), static_cast<uint16_t*>(to));
  }
}

CpuKernels::CpuKernels(int num_threads, std::string_view isa)
    : isa_(select_cpu_isa(isa)),
      block_kernels_(select_block_kernels(isa_)),
      pool_(num_threads),
      thread_scratch_(static_cast<size_t>(num_threads)),
      sampler_(isa_, num_threads) {}

void CpuKernels::reserve_scratch(int64_t floats) {
  for (ScratchBuffer& buffer : thread_scratch_) buffer.reserve(floats);
}

void CpuKernels::linear(const CpuLinear& weights, const void* x, int64_t x_stride, int64_t rows, void* y, bool y_float32) {
  multiply(weights, x, x_stride, rows, y, y_float32, std::nullopt, [](int64_t, int64_t) {});
}

void CpuKernels::norm_linear(const CpuNorm& norm, const CpuLinear& weights, const void* x, void* residual, int64_t rows, void* y,
                             bool y_float32, std::optional<Activation> activation) {
  if (activation && activation->gated) throw std::invalid_argument("a gated activation takes two columns for one");
  void* normed = normed_.reserve(ceil_div(rows * weights.k * dtype_size(weights.dtype), 4));
  const NormTask task{.x = x,
                      .residual = residual,
                      .weight = norm.weight,
                      .bias = norm.bias,
                      .y = normed,
                      .x_stride = weights.k,
                      .y_stride = weights.k,
                      .heads = 1,
                      .width = weights.k,
                      .eps = norm.eps,
                      .float_weight = norm.float_weight};
  multiply(weights, normed, weights.k, rows, y, y_float32, activation,
           [&](int64_t begin, int64_t end) { isa_.norm(weights.dtype, task, begin, end); });
}

template <class Prepare>
void CpuKernels::multiply(const CpuLinear& weights, const void* x, int64_t x_stride, int64_t rows, void* y, bool y_float32,
                          std::optional<Activation> activation, Prepare&& prepare) {
  if (rows == 0) return;
  const Dtype dtype = weights.dtype;
  const Dtype y_dtype = y_float32 ? Dtype::kFloat32 : dtype;
  if (weights.in_blocks()) {
    for_row_chunks(rows, weights.k, prepare);
    multiply_blocks(weights, x, x_stride, rows, y, y_dtype, activation);
    return;
  }
  const int64_t y_stride = weights.total_rows();
  const LinearKernels& kernels = isa_.linear(dtype);
  const int64_t tile_rows = kernels.tile_rows(rows), tiles = ceil_div(rows, tile_rows);
  float* packed = packed_x_.reserve(kernels.packed_x_floats(rows, weights.k));
  const bool ordered = weights.order != nullptr;
  void* arranged = ordered ? arranged_.reserve(ceil_div(rows * weights.k * dtype_size(dtype), 4)) : nullptr;
  const LinearInput input{ordered ? arranged : x, ordered ? weights.k : x_stride, rows, weights.k, weights.panels};
  for_row_chunks(tiles, tile_rows * weights.k, [&](int64_t begin, int64_t end) {
    const int64_t last = std::min(rows, end * tile_rows);
    prepare(begin * tile_rows, last);
    for (int64_t row = begin * tile_rows; ordered && row < last; ++row) {
      weights.arrange(offset(x, row * x_stride, dtype), offset(arranged, row * weights.k, dtype));
    }
    kernels.pack_x(input, begin, end, packed);
  });

  const int64_t block_rows = rows <= kernels.few_rows ? rows : ceil_div(tiles, ceil_div(rows, kBlockRows)) * tile_rows;
  const int64_t row_blocks = ceil_div(rows, block_rows);
  const int64_t column_items = ceil_div(kItemsPerThread * pool_.num_threads(), row_blocks);
  int64_t columns = round_up(ceil_div(y_stride, column_items), kernels.panel_columns);
  if (rows > kernels.few_rows) columns = std::min(columns, kBlockColumns);
  reserve_scratch(kernels.scratch_floats(rows, block_rows, columns));
  int64_t column_blocks = 0;
  for (const CpuLinear::Matrix& matrix : weights.matrices) column_blocks += ceil_div(matrix.rows, columns);

  pool_.parallel_for(column_blocks * row_blocks, [&](int64_t item, int thread) {
    int64_t block = item / row_blocks, first_column = 0;
    const CpuLinear::Matrix* matrix = weights.matrices.data();
    for (; block >= ceil_div(matrix->rows, columns); ++matrix) {
      block -= ceil_div(matrix->rows, columns);
      first_column += matrix->rows;
    }
    const int64_t m = item % row_blocks * block_rows;
    const LinearTask task{
        .packed_x = packed,
        .rows = rows,
        .tile_rows = tile_rows,
        .k = weights.k,
        .weight = matrix->weight,
        .panels = weights.panels,
        .codes = matrix->codes_or_null(),
        .bias = matrix->bias,
        .y = offset(y, first_column, y_dtype),
        .y_stride = y_stride,
        .y_float32 = y_float32,
        .m_begin = m,
        .m_end = std::min(rows, m + block_rows),
        .n_begin = block * columns,
        .n_end = std::min(matrix->rows, (block + 1) * columns),
        .scratch = scratch(thread),
    };
    kernels.run(task);
    for (int64_t row = task.m_begin; activation && row < task.m_end; ++row) {  // while the block is in the cache
      void* part = offset(task.y, row * y_stride + task.n_begin, y_dtype);
      isa_.activation(y_dtype, *activation, part, part, task.n_end - task.n_begin, 0, 1);
    }
  });
}

void CpuKernels::pack_panels(Dtype dtype, const void* weight, bool transposed, int64_t rows, int64_t k, void* panels) {
  const LinearKernels& kernels = isa_.linear(dtype);
  const int64_t count = round_up(rows, kernels.panel_columns) / isa_.vector_width;
  const int64_t words = panel_words(kernels, k, dtype);
  pool_.parallel_for(ceil_div(count, kPackedPanels), [&](int64_t item, int) {
    const int64_t begin = item * kPackedPanels, end = std::min(count, begin + kPackedPanels);
    if (dtype == Dtype::kFloat32) {
      pack_panel_range(static_cast<const uint32_t*>(weight), transposed, rows, k, isa_.vector_width, words, begin, end,
                       static_cast<uint32_t*>(panels));
    } else {
      pack_panel_range(static_cast<const uint16_t*>(weight), transposed, rows, k, isa_.vector_width, words, begin, end,
                       static_cast<uint16_t*>(panels));
    }
  });
}

void CpuKernels::embed(const CpuLinear& table, const void* position_table, const StepBatch& batch, void* y, float scale) {
  if (table.in_blocks()) {
    if (position_table != nullptr) throw std::invalid_argument("a table of positions goes with a dense embedding");
    return embed_blocks(table, batch, y, scale);
  }
  const EmbedTask task{
      .ids = batch.input_ids.data(),
      .table = table.matrices.front().weight,
      .panel_words = table.panels ? panel_words(isa_.linear(table.dtype), table.k, table.dtype) : 0,
      .positions = batch.positions.data(),
      .position_table = position_table,
      .y = y,
      .width = table.k,
      .scale = scale,
  };
  // In panels each element of a row is in a cache line of its own.
  for_row_chunks(batch.num_tokens, table.k * (table.panels ? kElementsPerCacheMiss : 1),
                 [&](int64_t begin, int64_t end) { isa_.embed(table.dtype, task, begin, end); });
}

void CpuKernels::norm(Dtype dtype, const NormTask& task, int64_t tokens) {
  for_row_chunks(tokens * task.heads, task.width, [&](int64_t begin, int64_t end) { isa_.norm(dtype, task, begin, end); });
}

void CpuKernels::activation(Dtype dtype, Activation kind, const void* x, void* y, int64_t rows, int64_t width) {
  for_row_chunks(rows, width, [&](int64_t begin, int64_t end) { isa_.activation(dtype, kind, x, y, width, begin, end); });
}

void CpuKernels::rotary(Dtype dtype, const RotaryTask& task, int64_t tokens) {
  for_row_chunks(tokens, task.heads * task.head_dim, [&](int64_t begin, int64_t end) { isa_.rotary(dtype, task, begin, end); });
}

void CpuKernels::store_kv(Dtype dtype, const void* k, int64_t k_stride, const void* v, int64_t v_stride, const PagedKV& cache,
                          const StepBatch& batch) {
  const TokenRange all{0, batch.num_tokens};
  store_tokens(dtype, {k, v, k_stride, v_stride, batch.slots_of(cache.group)}, cache, {&all, 1});
}

void CpuKernels::store_tokens(Dtype dtype, const NewKV& fresh, const PagedKV& cache, std::span<const TokenRange> ranges) {
  int64_t tokens = 0;
  for (const TokenRange& range : ranges) tokens += range.end - range.begin;
  // Work is split by head: neighbouring tokens share cache lines of K. An element of K is a cache line of its own when
  // each token is the only one of its sequence, so it counts for many.
  for_row_chunks(cache.num_kv_heads, tokens * cache.head_dim * kElementsPerCacheMiss, [&](int64_t begin, int64_t end) {
    for (int64_t head = begin; head < end; ++head) {
      for (const TokenRange& range : ranges) {
        for (int64_t token = range.begin; token < range.end; ++token) store_new(dtype, fresh, cache, token, head);
      }
    }
  });
}

void CpuKernels::store_new(Dtype dtype, const NewKV& fresh, const PagedKV& cache, int64_t token, int64_t head) const {
  const int64_t at = head * cache.head_dim, slot = fresh.slots[token];
  if (slot < 0) return;  // a host row's
  const int64_t dim = cache.head_dim, size = cache.block_size;
  const int64_t first = (slot / size * cache.num_kv_heads + head) * dim * size;
  const int64_t bytes = cache.scales != nullptr ? 1 : dtype_size(dtype);
  store_head(isa_, dtype, offset(fresh.k, token * fresh.k_stride + at, dtype), offset(fresh.v, token * fresh.v_stride + at, dtype),
             {.k = static_cast<char*>(cache.k) + first * bytes,
              .v = static_cast<char*>(cache.v) + first * bytes,
              .head_dim = dim,
              .block_size = size,
              .offset = slot % size,
              .keys_by_token = false,
              .scales = {cache.scales, cache.num_kv_heads},
              .head = head});
}

// Tiles of queries × heads of a group per KV head; a single decode token's partitions are spread over items of their
// own when there would be too few items otherwise. The key and value of a token that only one item per KV head reads
// are stored by that item: rows that share blocks share what earlier steps have written.
void CpuKernels::plan_attention(const AttentionTask& task, const StepBatch& batch, int64_t tokens, const int32_t* const* tables) {
  items_.clear();
  split_rows_.clear();
  stored_apart_.clear();
  const int64_t group = task.num_q_heads / task.num_kv_heads;
  const int64_t heads = std::min(group, kAttentionRows), tile_queries = std::max<int64_t>(1, kAttentionRows / group);
  const bool split = tokens * task.num_kv_heads < kItemsPerThread * pool_.num_threads();
  int64_t partial_floats = 0;
  size_t rows = static_cast<size_t>(batch.num_rows);
  while (rows > 0 && batch.query_start[rows] > tokens) --rows;
  for (size_t r = rows; r-- > 0;) {  // long rows tend to come last: start them first
    const int64_t first_token = batch.query_start[r];
    const int64_t queries = batch.query_start[r + 1] - first_token;
    bool alone = queries == 1 && heads == group;  // nobody but the item of a KV head reads the token's key and value
    for (int64_t tile = (ceil_div(queries, tile_queries) - 1) * tile_queries; tile >= 0; tile -= tile_queries) {
      const int64_t count = std::min(tile_queries, queries - tile);
      const int64_t position = batch.context_len[r] + tile;
      const int64_t first_key = task.window > 0 ? std::max<int64_t>(0, position - task.window + 1) : 0;
      AttentionItem item{
          .block_table = tables[r],
          .first_token = first_token + tile,
          .first_position = position,
          .num_queries = static_cast<int32_t>(count),
          .kv_head = 0,
          .head_begin = 0,
          .head_end = 0,
          .partition_begin = first_key / kPartitionKeys,
          .partition_end = (position + count - 1) / kPartitionKeys + 1,
          .partials = nullptr,
      };
      const int64_t partitions = item.partition_end - item.partition_begin;
      const bool in_parts = split && partitions > 1 && count == 1;
      alone = alone && !in_parts;
      for (int32_t kv_head = 0; kv_head < task.num_kv_heads; ++kv_head) {
        item.kv_head = kv_head;
        for (int64_t head = 0; head < group; head += heads) {
          item.head_begin = static_cast<int32_t>(head);
          item.head_end = static_cast<int32_t>(std::min(group, head + heads));
          if (!in_parts) {
            items_.push_back({item, -1, alone});
            continue;
          }
          const int32_t item_heads = item.head_end - item.head_begin;
          split_rows_.push_back({item.first_token, kv_head, item_heads, static_cast<int32_t>(kv_head * group) + item.head_begin,
                                 partitions, partial_floats});
          for (int64_t p = 0; p < partitions; ++p) {
            AttentionItem part = item;
            part.partition_begin = item.partition_begin + p;
            part.partition_end = part.partition_begin + 1;
            items_.push_back({part, partial_floats, false});
            partial_floats += item_heads * attention_partial_floats(task.head_dim);
          }
        }
      }
    }
    if (!alone) stored_apart_.push_back({first_token, first_token + queries});
  }
  float* partials = partials_.reserve(partial_floats);
  for (PlannedItem& planned : items_) {
    if (planned.partials >= 0) planned.item.partials = partials + planned.partials;
  }
}

namespace {

AttentionTask attention_task(const void* q, int64_t q_stride, int64_t num_q_heads, void* out, const PagedKV& cache, float scale,
                             int64_t window, float softcap, const float* sinks) {
  return {.q = q,
          .q_stride = q_stride,
          .out = out,
          .k_cache = cache.k,
          .v_cache = cache.v,
          .num_q_heads = num_q_heads,
          .num_kv_heads = cache.num_kv_heads,
          .head_dim = cache.head_dim,
          .block_size = cache.block_size,
          .window = window,
          .scale = scale,
          .softcap = softcap,
          .sinks = sinks,
          .scales = {cache.scales, cache.num_kv_heads}};
}

}  // namespace

void CpuKernels::paged_attention(Dtype dtype, const void* q, int64_t q_stride, int64_t tokens, int64_t num_q_heads, void* out,
                                 const PagedKV& cache, const StepBatch& batch, float scale, int64_t window, float softcap,
                                 const float* sinks) {
  const AttentionTask task = attention_task(q, q_stride, num_q_heads, out, cache, scale, window, softcap, sinks);
  attend(dtype, task, tokens, cache, batch, nullptr);
}

void CpuKernels::attention(Dtype dtype, const void* heads, int64_t num_q_heads, void* out, const PagedKV& cache,
                           const StepBatch& batch, float scale, int64_t window, float softcap, const float* sinks) {
  const int64_t k = num_q_heads * cache.head_dim, v = k + cache.num_kv_heads * cache.head_dim;
  const int64_t stride = v + cache.num_kv_heads * cache.head_dim;
  const NewKV fresh{offset(heads, k, dtype), offset(heads, v, dtype), stride, stride, batch.slots_of(cache.group)};
  const AttentionTask task = attention_task(heads, stride, num_q_heads, out, cache, scale, window, softcap, sinks);
  attend(dtype, task, batch.num_tokens, cache, batch, &fresh);
}

void CpuKernels::attend(Dtype dtype, const AttentionTask& task, int64_t tokens, const PagedKV& cache, const StepBatch& batch,
                        const NewKV* fresh) {
  plan_attention(task, batch, tokens, batch.tables_of(cache.group));
  if (fresh != nullptr) store_tokens(dtype, *fresh, cache, stored_apart_);
  reserve_scratch(attention_scratch_floats(task.head_dim));
  pool_.parallel_for(static_cast<int64_t>(items_.size()), [&](int64_t index, int thread) {
    const PlannedItem& planned = items_[static_cast<size_t>(index)];
    if (fresh != nullptr && planned.stores) {
      store_new(dtype, *fresh, cache, planned.item.first_token, planned.item.kv_head);
    }
    isa_.attend(dtype, task, planned.item, scratch(thread));
  });
  const int64_t partial = attention_partial_floats(task.head_dim);
  const float* partials = partials_.data();
  for (const SplitRow& row : split_rows_) {
    for (int32_t head = 0; head < row.heads; ++head) {
      isa_.combine(dtype, task, row.token, row.first_head + head, partials + row.partials + head * partial, row.partitions,
                   row.heads * partial, scratch(0));
    }
  }
}

void CpuKernels::soft_cap(float* x, int64_t rows, int64_t width, float cap) {
  for_row_chunks(rows, width, [&](int64_t begin, int64_t end) { isa_.soft_cap(x + begin * width, (end - begin) * width, cap); });
}

void CpuKernels::sample(const float* logits, int64_t vocab, const StepBatch& batch, int32_t* tokens) {
  sampler_.begin(batch, vocab);
  pool_.parallel_for(batch.num_samples, [&](int64_t row, int thread) {
    tokens[row] = sampler_.draw(batch.samples[static_cast<size_t>(row)], logits + row * vocab, vocab, thread);
  });
}

}  // namespace asyncengine
