"""AsyncEngine: the engine as a program sees it. Each method hands its call to the part of the engine that serves it."""

from __future__ import annotations

import os
import random
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable, Sequence
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, Unpack, cast

from asyncengine.api.engine_options import EngineOptions
from asyncengine.api.outputs import (
    ClassificationOutput,
    ContinuationScore,
    EmbeddingOutput,
    Finished,
    PairScores,
    Pooling,
    RequestDelta,
    RequestOutput,
)
from asyncengine.api.request import Prompt, SamplingParams
from asyncengine.api.stats import DebugStats, EngineLoad, EngineSnapshot, EngineStats
from asyncengine.config import EngineConfig
from asyncengine.engine.life import Health, Life
from asyncengine.engine.many import Many
from asyncengine.engine.scoring import Scoring
from asyncengine.engine.snapshots import Snapshots
from asyncengine.engine.stream import RequestStream
from asyncengine.engine.submission import Submission
from asyncengine.engine.texts import Texts
from asyncengine.engine.vectors import Vectors
from asyncengine.errors import RequestAbortedError
from asyncengine.runner.backend import Backend, load_backend

if TYPE_CHECKING:
    from asyncengine._core import BlockChange
    from asyncengine.api.model_info import ModelInfo
    from asyncengine.text.tokenizer import Tokenizer


