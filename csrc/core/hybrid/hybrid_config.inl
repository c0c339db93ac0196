// The settings of sequences that decode on the host (host_rows.h).
FIELD(int32_t, lanes, 0)  // of each step that has host rows; 0: nobody decodes on the host
FIELD(int32_t, layers, 0)  // that attend
FIELD(int32_t, workers, 1)  // threads that attend
FIELD(double, attend_ns, 0.0)  // of one worker, for a token of context in a layer; 0: not known
FIELD(double, exchange_ns, 0.0)  // time that lanes add to a step beside their tokens
FIELD(double, min_gain, 0.05)  // of throughput, as predicted: for less nobody is moved to the host
FIELD(int32_t, max_rows, 0)  // sequences on the host at most; 0: as many as keep the workers busy
FIELD(int64_t, host_tokens, 0)  // that the host's pool has room for, when the gain is predicted; 0: for all
FIELD(int64_t, job_timeout_ns, 10'000'000'000)  // of attention of a row in a layer: the row's request fails
