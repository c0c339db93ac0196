"""The native core. Addresses are ``Tensor.data_ptr()``; strides count elements.

Calls that compute release the GIL.
"""

import enum
from collections.abc import Callable, Sequence
from typing import ClassVar, Final, NamedTuple

import numpy as np
import numpy.typing as npt

# ---- enums, layouts and parameters that csrc/core/ defines ----

class Need(enum.IntFlag):
    """Parts of the sampler that the rows of a step need, as bits; 0 is argmax."""

    temperature = 1
    filters = 2
    penalties = 4
    bias = 8
    logprobs = 16
    mask = 32
    drafts = 64  # several tokens a step, verified on the device
    vector = 128  # a record of the hidden state
    mean = 256  # beside vector: of the mean over the prompt, which is computed whole; of any of a step's rows
    logits = 512  # beside mask: a record of the logits where the mask is missing

class EntryKind(enum.IntEnum):
    """Kinds of the entries that a slot is filled with."""

    token_history = 1
    bias = 2
    banned_words = 3
    grammar = 4
    adapter = 5
    parameters = 6
    end_tokens = 7
    allowed_tokens = 8
    named_tokens = 9

class RecordKind(enum.IntEnum):
    logprobs = 1
    """Rank of the token, then pairs of a token and the bits of its log probability: the chosen, top and named ones."""
    vector = 2  # bits of float32 numbers
    logits = 3  # float32 [vocabulary], after penalties, biases and bans

class FinishReason(enum.IntEnum):
    none = 0
    stop = 1
    length = 2
    aborted = 3
    failed = 4  # the logits of the sequence were not finite
    step_failed = 5  # a step that the sequence was part of failed

STEP_INPUT_LAYOUT: dict[str, int]
"""csrc/core/step_input.h by name: "magic", "max_stops", "flag.NAME", and in 32-bit words the size "TYPE_words" of each
structure and the offset "TYPE.FIELD" of each field. TYPE: header, row, copy, update."""

class SamplingState:
    """Sampling settings of a sequence (csrc/core/sampling_state.inl). temperature 0 is argmax; top_k 0 keeps all."""

    def __init__(
        self, *, temperature: float = 0.0, top_p: float = 1.0, min_p: float = 0.0, top_k: int = 0, seed: int = 0
    ) -> None: ...
    temperature: Final[float]
    top_p: Final[float]
    min_p: Final[float]
    top_k: Final[int]
    seed: Final[int]
    needs: Final[int]  # bits of Need

class RequestExtras:
    """Requirements of a request beyond one token a step (csrc/core/request_extras.inl); the defaults cost nothing.

    entries: (EntryKind, int32 words). A wrong kind or length raises ValueError."""

    def __init__(
        self, *, needs: int = 0, entries: Sequence[tuple[int, Sequence[int]]] = (), history: bool = False,
        result_words: int = 0, score_from: int = -1, tokens_per_step: int = 1, masks: Sequence[MaskChannel] = (),
    ) -> None: ...  # fmt: skip

class RequestSpec:
    """A request (csrc/core/request_spec.inl). Sequence i of n samples with seed + i. A wrong count raises ValueError.

    delay_ns: it is served as if it had arrived so much later. reserved: it may use an eighth more than the queue's
    limits. Tenants share slots and blocks; 0: none."""

    def __init__(
        self, *, id: int = 0, prompt: Sequence[int] = (), n: int = 1, max_tokens: int = 0, priority: int = 0,
        salt: int = 0, sampling: SamplingState = ..., stop_tokens: Sequence[int] = (), delay_ns: int = 0,
        reserved: bool = False, tenant: int = 0, extras: RequestExtras = ...,
    ) -> None: ...  # fmt: skip
    delay_ns: int

class MaskChannel:
    """Masks of a sequence, one at a time: a bit for each token, 1 if it may come, 32 a word from the lowest."""

    def __init__(self, mask_words: int) -> None: ...
    address: Final[int]
    """Address of the mask, int32 [mask_words]."""
    def write(self, position: int, allows_all: bool = False, forced: Sequence[int] = ()) -> None:
        """Say which token the mask is for, and which come before it without being sampled, from ``position``.

        ``allows_all``: the mask is not looked at. The first mask comes with the request."""
    def post(self) -> None:
        """Hand it on, from any thread. The next one is written once a token that came of this one is known."""

# ---- CPU kernels ----

class Dtype(enum.Enum):
    float32 = 0
    bfloat16 = 1

class ActivationFunction(enum.Enum):
    silu = 0
    gelu_tanh = 1
    gelu = 2
    clamped_silu = 3
    relu2 = 4

