// The compute kernels of the CPU executor: splits each call over threads and owns the scratch memory.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/step_batch.h"
#include "platform/cpu/blocks.h"
#include "platform/cpu/isa.h"
#include "platform/cpu/mixer.h"
#include "platform/cpu/sampler.h"
#include "platform/cpu/thread_pool.h"
#include "platform/cpu/tiling.h"

namespace asyncengine {

// Weight matrices [N_i, k] of one input, whose outputs lie side by side. Points into memory that the caller keeps.
// A matrix in panels is [N / width][words of k][width] with the vector width, a word being one float or two neighbouring
// bfloat16, the first in the low half; N is rounded up to two panels and k to a multiple of panel_steps.
// With codes weights are rows of these instead, and x is multiplied in the order of its columns. With block types, which all
// matrices have or none, weights are rows of blocks of GGUF, and x is rounded to 8 bits (blocks.h).
struct CpuLinear {
  struct Matrix {
    const void* weight;
    const void* bias;  // or null
    int64_t rows;
    std::optional<WeightCodes> codes = std::nullopt;
    std::optional<BlockType> block_type = std::nullopt;

    const WeightCodes* codes_or_null() const { return codes ? &*codes : nullptr; }
  };

  std::vector<Matrix> matrices;
  int64_t k;
  Dtype dtype;
  bool panels;
  const int32_t* order = nullptr;  // [k]: column i of the weights multiplies x[order[i]]; null: x[i]

  int64_t total_rows() const;
  bool in_blocks() const { return matrices.front().block_type.has_value(); }
  // A row of x [k] in the order of the columns; there must be one.
  void arrange(const void* x, void* to) const;
};

// A norm of rows; points into memory that the caller keeps.
struct CpuNorm {
  const void* weight;
  const void* bias;  // null: root mean square norm; else layer norm
  float eps;
  bool float_weight = false;  // of a root mean square norm: its weight is in float32, else in the rows' dtype
};

// Feed-forward blocks of one shape among which rows are distributed: down · activation(up · x). There is at least one.
struct CpuExperts {
  std::vector<CpuLinear> up, down;
  Activation activation;
};

// Scratch memory on cache-line boundaries. It only grows, so that a steady state allocates nothing.
class ScratchBuffer {
 public:
  float* reserve(int64_t floats);
  float* data() { return memory_.get(); }

 private:
  struct Free {
    void operator()(float* p) const;
  };
  std::unique_ptr<float[], Free> memory_;
  int64_t size_ = 0;
};

struct PagedKV {
  void* k;  // [num_blocks, num_kv_heads, head_dim, block_size]
  void* v;  // [num_blocks, num_kv_heads, block_size, head_dim]
  int64_t num_kv_heads, head_dim, block_size;
  int32_t group = 0;              // of the layer: StepBatch::tables_of()
  const float* scales = nullptr;  // of KVScales: keys and values are Float8; null: they are in the dtype of a call
};

// Every result is bit for bit independent of how rows are batched, chunked or threaded (isa.h). Rows are contiguous
// unless a stride, in elements, is given. One caller at a time.
class CpuKernels {
 public:
  CpuKernels(int num_threads, std::string_view isa);  // throws std::invalid_argument

  const char* isa_name() const { return isa_.name; }
  const char* block_kernels_name() const { return block_kernels_.name; }
  int num_threads() const { return pool_.num_threads(); }
  int64_t vector_width() const { return isa_.vector_width; }
  int64_t panel_steps(Dtype dtype) const { return isa_.linear(dtype).panel_steps; }

