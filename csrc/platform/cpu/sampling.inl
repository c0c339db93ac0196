// Passes over one row of logits.
namespace asyncengine {
namespace {

LogitStats isa_logit_stats(const float* logits, int64_t count) {
  const float inf = __builtin_inff();
  Vec high = splat(-inf), low = splat(inf);
  IVec bad{};
  for_each_vector(count, [&](int64_t i, int64_t elements) __attribute__((always_inline)) {
    Vec v = load_elements(logits + i, elements);
    if (elements != kWidth) v = element_index() < static_cast<int32_t>(elements) ? v : splat(-inf);
    bad = bad | ((v < inf) == 0);  // +inf and NaN; -inf is a probability of zero
    high = max(v, high);
    low = (v > -inf) & (v < low) ? v : low;
  });
  int32_t any_bad = 0;
  for (int i = 0; i < kWidth; ++i) any_bad |= bad[i];
  LogitStats stats{reduce_max(high), -reduce_max(-low), 0, any_bad == 0};
  if (!(stats.max > -inf)) stats.valid = false;
  if (!stats.valid) return stats;
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) {
    const IVec equal = load(logits + i) == stats.max;
    int32_t found = 0;
    for (int e = 0; e < kWidth; ++e) found |= equal[e];
    if (found != 0) break;
  }
  while (logits[i] != stats.max) ++i;
  stats.argmax = i;
  return stats;
}

void isa_sampling_mass(const float* logits, int64_t count, float maximum, float temperature, float* mass) {
  for_each_vector(count, [&](int64_t i, int64_t elements) __attribute__((always_inline)) {
    store_elements(mass + i, exp((load_elements(logits + i, elements) - maximum) / temperature), elements);
  });
}

void isa_block_sums(const float* mass, int64_t count, double* sums) {
  for (int64_t begin = 0, block = 0; begin < count; begin += kMassBlock, ++block) {
    const int64_t n = count - begin < kMassBlock ? count - begin : kMassBlock;
    Vec sum{};
    for_each_vector(n, [&](int64_t i, int64_t elements)
                           __attribute__((always_inline)) { sum = sum + load_elements(mass + begin + i, elements); });
    sums[block] = static_cast<double>(reduce_add(sum));
  }
}

}  // namespace
}  // namespace asyncengine
