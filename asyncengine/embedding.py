"""Vectors of prompts: embeddings, class probabilities, scores of pairs. One prefill gives each, and no token."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from asyncengine import _core
from asyncengine.checks import quoted
from asyncengine.conversation import Conversation
from asyncengine.errors import InternalError, InvalidRequestError
from asyncengine.prompts import check_terms
from asyncengine.request import Prompt, SamplingParams, Truncation, Usage
from asyncengine.stream import RequestStream

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from asyncengine.model_info import ModelInfo

Pooling = Literal["last", "cls", "mean"]
MAX_PROMPTS = 2048
PARAMS = SamplingParams(max_tokens=0, temperature=0.0, detokenize=False)
"""Parameters of a request for a vector, which samples nothing."""


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


class VectorStream(RequestStream):
    """A request that ends with a vector."""

    payload = b""

    def feed(self, news: _core.SequenceNews) -> None:
        """Take in what the step thread delivered. Called by the engine only."""
        self.cached_tokens = news.cached_tokens
        for record in news.records:
            if record.kind is _core.RecordKind.vector:
                self.payload = record.payload
        super().feed(news)

    async def vector(self) -> bytes:
        """Float32 numbers. Errors and cancellation are those of ``collect``."""
        await self.collect()
        if not self.payload:
            raise InternalError(f"request {self.request_id} ended without its vector")
        return self.payload


@dataclass(frozen=True, slots=True)
class Terms:
    """Settings for all requests of a call; see ``AsyncEngine.submit`` and ``SamplingParams``."""

    priority: int = 0
    cache_salt: str | None = None
    tenant: str | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    """Side on which tokens are left out; None: right, since the subject of a text stands at its beginning."""

    def __post_init__(self) -> None:
        check_terms(self.priority, cache_salt=self.cache_salt, tenant=self.tenant)
        _ = self.truncation

    @property
    def truncation(self) -> Truncation:
        """Return the truncation of the prompts. Raises InvalidRequestError."""
        return Truncation(self.truncate_prompt_tokens, self.truncation_side or "right")


def vector_extras(model: ModelInfo, pooling: Pooling) -> _core.RequestExtras:
    """Return the core's settings for a request that wants a vector."""
    needs = _core.Need.vector | (_core.Need.mean if pooling == "mean" else _core.Need(0))
    return _core.RequestExtras(needs=needs, result_words=1 + model.vector_size)


def check_generates(model: ModelInfo) -> None:
    """Raises InvalidRequestError for a model that classifies, or has no head."""
    if model.labels:
        raise InvalidRequestError(f"{model.architecture} classifies and generates no text: use classify()")
    if not model.generates:
        raise InvalidRequestError(f"{model.name} has no head and generates no text: use embed()")