  // y [rows, Σ N_i] = x [rows, k] · Wᵀ + bias, in the dtype of the weights, or in float32 if y_float32.
  void linear(const CpuLinear& weights, const void* x, int64_t x_stride, int64_t rows, void* y, bool y_float32);
  // The same of the norm of x, or, with a residual, of residual += x, which is in place; both are contiguous. Then the
  // activation of y, which is not gated.
  void norm_linear(const CpuNorm& norm, const CpuLinear& weights, const void* x, void* residual, int64_t rows, void* y,
                   bool y_float32, std::optional<Activation> activation = std::nullopt);
  // y [rows, N of down] = the results of each row's experts, ids [rows, top_k], times weights [rows, top_k], added up in
  // float32 in the order of the ids. Experts that no row has are not read. Throws std::invalid_argument for an id that is
  // out of range.
  void experts(const CpuExperts& experts, const void* x, int64_t x_stride, int64_t rows, const int64_t* ids, const float* weights,
               int64_t top_k, void* y);
  // weight [rows, k], or if transposed [k, rows], into panels (see CpuLinear), filled up with zeros.
  void pack_panels(Dtype dtype, const void* weight, bool transposed, int64_t rows, int64_t k, void* panels);
  // y [tokens, k] = the tokens' rows of the first matrix of `table` times scale, plus, if there is such a table, those of
  // their positions. No id or position is checked. Throws std::invalid_argument for a table in blocks beside one of positions.
  void embed(const CpuLinear& table, const void* position_table, const StepBatch& batch, void* y, float scale = 1.f);
  void norm(Dtype dtype, const NormTask& task, int64_t tokens);
  void activation(Dtype dtype, Activation kind, const void* x, void* y, int64_t rows, int64_t width);
  void rotary(Dtype dtype, const RotaryTask& task, int64_t tokens);
  // k and v: [num_tokens, num_kv_heads, head_dim], heads contiguous.
  void store_kv(Dtype dtype, const void* k, int64_t k_stride, const void* v, int64_t v_stride, const PagedKV& cache,
                const StepBatch& batch);
  // q [tokens, num_q_heads, head_dim] -> out [tokens, num_q_heads * head_dim], for the leading rows of the batch that
  // `tokens` holds: all of them, or those that decode.
  void paged_attention(Dtype dtype, const void* q, int64_t q_stride, int64_t tokens, int64_t num_q_heads, void* out,
                       const PagedKV& cache, const StepBatch& batch, float scale, int64_t window, float softcap = 0.f,
                       const float* sinks = nullptr);
  // store_kv and paged_attention of all rows: heads [tokens, num_q_heads + 2 * num_kv_heads, head_dim], contiguous.
  void attention(Dtype dtype, const void* heads, int64_t num_q_heads, void* out, const PagedKV& cache, const StepBatch& batch,
                 float scale, int64_t window, float softcap = 0.f, const float* sinks = nullptr);
  // out [tokens, inner] = the mixer's result for x [tokens, width]; it renews the states [slots, slot_bytes] of the rows.
  void mix(Dtype dtype, const CpuMixer& mixer, const void* x, int64_t x_stride, void* out, std::byte* states, int64_t slot_bytes,
           const StepBatch& batch);
  // x [rows, width] = cap * tanh(x / cap), in place.
  void soft_cap(float* x, int64_t rows, int64_t width, float cap);
  // logits [num_samples, vocab] float32 -> tokens [num_samples], and the records that samples want; see CpuSampler. To be
  // called for every step of a step loop, with or without samples.
  void sample(const float* logits, int64_t vocab, const StepBatch& batch, int32_t* tokens);

 private:
  struct SplitRow {  // a query token whose partitions went to different items
    int64_t token;
    int32_t kv_head, heads, first_head;
    int64_t partitions;
    int64_t partials;  // offset into partials_, in floats
  };

  struct MixerItem {  // tokens of a row
    int32_t row;
    int64_t begin, end;
  };
  struct TokenRange {
    int64_t begin, end;
  };
  struct NewKV {  // of the step's tokens
    const void* k;
    const void* v;
    int64_t k_stride, v_stride;
    const int64_t* slots;  // in the blocks of the layer's group
  };
  struct HitExpert {  // an expert that computes rows of a call
    const CpuLinear *up, *down;
    int64_t first, rows;  // of its pairs
    int64_t packed;       // offset into packed_x_, in floats
  };
  struct PlannedItem {
    AttentionItem item;
    int64_t partials;  // offset into partials_, in floats; -1: none
    bool stores;       // the key and value of its token, first
  };

