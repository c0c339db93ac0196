"""EngineConfig: one frozen object, validated once. Its fields are the CLI's flags with underscores."""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from dataclasses import dataclass
from types import UnionType
from typing import Any, Literal, Self, Union, get_args, get_origin, get_type_hints

from asyncengine.errors import ConfigError
from asyncengine.machine import num_cores, total_memory

_BLOCKS_AND_TOKENS = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "prefill_chunk_size", "num_kv_blocks")
_QUEUED = ("max_queued_requests", "max_queued_tokens", "max_queued_characters")
_HIGHEST = {
    **dict.fromkeys(("block_size", *_BLOCKS_AND_TOKENS), 2**31 - 1),
    **dict.fromkeys((*_QUEUED, "kv_cache_memory_bytes", "host_kv_memory_bytes", "disk_kv_bytes"), 2**63 - 1),
    "seed": 2**64 - 1,
    **dict.fromkeys(("cpu_threads", "hybrid_workers"), 4096),
    "data_parallel_size": 64,
    "tensor_parallel_size": 64,
}
"""Highest values of integer fields: the core's and torch's integers end there, and no machine has more cores than the
limit of threads."""
_DEVICE = re.compile(r"auto|cpu|cuda(:(0|[1-9][0-9]{0,3}))?")
_MOST_DEFAULT_LANES = 8
_FASTEST_CARDS = ("H100", "H200", "H800", "B100", "B200", "B300")
"""By what their names contain: 3 TB/s of memory and more."""


def check_types(config: object) -> None:
    """Raises ConfigError unless every field of a dataclass holds what its annotation says."""
    for field, hint in get_type_hints(type(config)).items():
        _check_type(field, getattr(config, field), hint)


