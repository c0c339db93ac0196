"""AsyncEngine: the engine as a program sees it."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Literal, Self, Unpack

from asyncengine import _core
from asyncengine.backend import Backend, load_backend, stop_at_exit
from asyncengine.config import EngineConfig
from asyncengine.embedding import PARAMS, Pooling, Terms, VectorMethods, VectorStream, check_generates, vector_extras
from asyncengine.engine_options import EngineOptions
from asyncengine.errors import (
    ConfigError,
    EngineClosedError,
    EngineDeadError,
    EngineError,
    EngineOverloadedError,
    InternalError,
    InvalidRequestError,
    RequestAbortedError,
)
from asyncengine.live_requests import LiveRequests
from asyncengine.many import ManyMethods
from asyncengine.prompts import Prompts, check_size, check_terms, check_vocabulary, hash_salt, kept_tokens, stop_tokens
from asyncengine.request import Prompt, RequestDelta, RequestOutput, SamplingParams
from asyncengine.request_extras import request_extras, sampling_state
from asyncengine.scoring import ScoringMethods
from asyncengine.snapshots import SnapshotMethods
from asyncengine.stats import DebugStats, EngineStats, StepTokens
from asyncengine.stream import RequestStream, warn_unclosed
from asyncengine.structured.requests import StructuredRequests
from asyncengine.texts import TextMethods

if TYPE_CHECKING:
    from asyncengine.model_info import ModelInfo
    from asyncengine.tokenization import Tokenizer

logger = logging.getLogger(__name__)

_HOW_TO_START = "write 'async with AsyncEngine.from_pretrained(...) as engine:', or 'await engine.start()' before"
Health = Literal["loading", "ready", "draining", "closed", "dead"]


async def _drive(step_loop: _core.StepLoop) -> None:
    """Drive the step loop in place of the step thread, a round at a time between the event loop's other callbacks."""
    while not step_loop.error:
        moved = step_loop.advance()
        await asyncio.sleep(0 if moved or not step_loop.quiescent else 0.0005)


