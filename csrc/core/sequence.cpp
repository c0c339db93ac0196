#include "core/sequence.h"

namespace asyncengine {

std::unique_ptr<Request> make_request(const RequestSpec& spec, int64_t order, uint64_t sequence_number) {
  auto request = std::make_unique<Request>();
  request->id = spec.id;
  request->order = order;
  request->sequence_number = sequence_number;
  request->salt = spec.salt;
  request->prompt_len = static_cast<int32_t>(spec.prompt.size());
  request->max_total = request->prompt_len + spec.max_tokens;
  request->stop_tokens = spec.stop_tokens;
  request->unreleased = spec.n;
  request->queued = true;
  request->sequences = std::vector<Sequence>(static_cast<size_t>(spec.n));
  for (int32_t i = 0; i < spec.n; ++i) {
    Sequence& sequence = request->sequences[static_cast<size_t>(i)];
    sequence.request = request.get();
    sequence.index = i;
    sequence.tokens.reserve(static_cast<size_t>(request->max_total));
    sequence.tokens = spec.prompt;
    sequence.sampling = spec.sampling;
    sequence.sampling.seed += static_cast<uint64_t>(i);
  }
  return request;
}

}  // namespace asyncengine