class StepBatch:
    """A step as the forward sees it. The arrays are views that the next step overwrites."""

    def __init__(
        self, input_ids: Sequence[int], positions: Sequence[int], slot_mapping: Sequence[int],
        query_start: Sequence[int], context_len: Sequence[int], block_tables: Sequence[Sequence[int]],
        sample_index: Sequence[int], sample_position: Sequence[int] = ..., sampling: Sequence[SamplingState] = ...,
        window_tables: Sequence[Sequence[Sequence[int]]] = ..., window_slots: Sequence[Sequence[int]] = ...,
    ) -> None:  # fmt: skip
        """Copy a batch, for tests. sampling: per sampled row. block_tables and slot_mapping are those of group 0, and
        window_tables and window_slots those of each group behind it. Raises ValueError where lengths contradict."""
    num_tokens: Final[int]
    num_rows: Final[int]
    num_samples: Final[int]
    num_groups: Final[int]  # of layers, each with block tables of its own
    num_lanes: Final[int]  # the last tokens, in which rows of the host cross
    needs: Final[int]  # bits of Need of the sampled rows
    @property
    def input_ids(self) -> npt.NDArray[np.int64]:
        """[T] token ids."""
    @property
    def positions(self) -> npt.NDArray[np.int64]:
        """[T] position of each token in its sequence."""
    @property
    def slot_mapping(self) -> npt.NDArray[np.int64]:
        """[T] block * block_size + offset: where the token's KV goes."""
    @property
    def query_start(self) -> npt.NDArray[np.int32]:
        """[R + 1] row r has the tokens query_start[r] to query_start[r + 1]; rows that decode come first."""
    @property
    def context_len(self) -> npt.NDArray[np.int32]:
        """[R] tokens of KV that precede the row's query."""
    @property
    def slots(self) -> npt.NDArray[np.int32]:
        """[R] slot of the row's sequence, by which layers keep states."""
    @property
    def adapters(self) -> npt.NDArray[np.int32]:
        """[R] adapter of the row's sequence (EntryKind.adapter), 0 for none. [0] if no slot ever had one."""
    @property
    def sample_index(self) -> npt.NDArray[np.int64]:
        """[S] tokens whose logits are wanted."""
    means: Final[list[tuple[int, int, int]]]
    """Rows of Need.mean: row, slot, and the sample that gives the mean, or -1: more of the prompt is to come."""
    def only_sampled(self) -> StepBatch: ...
    def block_table(self, row: int, num_blocks: int, group: int = 0) -> npt.NDArray[np.int32]:
        """The first num_blocks block ids of a row in the table of a group (LayerKVCache.group); how many there are, the
        caller knows from its length. Raises IndexError."""
    def slots_of(self, group: int) -> npt.NDArray[np.int64]:
        """[T] slot_mapping in the blocks of a group. Raises IndexError."""

class CodeType(enum.Enum):  # of a weight whose columns share scales in groups
    int4 = 0
    int8 = 1
    float8 = 2

class CpuLinear:
    """Addresses of weights [rows[i], k] and biases [rows[i]] (0: none); the caller keeps the memory.

    With ``panels`` weights are [rows[i] / vector_width, words of k, vector_width], a word holding 4 bytes of a row;
    rows[i] is rounded up to 2 * vector_width, k to a multiple of panel_steps(dtype) with zeros."""

    def __init__(
        self, weights: Sequence[int], rows: Sequence[int], biases: Sequence[int], k: int, dtype: Dtype,
        panels: bool = False,
    ) -> None: ...  # fmt: skip
    def set_codes(self, codes: Sequence[tuple[CodeType, int, int, int, int]], order: int) -> None:
        """Weights are codes [rows[i], k], of 4 bits in pairs; ``order``: address of int32 [k], the element of x for
        each column (0: its own). A matrix has its type, the columns of a group, addresses of scales float32
        [k / group, rows[i]], of offsets alike (0: none), and of the numbers float32 [16] of 4 bits (else 0). 64 bytes
        behind scales and offsets may be read."""

    def set_blocks(self, types: Sequence[int]) -> None:
        """Weights are rows of blocks, of a type of GGUF for each matrix; x is rounded to 8 bits. ValueError for a type
        that no kernel reads, or rows of no whole blocks."""

class CpuExperts:
    """Experts whose matrices are alike: down times the activation of up."""

    def __init__(
        self, up: Sequence[CpuLinear], down: Sequence[CpuLinear], function: ActivationFunction, gated: bool
    ) -> None: ...

class CpuNorm:
    """Addresses of the weight and the bias (0: an RMS norm) of a norm; the caller keeps the memory.

    The weight of an RMS norm may be in float32, whatever the rows are in."""

    def __init__(self, weight: int, bias: int, eps: float, float_weight: bool = False) -> None: ...

class CpuMixer:
    """A mixer of kernels/states.py, by addresses (0: none) of memory that the caller keeps."""

    def __init__(
        self, delta: bool, shape: tuple[int, int, int, int], conv: tuple[int, int, int], heads: tuple[int, int, int],
        norm: tuple[int, float], dt_range: tuple[float, float], norm_before_gate: bool, half_states: bool,
    ) -> None: ...  # fmt: skip

class PagedKV:
    """A layer's cache: k [num_blocks, Hk, head_dim, block_size], v [num_blocks, Hk, block_size, head_dim].

    With scales, float32 [2, 2, Hk] of keys and values, scales and inverses, it is in float8 (e4m3)."""

    def __init__(
        self, k: int, v: int, num_kv_heads: int, head_dim: int, block_size: int, scales: int = 0, group: int = 0
    ) -> None: ...

