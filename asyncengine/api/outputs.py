"""Results of calls for many prompts, for vectors and for scores. Those of one request are in request.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from asyncengine.api.logprobs import TokenLogProbs
from asyncengine.api.request import RequestOutput, Usage
from asyncengine.errors import AsyncEngineError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Pooling = Literal["last", "cls", "mean"]
"""The state of the last token, of the first one, or the mean over all."""


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddingOutput:
    """The vectors of a call's prompts, in their order."""

    vectors: npt.NDArray[np.float32]
    """[prompts, dimensions]"""
    usage: Usage


@dataclass(frozen=True, slots=True, eq=False)
class ClassificationOutput:
    """What a classification model says of a call's prompts, in their order."""

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
    """How probable a continuation is."""

    logprobs: tuple[TokenLogProbs, ...]
    """Of each of its tokens."""
    usage: Usage

    @property
    def total(self) -> float:
        """Natural logarithm of the probability of all of it."""
        return sum(data.logprob for data in self.logprobs)

    @property
    def is_greedy(self) -> bool:
        """Whether each of its tokens is the most probable one at its place."""
        return all(data.rank == 1 for data in self.logprobs)


class Finished(NamedTuple):
    """The result of one prompt of ``AsyncEngine.generate_many``."""

    position: int
    """Place of the prompt among the prompts, from 0."""
    output: RequestOutput | None
    """None where ``error`` says why there is none."""
    error: AsyncEngineError | None = None
