// The table of single-threaded compute functions that every instruction set fills. kernels.cpp splits the work.
//
// All of them keep one promise: the value of an output element is produced by one fixed sequence of floating point
// operations, whatever rows come with it, whichever tile it falls in and whoever computes it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace asyncengine {

struct MixerTask;
struct MixerRow;

enum class Dtype : int { kFloat32 = 0, kBFloat16 = 1 };

struct BFloat16 {
  uint16_t bits;
};

// e4m3, as torch.float8_e4m3fn: 448 is the largest, there is no infinity, and 0x7f and 0xff are NaN.
struct Float8 {
  uint8_t bits;
};

// Scales of keys and values in float8: an element is its Float8 times its head's scale, for keys and for values apart.
// Inverses are given, so that every kernel on every machine multiplies by the same number when it quantises.
struct KVScales {
  const float* values;  // [keys, values][scale, inverse][num_kv_heads]; null: keys and values are not in float8
  int64_t num_kv_heads;

  float key(int64_t head) const { return values == nullptr ? 1.f : values[head]; }
  float key_inverse(int64_t head) const { return values[num_kv_heads + head]; }
  float value(int64_t head) const { return values == nullptr ? 1.f : values[2 * num_kv_heads + head]; }
  float value_inverse(int64_t head) const { return values[3 * num_kv_heads + head]; }
};

inline int64_t dtype_size(Dtype dtype) { return dtype == Dtype::kFloat32 ? 4 : 2; }

enum class CodeType : int { kInt4 = 0, kInt8 = 1, kFloat8 = 2 };

// A weight [N, K] in codes whose columns share scales in groups: an element is number * scale + offset. Codes of 4 bits lie in
// pairs, the even column in the low half of a byte. A vector may be read behind the last scale and offset.
struct WeightCodes {
  CodeType type;
  int64_t group_shift;   // log2 of the columns of a group, at least 4; 62: all of a row
  int64_t rows;          // N
  const float* scales;   // [K / group, N]
  const float* offsets;  // the same, or null
  const float* table;    // [16]: the numbers of codes of 4 bits
};

struct LinearInput {
  const void* x;   // [rows, k]
  int64_t stride;  // elements between rows
  int64_t rows, k;
  bool panels;  // of the weights
};

// One block of y[:, n] = x · w[n, :] + bias[n]: rows [m_begin, m_end), columns [n_begin, n_end) of one matrix.
struct LinearTask {
  const float* packed_x;  // as written by pack_x
  int64_t rows, tile_rows;  // of x, and of a tile of packed_x
  int64_t k;
  const void* weight;  // [N, k], or in panels, or codes
  bool panels;
  const WeightCodes* codes;  // null: the weight is in the dtype of x
  const void* bias;    // [N] or null
  void* y;             // column 0 of this matrix in row 0
  int64_t y_stride;    // elements
  bool y_float32;      // else the weight's dtype
  int64_t m_begin, m_end, n_begin, n_end;
  float* scratch;  // scratch_floats
};

struct NormTask {
  const void* x;
  void* residual;  // null, or added to x and stored before the norm
  const void* weight;
  const void* bias;  // null: root mean square norm; else layer norm
  void* y;
  int64_t x_stride, y_stride;  // elements between tokens; residual is contiguous
  int64_t heads;               // rows of one token, contiguous; a kernel's row is token * heads + head
  int64_t width;
  float eps;
  bool float_weight = false;  // of a root mean square norm: its weight is in float32, else in the rows' dtype
};

struct EmbedTask {
  const int64_t* ids;
  const void* table;    // [rows, width], or in panels
  int64_t panel_words;  // 0: not in panels; else words of one row
  const int64_t* positions;
  const void* position_table;  // [positions, width] or null
  void* y;                     // [tokens, width]
  int64_t width;
  float scale;  // of the rows of `table`
};

// kClampedSilu, which is gated: g * sigmoid(1.702 g) * (u + 1) of g = min(gate, 7) and u = up between -7 and 7.
enum class ActivationFunction : int { kSilu = 0, kGeluTanh = 1, kGelu = 2, kClampedSilu = 3, kRelu2 = 4 };

struct Activation {
  ActivationFunction function;
  bool gated;  // x [rows, 2 * width] -> function(first half) * second half [rows, width]; else [rows, width] -> as many
};

struct RotaryTask {
  void* x;              // [tokens, heads, head_dim], heads contiguous
  int64_t token_stride; // elements
  int64_t heads, head_dim;
  const float* cos_sin;  // [max_position, head_dim]: head_dim / 2 cosines, then as many sines
  const int64_t* positions;
};

// Softmax runs over partitions of this many keys, at absolute positions, folded in ascending order.
inline constexpr int64_t kPartitionKeys = 512;
// Query tokens × heads that one attention item works on.
inline constexpr int64_t kAttentionRows = 32;

struct AttentionTask {
  const void* q;     // [tokens, num_q_heads, head_dim], heads contiguous
  int64_t q_stride;  // elements between tokens
  void* out;         // [tokens, num_q_heads * head_dim]
  const void* k_cache;  // [blocks, num_kv_heads, head_dim, block_size]
  const void* v_cache;  // [blocks, num_kv_heads, block_size, head_dim]
  int64_t num_q_heads, num_kv_heads, head_dim, block_size;
  int64_t window;  // keys visible to a query, itself included; 0: all before it
  float scale;
  float softcap;  // scores become softcap * tanh(score / softcap); 0: as they are
  const float* sinks = nullptr;  // [num_q_heads]: a score of each head without a value, or null
  KVScales scales = {};  // with them the caches hold Float8
  int64_t block_stride = 0;  // elements from a block's keys, or values, to those of the next one; 0: they lie side by side
  bool keys_by_token = false;  // k_cache is [blocks, num_kv_heads, block_size, head_dim]
};

