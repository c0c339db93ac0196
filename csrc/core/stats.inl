// The statistics of a step loop, one a line: the struct, its published copy and Python's snapshot come from this list. Names
// are those of asyncengine.EngineStats where it has them. A value is a count of now, or a sum since the start.

// The scheduler's.
STAT(num_requests_running)  // sequences that have a slot
STAT(num_requests_waiting)  // sequences in the queue; at least queued_requests
STAT(num_host_rows)         // of these, those that decode on the host, or are on their way
STAT(host_row_tokens)       // sum: of generation_tokens, those of host rows
STAT(moved_to_host)         // sum: sequences that went on decoding on the host
STAT(moved_from_host)       // sum: sequences that went back to the device
STAT(host_attention_ns)      // sum: that those who attend on the host took for it, each for itself
STAT(host_attention_tokens)  // sum: of context that they saw, in a layer each
STAT(failed_host_rows)      // sum: sequences whose attention on the host failed
STAT(num_preemptions)       // sum
STAT(prefix_cache_queries)  // sum: prompt tokens looked up in the prefix cache
STAT(prefix_cache_hits)     // sum: prompt tokens found there
STAT(prompt_tokens)         // sum
STAT(generation_tokens)     // sum
STAT(num_kv_blocks)
STAT(num_free_blocks)       // blocks that no sequence holds
STAT(num_free_slots)
STAT(cached_blocks)         // free blocks that a prompt may find
STAT(block_references)      // of all blocks
STAT(num_snapshots)         // room for snapshots of states; 0 for layers that keep none
STAT(cached_snapshots)      // of these, those that a prompt may find
STAT(pinned_snapshots)      // of these, those that a step writes or siblings wait for
STAT(kept_states)           // sum: states of sequences that gave way that were copied for when they go on
STAT(resumed_states)        // sum: of these, those that they went on with
STAT(state_snapshot_tokens)  // of a prompt between two of them; 0: there is none within a prompt
STAT(num_host_snapshots)    // room for snapshots on the host; 0: there is none
STAT(cached_host_snapshots)  // of these, those that a prompt may find
STAT(pinned_host_snapshots)  // of these, those that are copied
STAT(snapshots_to_host)     // sum
STAT(snapshots_from_host)   // sum
STAT(num_host_blocks)       // of the host tier; 0: there is none
STAT(host_cached_blocks)    // of these, those that a prompt may find, or that are copies of the device's
STAT(blocks_to_host)        // sum
STAT(blocks_from_host)      // sum
STAT(failed_transfers)      // sum: copies between the two that came to nothing
STAT(blocks_to_disk)        // sum
STAT(blocks_from_disk)      // sum
STAT(kv_events_lost)        // sum: changes of the prefix cache that found no room
STAT(failed_disk_transfers)  // sum: reads and writes that came to nothing

// The step thread's.
STAT(num_steps)             // sum: steps launched
STAT(num_steps_in_flight)   // as many staging buffers are leased
STAT(num_late_launches)     // sum: steps held back until nothing was left to do for the device, or as good as nothing
STAT(failed_steps)          // sum
STAT(decode_cost_ppm)       // StepCosts::Factors, in millionths
STAT(rest_cost_ppm)
STAT(attention_cost_ppm)
STAT(hybrid_cost_ppm)

// The event loop's.
STAT(queued_requests)       // submitted and not yet scheduled
STAT(queued_tokens)         // their prompts'
STAT(live_requests)         // requests in memory
