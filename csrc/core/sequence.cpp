#include "core/sequence.h"

#include <algorithm>

namespace asyncengine {

std::unique_ptr<Request> make_request(const RequestSpec& spec, int64_t order, uint64_t sequence_number, int32_t block_size,
                                      Tenant* tenant) {
  auto request = std::make_unique<Request>();
  request->id = spec.id;
  request->order = order;
  request->sequence_number = sequence_number;
  request->salt = spec.salt;
  request->tenant = tenant;
  request->priority = spec.priority;
  request->prompt_len = static_cast<int32_t>(spec.prompt.size());
  request->stop_tokens = spec.stop_tokens;
  request->extras = spec.extras;
  request->unreleased = spec.n;
  request->queued = true;
  request->sequences = std::vector<Sequence>(static_cast<size_t>(spec.n));
  for (int32_t i = 0; i < spec.n; ++i) {
    Sequence& sequence = request->sequences[static_cast<size_t>(i)];
    sequence.request = request.get();
    sequence.index = i;
    sequence.max_total = request->prompt_len + spec.max_tokens;
    const int32_t shared = i == 0 ? 0 : request->prompt_len / block_size * block_size;
    sequence.tokens = Tokens(spec.prompt, sequence.max_total, i == 0 ? nullptr : &request->sequences[0].tokens, shared);
    sequence.num_stops = static_cast<int32_t>(spec.stop_tokens.size());
    std::copy_n(spec.stop_tokens.begin(), std::min(sequence.num_stops, Sequence::kInlineStops), sequence.stops);
    sequence.sampling = spec.sampling;
    sequence.needs = spec.needs();
    if (!request->extras.masks.empty()) {
      sequence.masks = request->extras.masks[static_cast<size_t>(i)].get();
      sequence.masks->sequence = &sequence;
    }
    sequence.sampling.seed += static_cast<uint64_t>(i);
  }
  return request;
}

}  // namespace asyncengine