def draw_token(logits: npt.NDArray[np.float32], state: SamplingState, position: int) -> int:
    """Draw a token from float32 [vocabulary], as the CPU does; -1 if NaN or +inf is among them, or none is finite."""

class CpuKernels:
    """Kernels over num_threads threads; isa is "auto" or one of available_isas(). One caller at a time."""

    def __init__(self, num_threads: int, isa: str = "auto") -> None: ...
    @staticmethod
    def available_isas() -> list[str]: ...
    isa: Final[str]
    block_kernels: Final[str]  # of blocks of GGUF: "amx" (few rows: "vnni"), "vnni", "avx2" or "portable"
    num_threads: Final[int]
    vector_width: Final[int]
    def panel_steps(self, dtype: Dtype, /) -> int: ...
    def linear(self, weights: CpuLinear, x: int, x_stride: int, rows: int, y: int, y_float32: bool, /) -> None: ...
    def norm_linear(
        self, norm: CpuNorm, weights: CpuLinear, x: int, residual: int, rows: int, y: int, y_float32: bool,
        activation: ActivationFunction | None, /,
    ) -> None:  # fmt: skip
        """linear of the norm of x, or with a residual (0: none) of residual += x, activated."""
    def experts(
        self, experts: CpuExperts, x: int, x_stride: int, rows: int, ids: int, weights: int, top_k: int, y: int, /
    ) -> None:
        """y = the sums of each row's experts, int64 ids [rows, top_k], times float32 weights. ValueError for an id that
        is out of range."""
    def pack_panels(self, dtype: Dtype, weight: int, transposed: bool, rows: int, k: int, panels: int, /) -> None: ...
    def embed(self, table: CpuLinear, position_table: int, batch: StepBatch, y: int, scale: float, /) -> None:
        """y = the tokens' rows of the table times scale, plus those of their positions (0: none)."""
    def norm(
        self, dtype: Dtype, x: int, x_stride: int, residual: int, weight: int, bias: int, y: int, y_stride: int,
        tokens: int, heads: int, width: int, eps: float, float_weight: bool, /,
    ) -> None: ...  # fmt: skip
    def activation(
        self, dtype: Dtype, function: ActivationFunction, gated: bool, x: int, y: int, rows: int, width: int, /
    ) -> None:
        """y [rows, width] = function(x); gated: of x [rows, 2 * width], function(first half) * second half."""
    def rotary(
        self, dtype: Dtype, x: int, token_stride: int, tokens: int, heads: int, head_dim: int, cos_sin: int,
        positions: int, /,
    ) -> None: ...  # fmt: skip
    def store_kv(
        self, dtype: Dtype, k: int, k_stride: int, v: int, v_stride: int, cache: PagedKV, batch: StepBatch, /
    ) -> None: ...
    def paged_attention(
        self, dtype: Dtype, q: int, q_stride: int, tokens: int, num_q_heads: int, out: int, cache: PagedKV,
        batch: StepBatch, scale: float, window: int, softcap: float, sinks: int, /,
    ) -> None: ...  # fmt: skip
    def attention(
        self, dtype: Dtype, heads: int, tokens: int, num_q_heads: int, out: int, cache: PagedKV, batch: StepBatch,
        scale: float, window: int, softcap: float, sinks: int, /,
    ) -> None:  # fmt: skip
        """ValueError unless tokens are the batch's."""
    def mix(
        self, dtype: Dtype, mixer: CpuMixer, x: int, x_stride: int, tokens: int, out: int, states: int,
        slot_bytes: int, batch: StepBatch, /,
    ) -> None: ...  # fmt: skip
    def soft_cap(self, x: int, rows: int, width: int, cap: float, /) -> None: ...  # float32, in place
    def sample(self, logits: int, vocab: int, batch: StepBatch, tokens: int, /) -> None: ...

# ---- block manager and scheduler, without their thread: for tests and bench/core ----

class HybridConfig:
    """Settings of host rows (csrc/core/hybrid/hybrid_config.inl). A wrong count raises ValueError."""

    def __init__(
        self, *, lanes: int = 0, layers: int = 0, workers: int = 1, attend_ns: float = 0.0, exchange_ns: float = 0.0,
        min_gain: float = 0.05, max_rows: int = 0, host_tokens: int = 0, job_timeout_ns: int = 10_000_000_000,
    ) -> None: ...  # fmt: skip
    def gain(self, costs: StepCosts, rows: int, attended: int, /) -> float | None:
        """Share of throughput that the host adds to ``rows`` that see ``attended`` tokens in all; None: not known."""
    ENOUGH_TOKENS: ClassVar[int]  # attended to on the host: then their times tell more than those measured before

class ItlTargets:
    """Nanoseconds that steps with decode rows may take, by priority, or 0 (csrc/core/itl_targets.inl)."""

    def __init__(self, *, ns: int = 0, of_class: Sequence[tuple[int, int]] = ()) -> None: ...

