// A request as it is submitted.
FIELD(uint64_t, id, 0)
FIELD(std::vector<int32_t>, prompt, {})
FIELD(int32_t, n, 1)
FIELD(int32_t, max_tokens, 0)  // at least 1
FIELD(int32_t, priority, 0)    // smaller runs sooner
FIELD(uint64_t, salt, 0)
FIELD(SamplingState, sampling, {})  // sequence i samples with seed + i
FIELD(std::vector<int32_t>, stop_tokens, {})
FIELD(int64_t, delay_ns, 0)    // it is served as if it had arrived so much later
FIELD(bool, reserved, false)   // it may take of what the queue's limits keep back for such requests
FIELD(uint64_t, tenant, 0)     // which shares slots and blocks with others (tenants.h); 0: none
FIELD(RequestExtras, extras, {})
