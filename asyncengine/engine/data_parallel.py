"""DataParallelEngine: several engines, each with a device and the whole model, behind the methods of one."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import random
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar

from asyncengine._core import BlockChange, StepTokens
from asyncengine.api.outputs import (
    ClassificationOutput,
    ContinuationScore,
    EmbeddingOutput,
    PairScores,
    Pooling,
    Usage,
)
from asyncengine.api.request import Prompt, SamplingParams
from asyncengine.api.stats import DebugStats, EngineLoad, EngineSnapshot, EngineStats
from asyncengine.config import EngineConfig
from asyncengine.engine.engine import AsyncEngine
from asyncengine.engine.life import Health
from asyncengine.engine.many import Many
from asyncengine.engine.stream import RequestStream
from asyncengine.engine.vectors import checked_prompts
from asyncengine.engine.warmth import PIECE_TOKENS, Pieces, Warmth, pieces_of
from asyncengine.errors import (
    EngineClosedError,
    EngineDeadError,
    EngineOverloadedError,
    InvalidRequestError,
)
from asyncengine.runner.backend import Backend, choose_device

if TYPE_CHECKING:
    from asyncengine.api.model_info import ModelInfo
    from asyncengine.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

ROW_TOKENS = 32
"""A sequence that runs or waits holds up a new prompt as so many tokens of another prompt do, about."""
_HEALTHS: tuple[Health, ...] = ("ready", "loading", "draining", "dead", "closed")

T = TypeVar("T", EmbeddingOutput, ClassificationOutput, PairScores)


class DataParallelEngine(AsyncEngine):
    """Several engines behind one. ``AsyncEngine.from_pretrained(..., data_parallel_size=2)`` makes it.

    A request goes to one engine and stays there: the one where the fewest tokens are left to compute before its own
    first token, with what waits there and what its prefix cache lacks of the prompt. An engine that dies gets no more
    requests; those that it had end with EngineDeadError. ``health`` is "dead" once all engines are.
    """

    def __init__(self, engines: Sequence[AsyncEngine]) -> None:
        """``engines`` have the same model and have not been started."""
        if not engines:
            raise ValueError("a front needs at least one engine")
        self.config = engines[0].config
        self.engines = tuple(engines)
        self._warmth = {engine: Warmth(0) for engine in self.engines}
        self._turns = itertools.count()
        self._names = itertools.count(1)
        most = sum(engine.config.max_num_seqs for engine in engines)
        self._many = Many(lambda: self.model_info, lambda: self.health, most)

    @classmethod
    def of(cls, config: EngineConfig, load: Callable[[EngineConfig], Backend]) -> Self:
        """Make ``config.data_parallel_size`` engines, each for a device of its own; on the CPU they share the cores."""
        seeds = random.Random(config.seed)
        return cls(
            [
                AsyncEngine(_config_of(config, rank), partial(_load_on_device, load, rank), seeds=seeds)
                for rank in range(config.data_parallel_size)
            ]
        )

    # ---- life ----

    async def start(self) -> None:
        """Start the engines one after the other: those behind the first find its compiled kernels. If one fails, all
        are closed."""
        await self.engines[0].start()
        try:
            for engine in self.engines[1:]:
                await engine.start()
        except BaseException:
            await self.aclose(drain=False)
            raise
        for engine in self.engines:
            info = engine.model_info
            self._warmth[engine] = Warmth(info.num_kv_blocks * info.block_size // PIECE_TOKENS)

    async def aclose(self, drain: bool = True, timeout_s: float = 30.0) -> None:
        """See ``AsyncEngine.aclose``. The engines close at the same time."""
        closing = (engine.aclose(drain, timeout_s) for engine in self.engines)
        for error in await asyncio.gather(*closing, return_exceptions=True):
            if isinstance(error, BaseException):
                raise error

    # ---- requests ----

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
        """See ``AsyncEngine.submit``. EngineOverloadedError is raised when the queues of all engines are full."""
        pieces = pieces_of(prompt, cache_salt if isinstance(cache_salt, str) else None)
        if request_id is None:
            request_id = f"dp-{next(self._names)}"
        elif any(engine.has_request(request_id) for engine in self._alive()):
            raise InvalidRequestError(f"request_id {request_id!r} is in use", param="request_id")
        error: Exception = self._gone()
        for engine in self._by_load(pieces):
            try:
                stream = await engine.submit(
                    prompt, params, request_id=request_id, priority=priority, cache_salt=cache_salt, tenant=tenant
                )
            except (EngineOverloadedError, EngineDeadError) as e:
                error = e
                continue
            self._warmth[engine].add(pieces)
            return stream
        raise error

    def abort(self, request_id: str) -> bool:
        """See ``AsyncEngine.abort``."""
        return any(engine.abort(request_id) for engine in self._some())

    def has_request(self, request_id: str) -> bool:
        """See ``AsyncEngine.has_request``."""
        return any(engine.has_request(request_id) for engine in self.engines)

    # ---- vectors, scores, texts ----

    async def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: Pooling = "last",
        normalize: bool = True,
        dimensions: int | None = None,
        **terms: Any,
    ) -> EmbeddingOutput:
        """See ``AsyncEngine.embed``. Each engine gets a share of the prompts."""

        def ask(engine: AsyncEngine, share: slice) -> Coroutine[Any, Any, EmbeddingOutput]:
            return engine.embed(
                listed[share], pooling=pooling, normalize=normalize, dimensions=dimensions, **terms
            )  # fmt: skip

        listed = checked_prompts(prompts, "prompts")
        return _joined(await self._shared(len(listed), ask))

    async def classify(self, prompts: Prompt | Sequence[Prompt], **terms: Any) -> ClassificationOutput:
        """See ``AsyncEngine.classify``. Each engine gets a share of the prompts."""
        listed = checked_prompts(prompts, "prompts")
        return _joined(await self._shared(len(listed), lambda engine, share: engine.classify(listed[share], **terms)))

    async def score_pairs(self, queries: Sequence[str], documents: Sequence[str], **terms: Any) -> PairScores:
        """See ``AsyncEngine.score_pairs``. Each engine gets a share of the pairs."""
        if isinstance(queries, str) or isinstance(documents, str) or len(queries) != len(documents):
            return await self._least().score_pairs(queries, documents, **terms)  # it says what is wrong
        return _joined(
            await self._shared(
                len(queries),
                lambda engine, share: engine.score_pairs(queries[share], documents[share], **terms),
            )
        )

    async def score(
        self, prompt: str | Sequence[int], continuation: str | Sequence[int], **terms: Any
    ) -> ContinuationScore:
        """See ``AsyncEngine.score``."""
        pieces = pieces_of(prompt, None)
        engine = self._by_load(pieces)[0]
        self._warmth[engine].add(pieces)
        return await engine.score(prompt, continuation, **terms)

    async def tokenize(
        self,
        prompt: Prompt,
        *,
        add_special_tokens: bool = True,
        truncate_prompt_tokens: int | None = None,
        truncation_side: str = "left",
    ) -> list[int]:
        """See ``AsyncEngine.tokenize``."""
        return await self._least().tokenize(
            prompt,
            add_special_tokens=add_special_tokens,
            truncate_prompt_tokens=truncate_prompt_tokens,
            truncation_side=truncation_side,
        )

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """See ``AsyncEngine.detokenize``."""
        return await self._least().detokenize(token_ids, skip_special_tokens=skip_special_tokens)

    # ---- what the engines tell of themselves ----

    @property
    def health(self) -> Health:
        """The best health of an engine: "ready" as long as one serves."""
        return min((engine.health for engine in self.engines), key=_HEALTHS.index)

    @property
    def model_info(self) -> ModelInfo:
        """See ``AsyncEngine.model_info``. Its device and its counts of blocks are those of one engine."""
        return self._some()[0].model_info

    @property
    def tokenizer(self) -> Tokenizer:
        """See ``AsyncEngine.tokenizer``."""
        return self._some()[0].tokenizer

    def stats(self) -> EngineStats:
        """Sums over the engines, also over those that are dead."""
        return _sum(self.engine_stats())

    def load(self) -> EngineLoad:
        """See ``AsyncEngine.load``. Sums over the engines."""
        return EngineLoad(*map(sum, zip(*(engine.load() for engine in self.engines), strict=True)))

    def engine_stats(self) -> list[EngineStats]:
        """See ``AsyncEngine.engine_stats``. They are in the order of ``engines``."""
        return [engine.stats() for engine in self.engines]

    def block_changes(self, most: int) -> list[list[BlockChange]]:
        """See ``AsyncEngine.block_changes``. They are in the order of ``engines``."""
        return [changes for engine in self.engines for changes in engine.block_changes(most)]

    def debug_stats(self) -> DebugStats:
        """Sums over the engines."""
        each = [engine.debug_stats() for engine in self.engines]
        return DebugStats(**{f.name: sum(getattr(stats, f.name) for stats in each) for f in fields(DebugStats)})

    def snapshot(self) -> EngineSnapshot:
        """Sums of statistics; steps, wakes and blocks of the first engine that serves."""
        return replace(self._some()[0].snapshot(), stats=self.stats())

    def __repr__(self) -> str:
        return f"<DataParallelEngine of {len(self.engines)} {self.config.model} {self.health}>"

    # ---- choice of an engine ----

    def _alive(self) -> list[AsyncEngine]:
        return [engine for engine in self.engines if engine.health == "ready"]

    def _some(self) -> Sequence[AsyncEngine]:
        """Engines that serve, or where there is none all, which say why."""
        return self._alive() or self.engines

    def _gone(self) -> Exception:
        """The error of a request that no engine takes, where none has an error of its own."""
        return EngineDeadError("no engine serves") if self.health == "dead" else EngineClosedError("no engine serves")

    def _least(self) -> AsyncEngine:
        return self._by_load(Pieces([], 0))[0]

    def _by_load(self, pieces: Pieces) -> list[AsyncEngine]:
        """Engines, the one first that is soonest at a new prompt's first token. Equal ones take turns."""
        engines = self._alive()
        if not engines:
            return list(self.engines)
        turn = next(self._turns) % len(engines)
        return sorted(engines[turn:] + engines[:turn], key=lambda engine: self._tokens_before(engine, pieces))

    def _tokens_before(self, engine: AsyncEngine, pieces: Pieces) -> int:
        rows, queued = engine.load()
        return queued + ROW_TOKENS * rows + pieces.tokens - self._warmth[engine].matched(pieces)

    async def _shared(self, count: int, ask: Callable[[AsyncEngine, slice], Coroutine[Any, Any, T]]) -> list[T]:
        """Ask each engine for a share of ``count`` prompts. If one raises, the others are cancelled."""
        engines = self._by_load(Pieces([], 0))[: max(1, count)]
        bounds = [count * i // len(engines) for i in range(len(engines) + 1)]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(ask(engine, slice(first, last)))
                    for engine, (first, last) in zip(engines, itertools.pairwise(bounds), strict=True)
                ]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]