class AsyncEngine(ManyMethods, VectorMethods, ScoringMethods, SnapshotMethods, TextMethods):
    """Generates text from many prompts at once, inside the event loop that started it.

        async with AsyncEngine.from_pretrained("path/or/hub-id") as engine:
            output = await engine.generate("Once upon a time", SamplingParams(max_tokens=64))

    All methods belong to that loop and its thread; another loop gets WrongLoopError. The engine installs no signal
    handlers. It starts a process that renders chat templates at the first conversation, processes that compile grammars
    at the first of them (``sandbox=False``: none), and on a GPU processes that compile kernels while it starts
    (``compile_processes=False``: none); none outlives it.
    Several engines may live in one process.
    """

    def __init__(self, config: EngineConfig, load: Callable[[EngineConfig], Backend]) -> None:
        """Use ``from_pretrained``. ``load`` runs on a thread when the engine starts."""
        self.config = config
        self._load = load
        self._health: Health = "loading"
        self._loop: asyncio.AbstractEventLoop | None = None
        self._backend: Backend | None = None
        self._prompts: Prompts | None = None
        self._structured: StructuredRequests | None = None
        self._requests = LiveRequests(config.fair_share_s)
        self._seeds = random.Random(config.seed)
        self._death: str = ""
        self._stopping: asyncio.Future[bool] | None = None
        self._driver: asyncio.Future[None] | None = None

    @classmethod
    def from_pretrained(
        cls, model: str | os.PathLike[str], *, progress: bool = True, **config: Unpack[EngineOptions]
    ) -> Self:
        """An engine for a directory in Hugging Face layout or a hub id; ``start`` loads the model.

        ``config`` are fields of EngineConfig: ConfigError for an unknown or wrong one. ``progress`` shows a bar while
        weights load, if stderr is a terminal."""
        return cls(EngineConfig.from_kwargs(os.fspath(model), {**config}), partial(load_backend, progress=progress))

    # ---- life ----

    async def start(self) -> None:
        """Load the model, off the loop, and begin to serve. Raises ModelError, ConfigError."""
        if self._health != "loading" or self._loop is not None:
            raise EngineClosedError("the engine was started before; create a new one for each start")
        self._loop = self._requests.loop = asyncio.get_running_loop()
        try:
            self._backend = await asyncio.to_thread(self._load, self.config)
        except BaseException:
            self._health = "closed"
            raise
        if self.health != "loading":  # aclose() came first
            self._backend = None
            raise EngineClosedError("the engine was closed while it was loading")
        self._prompts = Prompts(self.config, self._backend.tokenizer, self._backend.model_info)
        self._structured = StructuredRequests(
            self._backend.tokenizer, self._backend.model_info, sandbox=self.config.sandbox
        )
        step_loop = self._requests.step_loop = self._backend.step_loop
        self._loop.add_reader(step_loop.wake_fd, self._on_wake)
        if self.config.step_driver == "loop":
            self._driver = asyncio.ensure_future(_drive(step_loop))
        else:
            cpu = self.config.cpu_affinity
            step_loop.start(-1 if cpu is None else cpu)
        stop_at_exit(self._backend)
        self._health = "ready"

    async def aclose(self, drain: bool = True, timeout_s: float = 30.0) -> None:
        """Stop serving. Idempotent.

        With ``drain``, requests under way may finish for ``timeout_s`` seconds; what is left then, or at once
        without it, ends with EngineClosedError.
        """
        if self._backend is None or self._backend.forked:
            self._health = "closed"  # never started, still loading, closed before, or the parent process's
            return
        self._check_loop()
        if self._health == "ready":
            self._health = "draining"
        try:
            if drain and self._health == "draining":
                async with asyncio.timeout(timeout_s):
                    await self._requests.idle.wait()
        except TimeoutError:
            pass
        finally:
            await self._shut_down()

    async def _shut_down(self) -> None:
        if self._backend is None or self._loop is None:
            return
        self._health = "closed"
        if self._stopping is None:
            for stream in self._requests:
                stream.fail(EngineClosedError("the engine was closed before the request was finished"))
            self._loop.remove_reader(self._backend.step_loop.wake_fd)
            if self._driver is not None:
                self._driver.cancel()
            self._stopping = asyncio.ensure_future(self._stop(self._backend))
        if await asyncio.shield(self._stopping):
            self._backend = self._requests.step_loop = None

    async def _stop(self, backend: Backend) -> bool:
        if self._prompts is not None:
            await self._prompts.aclose()
        if self._structured is not None:
            await self._structured.aclose()
        return await asyncio.to_thread(backend.stop, 5.0)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose(drain=exc_info[0] is None)

    def __del__(self) -> None:
        if getattr(self, "_health", "closed") in ("ready", "draining"):
            warn_unclosed(self)
            backend = self._loaded()
            if self._prompts is not None and backend.process == os.getpid():
                self._prompts.release()
                if self._structured is not None:
                    self._structured.release()
            backend.stop(5.0)

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
        arrived = time.monotonic()
        backend = self._serving()
        params = params if params is not None else SamplingParams()
        if not isinstance(params, SamplingParams):
            raise InvalidRequestError(f"params must be SamplingParams, got {type(params).__name__}", param="params")
        check_terms(priority, request_id=request_id, cache_salt=cache_salt, tenant=tenant)
        assert self._prompts is not None
        assert self._structured is not None
        self._check_features(params)
        check_generates(backend.model_info)
        prompt_ids = await self._prompts.token_ids(prompt, kept_tokens(params.truncation, params, backend.model_info))
        max_tokens = check_size(backend.model_info, prompt_ids, params)
        check_vocabulary(prompt_ids, backend.model_info.vocab_size)
        words = await self._prompts.words(params.bad_words, "bad_words")
        constraints = await self._structured.constraints(params, prompt, prompt_ids, tenant)
        backend = self._serving()  # that may have taken a while
        ends = stop_tokens(backend.model_info, params)
        if constraints and not backend.model_info.eos_token_ids and constraints[0].end not in ends:
            ends.append(constraints[0].end)
        seed = params.seed if params.seed is not None else self._seeds.getrandbits(63)
        states = [sampling_state(params, seed + i) for i in range(params.n if params.logits_processor else 1)]
        processed = self._structured.processed(params, prompt_ids, states)
        masks = [follower.channel for follower in constraints or processed]
        extras = request_extras(params, len(prompt_ids), ends, backend.model_info, words, masks)
        key = self._requests.new_key()
        if request_id is None:
            request_id = f"req-{key}"
        self._requests.check_name(request_id)

        place = self._requests.fair_share.place(tenant, priority)
        result = backend.step_loop.submit(
            id=key,
            prompt=prompt_ids,
            n=params.n,
            max_tokens=max_tokens,
            priority=priority,
            salt=hash_salt(cache_salt),
            sampling=states[0],
            stop_tokens=ends,
            delay_ns=place.delay_ns,
            reserved=place.reserved,
            tenant=place.tenant,
            extras=extras,
        )
        self._check_result(result, params.features)
        stream = RequestStream(self._requests, backend.tokenizer, key, request_id, prompt_ids, params, arrived)
        if params.timeout is not None:
            stream.end_at(arrived + params.timeout)
        if constraints:
            stream.follow(constraints, self._structured.advance)
        if processed:
            stream.process(processed, self._structured.process)
        self._requests.enter(stream, key, tenant, priority, params.n, place)
        return stream

    async def _submit_vector(self, prompt: Prompt, terms: Terms, pooling: Pooling) -> VectorStream:
        """``submit``, for the vector of a prompt in place of tokens: what ``embed`` and ``classify`` are made of.

        The first token sees no other: for ``cls`` nothing else is computed.
        """
        arrived = time.monotonic()
        backend = self._serving()
        assert self._prompts is not None
        prompt_ids = await self._prompts.token_ids(prompt, kept_tokens(terms.truncation, PARAMS, backend.model_info))
        backend = self._serving()
        check_size(backend.model_info, prompt_ids, PARAMS)
        check_vocabulary(prompt_ids, backend.model_info.vocab_size)
        key = self._requests.new_key()
        place = self._requests.fair_share.place(terms.tenant, terms.priority)
        result = backend.step_loop.submit(
            id=key,
            prompt=prompt_ids[:1] if pooling == "cls" else prompt_ids,
            n=1,
            max_tokens=1,
            priority=terms.priority,
            salt=hash_salt(terms.cache_salt),
            sampling=_core.SamplingState(),
            stop_tokens=[],
            delay_ns=place.delay_ns,
            reserved=place.reserved,
            tenant=place.tenant,
            extras=vector_extras(backend.model_info, pooling),
        )
        self._check_result(result, ("classification" if backend.model_info.labels else f"pooling={pooling!r}",))
        stream = VectorStream(self._requests, backend.tokenizer, key, f"req-{key}", prompt_ids, PARAMS, arrived)
        self._requests.enter(stream, key, terms.tenant, terms.priority, 1, place)
        return stream

    def abort(self, request_id: str) -> bool:
        """Abort somebody's request, which gets RequestAbortedError. False if there is no such request."""
        self._loaded()
        self._check_loop()
        key = self._requests.named(request_id)
        if key is None:
            return False
        self._requests.fail(key, RequestAbortedError(f"request {request_id} was aborted"))
        return True

    # ---- what the engine tells of itself ----

    @property
    def health(self) -> Health:
        """loading → ready → draining → closed; dead after a failure."""
        return self._health

    @property
    def model_info(self) -> ModelInfo:
        """The loaded model. Raises EngineClosedError before ``start`` has finished and after ``aclose``."""
        return self._loaded().model_info

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises EngineClosedError like ``model_info``, ConfigError where it was left out."""
        tokenizer = self._loaded().tokenizer
        if tokenizer is None:
            raise ConfigError("the engine was created with skip_tokenizer_init: it has no tokenizer")
        return tokenizer

    def stats(self) -> EngineStats:
        """Counters and gauges. Raises EngineClosedError like ``model_info``."""
        step_loop = self._loaded().step_loop
        return EngineStats.of(step_loop.stats(), StepTokens(*step_loop.step_tokens()))

    def debug_stats(self) -> DebugStats:
        """Return counts of all that the engine holds, to look for leaks. Raises EngineClosedError like
        ``model_info``."""
        held = 0 if self._prompts is None else self._prompts.held_characters
        streams = self._requests
        waiting = sum(stream.awaited for stream in streams)
        return DebugStats.of(self._loaded().step_loop.stats(), self.config.max_num_seqs, len(streams), waiting, held)

    def __repr__(self) -> str:
        return f"<AsyncEngine {self.config.model} {self._health}>"

    # ---- inside ----

    def _check_loop(self) -> None:
        self._requests.check_loop()

    def _on_wake(self) -> None:
        if self._backend is None:
            return
        news, alive = self._backend.step_loop.drain()
        for fresh in news:
            stream = self._requests.get(fresh.request)
            if stream is None:
                continue  # aborted; its last tokens were under way
            try:
                stream.feed(fresh)
            except Exception as e:  # a bug while handling one request must not cost the others theirs
                logger.exception("request %s failed", stream.request_id)
                error = InternalError(f"request {stream.request_id} failed: {e!r}")
                error.__cause__ = e
                self._requests.fail(fresh.request, error)
        for line in self._backend.step_loop.take_step_error().splitlines():
            logger.error("a step failed, and its requests with it: %s", line)
        if not alive:
            self._die(self._backend.step_loop.error)

    def _die(self, reason: str) -> None:
        if self._health == "dead":
            return
        self._health = "dead"
        self._death = reason
        logger.error("the engine is dead: %s", reason)
        for stream in self._requests:
            stream.fail(self._dead_or_closed())

    def _dead_or_closed(self) -> EngineError:
        if self._backend is not None and (self._health == "dead" or self._backend.step_loop.error):
            reason = self._death or self._backend.step_loop.error
            return EngineDeadError(f"the engine is dead: {reason}")
        if self._health == "loading" and self._loop is None:
            return EngineClosedError(f"the engine is loading: it was not started; {_HOW_TO_START}")
        if self._health == "loading":
            return EngineClosedError("the engine is loading: wait until start() has returned")
        if self._health == "draining":
            return EngineClosedError("the engine takes no requests: it is draining, since aclose() was called")
        return EngineClosedError(f"the engine is closed: it cannot start again, create a new one; {_HOW_TO_START}")

    def _check_features(self, params: SamplingParams) -> None:
        assert self._prompts is not None
        self._prompts.check_stop_strings(params)
        for name in ("logprobs", "prompt_logprobs"):
            asked, limit = getattr(params, name), self.config.max_logprobs
            if asked is not None and asked > limit:
                raise InvalidRequestError(f"{name} must be in [0, {limit}] (max_logprobs), got {asked}", param=name)

    def _check_result(self, result: _core.SubmitResult, asked: Sequence[str] = ()) -> None:
        """``asked``: the fields that ask for more than plain sampling."""
        if result == _core.SubmitResult.queue_full:
            raise EngineOverloadedError(
                f"the queue is full: max_queued_requests ({self.config.max_queued_requests}) or max_queued_tokens "
                f"({self.config.max_queued_tokens}) is reached; raise it, or use generate_many, which waits for room"
            )
        if result == _core.SubmitResult.unserved:
            what, device = ", ".join(asked) or "this kind of request", self.model_info.device
            param = asked[0].partition("=")[0] if asked else "params"
            raise InvalidRequestError(f"{what}: not served on this device ({device}) yet", param=param)
        if result == _core.SubmitResult.too_large:  # check_size has checked the tokens
            raise InvalidRequestError("the parameters ask for more than a step has room for", param="params")
        if result != _core.SubmitResult.accepted:
            self._on_wake()  # it ended by itself, and a caller who only asks again keeps the loop from hearing of it
            raise self._dead_or_closed()

    def _serving(self) -> Backend:
        if self._loop is not None:
            self._check_loop()
        if self._health != "ready" or self._backend is None:
            raise self._dead_or_closed()
        return self._backend

    def _loaded(self) -> Backend:
        if self._backend is None:
            raise self._dead_or_closed()
        return self._backend
