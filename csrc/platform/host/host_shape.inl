// The heads of host rows, and how many rows there may be.
FIELD(Dtype, dtype, Dtype::kFloat32)  // of heads and results
FIELD(int32_t, num_slots, 1)
FIELD(int32_t, num_q_heads, 1)
FIELD(int32_t, num_kv_heads, 1)
FIELD(int32_t, head_dim, 2)  // even
