"""The way from a parsed request to its response, common to completions and chat completions."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from asyncengine.api.conversation import Conversation
from asyncengine.api.outputs import FinishReason, RequestDelta, RequestOutput, Usage
from asyncengine.api.request import LONG_TEXT, Prompt, SamplingParams
from asyncengine.errors import EngineDeadError, InvalidRequestError, RequestAbortedError, RequestTimeoutError
from asyncengine.server.access import Account
from asyncengine.server.config import ServerConfig
from asyncengine.server.engine_api import Engine, ModelInfo, RequestStream
from asyncengine.server.errors import failure
from asyncengine.server.logprobs import JobLogProbs
from asyncengine.server.metrics import Metrics, RequestMetrics
from asyncengine.server.parsing.choose import Parsing
from asyncengine.server.protocol import GenerationBody, name_as_asked
from asyncengine.server.sse import NO_USAGE, NULL_USAGE, ChunkFormat, StreamFormat, encode, usage_field
from asyncengine.server.wire import SseResponse, in_turns
from asyncengine.text.tokenizer import Tokenizer
from asyncengine.version import VERSION

logger = logging.getLogger("asyncengine.server")
T = TypeVar("T")

_PER_TURN = 64
"""Prompts of one request that are ended in one turn of the event loop: about 2 ms."""


@dataclass(frozen=True, slots=True)
class Job:
    """One HTTP request for P prompts of n sequences each; choice p·n + i is sequence i of prompt p."""

    id: str
    created: int
    model: str
    fingerprint: str
    """The ``system_fingerprint`` of answers: requests with one seed may differ where it does."""
    prompts: Sequence[Prompt]
    params: SamplingParams
    body: GenerationBody
    priority: int
    tenant: str
    """The client: requests of different tenants share the engine fairly."""
    admission: asyncio.Lock
    """The server's: requests of several prompts enter the engine's queue one after the other. If they all did at once,
    they could fill it between them, and none would have all of its prompts in it."""
    logprobs: JobLogProbs | None = None
    """Log probabilities of the choices and prompts, if the request asks for any."""
    tokenizer: Tokenizer | None = None
    parsing: Parsing | None = None
    """Parser of the outputs; None: outputs are plain text."""
    account: Account = field(default_factory=Account)
    """Account of the request for the log's line."""

    @property
    def detailed(self) -> bool:
        """True if the response has more than text."""
        return self.logprobs is not None or bool(self.body.return_token_ids)

    @property
    def choice_logprobs(self) -> JobLogProbs | None:
        return self.logprobs if self.params.wants_logprobs else None

    def with_prompt_logprobs(self, document: bytes, output: RequestOutput) -> Iterator[bytes]:
        """``document``, an object as JSON whose last member is prompt_logprobs, null, with those that are asked for."""
        if self.body.prompt_logprobs is None or self.logprobs is None or output.prompt_logprobs is None:
            yield document
            return
        yield document.removesuffix(b"null}") + b"["
        yield from joined(encode(some)[1:-1] for some in self.logprobs.prompt(output.prompt_logprobs))
        yield b"]}"

    def turn(self) -> AbstractAsyncContextManager[Any]:
        """Return a lock to hold while the job's prompts are submitted. Prompts that take long to tokenize hold up no
        other request."""
        waits = len(self.prompts) == 1 or any(map(_is_long, self.prompts))
        return nullcontext() if waits else self.admission

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.params.n

    def submission(self, p: int) -> dict[str, Any]:
        """Arguments that hand prompt ``p`` to an engine."""
        return {
            "prompt": self.prompts[p],
            "params": self.params,
            "request_id": self.id if len(self.prompts) == 1 else f"{self.id}-{p}",
            "priority": self.priority,
            "cache_salt": self.body.cache_salt,
            "tenant": self.tenant,
        }


def _is_long(prompt: Prompt) -> bool:
    return isinstance(prompt, Conversation) or len(prompt) > LONG_TEXT


def system_fingerprint(info: ModelInfo) -> str:
    """A short name of program, model and device. Where it is the same, a seed gives the same tokens, as far as the
    device computes the same twice."""
    told = (VERSION, info.name, info.architecture, info.dtype, info.device, info.num_parameters)
    return f"fp_{hashlib.sha256(repr(told).encode()).hexdigest()[:12]}"


