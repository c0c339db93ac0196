"""DataParallelEngine: several engines, each with a device and the whole model, behind the methods of one."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from asyncengine._core import BlockChange, StepTokens
from asyncengine.api.outputs import (
    ClassificationOutput,
    ContinuationScore,
    EmbeddingOutput,
    PairScores,
    Pooling,
)
from asyncengine.api.request import Prompt, SamplingParams
from asyncengine.api.stats import DebugStats, EngineLoad, EngineSnapshot, EngineStats
from asyncengine.config import EngineConfig
from asyncengine.engine.common_queue import CommonQueue
from asyncengine.engine.engine import AsyncEngine
from asyncengine.engine.life import Health
from asyncengine.engine.many import Many
from asyncengine.engine.scoring import Scoring
from asyncengine.engine.stream import RequestStream
from asyncengine.engine.submission import Submission
from asyncengine.engine.vectors import Vectors
from asyncengine.errors import EngineClosedError, EngineDeadError, RequestAbortedError
from asyncengine.runner.backend import Backend, choose_device

if TYPE_CHECKING:
    from asyncengine.api.model_info import ModelInfo
    from asyncengine.text.tokenizer import Tokenizer

_HEALTHS: tuple[Health, ...] = ("ready", "loading", "draining", "dead", "closed")


class DataParallelEngine(AsyncEngine):
    """Several engines behind one. ``AsyncEngine.from_pretrained(..., data_parallel_size=2)`` makes it.

    Requests wait in one queue, in the order in which one engine would serve them, until an engine has room
    (asyncengine/engine/common_queue.py). Then a request goes to one engine and stays there. An engine that dies gets no
    more requests; those that it had end with EngineDeadError. ``health`` is "dead" once all engines are.
    """

    def __init__(self, engines: Sequence[AsyncEngine]) -> None:
        """``engines`` have the same model and configuration, and have not been started."""
        if not engines:
            raise ValueError("a front needs at least one engine")
        self.config = engines[0].config
        self.engines = tuple(engines)
        self._queue = CommonQueue(self.config, [engine._life for engine in engines])
        seeds = random.Random(self.config.seed)
        self._ways = {engine: _Way(engine, seeds, self._queue) for engine in engines}
        most = sum(engine.config.max_num_seqs for engine in engines)
        self._many = Many(lambda: self.model_info, lambda: self.health, most)

    @classmethod
    def of(cls, config: EngineConfig, load: Callable[[EngineConfig], Backend]) -> Self:
        """Make ``config.data_parallel_size`` engines, each for a device of its own; on the CPU they share the cores."""
        ranks = range(config.data_parallel_size)
        return cls([AsyncEngine(_config_of(config, rank), partial(_load_on_device, load, rank)) for rank in ranks])

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
        self._queue.open()

    async def aclose(self, drain: bool = True, timeout_s: float = 30.0) -> None:
        """See ``AsyncEngine.aclose``. Requests that wait still go to the engines, which close at the same time."""
        until = time.monotonic() + timeout_s
        lives = [engine._life for engine in self._alive()]
        for life in lives:
            life.check_loop()
            life.refuse_requests()
        try:
            if drain and lives:
                async with asyncio.timeout(timeout_s):
                    await self._queue.idle.wait()
        except TimeoutError:
            pass
        finally:
            await self._close(drain, until)

    async def _close(self, drain: bool, until: float) -> None:
        for stream in self._queue:
            stream.fail(EngineClosedError("the engine was closed before the request was finished"))
        self._queue.close()
        closing = (engine.aclose(drain, max(0.0, until - time.monotonic())) for engine in self.engines)
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
        """See ``AsyncEngine.submit``. The limits are those of all queues together."""
        while True:
            engine = self._some()[0]
            try:
                return await self._ways[engine].submission.submit(
                    prompt, params, request_id=request_id, priority=priority, cache_salt=cache_salt, tenant=tenant
                )
            except EngineDeadError:  # while it made the prompt's token ids
                if engine.health == "ready" or not self._alive():
                    raise

    def abort(self, request_id: str) -> bool:
        """See ``AsyncEngine.abort``."""
        if (key := self._queue.named(request_id)) is not None:
            self._queue.check_loop()
            self._queue.fail(key, RequestAbortedError(f"request {request_id} was aborted"))
            return True
        return any(engine.abort(request_id) for engine in self._some())

    def has_request(self, request_id: str) -> bool:
        """See ``AsyncEngine.has_request``."""
        return any(engine.has_request(request_id) for engine in self.engines) or bool(self._queue.named(request_id))

    # ---- vectors, scores, texts: an engine makes the requests, and any of them serves each ----

    async def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: Pooling = "last",
        normalize: bool = True,
        dimensions: int | None = None,
        **terms: Any,
    ) -> EmbeddingOutput:
        """See ``AsyncEngine.embed``."""
        return await self._way.vectors.embed(
            prompts, pooling=pooling, normalize=normalize, dimensions=dimensions, terms=terms
        )

    async def classify(self, prompts: Prompt | Sequence[Prompt], **terms: Any) -> ClassificationOutput:
        """See ``AsyncEngine.classify``."""
        return await self._way.vectors.classify(prompts, terms)

    async def score_pairs(self, queries: Sequence[str], documents: Sequence[str], **terms: Any) -> PairScores:
        """See ``AsyncEngine.score_pairs``."""
        return await self._way.vectors.score_pairs(queries, documents, terms)

    async def score(
        self, prompt: str | Sequence[int], continuation: str | Sequence[int], **terms: Any
    ) -> ContinuationScore:
        """See ``AsyncEngine.score``."""
        return await self._way.scoring.score(prompt, continuation, partial(self.generate, **terms))

    async def tokenize(
        self,
        prompt: Prompt,
        *,
        add_special_tokens: bool = True,
        truncate_prompt_tokens: int | None = None,
        truncation_side: str = "left",
    ) -> list[int]:
        """See ``AsyncEngine.tokenize``."""
        return await self._some()[0].tokenize(
            prompt,
            add_special_tokens=add_special_tokens,
            truncate_prompt_tokens=truncate_prompt_tokens,
            truncation_side=truncation_side,
        )

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """See ``AsyncEngine.detokenize``."""
        return await self._some()[0].detokenize(token_ids, skip_special_tokens=skip_special_tokens)

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
        """See ``AsyncEngine.load``. Sums over the engines, with what waits in front of them."""
        requests, tokens = map(sum, zip(*(engine.load() for engine in self.engines), strict=True))
        return EngineLoad(requests + len(self._queue), tokens + self._queue.tokens)

    def engine_stats(self) -> list[EngineStats]:
        """See ``AsyncEngine.engine_stats``. They are in the order of ``engines``. Of the requests that wait in front of
        the engines, each engine that serves counts an equal share."""
        each = [engine.stats() for engine in self.engines]
        serving = [i for i, engine in enumerate(self.engines) if engine in self._some()]
        for turn, i in enumerate(serving):
            each[i] = replace(
                each[i],
                num_requests_waiting=each[i].num_requests_waiting + (len(self._queue) + turn) // len(serving),
                queued_tokens=each[i].queued_tokens + (self._queue.tokens + turn) // len(serving),
            )
        return each

    def block_changes(self, most: int) -> list[list[BlockChange]]:
        """See ``AsyncEngine.block_changes``. They are in the order of ``engines``."""
        return [changes for engine in self.engines for changes in engine.block_changes(most)]

    def debug_stats(self) -> DebugStats:
        """Sums over the engines, with what waits in front of them. The distance of snapshots is that of each."""
        each = [engine.debug_stats() for engine in self.engines]
        total = DebugStats(**{f.name: sum(getattr(stats, f.name) for stats in each) for f in fields(DebugStats)})
        return replace(
            total,
            state_snapshot_tokens=each[0].state_snapshot_tokens,
            streams=total.streams + len(self._queue),
            tasks=total.tasks + sum(stream.awaited for stream in self._queue),
            queued_requests=total.queued_requests + len(self._queue),
            queued_tokens=total.queued_tokens + self._queue.tokens,
        )

    def snapshot(self) -> EngineSnapshot:
        """Sums of statistics; steps, wakes and blocks of the first engine that serves."""
        return replace(self._some()[0].snapshot(), stats=self.stats())

    def __repr__(self) -> str:
        return f"<DataParallelEngine of {len(self.engines)} {self.config.model} {self.health}>"

    def _alive(self) -> list[AsyncEngine]:
        return [engine for engine in self.engines if engine.health == "ready"]

    def _some(self) -> Sequence[AsyncEngine]:
        """Engines that serve, or where there is none all, which say why."""
        return self._alive() or self.engines

    @property
    def _way(self) -> _Way:
        return self._ways[self._some()[0]]


class _Way:
    """The parts of one engine that make requests, for the queue in front of all."""

    def __init__(self, engine: AsyncEngine, seeds: random.Random, queue: CommonQueue) -> None:
        self.submission = Submission(engine._life, seeds, queue)
        self.vectors = Vectors(engine._life, self.submission)
        self.scoring = Scoring(engine._life)


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
    """Load on the GPUs of engine ``rank``, counted from the configured one, or on the CPU."""
    if choose_device(config) == "cuda":
        config = replace(config, device=f"cuda:{config.device_index + rank * config.tensor_parallel_size}")
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