class AsyncEngine:
    """Generates text from many prompts at once, inside the event loop that started it.

        async with AsyncEngine.from_pretrained("path/or/hub-id") as engine:
            output = await engine.generate("Once upon a time", SamplingParams(max_tokens=64))

    All methods belong to that loop and its thread; another loop gets WrongLoopError. The engine installs no signal
    handlers. It starts a process that renders chat templates at the first conversation, processes that compile grammars
    at the first of them (``sandbox=False``: none), and on a GPU processes that compile kernels while it starts
    (``compile_processes=False``: none); none outlives it.
    Several engines may live in one process.
    """

    several: ClassVar[Callable[[EngineConfig, Callable[[EngineConfig], Backend]], AsyncEngine]]
    """Makes an engine of several. DataParallelEngine, which builds on this class, puts itself here."""

    def __init__(self, config: EngineConfig, load: Callable[[EngineConfig], Backend]) -> None:
        """Use ``from_pretrained``. ``load`` runs on a thread when the engine starts."""
        self.config = config
        self._life = Life(config, load)
        self._submission = Submission(self._life, random.Random(config.seed))
        self._many = Many(self._life.serving, lambda: self._life.health, config.max_num_seqs)
        self._vectors = Vectors(self._life, self._submission)
        self._scoring = Scoring(self._life)
        self._texts = Texts(self._life)
        self._snapshots = Snapshots(self._life)

    @classmethod
    def from_pretrained(
        cls, model: str | os.PathLike[str], *, progress: bool = True, **config: Unpack[EngineOptions]
    ) -> Self:
        """An engine for a directory in Hugging Face layout or a hub id; ``start`` loads the model.

        ``config`` are fields of EngineConfig: ConfigError for an unknown or wrong one. ``progress`` shows a bar while
        weights load, if stderr is a terminal. With data_parallel_size it is a DataParallelEngine."""
        made, load = EngineConfig.from_kwargs(os.fspath(model), {**config}), partial(load_backend, progress=progress)
        if made.data_parallel_size == 1:
            return cls(made, load)
        return cast(Self, AsyncEngine.several(made, load))

    # ---- life ----

    async def start(self) -> None:
        """Load the model, off the loop, and begin to serve. Raises ModelError, ConfigError."""
        await self._life.start()

    async def aclose(self, drain: bool = True, timeout_s: float = 30.0) -> None:
        """Stop serving. Idempotent.

        With ``drain``, requests under way may finish for ``timeout_s`` seconds; what is left then, or at once
        without it, ends with EngineClosedError.
        """
        await self._life.aclose(drain, timeout_s)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose(drain=exc_info[0] is None)

    # ---- requests ----

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        tenant: str | None = None,
    ) -> RequestOutput:
        """Generate to the end. Arguments and errors are those of ``submit``; cancelling the task aborts."""
        stream = await self.submit(
            prompt, params, request_id=request_id, priority=priority, cache_salt=cache_salt, tenant=tenant
        )
        return await stream.collect()

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        tenant: str | None = None,
    ) -> AsyncGenerator[RequestDelta, None]:
        """Generate piece by piece. Arguments and errors are those of ``submit``; leaving the loop aborts."""
        request = await self.submit(
            prompt, params, request_id=request_id, priority=priority, cache_salt=cache_salt, tenant=tenant
        )
        async with aclosing(request):
            async for delta in request:
                yield delta

    async def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        tenant: str | None = None,
    ) -> RequestStream:
        """Check and enqueue a request; its errors are raised here, before anything is allocated.

        ``prompt`` is text, token ids, or chat messages for the model's template. A smaller ``priority`` runs sooner,
        in [-1000, 1000]; waiting makes up for it (EngineConfig.priority_ageing_s). Requests with different
        ``cache_salt`` share no KV through the prefix cache. Requests of different ``tenant`` share queue, slots and KV
        blocks fairly (EngineConfig.fair_share_s); those without one are served as they come.

        Raises InvalidRequestError (ContextLengthError, KVCapacityError), EngineOverloadedError, EngineClosedError,
        EngineDeadError, WrongLoopError.
        """
        return await self._submission.submit(
            prompt, params, request_id=request_id, priority=priority, cache_salt=cache_salt, tenant=tenant
        )

    def abort(self, request_id: str) -> bool:
        """Abort somebody's request, which gets RequestAbortedError. False if there is no such request."""
        self._life.loaded()
        self._life.check_loop()
        requests = self._life.requests
        key = requests.named(request_id)
        if key is None:
            return False
        requests.fail(key, RequestAbortedError(f"request {request_id} was aborted"))
        return True

    def has_request(self, request_id: str) -> bool:
        """Return whether a request of this name is under way."""
        self._life.loaded()
        self._life.check_loop()
        return self._life.requests.named(request_id) is not None

    # ---- many prompts, vectors, scores, texts ----

    async def generate_many(
        self,
        prompts: Iterable[Prompt] | AsyncIterable[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        concurrency: int | None = None,
        in_order: bool = False,
        errors: Literal["raise", "return"] = "raise",
        progress: Callable[[int], None] | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        tenant: str | None = None,
    ) -> AsyncGenerator[Finished, None]:
        """Generate for any number of prompts, and give each result when it is there.

            async for position, output, error in engine.generate_many(prompts, params):

        Prompts are taken as there is room, so they may come from a generator without an end. ``params`` are those of
        all prompts, or one for each. ``concurrency`` prompts are under way at most; None: as many as keep the engine
        busy. The engine's queue never overflows: a prompt waits until others have left it. ``in_order`` gives results
        in the order of the prompts. ``errors="return"`` gives a prompt's error in place of its output, where "raise"
        ends the loop. ``progress`` is called with the count of results so far. Leaving the loop aborts the rest
        (``contextlib.aclosing`` does it at once). Other arguments and errors are those of ``submit``.
        """
        generate = partial(self.generate, priority=priority, cache_salt=cache_salt, tenant=tenant)
        results = self._many.results(
            generate,
            prompts,
            params,
            concurrency=concurrency,
            in_order=in_order,
            errors=errors,
            progress=progress,
        )
        async with aclosing(results):
            async for finished in results:
                yield finished

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
        return await self._vectors.embed(
            prompts, pooling=pooling, normalize=normalize, dimensions=dimensions, terms=terms
        )

    async def classify(self, prompts: Prompt | Sequence[Prompt], **terms: Any) -> ClassificationOutput:
        """Logits and probabilities of a classification model's labels; otherwise as ``embed``."""
        return await self._vectors.classify(prompts, terms)

    async def score_pairs(self, queries: Sequence[str], documents: Sequence[str], **terms: Any) -> PairScores:
        """Score how well each document fits its query. The score is the probability of the model's one label, for the
        query and the document on lines of their own; a model without labels gives the cosine of their embeddings.
        ``terms`` and errors are those of ``embed``."""
        return await self._vectors.score_pairs(queries, documents, terms)

    async def score(
        self, prompt: str | Sequence[int], continuation: str | Sequence[int], **terms: Any
    ) -> ContinuationScore:
        """Score ``continuation`` after ``prompt``. Both are text, or both are token ids.

        Text is tokenized together: the continuation's tokens are those behind as many as the prompt has by itself.
        Calls with the same prompt share what is computed of it. ``terms`` and errors are those of ``submit``.
        """
        return await self._scoring.score(prompt, continuation, partial(self.generate, **terms))

    async def tokenize(
        self,
        prompt: Prompt,
        *,
        add_special_tokens: bool = True,
        truncate_prompt_tokens: int | None = None,
        truncation_side: str = "left",
    ) -> list[int]:
        """Token ids of a prompt, as a request has them; nothing is computed. Errors are those of ``submit``.

        Chat templates write all special tokens themselves: ``add_special_tokens`` is for text. The prompt is truncated
        as by SamplingParams; -1 keeps as many tokens as the context has.
        """
        return await self._texts.tokenize(
            prompt,
            add_special_tokens=add_special_tokens,
            truncate_prompt_tokens=truncate_prompt_tokens,
            truncation_side=truncation_side,
        )

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of token ids. Raises InvalidRequestError for one that neither the tokenizer nor the model has,
        ConfigError without a tokenizer."""
        return await self._texts.detokenize(token_ids, skip_special_tokens=skip_special_tokens)

    # ---- what the engine tells of itself ----

    @property
    def health(self) -> Health:
        """loading → ready → draining → closed; dead after a failure."""
        return self._life.health

    @property
    def model_info(self) -> ModelInfo:
        """The loaded model. Raises EngineClosedError before ``start`` has finished and after ``aclose``."""
        return self._life.model

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises EngineClosedError like ``model_info``, ConfigError where it was left out."""
        return self._life.tokenizer

    def stats(self) -> EngineStats:
        """Counters and gauges. Raises EngineClosedError like ``model_info``."""
        return self._snapshots.stats()

    def load(self) -> EngineLoad:
        """Return how much the engine has to do: two numbers of ``stats``, at a fraction of its cost."""
        running, waiting, _, queued_tokens, _ = self._life.loaded().step_loop.load()
        return EngineLoad(running + waiting, queued_tokens)

    def engine_stats(self) -> list[EngineStats]:
        """Return ``stats`` of each engine behind this one; there are several with data_parallel_size."""
        return [self.stats()]

    def block_changes(self, most: int) -> list[list[BlockChange]]:
        """Take the changes of the prefix cache since the last call, at most ``most`` of each engine behind this one.

        An engine that is dead answers that all is cleared.

        Raises ConfigError without EngineConfig.kv_events, EngineClosedError like ``model_info``, and WrongLoopError.
        """
        return [self._snapshots.block_changes(most)]

    def debug_stats(self) -> DebugStats:
        """Return counts of all that the engine holds, to look for leaks. Raises EngineClosedError like
        ``model_info``."""
        return self._snapshots.debug_stats()

    def snapshot(self) -> EngineSnapshot:
        """Return the counts that the engine holds now, and the recorded times of its last steps and wake-ups.

        Each call has the engine record its next 32 wake-ups, and its steps meanwhile, for the next call to tell: it is
        to be called again and again, about four times a second, and costs nothing once it is not. The map of the blocks
        is of the time of the call before. Raises EngineClosedError like ``model_info``, and WrongLoopError.
        """
        return self._snapshots.snapshot()

    def __repr__(self) -> str:
        return repr(self._life)
