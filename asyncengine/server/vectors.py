"""/v1/embeddings, /score, /rerank and /classify: one vector or number for each prompt, and no token."""

from __future__ import annotations

import asyncio
import base64
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from asyncengine.api.checks import quoted
from asyncengine.server.calls import Call, CallBody, Context, PromptUsage, numbers
from asyncengine.server.config import ServerConfig
from asyncengine.server.engine_api import Engine
from asyncengine.server.errors import bad_request
from asyncengine.server.protocol import JsonDecoder, prompts_of
from asyncengine.server.unserved import VECTORS

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_AT_ONCE = 65_536
"""Numbers that become JSON in one turn of the event loop: a few milliseconds."""
_ARRAY = {"type": "array", "items": {"type": "number"}}

Prompts = str | list[str | int | list[int]]


class VectorBody(CallBody, kw_only=True):
    """Fields common to these routes."""

    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None

    def terms(self, context: Context) -> dict[str, Any]:
        """Return the settings with which the engine serves the request."""
        return context.terms | {
            "truncate_prompt_tokens": self.truncate_prompt_tokens,
            "truncation_side": self.truncation_side,
        }


class EmbeddingBody(VectorBody, kw_only=True):
    input: Prompts | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    pooling: str | None = None
    normalize: bool | None = None


class Embedding(msgspec.Struct, kw_only=True):
    index: int
    object: str = "embedding"
    embedding: Annotated[msgspec.Raw, msgspec.Meta(extra_json_schema={"anyOf": [_ARRAY, {"type": "string"}]})]


class EmbeddingList(msgspec.Struct, kw_only=True):
    object: str = "list"
    data: list[Embedding]
    model: str
    usage: PromptUsage


class Embeddings(Call[EmbeddingBody]):
    prompt_param = "input"
    _decoder = JsonDecoder(EmbeddingBody, VECTORS)
    fields = _decoder.fields

    def parse(self, raw: bytes | bytearray, config: ServerConfig) -> EmbeddingBody:
        body = self._decoder.decode(raw)
        body.input = prompts_of(body.input, config.max_sequences_per_request, "input")  # type: ignore[assignment]
        return body

    async def answer(self, engine: Engine, body: EmbeddingBody, context: Context) -> EmbeddingList:
        assert body.input is not None
        output = await engine.embed(
            body.input,  # type: ignore[arg-type]  # prompts_of made it a list of prompts
            pooling=body.pooling or "last",  # type: ignore[arg-type]  # the engine checks it
            dimensions=body.dimensions,
            normalize=body.normalize is not False,
            **body.terms(context),
        )
        rows = await _rows(output.vectors, body.encoding_format == "base64")
        data = [Embedding(index=i, embedding=row) for i, row in enumerate(rows)]
        return EmbeddingList(data=data, model=context.model, usage=context.usage(output.usage))


async def _rows(vectors: npt.NDArray[np.float32], as_base64: bool) -> list[msgspec.Raw]:
    """Each vector as JSON: its numbers, or little-endian float32 in base64."""
    rows, since = [], 0
    for vector in vectors:
        if as_base64:
            rows.append(msgspec.Raw(b'"' + base64.b64encode(vector.astype("<f4").tobytes()) + b'"'))
        else:
            rows.append(numbers(vector.tolist()))
        since += len(vector)
        if since >= _AT_ONCE:
            since = 0
            await asyncio.sleep(0)
    return rows


class ScoreBody(VectorBody, kw_only=True):
    """text_1 and text_2, or queries and documents: as many of each, or one of the first."""

    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None


class Score(msgspec.Struct, kw_only=True):
    index: int
    object: str = "score"
    score: float


class ScoreList(msgspec.Struct, kw_only=True):
    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Score]
    usage: PromptUsage


class Scores(Call[ScoreBody]):
    prompt_param = "text_1"
    _decoder = JsonDecoder(ScoreBody, VECTORS)
    fields = _decoder.fields

    def parse(self, raw: bytes | bytearray, config: ServerConfig) -> ScoreBody:
        body = self._decoder.decode(raw)
        left, right = ("queries", "documents") if body.queries or body.documents else ("text_1", "text_2")
        if left == "queries" and (body.text_1 or body.text_2):
            raise bad_request("give text_1 and text_2, or queries and documents, not both", "queries")
        limit = config.max_sequences_per_request
        first, second = (prompts_of(getattr(body, name), limit, name) for name in (left, right))
        if len(first) not in (1, len(second)):
            raise bad_request(f"{left} and {right} are {len(first)} and {len(second)} texts, which make no pairs", left)
        body.text_1 = first * (len(second) if len(first) == 1 else 1)  # type: ignore[assignment]
        body.text_2 = second  # type: ignore[assignment]
        return body

    async def answer(self, engine: Engine, body: ScoreBody, context: Context) -> ScoreList:
        assert body.text_1 is not None
        assert body.text_2 is not None
        output = await engine.score_pairs(body.text_1, body.text_2, **body.terms(context))
        return ScoreList(
            id="score-" + context.id,
            created=context.created,
            model=context.model,
            data=[Score(index=i, score=score) for i, score in enumerate(output.scores.tolist())],
            usage=context.usage(output.usage),
        )


