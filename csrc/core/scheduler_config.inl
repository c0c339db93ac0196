// The settings of a scheduler.
FIELD(int32_t, num_blocks, 0)
FIELD(int32_t, block_size, 16)
FIELD(int32_t, max_num_seqs, 256)
FIELD(int32_t, max_num_batched_tokens, 2048)
FIELD(int32_t, prefill_chunk_size, 0)  // 0: as many as the step has room for
FIELD(int32_t, max_model_len, 0)
FIELD(bool, prefix_caching, true)
// Sizes of step that the executor has graphs for, ascending. A chunk that does not finish its prompt ends where it
// fills one of them. Empty: any size is as good as another.
FIELD(std::vector<int32_t>, token_buckets, {})
// Budgets of a step: samples (0: one for each sequence), words of slot updates' entries and words of records.
FIELD(int32_t, max_samples, 0)
FIELD(int32_t, max_update_words, 0)
FIELD(int32_t, max_result_words, 0)
FIELD(int32_t, mask_words, 0)       // of a bit per token of the vocabulary; 0: no sequence has masks
FIELD(int32_t, num_host_blocks, 0)  // of a host tier
FIELD(int32_t, num_host_states, 0)  // of that, where layers keep a state
FIELD(StepCosts, costs, {})         // with none known, targets are not heeded
FIELD(ItlTargets, targets, {})
FIELD(int32_t, paced_chunk_size, 0)  // in place of prefill_chunk_size where a target decides; 0: no limit but the step's
FIELD(HybridConfig, hybrid, {})      // needs host blocks
FIELD(int32_t, window, 0)  // tokens that the layers with keys and values see, the most that one does; 0: one sees all
// Groups of layers that see group_window tokens, beside others that see all. Each has a block of its own for every block of
// those, and lets go of blocks that no query sees any more. All blocks come from one pool. 0: one block holds all layers.
FIELD(int32_t, window_groups, 0)
FIELD(int32_t, group_window, 0)
// State slots of layers that keep a state: one for each slot, and behind them those of snapshots. 0: no layer keeps one.
FIELD(int32_t, num_state_slots, 0)
// Tokens between the snapshots of a prompt's states, a multiple of block_size; 0: there is one at its end alone.
FIELD(int32_t, state_snapshot_tokens, 0)
// And of an answer's, of which the newest is kept: the next turn computes fewer tokens of it again.
FIELD(int32_t, answer_snapshot_tokens, 256)
FIELD(int32_t, num_block_events, 0)  // changes of the prefix cache that wait for a reader at most; 0: none is recorded
