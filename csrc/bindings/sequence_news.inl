// News of a sequence since the last delivery. Times are those of time.monotonic_ns().
FIELD(uint64_t, request, 0)  // the request's id
FIELD(int32_t, index, 0)  // of the sequence among the n of its request
FIELD(py::list, tokens, py::list())  // sampled since the last news
FIELD(FinishReason, finish, FinishReason::kNone)
FIELD(int64_t, first_ns, 0)  // when the first of this news came about
FIELD(int64_t, last_ns, 0)  // when the last of it did
FIELD(int64_t, scheduled_ns, 0)  // when the request first ran
FIELD(int32_t, cached_tokens, 0)  // of the prompt, found in the prefix cache
FIELD(py::tuple, logprobs, py::tuple())  // payloads of kLogprobs records, one for each of the tokens that has one
FIELD(py::tuple, records, py::tuple())  // the other Records, mostly none
FIELD(int32_t, host_tokens, 0)  // of the tokens, those made while the sequence decoded on the host
