// Needs of a request beyond one token a step. The defaults cost nothing.
FIELD(Needs, needs, 0)              // beyond those of its SamplingState
FIELD(EntryWords, entries, {})      // EntryKind, for its slot whenever that is filled (step_input.h)
FIELD(bool, history, false)         // the slot also gets its tokens so far, as an entry
FIELD(int32_t, result_words, 0)     // of records, for each sample
FIELD(int32_t, score_from, -1)      // prompt tokens from this one on are sampled too, for records; -1: none
FIELD(int32_t, tokens_per_step, 1)  // that a decode step may append
FIELD(MaskChannels, masks, {})      // one for each sequence, or none