class SchedulerConfig:
    """Settings of the scheduler (csrc/core/scheduler_config.inl). A wrong count raises ValueError."""

    def __init__(
        self, *, num_blocks: int = 0, block_size: int = 16, max_num_seqs: int = 256, max_num_batched_tokens: int = 2048,
        prefill_chunk_size: int = 0, max_model_len: int = 0, prefix_caching: bool = True,
        token_buckets: Sequence[int] = (), max_samples: int = 0, max_update_words: int = 0, max_result_words: int = 0,
        mask_words: int = 0, num_host_blocks: int = 0, num_host_states: int = 0, costs: StepCosts = ...,
        targets: ItlTargets = ..., paced_chunk_size: int = 0, hybrid: HybridConfig = ..., window: int = 0,
        window_groups: int = 0, group_window: int = 0, num_state_slots: int = 0, state_snapshot_tokens: int = 0,
        answer_snapshot_tokens: int = 256, num_block_events: int = 0,
    ) -> None: ...  # fmt: skip

class CostPoint:
    def __init__(self, *, tokens: int = 0, base_ns: float = 0.0, context_ns: float = 0.0) -> None: ...

class CostCopy:
    def __init__(self, *, call_ns: float = 0.0, byte_ns: float = 0.0) -> None: ...

class CostFactors:
    def __init__(
        self, *, decode: float = 1.0, rest: float = 1.0, attention: float = 1.0, hybrid: float = 1.0
    ) -> None: ...

class StepCosts:
    """Times in nanoseconds; 0 where nothing is known. csrc/core/step_costs.h and its lists explain them."""

    def __init__(
        self, decode: Sequence[CostPoint] = (), prompt: Sequence[CostPoint] = (), to_device: CostCopy = ...,
        to_host: CostCopy = ..., factors: CostFactors = ...,
    ) -> None:  # fmt: skip
        """Points ascend by tokens. Raises ValueError."""
    known: Final[bool]
    def decode_ns(self, rows: int, attended: int, /) -> int: ...
    def lanes_ns(self, rows: int, lanes: int, attended: int, exchange_ns: float, /) -> int: ...
    def mixed_ns(self, tokens: int, rows: int, attended: int, chunks_ns: float, /) -> int: ...
    def attention_ns(self, tokens: int, context: int, /) -> float: ...
    def recompute_ns(self, tokens: int, context: int, /) -> int: ...
    def copy_ns(self, bytes: int, to_device: bool, /) -> int: ...

class BlockManager:
    def __init__(
        self, num_blocks: int, block_size: int, prefix_caching: bool, num_host_blocks: int = 0, num_events: int = 0,
        window_groups: int = 0,
    ) -> None: ...  # fmt: skip
    def accompany(self, entry: int, group: int, block: int, /) -> None:
        """Make the block of a window group findable through one that is known, unless that has one already."""
    def companion(self, entry: int, group: int, /) -> int: ...  # or -1
    def match_windows(self, chain: list[int], window: int, /) -> int:
        """Count the blocks of the chain with which a sequence may begin whose groups see so many tokens."""
    num_free: Final[int]
    def changes(self, most: int) -> list[BlockChange]: ...  # as StepLoop.block_changes
    def ref_count(self, block: int, /) -> int: ...
    def writable(self, block: int, /) -> bool: ...
    def allocate(self) -> int: ...  # raises ValueError if no block is free
    def retain(self, block: int, /) -> None: ...
    def release(self, block: int, /) -> None:
        """Raises ValueError if the block is not held."""
    def publish(self, block: int, parent: int, tokens: Sequence[int], /) -> int:
        """Chain id after the block; tokens of exactly one block."""
    def match_prefix(self, tokens: Sequence[int], salt: int, /) -> list[int]:
        """Blocks that hold the start of tokens; takes no reference."""
    def time_match_prefix(self, tokens: Sequence[int], repeats: int, /) -> float: ...  # nanoseconds per match
    @staticmethod
    def root_chain(salt: int, /) -> int: ...
    def consistent(self) -> bool: ...

class StatePool:
    """Misuse raises ValueError."""

    def __init__(self, num_slots: int, num_state_slots: int) -> None: ...
    num_snapshots: Final[int]
    num_pinned: Final[int]
    num_cached: Final[int]
    def take(self, step: int, /) -> int: ...  # state slot of a snapshot, pinned once; -1 if there is none to give
    def take_at_rest(self) -> int: ...  # likewise; -1 also if a step that is not over reads the snapshot
    def retire(self, step: int, /) -> None: ...  # steps up to this one are over
    def pin(self, state: int, /) -> None: ...
    def unpin(self, state: int, in_place: bool = False) -> None: ...  # in_place: it keeps its place in the queue
    def enter(self, state: int, chain: int, /) -> None: ...
    def find(self, chain: int, /) -> int: ...  # state slot of the snapshot behind the chain; -1 if there is none
    def use(self, state: int, step: int, /) -> None: ...
    def forget(self, chain: int, /) -> None: ...
    def consistent(self) -> bool: ...

#: request, index, query_len, context_len, sample, from_device, blocks
_Row = tuple[int, int, int, int, bool, bool, list[int]]
#: [(request, index, token or -1, finish)], requests released
_News = tuple[list[tuple[int, int, int, FinishReason]], list[int]]