// Queries [first_token, first_token + num_queries) of one row against partitions of one KV head's keys.
struct AttentionItem {
  const int32_t* block_table;
  int64_t first_token;     // row of q and out
  int64_t first_position;  // absolute
  int32_t num_queries;
  int32_t kv_head;
  int32_t head_begin, head_end;  // query heads of the group, relative to its first
  int64_t partition_begin, partition_end;
  float* partials;  // null: fold all partitions and write out; else write one partial result per partition
};

// A partial result of one (query, head): maximum, sum, padding, then from kPartialHeader on head_dim weighted values.
inline constexpr int64_t kPartialHeader = 16;
inline int64_t attention_partial_floats(int64_t head_dim) { return kPartialHeader + (head_dim + 15) / 16 * 16; }
// Keys or values that are widened to floats at a time, where rows pass over them more than once.
inline constexpr int64_t kWidenedKeys = 32;
inline int64_t attention_scratch_floats(int64_t head_dim) {
  const int64_t padded = (head_dim + 15) / 16 * 16;
  return kAttentionRows * (2 * padded + kPartitionKeys + attention_partial_floats(head_dim)) + kWidenedKeys * padded + 64;
}

struct LogitStats {
  float max, min;  // over finite logits
  int64_t argmax;  // lowest index of the maximum
  bool valid;      // no NaN, no +inf, at least one finite
};

inline constexpr int64_t kMassBlock = 256;  // logits per partial sum of sampling mass

// Products with weights of one dtype.
struct LinearKernels {
  int64_t panel_columns;  // n_begin is a multiple of it, and so is N of weights in panels
  int64_t panel_steps;    // K of weights in panels is filled up with zeros to a multiple of it

  // Rows of a tile when x has `rows` of them; m_begin is a multiple of it. All rows in one block up to few_rows.
  int64_t few_rows;
  int64_t (*tile_rows)(int64_t rows);
  int64_t (*packed_x_floats)(int64_t rows, int64_t k);
  int64_t (*scratch_floats)(int64_t rows, int64_t block_rows, int64_t block_columns);
  // Tiles [tile_begin, tile_end) of x into the layout that `run` reads.
  void (*pack_x)(const LinearInput&, int64_t tile_begin, int64_t tile_end, float* packed);
  void (*run)(const LinearTask&);
};

struct CpuIsa {
  const char* name;
  int64_t vector_width;  // columns of a panel of weights (CpuLinear)

  LinearKernels linear_float32, linear_bfloat16;
  const LinearKernels& linear(Dtype dtype) const { return dtype == Dtype::kFloat32 ? linear_float32 : linear_bfloat16; }

  void (*embed)(Dtype, const EmbedTask&, int64_t token_begin, int64_t token_end);
  void (*norm)(Dtype, const NormTask&, int64_t row_begin, int64_t row_end);
  // y [rows, width].
  void (*activation)(Dtype, Activation, const void* x, void* y, int64_t width, int64_t row_begin, int64_t row_end);
  void (*rotary)(Dtype, const RotaryTask&, int64_t token_begin, int64_t token_end);
  // x = cap * tanh(x / cap), in place
  void (*soft_cap)(float* x, int64_t count, float cap);

  // y = x * inverse in float8, to nearest, ties to even; what is beyond becomes the largest, NaN stays NaN.
  void (*quantize)(Dtype, const void* x, int64_t count, float inverse, Float8* y);
  void (*attend)(Dtype, const AttentionTask&, const AttentionItem&, float* scratch);
  // Folds the partials of one (query token, head), stored `stride` floats apart, and writes its out.
  void (*combine)(Dtype, const AttentionTask&, int64_t token, int64_t head, const float* partials, int64_t count, int64_t stride,
                  float* scratch);

  // Parts of CpuKernels::mix (mixer.inl): of tokens of a row, of a row, of one of its heads, of tokens of a step.
  void (*mix_tokens)(Dtype, const MixerTask&, const MixerRow&, int64_t token_begin, int64_t token_end);
  void (*keep_inputs)(Dtype, const MixerTask&, const MixerRow&);
  void (*scan_head)(const MixerTask&, const MixerRow&, int64_t head);
  void (*finish_tokens)(Dtype, const MixerTask&, int64_t token_begin, int64_t token_end);

  LogitStats (*logit_stats)(const float* logits, int64_t count);
  // mass[i] = exp((logits[i] - max) / temperature)
  void (*sampling_mass)(const float* logits, int64_t count, float max, float temperature, float* mass);
  // sums[b] = sum of mass over block b of kMassBlock
  void (*block_sums)(const float* mass, int64_t count, double* sums);
};

// Null where the compiler's target has no such instructions; whether this machine does is another question. Ask for AMX
// only where AVX-512 runs: it is made from that.
const CpuIsa* cpu_isa_amx();
const CpuIsa* cpu_isa_avx512();
const CpuIsa* cpu_isa_avx2();
const CpuIsa* cpu_isa_portable();

// Tiles of AMX multiply bytes too. Ask only where cpu_isa_amx runs.
bool has_int8_tiles();

std::vector<std::string> available_cpu_isas();  // best first
// "auto" or one of available_cpu_isas(); throws std::invalid_argument.
const CpuIsa& select_cpu_isa(std::string_view name);

}  // namespace asyncengine