def _check_type(field: str, value: Any, hint: Any) -> None:
    options = get_args(hint) if get_origin(hint) in (Literal, Union, UnionType) else ()
    if get_origin(hint) is Literal:
        if value not in options:
            raise ConfigError(f"{field} must be one of {', '.join(options)}, got {value!r}")
        return
    allowed = tuple(get_origin(option) or option for option in options or (hint,))
    if bool not in allowed and isinstance(value, bool):
        raise ConfigError(f"{field} must not be a boolean, got {value!r}")
    if float in allowed:
        allowed = (*allowed, int)
    if not isinstance(value, allowed):
        wanted = " or ".join(t.__name__ for t in allowed)
        raise ConfigError(f"{field} must be {wanted}, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything that shapes an engine. Unknown keywords and wrong values raise ConfigError."""

    model: str
    """Directory in Hugging Face layout, or a hub id."""
    tokenizer: str | None = None
    """Directory or hub id of the tokenizer; None: the model's."""
    skip_tokenizer_init: bool = False
    """Load no tokenizer: requests bring token ids and get token ids, and no text. In a program tokenizer="none" says
    the same."""
    revision: str | None = None
    """Branch, tag or commit of the model on the hub."""
    chat_template: str | None = None
    """Path of a Jinja file that replaces the model's chat template, or the name of one of the model's templates, as
    files of additional_chat_templates/ have them."""
    sandbox: bool = True
    """Render chat templates, tokenize by rules that are not known to be quick, and try grammars of requests, in
    processes of their own, which can be ended; off: in this process, for models whose author is trusted not to hold it
    up, and requests that are trusted to bring no grammar that fills the memory."""
    sandbox_timeout_s: float = 5.0
    """A request whose template or tokenizer takes longer in that process is refused."""
    load_format: Literal["auto", "safetensors", "dummy"] = "auto"
    """dummy fills the model with random weights from config.json alone."""
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    """Type of weights and activations. auto takes the checkpoint's own, float16 becoming float32 on the CPU, and
    bfloat16 where layers are quantised. float16 is for GPUs, whose kernels for few rows are faster in bfloat16."""
    model_impl: Literal["auto", "native", "transformers"] = "auto"
    """Code that computes the model. native is asyncengine's own, for the families that it has. transformers runs the
    modules of the transformers library over this engine's attention, cache and projections: more families, slower.
    auto is native where there is such code."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model, with all that this process may do. It is for architectures that
    neither asyncengine nor transformers has."""
    quantization: Literal["none", "fp8", "int8", "int4"] = "none"
    """Rounding of layers at load. int8 and int4 round weights in groups of 128 columns; inputs stay as they are. fp8,
    on a GPU, gives weights a scale for each output channel, and rounds activations row by row, for families with RMS
    norms before the blocks and SiLU, as Llama, Mistral, Qwen and Phi, in bfloat16."""
    head_quantization: Literal["none", "int8", "fp8"] = "none"
    """Rounding of the head at load. Whatever the layers are, weights take 8 bits in groups of 128 columns, and inputs
    stay as they are. An embedding that the head is tied to stays as it is, beside a head of its own."""
    measure_quantization: bool = False
    """Run a text through the model before it is loaded, and log by how much rounding changes the results of its
    layers: some seconds on a GPU, minutes for a large model on the CPU. Needs quantization."""
    device: str = "auto"
    """Device that runs the model. It is cpu, or a GPU by its number, as in cuda:1; cuda is cuda:0. auto takes cuda:0 if
    there is a GPU."""
    data_parallel_size: int = 1
    """Engines in this process, each with the whole model on a device of its own. GPUs are taken from the one that
    ``device`` names upwards; on the CPU the engines share the cores. Sizes are those of each engine; limits
    of the queue are those of all engines together."""
    tensor_parallel_size: int = 1
    """Devices that hold the model together: each has a part of its heads, of its feed-forward blocks and of the KV
    cache. GPUs are taken from the one that ``device`` names upwards, and must reach each other's memory; on the CPU the
    ranks share the cores. Sizes in bytes are those of all together."""
    seed: int = 0
    """Seed of dummy weights and of the seeds drawn for requests that bring none."""

    max_model_len: int | None = None
    """Context in tokens, prompt and output together. None: the model's own."""
    max_num_seqs: int = 256
    """Sequences that run at once."""
    max_num_batched_tokens: int = 2048
    """Tokens in one step: decode rows first, then prefill."""
    prefill_chunk_size: int | None = 512
    """Prompt tokens that one sequence computes in one step at most; None: as many as the step has room for.
    Small chunks keep the inter-token latency of running streams even."""
    target_itl_ms: float | None = None
    """Milliseconds between tokens to aim at. Beside running streams, chunks of prompts are as large as measured costs
    say fits into a step of that time, and the default prefill_chunk_size does not count. None: no target."""
    target_itl_ms_by_priority: str | None = None
    """Targets of priority classes, as in 0=20,1=50; others have target_itl_ms. The strictest of the running streams'
    counts."""
    max_logprobs: int = 20
    """Tokens at each place, beside the chosen one, that a request may have log probabilities of; at most 128."""
    max_queued_requests: int = 4096
    max_queued_tokens: int = 4_194_304
    """Prompt tokens that wait at most, over all requests; a longer prompt waits alone."""
    max_queued_characters: int = 67_108_864
    """Characters that wait to be tokenized at most, over all requests; a longer prompt waits alone."""
    priority_ageing_s: float = 30.0
    """Seconds of waiting that outweigh one priority class, so that nothing starves."""
    fair_share_s: float = 1.0
    """Seconds by which each live sequence of a client puts back that client's next request in favour of others'. While
    several clients have requests, each has an equal share of max_num_seqs and of the KV blocks, and a client that holds
    more gives some back to those that wait. 0 turns both off: all are served in the order of their arrival."""

    block_size: int = 16
    """Tokens per KV block, a multiple of 16."""
    kv_cache_memory_bytes: int | None = None
    """Memory of the KV cache. None: as much as max_num_seqs sequences of max_model_len can use; on the CPU at most 4
    GiB, on a GPU within gpu_memory_utilization."""
    gpu_memory_utilization: float = 0.9
    """Share of the GPU's memory to take."""
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """Type of keys and values. auto takes the model's dtype. fp8 keeps them in float8 (e4m3), with a scale for each KV
    head of a layer: twice the tokens of bfloat16 in the same memory, four times those of float32. Scales are fixed when
    the model is loaded: the checkpoint's, or such that keys and values of a fixed prompt of random tokens have room to
    be twice as large. Latents have scales of the latter kind. A GPU needs compute capability 8.9 or newer."""
    state_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of recurrent states. Mamba-2 and gated DeltaNet have them. bfloat16 takes half the memory, and every token
    rounds the state to it."""
    state_snapshot_tokens: int | None = None
    """Tokens between the states that the prefix cache keeps of a long prompt, rounded up to whole blocks. It also
    keeps one at the end of each prompt, and one of each answer, at most 256 tokens before its end. None: the least
    power of two, not below a chunk of a prompt, at which they take an eighth of the memory of the prompt's keys and
    values. 0: none within a prompt. All snapshots take an eighth of the memory beside the weights at most."""
    num_kv_blocks: int | None = None
    """Count of KV blocks; overrides kv_cache_memory_bytes."""
    window_groups: bool = True
    """Layers with a window beside layers that see all have blocks of their own, and give back those behind the window.
    off: every layer keeps all tokens. So it is with a host tier, over ranks, beside layers with a state, and where
    layers have keys and values of different sizes."""
    enable_prefix_caching: bool = True
    kv_events: bool = False
    """Record which blocks the prefix cache gains and loses, for AsyncEngine.block_changes. Needs
    enable_prefix_caching."""
    host_kv_memory_bytes: int | None = None
    """Host memory for KV blocks that the cache evicts. It is pinned for a GPU. Blocks come back when a prompt, or a
    sequence that was preempted, asks for them. At most a quarter of it has states, for layers that keep some, which go
    and come with their blocks; of models that have states alone, three quarters. None: no host tier. Needs
    enable_prefix_caching."""
    disk_kv_path: str | None = None
    """Directory to which the host tier's blocks are written, and from where they come back, also after a restart. It
    holds what users wrote: files are readable to this user alone. None: no disk tier. Needs host_kv_memory_bytes."""
    disk_kv_bytes: int = 64 << 30
    """Size of that directory for this model; the blocks that were used least recently go first."""
    hybrid_attention: Literal["off", "auto", "always"] = "off"
    """Let sequences for which the cache has no room decode with their keys and values on the host, where threads attend
    for them. auto: on a GPU, where measured costs predict 5% more throughput, and targets allow it. always: whatever
    they predict. Needs host_kv_memory_bytes."""
    hybrid_form: Literal["auto", "workers", "link", "both"] = "auto"
    """Attention for these sequences is computed by threads (workers), by a kernel of the GPU that reads the host's
    memory over the link (link), or by both. auto is both on a GPU, where threads alone make fewer tokens and cost the
    GPU's rows less; on the CPU it is threads."""
    hybrid_workers: int | None = None
    """Threads that attend on the host; None: the cores this process may use but two."""
    hybrid_lanes: int | None = None
    """Rows of a step that sequences on the host share, of which each may have one at every layer. More make more tokens
    of theirs where contexts are short or steps long, and cost the others a little. None: 8, or 4 on GPUs of the fastest
    memory with 16-bit keys and values, whose steps are so short that more are seldom filled."""
    steps_in_flight: int = 2
    """2 hides the CPU's work behind the executor's; 1 is the serial engine to compare with."""
    late_launch: bool = True
    """On a GPU, the step thread plans a step just before the running one ends, so that what arrives meanwhile is in it;
    off: as soon as the running one begins."""
    step_timeout_s: float = 600.0
    """A step that takes longer counts as hung: the engine dies with EngineDeadError."""
    step_driver: Literal["thread", "loop"] = "thread"
    """The steps run in a native thread, or in the event loop, to measure the gain from the thread."""
    cpu_affinity: int | None = None
    """Core that the step thread is pinned to; None: any."""
    staging: Literal["pageable", "pinned", "mapped", "ahead"] = "ahead"
    """A step's input reaches the GPU in one of four ways: copied from plain or pinned memory, read in mapped memory by
    the first kernel, or copied from pinned memory while the step before still runs."""
    enforce_eager: bool = False
    """Run kernels one by one in place of captured graphs, for debugging: same results, slower."""
    programmatic_launch: bool = True
    """On a GPU that can, let a step's kernels start while the ones before them still run."""
    l2_cache_hints: bool = True
    """On a Hopper GPU, have keys and values, which a step reads once, leave the L2 cache first, and activations, which
    many programs read, last. Sequences that share most of a long prompt may be faster without."""
    tune_linear: bool = True
    """On a GPU, at the first start of a model, measure for up to half a minute which kernels multiply fastest where no
    table of plans says it, and keep that in the cache directory; off: cuBLAS there. Never done with batch_invariant or
    without programmatic_launch."""
    compile_processes: bool = True
    """On a GPU, have processes compile the kernels that Triton's cache lacks, which end when the model is loaded; off:
    threads, which takes longer."""
    batch_invariant: bool = False
    """On a GPU, compute every row the same way whatever else is in the batch."""
    cpu_threads: int | None = None
    """Threads that compute in a step, or at start compile a GPU's kernels, and as many processes; None: the cores this
    process may use."""
    prefill_attention: Literal["native", "sdpa"] = "native"
    """CPU prefill. native is bit-exact whatever the chunking; sdpa is torch's scaled_dot_product_attention."""
    fast_prefill: bool = True
    """On the CPU, layers that share keys and values with earlier ones compute only those tokens of a prompt whose
    logits are wanted; off: all tokens."""

    def __post_init__(self) -> None:
        check_types(self)
        if not _DEVICE.fullmatch(self.device):
            raise ConfigError(f"device must be auto, cpu, cuda or cuda:NUMBER, got {self.device!r}")
        for field in ("max_num_seqs", "max_num_batched_tokens", "data_parallel_size", "tensor_parallel_size", *_QUEUED):
            self._at_least(field, 1)
        for field in (
            "max_model_len",
            "prefill_chunk_size",
            "num_kv_blocks",
            "kv_cache_memory_bytes",
            "host_kv_memory_bytes",
            "cpu_threads",
            "hybrid_workers",
        ):
            if getattr(self, field) is not None:
                self._at_least(field, 1)
        for field, high in _HIGHEST.items():
            if (getattr(self, field) or 0) > high:
                raise ConfigError(f"{field} must be at most {high}")
        if self.quantization == "fp8" and (self.device == "cpu" or self.dtype == "float32"):
            wrong = "device=cpu" if self.device == "cpu" else "dtype=float32"
            raise ConfigError(f"quantization={self.quantization} needs a GPU and dtype=bfloat16, got {wrong}")
        if self.measure_quantization and self.quantization == "none":
            raise ConfigError("measure_quantization needs quantization: nothing is rounded without it")
        if self.dtype == "float16" and self.device == "cpu":
            raise ConfigError("dtype=float16 needs a GPU, got device=cpu: take bfloat16 or float32")
        if self.host_kv_memory_bytes is not None and not self.enable_prefix_caching:
            raise ConfigError("host_kv_memory_bytes needs enable_prefix_caching: its blocks are found as prefixes")
        if self.kv_events and not self.enable_prefix_caching:
            raise ConfigError("kv_events needs enable_prefix_caching: without it there are none")
        if self.disk_kv_path is not None and self.host_kv_memory_bytes is None:
            raise ConfigError("disk_kv_path needs host_kv_memory_bytes: blocks go to the disk from the host tier")
        if (self.host_kv_memory_bytes or 0) * self.data_parallel_size > total_memory():
            engines = f" of {self.data_parallel_size} engines" if self.data_parallel_size > 1 else ""
            raise ConfigError(
                f"host_kv_memory_bytes ({self.host_kv_memory_bytes:,}){engines} is more than this machine's memory of "
                f"{total_memory():,} bytes"
            )
        if self.disk_kv_path is not None and (not self.disk_kv_path or "\0" in self.disk_kv_path):
            raise ConfigError(f"disk_kv_path must be the path of a directory, got {self.disk_kv_path!r}")
        self._at_least("disk_kv_bytes", 1)
        if self.hybrid_attention != "off" and self.host_kv_memory_bytes is None:
            raise ConfigError("hybrid_attention needs host_kv_memory_bytes: sequences decode in the host tier")
        most_lanes = _MOST_DEFAULT_LANES if self.hybrid_lanes is None else self.hybrid_lanes
        if self.hybrid_attention != "off" and self.max_num_batched_tokens < self.max_num_seqs + most_lanes:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}) and hybrid_lanes ({most_lanes}) together"
            )
        if self.tensor_parallel_size > 1 and self.hybrid_attention != "off":
            raise ConfigError("hybrid_attention needs tensor_parallel_size=1: sequences decode on the host whole")
        if self.hybrid_form in ("link", "both") and self.device == "cpu":
            raise ConfigError(f"hybrid_form={self.hybrid_form} needs a GPU, got device=cpu")
        if not 1 <= most_lanes <= 64:
            raise ConfigError(f"hybrid_lanes must be in [1, 64], got {self.hybrid_lanes}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}): every running sequence decodes in every step"
            )
        if self.target_itl_ms is not None and not 0 < self.target_itl_ms <= 1e6:
            raise ConfigError(f"target_itl_ms must be in (0, 1e6] milliseconds, got {self.target_itl_ms}")
        _ = self.itl_targets_by_priority  # raises
        if not 0 <= self.max_logprobs <= 128:
            raise ConfigError(f"max_logprobs must be in [0, 128], got {self.max_logprobs}")
        if self.block_size < 16 or self.block_size % 16:
            raise ConfigError(f"block_size must be a multiple of 16, got {self.block_size}")
        if not 0 <= (self.state_snapshot_tokens or 0) <= 1 << 24:
            raise ConfigError(f"state_snapshot_tokens must be in [0, 2^24], got {self.state_snapshot_tokens}")
        if not 1 <= self.steps_in_flight <= 8:
            raise ConfigError(f"steps_in_flight must be in [1, 8], got {self.steps_in_flight}")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization}")
        if self.cpu_affinity is not None:
            cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
            if self.cpu_affinity not in cores:
                raise ConfigError(f"cpu_affinity must be a core that this process may use, got {self.cpu_affinity}")
        if self.tokenizer == "none":
            object.__setattr__(self, "tokenizer", None)
            object.__setattr__(self, "skip_tokenizer_init", True)
        for field in ("priority_ageing_s", "step_timeout_s", "sandbox_timeout_s"):
            if not 0 < getattr(self, field) <= 1e6:
                raise ConfigError(f"{field} must be in (0, 1e6] seconds, got {getattr(self, field)}")
        if not 0 <= self.fair_share_s <= 1000:
            raise ConfigError(f"fair_share_s must be in [0, 1000] seconds, got {self.fair_share_s}")

    @classmethod
    def from_kwargs(cls, model: str, kwargs: dict[str, Any]) -> Self:
        """Build from keywords as users type them; an unknown one raises ConfigError with the nearest name."""
        names = [f.name for f in dataclasses.fields(cls) if f.name != "model"]
        for key in kwargs:
            if key not in names:
                near = difflib.get_close_matches(key, names, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ConfigError(f"unknown configuration keyword {key!r}{hint}")
        return cls(model=model, **kwargs)

    @property
    def device_index(self) -> int:
        """The number of the GPU that ``device`` names; 0 if it names none."""
        return int(self.device.partition(":")[2] or 0)

    @property
    def num_threads(self) -> int:
        """``cpu_threads`` resolved."""
        if self.cpu_threads is not None:
            return self.cpu_threads
        return num_cores()

    def hybrid_form_on(self, device: str) -> Literal["workers", "link", "both"]:
        """``hybrid_form`` resolved; ``device`` is ModelInfo.device."""
        return ("workers" if device == "cpu" else "both") if self.hybrid_form == "auto" else self.hybrid_form

    @property
    def num_hybrid_workers(self) -> int:
        """``hybrid_workers`` resolved, 0 if the link attends alone; two cores are left to others."""
        return 0 if self.hybrid_form == "link" else self.hybrid_workers or max(1, num_cores() - 2)

    def hybrid_lanes_on(self, device: str) -> int:
        """``hybrid_lanes`` resolved; ``device`` is ModelInfo.device."""
        short_steps = self.kv_cache_dtype == "auto" and any(card in device for card in _FASTEST_CARDS)
        return self.hybrid_lanes or (4 if short_steps else _MOST_DEFAULT_LANES)

    @property
    def itl_targets_by_priority(self) -> dict[int, float]:
        """``target_itl_ms_by_priority`` as milliseconds by priority."""
        text = self.target_itl_ms_by_priority
        targets: dict[int, float] = {}
        try:
            for entry in filter(None, (text or "").split(",")):
                priority, ms = entry.split("=")
                targets[int(priority)] = float(ms)
        except ValueError:
            raise ConfigError(f"target_itl_ms_by_priority must be like 0=20,1=50, got {text!r}") from None
        if wrong := [ms for ms in targets.values() if not 0 < ms <= 1e6]:
            raise ConfigError(f"target_itl_ms_by_priority must have milliseconds in (0, 1e6], got {wrong[0]}")
        if wrong_classes := [priority for priority in targets if not -(2**31) <= priority < 2**31]:
            raise ConfigError(f"target_itl_ms_by_priority must have priorities of 32 bits, got {wrong_classes[0]}")
        return targets

    @property
    def float8_cache(self) -> bool:
        """True if keys and values are in float8."""
        return self.kv_cache_dtype == "fp8"

    @property
    def needs_costs(self) -> bool:
        """True if the engine needs predictions of how long a step takes."""
        targets = self.target_itl_ms is not None or bool(self.itl_targets_by_priority)
        return targets or self.host_kv_memory_bytes is not None

    def _at_least(self, field: str, low: int) -> None:
        if getattr(self, field) < low:
            raise ConfigError(f"{field} must be at least {low}, got {getattr(self, field)}")