class SchedulerHarness:
    """A scheduler whose caller plays executor and event loop."""

    def __init__(self, config: SchedulerConfig, steps_in_flight: int) -> None: ...
    def add(self, spec: RequestSpec, order: int) -> None: ...
    def abort(self, id: int, index: int = -1) -> None: ...
    def schedule(self) -> tuple[list[_Row], list[tuple[int, int]]] | None:
        """Rows and block copies (source, target) of the next step, which is then in flight; None if nothing can run."""
    def commit(self, tokens: Sequence[int] | None, /) -> _News:
        """Retires a step: a token for each sampled row, negative where logits were not finite. None: it failed."""
    def news(self) -> _News: ...
    step_input: Final[bytes]
    """The StepInput of the step that was scheduled last; then its copies of state slots, and the slots of its rows."""
    state_copies: Final[list[tuple[int, int]]]
    slots: Final[list[int]]
    in_flight: Final[int]
    quiescent: Final[bool]
    free_blocks: Final[int]
    preemptions: Final[int]
    ref_counts: Final[list[int]]
    def consistent(self) -> bool: ...
    def move_blocks(self) -> bool: ...  # of a host tier: takes in transfers that are over, and starts others
    held_by_tier: Final[list[int]]
    """Blocks, one for each reference of a transfer or a load."""
    loading: Final[list[tuple[int, int]]]
    """Request and index of each sequence that waits for blocks from the host, or for those that go there."""
    running: Final[list[tuple[int, int]]]  # request and index of each sequence that runs on the device
    def moves(self, states: bool = False) -> list[tuple[int, int, int]]: ...  # transfer, block and host block under way
    def finish_moves(self, transfer: int, done: bool, states: bool = False) -> None: ...
    def refuse_moves(self, count: int, states: bool = False) -> None: ...
    lanes: Final[list[tuple[int, int, int, int]]]
    """Stage, lane, slot and position in the step that was scheduled last."""
    host_rows: Final[list[tuple[int, int, int, str, int, bool, list[int]]]]
    """Request, index, slot, phase, stage, whether it leaves, and blocks of the host."""
    jobs: Final[list[tuple[int, int, int, int, list[int], bool]]]  # slot, layer, step, position, blocks, cancelled
    def end_job(self, slot: int, done: bool) -> None: ...
    now: int  # nanoseconds
    host_pins: Final[list[int]]
    pinned_by_tier: Final[list[int]]  # of the host, one for each pin
    stats: Final[dict[str, int]]
    def time_steps(self, steps: int, /) -> float: ...  # nanoseconds of schedule + pack + commit per step

# ---- server ----

def json_extent(document: bytes | bytearray, /) -> tuple[int, int]:
    """Count of values and greatest depth. The GIL is released.

    By its cost to a parser, a number counts once, a string, also a member's name, an array and an object twice. A
    document that is not JSON gets numbers too: no parser that stops at its first mistake makes more of it."""

def json_shape(document: bytes | bytearray, long_size: int, /) -> tuple[int, int, list[tuple[bytes, int]]]:
    """Return ``json_extent``, and the outermost object's members whose values have at least ``long_size`` bytes.

    Each has its name as it stands in the document, escapes included, and the bytes from the name to the next comma or
    bracket. A name that comes twice is listed as often as it is long."""

# ---- engine ----

class SubmitResult(enum.Enum):
    accepted = 0
    queue_full = 1
    too_large = 2
    closed = 3
    duplicate = 4
    unserved = 5
    """The executor does not serve what the request needs, or nothing that it needs writes the records that it wants."""

class StepLoopConfig:
    """Settings of a step loop (csrc/step_loop/step_loop_config.inl). A wrong count raises ValueError.

    A step loop raises RuntimeError if disk_path cannot be used."""

    def __init__(
        self, *, scheduler: SchedulerConfig = ..., steps_in_flight: int = 2, max_queued_requests: int = 4096,
        max_queued_tokens: int = 4194304, priority_ageing_s: float = 30.0, step_timeout_s: float = 600.0,
        late_launch: bool = False, disk_path: str = "", fingerprint: str = "", disk_bytes: int = 0,
    ) -> None: ...  # fmt: skip

class SimulatedDevice:
    """A device in software, and a model whose next token is a hash of all tokens before. Runs one step loop."""

    def __init__(
        self, *, vocab_size: int, first_token: int = 0, step_latency_us: float = 0.0, token_latency_us: float = 0.0,
        read_kv: bool = True,
    ) -> None: ...  # fmt: skip
    def add_graph(self, body: Callable[[], None]) -> int:
        """A graph whose launch calls ``body`` on the device's thread, in the order of the CUDA stream."""
    def refuse_pinning(self) -> None:
        """No host memory can be pinned from now on."""
    def fail_at(self, nth_launch: int) -> None:
        """The n-th graph launch from now fails with an illegal memory access, and so does all that follows."""
    def hang_at(self, nth_launch: int) -> None:
        """The n-th graph launch from now does not end before resume()."""
    def fail_call(self, call: str, nth: int = 0, error: int = 2) -> None:
        """The n-th copy, graph_launch, event_record or wait_event from now does nothing but answer ``error``."""
    def resume(self) -> None: ...
    @staticmethod
    def wrong_device_calls() -> int: ...  # of all devices: calls made while another device was current
    def next_token(self, tokens: Sequence[int], temperature: float = 0.0, seed: int = 0) -> int:
        """Return the token that the simulated model gives after ``tokens``: the reference for tests."""

