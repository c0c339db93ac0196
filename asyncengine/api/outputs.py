"""Results: a request's pieces and its whole output, results of many prompts, vectors and scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Literal, NamedTuple

from asyncengine.api.logprobs import TokenLogProbs
from asyncengine.errors import AsyncEngineError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Pooling = Literal["last", "cls", "mean"]
"""The state of the last token, of the first one, or the mean over all."""


class FinishReason(StrEnum):
    """Reason why a sequence ended. An abort or a failure is an exception, never a finish reason."""

    STOP = "stop"  #: end-of-sequence token, stop token or stop string
    LENGTH = "length"  #: max_tokens, or the end of the context or of the KV cache
    TIMEOUT = "timeout"  #: the time that the request gave itself


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request, all of its sequences together."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    """Prompt tokens whose KV came from the prefix cache."""

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class RequestTiming:
    """Points in time of one request, in seconds of time.monotonic()."""

    arrived: float
    scheduled: float
    """First scheduled to run; queue time ends here."""
    first_token: float
    finished: float
    completion_tokens: int
    """Tokens of the longest sequence."""
    host_tokens: int = 0
    """Tokens of the longest sequence that were made while it decoded on the host."""
    engine: int = 0
    """Number of the engine that served the request, among those of ``AsyncEngine.engine_stats``."""

    @property
    def decoded_on(self) -> Literal["device", "host"]:
        """The place where most of the tokens were made."""
        return "host" if 2 * self.host_tokens > self.completion_tokens else "device"

    @property
    def queue_time(self) -> float:
        return self.scheduled - self.arrived

    @property
    def ttft(self) -> float:
        """Time to first token, in seconds."""
        return self.first_token - self.arrived

    @property
    def e2e(self) -> float:
        """End to end latency, in seconds."""
        return self.finished - self.arrived

    @property
    def tpot(self) -> float:
        """Time per output token after the first, in seconds; 0 with one token."""
        return (self.finished - self.first_token) / max(1, self.completion_tokens - 1)


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One finished sequence of a request."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    """Generated tokens, the one that ended the sequence included."""
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    """The stop string or stop token id that ended it; None for the model's own end-of-sequence token."""
    logprobs: Sequence[TokenLogProbs] | None = None
    """One for each token, if they were asked for."""


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A finished request. ``text``, ``token_ids`` and ``finish_reason`` are those of its first sequence."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    usage: Usage
    timing: RequestTiming
    prompt_logprobs: Sequence[TokenLogProbs | None] | None = None
    """One for each token of the prompt, if they were asked for. The first one is None: nothing comes before it."""

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.outputs[0].finish_reason


@dataclass(slots=True)
class RequestDelta:
    """Progress of one sequence of a streamed request since its last delta.

    ``text`` may be empty (an unfinished character, a possible stop string) and ``token_ids`` may hold
    several tokens when the consumer fell behind. The last delta of a sequence has ``finish_reason``;
    the last delta of the request also has ``usage`` and ``timing``.
    """

    request_id: str
    index: int
    text: str
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    usage: Usage | None = None
    timing: RequestTiming | None = None
    logprobs: Sequence[TokenLogProbs] | None = None
    """One for each of ``token_ids``, if they were asked for."""
    host_tokens: int = 0
    """Number of ``token_ids`` that were made while the sequence decoded on the host."""


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddingOutput:
    """The vectors of a call's prompts, in their order."""

    vectors: npt.NDArray[np.float32]
    """[prompts, dimensions]"""
    usage: Usage


@dataclass(frozen=True, slots=True, eq=False)
class ClassificationOutput:
    """Answer of a classification model to the prompts of a call, in their order."""

    logits: npt.NDArray[np.float32]
    """[prompts, labels]"""
    probabilities: npt.NDArray[np.float32]
    """[prompts, labels]: softmax of the logits; a sigmoid of each where labels do not exclude each other."""
    labels: tuple[str, ...]
    usage: Usage


@dataclass(frozen=True, slots=True, eq=False)
class PairScores:
    """Scores of pairs, in their order."""

    scores: npt.NDArray[np.float32]
    """[pairs]: the probability of the model's one label, or the cosine of two embeddings."""
    usage: Usage


@dataclass(frozen=True, slots=True)
class ContinuationScore:
    """Log probabilities of a continuation."""

    logprobs: tuple[TokenLogProbs, ...]
    """Log probabilities at each token of the continuation."""
    usage: Usage

    @property
    def total(self) -> float:
        """Natural logarithm of the probability of all of it."""
        return sum(data.logprob for data in self.logprobs)

    @property
    def is_greedy(self) -> bool:
        """True if each token of the continuation is the most probable one at its place."""
        return all(data.rank == 1 for data in self.logprobs)


class Finished(NamedTuple):
    """The result of one prompt of ``AsyncEngine.generate_many``."""

    position: int
    """Place of the prompt among the prompts, from 0."""
    output: RequestOutput | None
    """Output of the prompt; None where ``error`` says why there is none."""
    error: AsyncEngineError | None = None
