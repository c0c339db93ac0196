"""The keywords of an engine's constructor, for type checkers and editors."""

from __future__ import annotations

from typing import Literal, TypedDict


class EngineOptions(TypedDict, total=False):
    """The fields of EngineConfig but ``model``, which says what they mean. A test holds both equal."""

    tokenizer: str | None
    skip_tokenizer_init: bool
    revision: str | None
    chat_template: str | None
    sandbox: bool
    sandbox_timeout_s: float
    load_format: Literal["auto", "safetensors", "dummy"]
    dtype: Literal["auto", "float32", "float16", "bfloat16"]
    model_impl: Literal["auto", "native", "transformers"]
    trust_remote_code: bool
    quantization: Literal["none", "fp8", "int8", "int4"]
    head_quantization: Literal["none", "int8", "fp8"]
    measure_quantization: bool
    device: str
    data_parallel_size: int
    tensor_parallel_size: int
    seed: int
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    prefill_chunk_size: int | None
    target_itl_ms: float | None
    target_itl_ms_by_priority: str | None
    max_logprobs: int
    max_queued_requests: int
    max_queued_tokens: int
    max_queued_characters: int
    priority_ageing_s: float
    fair_share_s: float
    block_size: int
    kv_cache_memory_bytes: int | None
    gpu_memory_utilization: float
    kv_cache_dtype: Literal["auto", "fp8"]
    state_dtype: Literal["float32", "bfloat16"]
    state_snapshot_tokens: int | None
    num_kv_blocks: int | None
    window_groups: bool
    enable_prefix_caching: bool
    kv_events: bool
    host_kv_memory_bytes: int | None
    disk_kv_path: str | None
    disk_kv_bytes: int
    hybrid_attention: Literal["off", "auto", "always"]
    hybrid_form: Literal["auto", "workers", "link", "both"]
    hybrid_workers: int | None
    hybrid_lanes: int | None
    steps_in_flight: int
    late_launch: bool
    step_timeout_s: float
    step_driver: Literal["thread", "loop"]
    cpu_affinity: int | None
    staging: Literal["pageable", "pinned", "mapped", "ahead"]
    enforce_eager: bool
    programmatic_launch: bool
    l2_cache_hints: bool
    tune_linear: bool
    compile_processes: bool
    batch_invariant: bool
    cpu_threads: int | None
    prefill_attention: Literal["native", "sdpa"]
    fast_prefill: bool