class Endpoint(ABC):
    """One route that generates: its request, its response and its chunks."""

    id_prefix: str
    fields: frozenset[str]
    """The names of the fields that its bodies may have."""
    chunk_format: type[ChunkFormat]

    @abstractmethod
    def parse(self, raw: bytes | bytearray, config: ServerConfig) -> tuple[GenerationBody, list[Prompt]]:
        """Typed body, without its prompts, and prompts; neither refers to ``raw``. Raises ApiError 400."""

    @abstractmethod
    def params(self, body: GenerationBody) -> SamplingParams:
        """Return the sampling parameters for the engine. Raises InvalidRequestError, ApiError 400."""

    def prepare(
        self, body: GenerationBody, prompts: list[Prompt], tokenizer: Tokenizer | None, config: ServerConfig
    ) -> tuple[list[Prompt], SamplingParams, Parsing | None]:
        """The prompts as the engine takes them, what it is asked for, and how to read the outputs.

        Raises InvalidRequestError, ApiError 400.
        """
        return prompts, self.params(body), None

    async def fit(self, engine: Engine, body: GenerationBody, prompts: list[Prompt]) -> list[Prompt]:
        """The prompts as long as the context allows, where the request asks for that. Raises InvalidRequestError."""
        return prompts

    def chunks(self, job: Job) -> StreamFormat:
        """Return the format in which the response is streamed."""
        return self.chunk_format(job)

    def name_as_asked(self, exc: InvalidRequestError, body: GenerationBody, grammar: str | None = None) -> None:
        """``protocol.name_as_asked``, with this API's names of fields."""
        name_as_asked(exc, body, grammar)

    def document(self, job: Job, outputs: list[RequestOutput]) -> msgspec.Struct:
        """The response without streaming; outputs in the order of the prompts."""
        raise NotImplementedError

    def pieces(self, job: Job, outputs: list[RequestOutput]) -> Iterator[bytes]:
        """``document`` as JSON, in parts each of which takes some 10 ms at most."""
        yield encode(self.document(job, outputs))


def joined(values: Iterable[bytes]) -> Iterator[bytes]:
    """JSON values with commas between them."""
    for i, value in enumerate(values):
        yield b"," + value if i else value


async def generate(engine: Engine, job: Job, metrics: Metrics) -> list[RequestOutput]:
    """All outputs, in the order of the prompts. A failure of one prompt aborts the others."""
    try:
        outputs = await _all(lambda p: engine.generate(**job.submission(p)), len(job.prompts), job.turn())
    except asyncio.CancelledError:
        metrics.of(0).finished["abort"] += job.num_choices
        raise
    except (EngineDeadError, RequestAbortedError, RequestTimeoutError):
        metrics.of(0).finished["error"] += job.num_choices
        raise
    for output in outputs:
        served = metrics.of(output.timing.engine)
        served.time_to_first_token.observe(output.timing.ttft)
        served.request_finished(output.timing, output.usage)
        job.account.add(output.usage, output.timing)
        for sequence in output.outputs:
            served.finished[sequence.finish_reason] += 1
    return outputs


async def send_sse(
    engine: Engine, job: Job, metrics: Metrics, events: SseResponse, chunks: StreamFormat, ping_interval_s: float
) -> None:
    """Write all deltas as events. Raises only before anything was sent: after that, errors are events too."""
    streaming = _Streaming(job, metrics, events, chunks)
    events.begin_pings(ping_interval_s)
    try:
        streaming.streams = await _admit(engine, job)
        streaming.open_choices = job.num_choices
        chunks.streams = streaming.streams
        await _all(streaming.pump, len(job.prompts))
        await streaming.end()
    except ConnectionError as exc:
        logger.info("request %s aborted: %s", job.id, exc)
    except Exception as exc:
        streaming.ended_as = "error"
        if not events.started:
            raise
        await _fail(events, job, chunks, exc)
    finally:
        events.end_pings()
        served_by = streaming.streams[0].engine if streaming.streams else 0
        metrics.of(served_by).finished[streaming.ended_as] += streaming.open_choices
        await _close(streaming.streams)


async def _fail(events: SseResponse, job: Job, chunks: StreamFormat, exc: Exception) -> None:
    error = failure(exc, events.request_id)
    try:
        await events.fail(chunks.failed(error, events.request_id))
    except ConnectionError as gone:
        logger.info("request %s: %s", job.id, gone)


async def _admit(engine: Engine, job: Job) -> list[RequestStream]:
    """Submit every prompt, or none: a rejected one aborts those before it. Others' streams go on meanwhile."""
    if len(job.prompts) == 1:
        return [await engine.submit(**job.submission(0))]
    streams: list[RequestStream] = []
    try:
        async with job.turn():
            for p in range(len(job.prompts)):
                streams.append(await engine.submit(**job.submission(p)))
                await asyncio.sleep(0)
    except BaseException:
        await _close(streams)
        raise
    return streams


async def _close(streams: Sequence[RequestStream]) -> None:
    """Some in each turn of the loop: aborting thousands would hold it up."""
    done = 0
    try:
        while done < len(streams):
            for s in streams[done : done + _PER_TURN]:
                await s.aclose()
            done += _PER_TURN
            if done < len(streams):
                await asyncio.sleep(0)
    finally:  # also if the client leaves meanwhile; closing waits for nothing, and may be done twice
        for s in streams[done:]:
            await s.aclose()