AsyncEngine.several = DataParallelEngine.of


def _config_of(config: EngineConfig, rank: int) -> EngineConfig:
    """The configuration of one of several engines."""
    changes: dict[str, Any] = {"data_parallel_size": 1}
    if config.cpu_threads is None:
        changes["cpu_threads"] = max(1, config.num_threads // config.data_parallel_size)
    if config.disk_kv_path is not None:
        changes["disk_kv_path"] = os.path.join(config.disk_kv_path, f"engine-{rank}")
    return replace(config, **changes)


def _load_on_device(load: Callable[[EngineConfig], Backend], rank: int, config: EngineConfig) -> Backend:
    """Load on the GPU that is ``rank`` behind the configured one, or on the CPU."""
    if choose_device(config) == "cuda":
        config = replace(config, device=f"cuda:{config.device_index + rank}")
    if config.disk_kv_path is not None:
        os.makedirs(config.disk_kv_path, mode=0o700, exist_ok=True)
    return load(config)


def _sum(each: Sequence[EngineStats]) -> EngineStats:
    """Add up statistics. Shares are those of all blocks."""
    total = {
        f.name: sum(getattr(stats, f.name) for stats in each) for f in fields(EngineStats) if f.name != "step_tokens"
    }
    total["kv_cache_usage"] = 1 - total["num_free_blocks"] / total["num_kv_blocks"]
    histograms = [stats.step_tokens for stats in each]
    counts = tuple(sum(column) for column in zip(*(h.counts for h in histograms), strict=True))
    tokens = StepTokens(histograms[0].bounds, counts, sum(h.total for h in histograms))
    return EngineStats(step_tokens=tokens, **total)


def _joined(parts: Sequence[T]) -> T:
    """Join the results of shares in their order."""
    import numpy as np

    first = parts[0]
    changes: dict[str, Any] = {
        f.name: np.concatenate([getattr(part, f.name) for part in parts])
        for f in fields(first)
        if isinstance(getattr(first, f.name), np.ndarray)
    }
    usages = [part.usage for part in parts]
    usage = Usage(*(sum(getattr(u, f.name) for u in usages) for f in fields(Usage)))
    return replace(first, usage=usage, **changes)