class CudaDevice:
    """A device behind the table of CUDA functions."""

    def __init__(self, libcudart: str, index: int) -> None:
        """The library must be loaded already. Raises RuntimeError if it is not, or lacks a function."""
    @staticmethod
    def simulated(device: SimulatedDevice) -> CudaDevice: ...
    index: Final[int]

class Staging:
    """StepInputs and results on their way, a pair of buffers per step in flight."""

    def __init__(self, device: CudaDevice, config: StepLoopConfig, mode: str) -> None:
        """mode: that of EngineConfig.staging. Raises RuntimeError for a CUDA error, ValueError for another mode."""
    @staticmethod
    def following(first: Staging) -> Staging:
        """For another device that runs the same steps: the same memory of the host, and device buffers of its own."""
    mode: Final[str]  # pageable where memory could not be pinned
    num_steps: Final[int]
    input_stride: Final[int]  # bytes of a StepInput's buffer
    output_stride: Final[int]  # bytes of a buffer of results, int64 words
    output_words: Final[int]  # words of it in use: heads, then records
    records_begin: Final[int]
    """The first word of the records, and so the samples that there can be."""
    input: Final[int]
    """Host address of the first input buffer; the others follow."""
    output: Final[int]
    """Host address of the first output buffer; the others follow."""
    released: Final[int]
    """Host address of an int32, which is not 0 once devices that wait for each other are to wait no more."""
    masks: Final[int]
    """Host address of the masks, a row per slot: mask_head_words, then a bit per token."""
    mask_stride: Final[int]  # words from one row to the next; 0: there are none
    def set_device_buffers(self, input: int, output: int) -> None:
        """Set the device addresses that the copying modes copy inputs to and outputs from."""

class HostPool:
    """Pinned host memory for KV blocks.

    Where the system does not pin all that is wanted, there are fewer. RuntimeError if not one transfer's are."""

    transfers: ClassVar[int]
    def __init__(self, device: CudaDevice, block_bytes: int, num_blocks: int, max_moves: int) -> None: ...
    num_blocks: Final[int]
    @staticmethod
    def brings_in(transfer: int) -> bool: ...
    def list(self, transfer: int) -> int: ...  # address of int32: how many blocks of the device, then which; mapped
    list_words: Final[int]
    # Address of [transfers, max_moves, block_bytes] on the device, where blocks of a transfer lie side by side.
    def set_gathered(self, memory: int) -> None: ...
    def block(self, host: int) -> int: ...  # address of block_bytes
    def pin_states(self, device: CudaDevice, regions: Sequence[tuple[int, int]], num_states: int) -> int:
        """Pin states of (address of slot 0, bytes per slot) for each layer; return their count, at least one."""

class HostShape:
    """The heads of host rows (csrc/platform/host/host_shape.inl). A wrong count raises ValueError."""

    def __init__(
        self, *, dtype: Dtype = Dtype.float32, num_slots: int = 1, num_q_heads: int = 1, num_kv_heads: int = 1,
        head_dim: int = 2,
    ) -> None: ...  # fmt: skip
    dtype: Final[Dtype]
    num_slots: Final[int]
    num_q_heads: Final[int]
    num_kv_heads: Final[int]
    head_dim: Final[int]

class HostLayer:
    """Attention of a layer on the host (csrc/platform/host/host_layer.inl); scales: address of PagedKV.scales or 0."""

    def __init__(self, *, scale: float = 1.0, window: int = 0, softcap: float = 0.0, scales: int = 0) -> None: ...
    scale: Final[float]
    window: Final[int]
    softcap: Final[float]
    scales: Final[int]

class HostExchange:
    """Memory through which the device and the host pass heads of host rows (csrc/platform/host/host_exchange.h)."""

    def __init__(self, shape: HostShape, device: CudaDevice | None) -> None:
        """Allocate the memory, pinned for the device. Raises RuntimeError if there is none."""
    mailboxes: Final[int]
    """Address of int64 [num_slots, mailbox_words]."""
    mailbox_words: Final[int]
    results: Final[int]
    """Address of [num_slots, num_q_heads, head_dim]: result_bytes for each slot."""
    result_bytes: Final[int]

class LinkJobs:
    """Jobs of attention over the link (csrc/step_loop/graph_link.h), in pinned memory. Raises RuntimeError."""

    def __init__(self, device: CudaDevice, max_jobs: int, max_blocks: int) -> None: ...
    words: Final[int]
    """int32 at ``address``."""
    address: Final[int]