class Document(msgspec.Struct):
    text: str


class RerankBody(VectorBody, kw_only=True):
    """``texts`` in place of ``documents`` makes it a request of Text Embeddings Inference (TEI)."""

    query: str | None = None
    documents: list[str | Document] | None = None
    texts: list[str] | None = None
    return_text: bool | None = None
    truncate: bool | None = None
    top_n: int | None = None
    return_documents: bool | None = None


class Ranked(msgspec.Struct, kw_only=True):
    index: int
    relevance_score: float
    document: Document | UnsetType = UNSET


class RankedText(msgspec.Struct, kw_only=True):
    """A member of TEI's ranking, which is a list."""

    index: int
    score: float
    text: str | UnsetType = UNSET


class Ranking(msgspec.Struct, kw_only=True):
    id: str
    model: str
    results: list[Ranked]
    usage: PromptUsage


class Rerank(Call[RerankBody]):
    """Documents by falling score; those with the same in their order. A request with TEI's fields gets TEI's list."""

    prompt_param = "documents"
    _decoder = JsonDecoder(RerankBody, VECTORS)
    fields = _decoder.fields

    def parse(self, raw: bytes | bytearray, config: ServerConfig) -> RerankBody:
        body = self._decoder.decode(raw)
        if not body.query:
            raise bad_request("query is required and must not be empty", "query")
        if body.texts is not None and body.documents is not None:
            raise bad_request("give documents or texts, not both", "texts")
        if body.texts is not None:
            body.texts = prompts_of(body.texts, config.max_sequences_per_request, "texts")  # type: ignore[assignment]
        else:
            texts = [d.text if isinstance(d, Document) else d for d in body.documents or ()]
            body.documents = prompts_of(texts, config.max_sequences_per_request, "documents")  # type: ignore[assignment]
        if body.truncate and body.truncate_prompt_tokens is None:
            body.truncate_prompt_tokens = -1  # the context's
        if body.top_n is not None and body.top_n < 1:
            raise bad_request(f"top_n must be at least 1, got {quoted(body.top_n)}", "top_n")
        return body

    async def answer(self, engine: Engine, body: RerankBody, context: Context) -> Ranking | list[RankedText]:
        assert body.query is not None
        texts: list[str] = body.texts or body.documents or []  # type: ignore[assignment]  # parse made them texts
        output = await engine.score_pairs([body.query] * len(texts), texts, **body.terms(context))
        scores = output.scores.tolist()
        best = sorted(range(len(texts)), key=lambda i: -scores[i])[: body.top_n]
        if body.texts is not None:
            return [RankedText(index=i, score=scores[i], text=texts[i] if body.return_text else UNSET) for i in best]
        with_text = body.return_documents is not False
        return Ranking(
            id="rerank-" + context.id,
            model=context.model,
            results=[
                Ranked(index=i, relevance_score=scores[i], document=Document(texts[i]) if with_text else UNSET)
                for i in best
            ],
            usage=context.usage(output.usage),
        )


class ClassifyBody(VectorBody, kw_only=True):
    input: Prompts | None = None


class Class(msgspec.Struct, kw_only=True):
    index: int
    label: str
    probs: Annotated[msgspec.Raw, msgspec.Meta(extra_json_schema=_ARRAY)]
    num_classes: int


class ClassList(msgspec.Struct, kw_only=True):
    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Class]
    usage: PromptUsage


class Classify(Call[ClassifyBody]):
    prompt_param = "input"
    _decoder = JsonDecoder(ClassifyBody, VECTORS)
    fields = _decoder.fields

    def parse(self, raw: bytes | bytearray, config: ServerConfig) -> ClassifyBody:
        body = self._decoder.decode(raw)
        body.input = prompts_of(body.input, config.max_sequences_per_request, "input")  # type: ignore[assignment]
        return body

    async def answer(self, engine: Engine, body: ClassifyBody, context: Context) -> ClassList:
        assert body.input is not None
        output = await engine.classify(body.input, **body.terms(context))  # type: ignore[arg-type]
        best = output.probabilities.argmax(1).tolist()
        rows = await _rows(output.probabilities, as_base64=False)
        return ClassList(
            id="classify-" + context.id,
            created=context.created,
            model=context.model,
            data=[
                Class(index=i, label=output.labels[best[i]], probs=probs, num_classes=len(output.labels))
                for i, probs in enumerate(rows)
            ],
            usage=context.usage(output.usage),
        )
