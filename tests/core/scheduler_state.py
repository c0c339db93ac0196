"""State of the scheduler's models: requests, sequences, steps and host rows."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from enum import Enum, auto

VOCAB = 8
BLOCK_SIZE = 16

Copy = tuple[int, int]


@dataclass(frozen=True)
class Limits:
    """Configuration of a scheduler."""

    num_blocks: int = 12
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 32
    prefill_chunk_size: int = 0
    max_model_len: int = 96
    prefix_caching: bool = True
    steps_in_flight: int = 2
    num_host_blocks: int = 0
    target_itl_ns: int = 0
    lanes: int = 0
    layers: int = 2  # of the model that host rows pass
    tenants: int = 0  # whose requests come; 0: those of none
    window: int = 0  # tokens that every layer sees; 0: all
    snapshots: int | None = None  # of states, for which there is room; None: layers keep none
    num_host_states: int = 0

    @property
    def longest(self) -> int:
        """Tokens that a sequence may have."""
        return min(self.max_model_len, self.num_blocks * BLOCK_SIZE)

    @property
    def roomy(self) -> bool:
        """Nobody ever waits for blocks."""
        return self.num_blocks >= (self.max_num_seqs + 1) * -(-self.longest // BLOCK_SIZE) and not self.num_host_blocks


class State(Enum):
    DORMANT = auto()  # waits for its sibling's prompt
    WAITING = auto()
    RUNNING = auto()
    PREEMPTING = auto()  # preempted with a step in flight
    FINISHED = auto()  # told so, perhaps with a step in flight
    RELEASED = auto()
    HOSTED = auto()  # decodes on the host, or is on its way there


@dataclass(eq=False)
class Job:
    """Attention of a host row in a layer, until its worker ends."""

    layer: int
    position: int
    blocks: list[int]  # of the host
    status: str = "pending"  # or done, or failed


@dataclass(eq=False)
class HostRow:
    slot: int
    phase: str  # draining, storing, ready, attending, sampling
    stage: int = 0
    leaves: bool = False
    blocks: list[int] = field(default_factory=list)  # of the host
    job: Job | None = None  # the last one
    since: int = 0  # the step of its job was over
    waited: int = 0  # steps planned since it was ready

    @property
    def attended(self) -> bool:
        """A worker may touch its blocks."""
        return self.job is not None and self.job.status == "pending"


@dataclass(eq=False)
class ModelSequence:
    request: ModelRequest
    index: int
    truth: list[int]  # all tokens, those included that steps in flight are sampling
    kv: list[int]  # what the KV cache must hold for them
    state: State
    blocks: list[int] = field(default_factory=list)  # -1: let go
    computed: int = 0
    in_flight: int = 0
    on_device: bool = False
    emitted: int = 0
    left_at: int = 0  # tokens that it had computed when it gave way
    loading: bool = False  # blocks come from the host for it, or go there
    host: HostRow | None = None

    @property
    def key(self) -> tuple[int, int, int]:
        return self.request.order, self.request.number, self.index

    @property
    def held(self) -> list[int]:
        return [block for block in self.blocks if block >= 0]

    @property
    def alive(self) -> bool:
        return self.state not in (State.FINISHED, State.RELEASED)

    @property
    def wants_more(self) -> bool:
        return self.computed < len(self.truth) < self.request.max_total

    def append(self, token: int) -> None:
        self.truth.append(token)
        self.kv.append(self.request.kv_of(token))

    def sample(self) -> int:
        """The model: a hash of all tokens before, and now and then logits that are not finite."""
        if len(self.truth) - self.request.prompt_len == self.request.fails_at:
            return -1
        return zlib.crc32(bytes(self.truth), self.index) % VOCAB


@dataclass(eq=False)
class ModelRequest:
    id: int
    number: int
    order: int
    salt: int
    prompt_len: int
    max_total: int
    stop_tokens: tuple[int, ...]
    fails_at: int | None
    tenant: int = 0
    priority: int = 0
    sequences: list[ModelSequence] = field(default_factory=list)
    steps: int = 0  # retired since it was added
    allowed: int = 0  # steps that it may take: see CheckedScheduler._allow

    @property
    def tokens(self) -> int:
        return len(self.sequences) * (self.max_total + 2)

    def kv_of(self, token: int) -> int:
        return self.salt * 1000 + token  # another tenant's KV is wrong even where the tokens are the same


@dataclass(eq=False)
class Row:
    sequence: ModelSequence
    query_len: int
    context_len: int
    sample: bool
    from_device: bool
    blocks: list[int]
    token: int = -1
    cached: int = 0  # blocks that a new sequence found in the prefix cache
    lane: bool = False  # of a host row
    slot: int = -1


@dataclass(eq=False)
class Step:
    rows: list[Row]
    copies: list[Copy]
    held: list[int]  # blocks that copies replaced, or that are seen no more: kept until the step has retired
    written: set[int]
    snapshots: list[int] = field(default_factory=list)  # state slots that it writes, beside those of its rows
    begun_with: list[int] = field(default_factory=list)  # state slots of snapshots that it reads
    lanes: list[tuple[int, ModelSequence]] = field(default_factory=list)  # stage and host row