class VectorMethods(ABC):
    """The engine's methods that give vectors."""

    @property
    @abstractmethod
    def model_info(self) -> ModelInfo:
        """The loaded model."""

    @abstractmethod
    def _serving(self) -> object:
        """Raises EngineClosedError and EngineDeadError where no request is served, and WrongLoopError."""

    @abstractmethod
    async def _submit_vector(self, prompt: Prompt, terms: Terms, pooling: Pooling) -> VectorStream:
        """Check and enqueue a request for the vector of one prompt."""

    async def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: Pooling = "last",
        normalize: bool = True,
        dimensions: int | None = None,
        **terms: Any,
    ) -> EmbeddingOutput:
        """The model's last hidden states, after its final norm, pooled to a vector for each prompt.

        The first ``dimensions`` numbers are kept, then scaled to length 1 with ``normalize``. A single prompt that is
        no text goes into a list. ``terms``: priority, cache_salt and tenant; truncate_prompt_tokens, with
        truncation_side (right unless it says left). The errors are those of ``submit``.
        """
        self._serving()
        model = self.model_info
        if model.labels:
            raise InvalidRequestError(f"{model.architecture} classifies and gives no embeddings: use classify()")
        if pooling not in get_args(Pooling):
            known = ", ".join(get_args(Pooling))
            raise InvalidRequestError(f"pooling must be one of {known}, got {quoted(pooling)}", param="pooling")
        if dimensions is not None and (
            isinstance(dimensions, bool) or not isinstance(dimensions, int) or not 1 <= dimensions <= model.vector_size
        ):
            raise InvalidRequestError(
                f"dimensions must be an integer in [1, {model.vector_size}], got {quoted(dimensions)}",
                param="dimensions",
            )
        vectors, usage = await _vectors(self, checked_prompts(prompts, "prompts"), Terms(**terms), pooling)
        vectors = vectors[:, :dimensions].copy()
        return EmbeddingOutput(_unit(vectors) if normalize else vectors, usage)

    async def classify(self, prompts: Prompt | Sequence[Prompt], **terms: Any) -> ClassificationOutput:
        """Logits and probabilities of a classification model's labels; otherwise as ``embed``."""
        self._serving()
        model = self.model_info
        if not model.labels:
            raise InvalidRequestError(f"{model.architecture} is no classification model: it has no labels")
        logits, usage = await _vectors(self, checked_prompts(prompts, "prompts"), Terms(**terms))
        return ClassificationOutput(logits, _probabilities(logits, model.exclusive_labels), model.labels, usage)

    async def score_pairs(self, queries: Sequence[str], documents: Sequence[str], **terms: Any) -> PairScores:
        """Score how well each document fits its query. The score is the probability of the model's one label, for the
        query and the document on lines of their own; a model without labels gives the cosine of their embeddings.
        ``terms`` and errors are those of ``embed``."""
        import numpy as np

        self._serving()
        model = self.model_info
        if len(model.labels) > 1:
            raise InvalidRequestError(f"{model.architecture} has {len(model.labels)} labels: a score takes one")
        for name, texts in (("queries", queries), ("documents", documents)):
            checked_prompts(texts, name)
            if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
                raise InvalidRequestError(f"{name} must be a sequence of texts", param=name)
        if len(queries) != len(documents):
            raise InvalidRequestError(
                f"{len(queries)} queries and {len(documents)} documents are no pairs", param="documents"
            )
        if model.labels:
            pairs = [f"{query}\n{document}" for query, document in zip(queries, documents, strict=True)]
            answer = await self.classify(pairs, **terms)
            return PairScores(answer.probabilities[:, 0], answer.usage)
        both, usage = await _vectors(self, [*queries, *documents], Terms(**terms))
        left, right = np.split(_unit(both), 2)
        return PairScores((left * right).sum(1, dtype=np.float32), usage)


def checked_prompts(prompts: Prompt | Sequence[Prompt], param: str) -> list[Prompt]:
    """A single text is a list of one. InvalidRequestError for none, too many, or no sequence."""
    if isinstance(prompts, str | Conversation):
        return [prompts]
    if isinstance(prompts, bytes) or not isinstance(prompts, Sequence):
        raise InvalidRequestError(f"{param} must be a sequence of prompts, got {type(prompts).__name__}", param=param)
    if not 1 <= len(prompts) <= MAX_PROMPTS:
        raise InvalidRequestError(f"{param} must hold 1 to {MAX_PROMPTS} prompts, got {len(prompts)}", param=param)
    return list(prompts)  # type: ignore[arg-type]


async def _vectors(
    engine: VectorMethods, prompts: list[Prompt], terms: Terms, pooling: Pooling = "last"
) -> tuple[npt.NDArray[np.float32], Usage]:
    """[prompts, width], all of them or an error."""
    import numpy as np

    streams: list[VectorStream] = []
    try:
        for prompt in prompts:
            streams.append(await engine._submit_vector(prompt, terms, pooling))
            await asyncio.sleep(0)  # submitting thousands at once would hold up the loop
        payloads = [await stream.vector() for stream in streams]
    finally:
        for stream in streams:
            stream.abort()
    vectors = np.frombuffer(b"".join(payloads), np.float32).reshape(len(prompts), -1)
    tokens = sum(len(stream.prompt_token_ids) for stream in streams)
    return vectors, Usage(tokens, 0, sum(stream.cached_tokens for stream in streams))


def _unit(vectors: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Scale each vector to length 1; a vector of zeros stays zero."""
    import numpy as np

    lengths = np.sqrt(np.square(vectors, dtype=np.float64).sum(1, keepdims=True))
    scaled: npt.NDArray[np.float32] = (vectors / np.where(lengths > 0, lengths, 1.0)).astype(np.float32)
    return scaled


def _probabilities(logits: npt.NDArray[np.float32], exclusive: bool) -> npt.NDArray[np.float32]:
    import numpy as np

    x = logits.astype(np.float64)
    if exclusive:
        x = np.exp(x - x.max(1, keepdims=True))
        x /= x.sum(1, keepdims=True)
    else:
        x = 0.5 * (1 + np.tanh(0.5 * x))
    return x.astype(np.float32)