class GraphLink:
    """``graph``, as torch captured it, computes the jobs; ``graphs`` own what is made of it."""

    def __init__(self, device: CudaDevice, jobs: LinkJobs, block_size: int, graphs: CudaGraphs, graph: int) -> None: ...

class HostWorkers:
    """Threads that attend for host rows (csrc/platform/host/host_workers.h)."""

    def __init__(
        self, exchange: HostExchange, *, pool: HostPool, block_size: int, transposed_keys: bool,
        layers: Sequence[HostLayer], num_workers: int, isa: str = "auto", link: GraphLink | None = None,
    ) -> None:  # fmt: skip
        """Raises ValueError for blocks of another shape."""
    def close(self, limit_s: float) -> bool:
        """False: one of them hangs."""

def time_host_attention(
    shape: HostShape, block_size: int, transposed_keys: bool, num_workers: int, tokens: int, float8: bool = False,
    isa: str = "auto", pool: HostPool | None = None, num_layers: int = 1,
) -> float:  # fmt: skip
    """Nanoseconds of a worker per token of context in a layer, while all of them attend over rows of so many tokens.

    They lie in blocks of ``pool``, which nobody uses yet, if these have ``num_layers``; else in memory of one layer."""

class CudaGraphs:
    """Executable graphs by bucket. Whoever captured them keeps the originals, which own the memory."""

    def __init__(self, device: CudaDevice) -> None: ...
    def add_bucket(
        self, max_rows: int, max_tokens: int, single_token_rows: bool, max_context: int,
        variants: Sequence[tuple[int, int]], lanes: int = 0,
    ) -> None:  # fmt: skip
        """Ascending: a step takes the first that fits; a max_context of 2**31 - 1 is any.

        variants: (Need bits, captured graph or 0 if all run eagerly), the cheapest first. A step takes the first that
        serves its needs. ValueError unless the last one serves the needs of all."""
    def set_copy_blocks(self, graph: int) -> None:
        """Set the graph that runs before a step that has block copies."""
    def set_host_pool(self, pool: HostPool, moves: Sequence[int]) -> None:
        """A graph for each transfer: it gathers the blocks of its list, or scatters them if it brings in."""
    def upload(self, cuda_stream: int) -> None: ...
    def launch(self, bucket: int, needs: int, cuda_stream: int) -> None:
        """The first variant that serves these Need bits."""

class Record(tuple[RecordKind, int, bytes]):
    """A record that a step gives beside a token or a row, as a named tuple."""

    n_fields: int
    n_sequence_fields: int
    n_unnamed_fields: int
    kind: RecordKind
    token: int
    """Place among the tokens of the token that it is of, or -1. Logits of a token still to come: their number."""
    payload: bytes  # 32-bit words

class SequenceNews(
    tuple[int, int, list[int], FinishReason, int, int, int, int, tuple[bytes, ...], tuple[Record, ...], int]
):
    """News of a sequence since the last delivery, as a named tuple. Times are those of time.monotonic_ns()."""

    n_fields: int
    n_sequence_fields: int
    n_unnamed_fields: int
    request: int
    index: int  # type: ignore[assignment]
    """Index of the sequence among the n of its request."""
    tokens: list[int]
    finish: FinishReason
    first_ns: int  # when the first of this news came about
    last_ns: int
    scheduled_ns: int  # when the request first ran
    cached_tokens: int  # of the prompt, found in the prefix cache
    logprobs: tuple[bytes, ...]
    """Payloads of the log probabilities of ``tokens``: one for each that has some, in order."""
    records: tuple[Record, ...]  # the others
    host_tokens: int  # of ``tokens``, those made while the sequence decoded on the host

class CpuLanes:
    """Lanes of the CPU's steps (csrc/platform/cpu/lanes.h)."""

    def __init__(self, shape: HostShape, hidden_size: int) -> None: ...
    def exchange(self, batch: StepBatch, layer: int, heads: int, x: int, residual: int) -> None:
        """Addresses of rows, one for each token of the step."""

class CpuHostRows:
    def __init__(self, *, lanes: CpuLanes, layers: Sequence[HostLayer], num_workers: int, isa: str) -> None: ...

class StepRecord(NamedTuple):
    """A step that is over. Times are those of time.monotonic_ns()."""

    step: int = 0
    begun_ns: int = 0  # scheduling began
    packed_ns: int = 0  # the step was scheduled and packed, and the launch began
    launched_ns: int = 0  # the launch returned; the device runs the step from then on, or once the step before is over
    ready_ns: int = 0  # the step thread saw that the device was done
    committed_ns: int = 0  # the step's tokens were taken in, and offered to the event loop
    rows: int = 0  # sequences in it
    tokens: int = 0  # computed in it, of prompts too
    decode_rows: int = 0  # sequences of which it computes one more token, and no prompt
    predicted_ns: int = 0
    """Predicted duration, from the end of the step before or this step's launch; 0 where costs were not measured."""

