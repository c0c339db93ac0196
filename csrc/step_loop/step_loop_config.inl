// The settings of a step loop.
FIELD(SchedulerConfig, scheduler, {})
FIELD(int32_t, steps_in_flight, 2)
FIELD(int64_t, max_queued_requests, 4096)
FIELD(int64_t, max_queued_tokens, 4194304)  // of prompts
FIELD(Seconds, priority_ageing_s, Seconds(30))
FIELD(Seconds, step_timeout_s, Seconds(600))
// Plan a step shortly before the ones in flight are over, so that what arrives meanwhile is in it. Off: as soon as there
// is room in flight, as with an executor whose steps cannot be foreseen.
FIELD(bool, late_launch, false)
// A directory for blocks behind the host tier; empty: none. The fingerprint is of all that keys and values depend on.
FIELD(std::string, disk_path, {})
FIELD(std::string, fingerprint, {})
FIELD(int64_t, disk_bytes, 0)