async def _all(
    work: Callable[[int], Coroutine[Any, Any, T]], count: int, turn: AbstractAsyncContextManager[Any] | None = None
) -> list[T]:
    """Results of ``work(0)`` to ``work(count - 1)`` in order; the first failure cancels the rest and is raised.

    Each is a task, since what wakes up for every token should not lie under all frames of the request's handler, and
    begins in a turn of the event loop of its own: the first steps of thousands would hold up everybody else.
    Not a TaskGroup: its exceptions are parts of cycles with tracebacks, frames and tasks, so what failed requests held
    would live until the garbage collector comes.
    """
    tasks: list[asyncio.Task[T]] = []
    try:
        async with turn or nullcontext():
            for p in range(count):
                tasks.append(asyncio.create_task(work(p)))
                await asyncio.sleep(0)
                if tasks[-1].done() and (tasks[-1].cancelled() or tasks[-1].exception() is not None):
                    break  # it was refused at once: the others would only be made to be cancelled
        return await asyncio.gather(*tasks)
    finally:
        try:
            await _end(tasks)
        finally:  # also if the client leaves meanwhile
            tasks.clear()  # this frame is in the traceback of the exception that a task holds


async def _end(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Some in each turn of the loop: ending thousands would hold it up."""
    try:
        for first in range(0, len(tasks), _PER_TURN):
            some = tasks[first : first + _PER_TURN]
            for task in some:
                task.cancel()
            await asyncio.gather(*some, return_exceptions=True)
    finally:  # also if the client leaves meanwhile
        for task in tasks:
            task.cancel()


class _Streaming:
    """State of one streamed response."""

    def __init__(self, job: Job, metrics: Metrics, events: SseResponse, chunks: StreamFormat) -> None:
        options = job.body.stream_options
        self.streams: list[RequestStream] = []
        self.open_choices = 0
        self.ended_as = "abort"
        self._job = job
        self._metrics = metrics
        self._chunks = chunks
        self._events = events
        self._include_usage = bool(options and options.include_usage)
        self._continuous_usage = bool(self._include_usage and options and options.continuous_usage_stats)
        self._usage = NULL_USAGE if self._include_usage else NO_USAGE
        self._generated = 0
        self._arrived = time.monotonic()
        self._last_token = [0.0] * job.num_choices
        self._one_writer = asyncio.Lock()

    async def pump(self, p: int) -> None:
        """Write the deltas of prompt ``p``."""
        first_choice = p * self._job.params.n
        alone = len(self.streams) == 1
        answered = False
        stream = self.streams[p]
        async for delta in stream:
            choice = first_choice + delta.index
            metrics = self._metrics.of(stream.engine)
            if count := len(delta.token_ids):
                now = time.monotonic()
                if last := self._last_token[choice]:
                    metrics.tokens_came(now - last, count, delta.host_tokens)
                elif not answered:
                    metrics.time_to_first_token.observe(now - self._arrived)
                    answered = True
                self._last_token[choice] = now
            if delta.finish_reason is not None:
                self._finish(metrics, delta, delta.finish_reason)
            if self._continuous_usage:
                self._usage = self._usage_so_far(count)
            if self._job.logprobs is not None:
                await self._send_pieces(self._chunks.pieces(choice, delta, self._usage))
                continue
            data = self._chunks.events(choice, delta, self._usage)
            if not data:
                continue
            if alone:
                await self._events.send(data)
            else:  # a writer that waits for the client holds back the other prompts' writers
                async with self._one_writer:
                    await self._events.send(data)

    async def _send_pieces(self, pieces: Iterator[bytes]) -> None:
        async with self._one_writer:
            async for data in in_turns(pieces):
                if data:
                    await self._events.send(data)

    async def end(self) -> None:
        """The usage chunk, where asked for, and the clean end."""
        if self._include_usage:
            await self._events.send(self._chunks.usage(usage_field(self._chunks.usage_of(self._job.account.usages))))
        await self._events.done(self._chunks.end)

    def _finish(self, metrics: RequestMetrics, delta: RequestDelta, reason: FinishReason) -> None:
        self.open_choices -= 1
        metrics.finished[reason] += 1
        self._job.account.add(delta.usage, delta.timing)
        if delta.timing is not None and delta.usage is not None:
            metrics.request_finished(delta.timing, delta.usage)

    def _usage_so_far(self, count: int) -> bytes:
        self._generated += count
        prompt_tokens = sum(len(s.prompt_token_ids) for s in self.streams)
        cached_tokens = sum(s.cached_tokens for s in self.streams)
        return usage_field(self._chunks.usage_of([Usage(prompt_tokens, self._generated, cached_tokens)]))
