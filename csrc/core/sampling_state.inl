// Sampling state of one slot, sent once when the slot is filled.
FIELD(float, temperature, 0.f)  // 0: greedy
FIELD(float, top_p, 1.f)
FIELD(float, min_p, 0.f)
FIELD(int32_t, top_k, 0)  // 0: all
FIELD(uint64_t, seed, 0)