class BlockChange(NamedTuple):
    """The block ``chain`` became known to the prefix cache (``stored``), is known no more (``removed``), or went to
    other memory (``moved``). ``cleared``: changes before this one were lost; forget what they said."""

    kind: str = "cleared"
    on_host: bool = False  # the block is in the host's memory, or was; else in the device's
    chain: int = 0  # never used for another block
    parent: int = 0  # the chain before it, or the salt of a block that is the first of a prompt
    is_first: bool = False
    tokens: bytes = b""  # the block's token ids as int32, in the machine's byte order; empty if it was removed
    group: int = 0  # 0, or that of layers with a window, whose block goes, without a change, with the one of group 0

class BlockMap(NamedTuple):
    """The KV blocks in order, in cells of ``blocks_per_cell``, at most 1,024 cells.

    A byte says how many blocks of its cell one sequence holds (``held``), several hold (``shared``), or the prefix
    cache alone holds (``cached``): 0 to 255 for none to all. The rest is free."""

    blocks_per_cell: int = 1
    held: bytes = b""
    shared: bytes = b""
    cached: bytes = b""

class StepTokens(NamedTuple):
    """A histogram of the tokens that steps computed."""

    bounds: tuple[int, ...] = ()
    """Upper bounds, rising; a step of as many tokens as a bound counts below it."""
    counts: tuple[int, ...] = ()
    """Steps between each bound and the one before it, and at the end the steps above the last bound."""
    total: int = 0  # tokens of all steps

class StepLoop:
    """submit, abort and drain belong to the event loop's thread. No call waits for the step thread but stop()."""

    @staticmethod
    def on_simulated_device(config: StepLoopConfig, device: SimulatedDevice, poll_interval_us: float) -> StepLoop: ...
    @staticmethod
    def on_cpu(
        config: StepLoopConfig, forward: Callable[[StepBatch], tuple[int, int, int]], kernels: CpuKernels,
        vocab_size: int, kv_regions: Sequence[tuple[int, int]], host_rows: CpuHostRows | None = None,
        state_regions: Sequence[tuple[int, int]] = (),
    ) -> StepLoop:  # fmt: skip
        """forward returns the address of float32 logits [num_samples, vocab_size], and the address and the width of
        vectors [num_samples, width], or 0 where no sample has Need.vector. Addresses are valid until its next call; it
        runs on the executor's thread. kv_regions: (address, bytes per block) of all memory that block copies concern;
        state_regions: that of states, by state slot."""
    @staticmethod
    def on_cuda(
        config: StepLoopConfig, device: CudaDevice, staging: Staging, graphs: CudaGraphs,
        eager: Callable[[int, int, int], None] | None, cuda_stream: int, poll_interval_us: float,
        host_workers: HostWorkers | None = None,
        others: Sequence[tuple[CudaDevice, Staging, CudaGraphs, int]] = (),
    ) -> StepLoop:  # fmt: skip
        """Steps run on ``cuda_stream``, or with 0 on one of their own. With lanes for host rows it needs their workers.

        ``others`` are devices that run the same steps, each with staging that follows the first one's, with its graphs
        and its CUDA stream.

        eager(bucket or -1 for block copies, Need bits of the variant, cuda_stream) enqueues a step's kernels, no graph.
        """
    def start(self, cpu: int = -1) -> None:
        """Start the thread, on core ``cpu`` if this process may use that core."""
    def advance(self) -> bool:
        """Do one round of the step thread's work, in place of start(). True when anything moved."""
    def stop(self, limit_s: float) -> bool:
        """False: the executor still runs after limit_s, and its memory is leaked rather than freed."""
    def submit(self, spec: RequestSpec) -> SubmitResult: ...
    def check(self, spec: RequestSpec) -> SubmitResult:
        """Return what submit() would with an empty queue; nothing happens."""
    def abort(self, id: int, index: int = -1) -> None:
        """One sequence of a request, or all; no-op for a request that has ended."""
    def drain(self) -> tuple[list[SequenceNews], bool]:
        """Return all news that is ready, one entry per sequence with news, and whether the engine is alive.

        Raises MemoryError only if there is no memory for any entry; the rest comes with the next wake-up."""
    def take_step_error(self) -> str:
        """Return why steps failed whose requests drain() gave with step_failed since the last call, one line each."""
    def stats(self) -> dict[str, int]:
        """Every statistic by its name: csrc/core/stats.inl lists them."""
    def load(self) -> tuple[int, int, int, int, int]:
        """Return num_requests_running, num_requests_waiting, queued_requests, queued_tokens and num_free_blocks of
        stats(), at a fraction of its cost."""
    def step_tokens(self) -> StepTokens: ...
    def watch(self, on: bool) -> None:
        """Record steps from now on, or no longer."""
    def last_steps(self, most: int) -> list[StepRecord]:
        """Return the last recorded steps, oldest first."""
    def block_map(self) -> BlockMap:
        """As it was when this was called before: the step thread looks meanwhile."""
    def block_changes(self, most: int) -> list[BlockChange]:
        """Take the oldest changes of the prefix cache, with SchedulerConfig.num_block_events."""
    wake_fd: Final[int]
    """Readable when drain() has something."""
    error: Final[str]
    """Reason why the engine is dead; empty while it lives."""
    quiescent: Final[bool]
