"""Compiled grammars of one engine: made off the event loop, within limits, shared, and kept for the next request.

A grammar is tried in a process of asyncengine.text.sandbox, which is ended when the grammar takes too long or too
much memory. A grammar that passes is compiled again in this process, where its masks are computed. Tenants take turns
at the processes; requests for one grammar wait for one compilation.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakSet

from asyncengine.api.structured_outputs import MAX_CHARACTERS, StructuredOutputs
from asyncengine.engine.constraints import compiling
from asyncengine.engine.constraints.vocabulary import describe
from asyncengine.errors import (
    AsyncEngineError,
    EngineClosedError,
    EngineOverloadedError,
    InternalError,
    InvalidRequestError,
)
from asyncengine.text.sandbox import GrammarLimits, SandboxProcess
from asyncengine.text.threads import TextThreads

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from asyncengine.text.tokenizer import Tokenizer

PARAM = "structured_outputs"
_COMPILERS = 2
"""Grammars that are compiled at once."""
_PROCESSOR_LIMIT_S = 2.0
"""Processor time of a compilation. A schema of a thousand properties takes 0.1 s."""
_TIME_LIMIT_S = 30.0
"""Time of a compilation on a machine that is busy, or where no process compiles."""
_RENEWAL_S = 0.1
"""Processor time of a grammar that is compiled anew when its automaton has reached its limit."""
_COMPILER_BYTES = 256 << 20
"""Memory that a compilation may take in its process."""
_MOST_GRAMMAR_BYTES = 64 << 20
"""Memory of one compiled grammar. Choices of a million characters take 30 MB."""
_KEPT = 128
"""Grammars that are kept for the next request."""
_KEPT_BYTES = 256 << 20
"""Memory of the grammars that are kept, as it was when they were compiled."""
_MOST_BYTES = 1 << 30
"""Memory of grammars in use, kept ones and what their sequences hold. A tenant gets as much as it leaves free."""
_MOST_WAITING = 64 << 20
"""Characters of grammars that wait to be compiled. A tenant gets as many as it leaves free."""
_RECORD_BYTES = 8192
"""Upper limit of the bytes of a grammar, a copy of it or its compilation beside those that are measured."""


class Held:
    """Memory that somebody uses until this object is gone."""

    def __init__(self, num_bytes: int, tenant: str | None) -> None:
        self.bytes = num_bytes
        self.tenant = tenant


class Grammar(Held):
    """A compiled grammar, which sequences share: their masks make one automaton larger.

    An automaton that has reached its limit has failed for all sequences, and their requests may be anybody's, so each
    goes on with another one, which ``renew`` makes. ``lock`` is held meanwhile.
    """

    def __init__(
        self,
        tokenizer: LLTokenizer,
        lowered: str,
        matcher: LLMatcher,
        seconds: float,
        size: int,
        copy_size: int,
        tenant: str | None,
    ) -> None:
        """``matcher`` is at the beginning of ``lowered`` and took ``seconds``; sizes, of a copy too, are in bytes."""
        super().__init__(size + len(lowered) + _RECORD_BYTES, tenant)
        self.copy_bytes = copy_size + _RECORD_BYTES
        self.lock = threading.Lock()
        self._tokenizer = tokenizer
        self._lowered = lowered
        self._matcher = matcher
        self._seconds = seconds
        self.generation = 0
        self.has_failed = False
        """True if the automaton of this generation is known to have failed."""

    def deep_copy(self) -> LLMatcher:
        """A matcher at the beginning of the grammar."""
        return self._matcher.deep_copy()

    def renew(self, generation: int) -> None:
        """Replace the automaton of ``generation``, which has failed, if nobody did. The caller holds ``lock``.

        Raises InvalidRequestError where that takes too long for a thread that computes masks.
        """
        if generation != self.generation and not self.has_failed:
            return
        self.has_failed = True
        if self._seconds > _RENEWAL_S:
            raise InvalidRequestError(f"{PARAM}: the grammar is too complex for texts of this length", param=PARAM)
        self._matcher, _ = _made(self._tokenizer, self._lowered)
        self.generation += 1
        self.has_failed = False


class _Compilation:
    """One grammar that is being compiled, or waits for it, and all who wait for it."""

    def __init__(self, key: bytes, kind: str, source: str) -> None:
        self.key = key
        self.kind = kind
        self.source = source
        self.tenants: list[str | None] = []  # in order of arrival
        self.num_waiting = 0
        self.outcome: asyncio.Future[Grammar | AsyncEngineError] = asyncio.get_running_loop().create_future()

    @property
    def size(self) -> int:
        return len(self.source) + _RECORD_BYTES

    def finish(self, outcome: Grammar | AsyncEngineError) -> None:
        if not self.outcome.done():
            self.outcome.set_result(outcome)


class Grammars:
    """Compiled grammars of one engine's vocabulary. All methods belong to the engine's event loop."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, ends: Sequence[int], *, sandbox: bool = False) -> None:
        """``ends``: the tokens that end a sequence, where a grammar allows an end.

        Without ``sandbox`` grammars are compiled in this process: one that takes too long is refused and goes on, and
        nothing bounds the memory that it takes meanwhile.
        """
        self._vocabulary = tokenizer, vocab_size, list(ends)
        self._sandbox = sandbox
        self._tokenizer: asyncio.Task[tuple[LLTokenizer, str]] | None = None
        self._kept: OrderedDict[bytes, Grammar] = OrderedDict()
        self._held: WeakSet[Held] = WeakSet()
        self._pending: dict[bytes, _Compilation] = {}
        self._waiting: OrderedDict[str | None, deque[_Compilation]] = OrderedDict()  # by tenant, the next one first
        self._busy: set[str | None] = set()  # tenants with a compilation under way
        self._tasks: set[asyncio.Task[None]] = set()
        self._threads = TextThreads()
        self._processes: list[SandboxProcess] = []
        self._idle = list(range(_COMPILERS))  # indices of processes, those that were started first
        self._closed = False

    async def compile(self, asked: StructuredOutputs, tenant: str | None = None) -> Grammar:
        """The grammar, at once where it is kept.

        Raises InvalidRequestError for a grammar that is wrong, unsatisfiable, too large or too slow to compile,
        EngineOverloadedError where too much is in use or waits, EngineClosedError.
        """
        source = asked.source()
        if len(source) > MAX_CHARACTERS:
            raise InvalidRequestError(
                f"{PARAM}: at most {MAX_CHARACTERS} characters are allowed, got {len(source)}", param=PARAM
            )
        if self._closed:
            raise _closed()
        key = hashlib.blake2b(f"{asked.kind} {source}".encode(errors="surrogatepass"), digest_size=32).digest()
        if (found := self._kept.get(key)) is not None and not found.has_failed:
            self._kept.move_to_end(key)
            return found
        job = self._pending.get(key) or _Compilation(key, asked.kind, source)
        self._enqueue(job, tenant)
        job.num_waiting += 1
        try:
            outcome = await asyncio.shield(job.outcome)
        finally:
            job.num_waiting -= 1
            if not job.num_waiting:
                self._withdraw(job)
        if isinstance(outcome, AsyncEngineError):
            raise copy.copy(outcome)  # each who waits has an error of its own
        return outcome

    def hold(self, num_bytes: int, tenant: str | None) -> Held:
        """Count memory that is about to be used, until the object is gone. Raises EngineOverloadedError."""
        held = Held(num_bytes, tenant)
        self._admit(held)
        return held

    def release(self) -> None:
        """Let threads and processes end that have nothing to do; the next grammar starts others."""
        self._threads.release()
        for process in self._processes:
            process.release()

    def close(self) -> None:
        """Fail what is being compiled, and let threads and processes end. Idempotent."""
        self._closed = True
        self._threads.close()
        for job in self._pending.values():
            job.finish(_closed())
        self._pending.clear()
        self._waiting.clear()
        for task in self._tasks:
            task.cancel()
        self.release()

    async def aclose(self) -> None:
        """``close``, and wait for the processes."""
        self.close()
        if self._tasks:
            await asyncio.wait(self._tasks)
        for process in self._processes:
            await process.aclose()

    # ---- compilations ----

    def _enqueue(self, job: _Compilation, tenant: str | None) -> None:
        """Have it compiled when it is the turn of any tenant that wants it."""
        begun = job.key in self._pending and not any(job in own for own in self._waiting.values())
        if begun or tenant in job.tenants:
            return
        own = job.size + sum(each.size for each in self._waiting.get(tenant, ()))
        waiting = job.size + sum(each.size for others in self._waiting.values() for each in others)
        if own > _MOST_WAITING - waiting:
            raise EngineOverloadedError("the queue is full: too many grammars are waiting to be compiled")
        self._waiting.setdefault(tenant, deque()).append(job)
        job.tenants.append(tenant)
        self._pending[job.key] = job
        self._advance()

    def _withdraw(self, job: _Compilation) -> None:
        """Nobody waits for it any more: forget it, unless it has begun."""
        for tenant, own in list(self._waiting.items()):
            if job in own:
                self._pending.pop(job.key, None)
                self._forget(job, tenant)

    def _forget(self, job: _Compilation, tenant: str | None) -> None:
        """Remove the compilation from those that wait for this tenant."""
        own = self._waiting[tenant]
        own.remove(job)
        if not own:
            del self._waiting[tenant]

    def _advance(self) -> None:
        """Begin what may begin. Tenants take turns, and none has more than one compilation under way."""
        while self._idle and not self._closed:
            tenant = next((each for each in self._waiting if each is None or each not in self._busy), None)
            if tenant not in self._waiting:
                return
            job = self._waiting[tenant][0]
            self._waiting.move_to_end(tenant)
            self._busy.add(tenant)
            for each in job.tenants:
                self._forget(job, each)
            task = asyncio.ensure_future(self._work(job, tenant, self._idle.pop(0)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _work(self, job: _Compilation, tenant: str | None, index: int) -> None:
        try:
            grammar = await self._compile(job, tenant, index)
            self._keep(job.key, grammar)
            job.finish(grammar)
        except AsyncEngineError as e:
            job.finish(e.with_traceback(None))
        except asyncio.CancelledError:
            job.finish(_closed())
            raise
        except BaseException as e:  # a bug, or a panic of the library: it ends these requests alone
            job.finish(InternalError(f"a grammar's compilation failed: {e!r:.500}"))
        finally:
            if self._pending.get(job.key) is job:
                del self._pending[job.key]
            self._idle = sorted([*self._idle, index])
            self._busy.discard(tenant)
            self._advance()

    async def _compile(self, job: _Compilation, tenant: str | None, index: int) -> Grammar:
        tokenizer, text = await self._make_tokenizer()
        if not self._sandbox:
            lowered, matcher, seconds, size, copy_size = await self._compile_here(job, tokenizer)
            self._check_size(size, tenant)
        else:
            if not self._processes:
                self._processes = [self._process(text) for _ in range(_COMPILERS)]
            lowered, size, copy_size = await self._processes[index].compile(job.kind, job.source)
            self._check_size(size, tenant)
            matcher, seconds = await self._threads.run(0, _made, tokenizer, lowered)
        return Grammar(tokenizer, lowered, matcher, seconds, size, copy_size, tenant)

    async def _compile_here(self, job: _Compilation, tokenizer: LLTokenizer) -> tuple[str, LLMatcher, float, int, int]:
        """Compile in a thread. Waiting requests get an error when the time is over; the thread goes on, and counts as
        busy until it has finished."""
        compiled = asyncio.ensure_future(self._threads.run(0, _compiled, tokenizer, job.kind, job.source))
        await asyncio.wait([compiled], timeout=_TIME_LIMIT_S)
        if not compiled.done():
            job.finish(
                InvalidRequestError(
                    f"{PARAM}: the grammar takes longer than {_TIME_LIMIT_S:g} s to compile", param=PARAM
                )
            )
        return await compiled

    def _process(self, tokenizer_json: str) -> SandboxProcess:
        _, vocab_size, ends = self._vocabulary
        limits = GrammarLimits(compiling.__file__, vocab_size, ends, _PROCESSOR_LIMIT_S, _COMPILER_BYTES)
        return SandboxProcess(tokenizer_json, _TIME_LIMIT_S, limits)

    async def _make_tokenizer(self) -> tuple[LLTokenizer, str]:
        """The library's form of the vocabulary, and its text, made once, when it is first asked for."""
        if self._tokenizer is None:
            self._tokenizer = asyncio.ensure_future(self._threads.run(0, _make_tokenizer, *self._vocabulary))
        return await asyncio.shield(self._tokenizer)

    # ---- memory ----

    def _check_size(self, size: int, tenant: str | None) -> None:
        if size > _MOST_GRAMMAR_BYTES:
            raise InvalidRequestError(
                f"{PARAM}: the grammar takes {size >> 20} MiB of memory, {_MOST_GRAMMAR_BYTES >> 20} MiB are allowed",
                param=PARAM,
            )
        self._admit(Held(size, tenant))

    def _keep(self, key: bytes, grammar: Grammar) -> None:
        self._held.add(grammar)
        self._kept[key] = grammar
        while len(self._kept) > _KEPT or sum(each.bytes for each in self._kept.values()) > _KEPT_BYTES:
            self._kept.popitem(last=False)

    def _admit(self, held: Held) -> None:
        """Count it. Grammars that are kept for the same tenant make room for it."""
        while not self._has_room(held):
            own = next((key for key, each in self._kept.items() if each.tenant == held.tenant), None)
            if own is None:
                raise EngineOverloadedError("the queue is full: grammars in use hold too much memory")
            del self._kept[own]
        self._held.add(held)

    def _has_room(self, held: Held) -> bool:
        others = list(self._held)
        own = sum(each.bytes for each in others if each.tenant == held.tenant) + held.bytes
        return own <= _MOST_BYTES - held.bytes - sum(each.bytes for each in others)


def _make_tokenizer(tokenizer: Tokenizer, vocab_size: int, ends: list[int]) -> tuple[LLTokenizer, str]:
    text = describe(tokenizer.backend, vocab_size, ends)
    try:
        return compiling.make_tokenizer(text, vocab_size, ends), text
    except ValueError as e:
        raise InvalidRequestError(f"{PARAM}: not served with this model's tokenizer: {e}", param=PARAM) from None


def _made(tokenizer: LLTokenizer, lowered: str) -> tuple[LLMatcher, float]:
    """A matcher, and the seconds of processor time that it took."""
    before = time.thread_time()
    try:
        return compiling.make_matcher(tokenizer, lowered), time.thread_time() - before
    except ValueError as e:
        raise _wrong(e) from None


def _compiled(tokenizer: LLTokenizer, kind: str, source: str) -> tuple[str, LLMatcher, float, int, int]:
    try:
        lowered, size, copy_size = compiling.try_grammar(tokenizer, kind, source)
    except ValueError as e:
        raise _wrong(e) from None
    return lowered, *_made(tokenizer, lowered), size, copy_size


def _wrong(error: ValueError) -> InvalidRequestError:
    return InvalidRequestError(f"{PARAM}: {str(error).strip()[:500]}", param=PARAM)


def _closed() -> EngineClosedError:
    return EngineClosedError("the engine was closed before the request was finished")
