"""Vectors of prompts: embeddings, class probabilities, scores of pairs. One prefill gives each, and no token."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

from asyncengine._core import Need, RecordKind, RequestExtras, SequenceNews
from asyncengine.api.checks import quoted
from asyncengine.api.conversation import Conversation
from asyncengine.api.outputs import ClassificationOutput, EmbeddingOutput, PairScores, Pooling, Usage
from asyncengine.api.request import Prompt, SamplingParams, Truncation
from asyncengine.engine.life import Life
from asyncengine.engine.stream import RequestStream
from asyncengine.engine.submission import Submission
from asyncengine.errors import InternalError, InvalidRequestError
from asyncengine.text.prompts import check_size, check_terms, check_vocabulary, kept_tokens

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from asyncengine.api.model_info import ModelInfo

MAX_PROMPTS = 2048
PARAMS = SamplingParams(max_tokens=0, temperature=0.0, detokenize=False)
"""Parameters of a request for a vector, which samples nothing."""


class VectorStream(RequestStream):
    """A request that ends with a vector."""

    payload = b""

    def feed(self, news: SequenceNews) -> None:
        """Take in what the step thread delivered. Called by the engine only."""
        self.cached_tokens = news.cached_tokens
        for record in news.records:
            if record.kind is RecordKind.vector:
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


def vector_extras(model: ModelInfo, pooling: Pooling) -> RequestExtras:
    """Return the core's settings for a request that wants a vector."""
    needs = Need.vector | (Need.mean if pooling == "mean" else Need(0))
    return RequestExtras(needs=needs, result_words=1 + model.vector_size)


class Vectors:
    """Vectors of prompts, for an engine's methods of the same names."""

    def __init__(self, life: Life, submission: Submission) -> None:
        self._life = life
        self._submission = submission

    async def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: Pooling,
        normalize: bool,
        dimensions: int | None,
        terms: dict[str, Any],
    ) -> EmbeddingOutput:
        """See ``AsyncEngine.embed``."""
        model = self._life.serving().model_info
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
        vectors, usage = await self._vectors(checked_prompts(prompts, "prompts"), Terms(**terms), pooling)
        vectors = vectors[:, :dimensions].copy()
        return EmbeddingOutput(_unit(vectors) if normalize else vectors, usage)

    async def classify(self, prompts: Prompt | Sequence[Prompt], terms: dict[str, Any]) -> ClassificationOutput:
        """See ``AsyncEngine.classify``."""
        model = self._life.serving().model_info
        if not model.labels:
            raise InvalidRequestError(f"{model.architecture} is no classification model: it has no labels")
        logits, usage = await self._vectors(checked_prompts(prompts, "prompts"), Terms(**terms))
        return ClassificationOutput(logits, _probabilities(logits, model.exclusive_labels), model.labels, usage)

    async def score_pairs(self, queries: Sequence[str], documents: Sequence[str], terms: dict[str, Any]) -> PairScores:
        """See ``AsyncEngine.score_pairs``."""
        import numpy as np

        model = self._life.serving().model_info
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
            answer = await self.classify(pairs, terms)
            return PairScores(answer.probabilities[:, 0], answer.usage)
        both, usage = await self._vectors([*queries, *documents], Terms(**terms))
        left, right = np.split(_unit(both), 2)
        return PairScores((left * right).sum(1, dtype=np.float32), usage)

    async def _vectors(
        self, prompts: list[Prompt], terms: Terms, pooling: Pooling = "last"
    ) -> tuple[npt.NDArray[np.float32], Usage]:
        """[prompts, width], all of them or an error."""
        import numpy as np

        streams: list[VectorStream] = []
        try:
            for prompt in prompts:
                streams.append(await self._submit(prompt, terms, pooling))
                await asyncio.sleep(0)  # submitting thousands at once would hold up the loop
            payloads = [await stream.vector() for stream in streams]
        finally:
            for stream in streams:
                stream.abort()
        vectors = np.frombuffer(b"".join(payloads), np.float32).reshape(len(prompts), -1)
        tokens = sum(len(stream.prompt_token_ids) for stream in streams)
        return vectors, Usage(tokens, 0, sum(stream.cached_tokens for stream in streams))

    async def _submit(self, prompt: Prompt, terms: Terms, pooling: Pooling) -> VectorStream:
        """Check and enqueue a request for the vector of one prompt.

        The first token sees no other: for ``cls`` nothing else is computed.
        """
        arrived = time.monotonic()
        life, requests = self._life, self._submission.requests
        model = life.serving().model_info
        prompt_ids = await life.prompts.token_ids(prompt, kept_tokens(terms.truncation, PARAMS, model))
        backend = life.serving()
        check_size(model, prompt_ids, PARAMS)
        check_vocabulary(prompt_ids, model.vocab_size)
        key = requests.new_key()
        stream = VectorStream(requests, backend.tokenizer, key, f"req-{key}", prompt_ids, PARAMS, arrived)
        self._submission.enqueue(
            stream,
            key,
            prompt_ids[:1] if pooling == "cls" else prompt_ids,
            priority=terms.priority,
            cache_salt=terms.cache_salt,
            tenant=terms.tenant,
            extras=vector_extras(model, pooling),
            asked=("classification" if model.labels else f"pooling={pooling!r}",),
        )
        return stream


def checked_prompts(prompts: Prompt | Sequence[Prompt], param: str) -> list[Prompt]:
    """A single text is a list of one. InvalidRequestError for none, too many, or no sequence."""
    if isinstance(prompts, str | Conversation):
        return [prompts]
    if isinstance(prompts, bytes) or not isinstance(prompts, Sequence):
        raise InvalidRequestError(f"{param} must be a sequence of prompts, got {type(prompts).__name__}", param=param)
    if not 1 <= len(prompts) <= MAX_PROMPTS:
        raise InvalidRequestError(f"{param} must hold 1 to {MAX_PROMPTS} prompts, got {len(prompts)}", param=param)
    return list(prompts)  # type: ignore[arg-type]


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