  // x is packed tile by tile; before that, prepare(row_begin, row_end) is called for the tile's rows.
  template <class Prepare>
  void multiply(const CpuLinear& weights, const void* x, int64_t x_stride, int64_t rows, void* y, bool y_float32,
                std::optional<Activation> activation, Prepare&& prepare);
  // Rounded for blocks of 32 columns and for those of 256, where matrices have such blocks.
  struct RoundedRows {
    const float *of_32, *of_256;
  };
  RoundedRows round_rows(const CpuLinear& weights, const void* x, int64_t x_stride, int64_t rows);
  void multiply_blocks(const CpuLinear& weights, const void* x, int64_t x_stride, int64_t rows, void* y, Dtype y_dtype,
                       std::optional<Activation> activation);
  void embed_blocks(const CpuLinear& table, const StepBatch& batch, void* y, float scale);
  void sort_pairs(const CpuExperts& experts, const int64_t* ids, int64_t pairs);
  template <class Prepare>
  void multiply_experts(bool up, void* x, void* y, bool y_float32, Prepare&& prepare);
  void sum_results(const float* results, const float* weights, int64_t first_pair, int64_t top_k, int64_t width, Dtype dtype,
                   void* y) const;
  void plan_attention(const AttentionTask& task, const StepBatch& batch, int64_t tokens, const int32_t* const* tables);
  // fresh is stored on the way; null: all keys and values are there.
  void attend(Dtype dtype, const AttentionTask& task, int64_t tokens, const PagedKV& cache, const StepBatch& batch,
              const NewKV* fresh);
  void store_new(Dtype dtype, const NewKV& fresh, const PagedKV& cache, int64_t token, int64_t head) const;
  void store_tokens(Dtype dtype, const NewKV& fresh, const PagedKV& cache, std::span<const TokenRange> ranges);
  // body(begin, end) for ranges of rows of so many elements.
  template <class Body>
  void for_row_chunks(int64_t rows, int64_t row_elements, Body&& body) {
    const int64_t wanted = std::min(rows * row_elements / kElementsPerChunk, pool_.num_threads() * kItemsPerThread);
    const int64_t chunk = ceil_div(rows, std::max<int64_t>(wanted, 1));
    pool_.parallel_for(ceil_div(rows, std::max<int64_t>(chunk, 1)),
                       [&](int64_t item, int) { body(item * chunk, std::min(rows, (item + 1) * chunk)); });
  }

  // Grows every thread's scratch here, in the caller: a worker must not throw.
  void reserve_scratch(int64_t floats);
  float* scratch(int thread) { return thread_scratch_[static_cast<size_t>(thread)].data(); }

  const CpuIsa& isa_;
  const BlockKernels& block_kernels_;
  ThreadPool pool_;
  ScratchBuffer normed_, packed_x_, arranged_, mixed_;
  std::vector<MixerRow> mixer_rows_;
  std::vector<MixerItem> mixer_items_;
  std::vector<ScratchBuffer> thread_scratch_;
  CpuSampler sampler_;
  std::vector<PlannedItem> items_;
  std::vector<SplitRow> split_rows_;
  std::vector<TokenRange> stored_apart_;  // rows whose keys and values are there before any item starts
  ScratchBuffer partials_;
  ScratchBuffer expert_rows_;  // of pairs of a row and an expert, in the order of their experts: inputs, products, results
  std::vector<HitExpert> hit_;
  std::vector<LinearTask> products_;
  std::vector<int64_t> first_pairs_, places_, pair_at_;  // by expert; places of pairs in that order, and the pairs there
};

}  // namespace asyncengine
