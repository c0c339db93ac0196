"""Costs of grammars: for requests that wait for one, for requests that wait beside it, and for the machine's memory."""

from __future__ import annotations

import asyncio
import ctypes
import os
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncengine import (
    AsyncEngine,
    EngineClosedError,
    EngineError,
    EngineOverloadedError,
    InvalidRequestError,
    SamplingParams,
    StructuredOutputs,
    bundled_model,
)
from asyncengine.engine.constraints import compiling, grammars
from asyncengine.engine.constraints.grammars import Grammar, Grammars
from asyncengine.engine.constraints.masks import Constraint
from asyncengine.engine.constraints.reasoning import Reasoning
from asyncengine.text.sandbox import SandboxProcess
from asyncengine.text.tokenizer import Tokenizer
from tests.amounts import sample_of

PROMPT = "Once upon a time"
PRIMES = sample_of((99999989, 99999971, 99999959), (99999989, 99999971))
MIB = 1 << 20


def engine_with(**config: Any) -> AsyncEngine:
    return AsyncEngine.from_pretrained(bundled_model(), progress=False, **config)


def params(asked: dict[str, Any], **given: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 20, "seed": 1, "structured_outputs": asked} | given)


@asynccontextmanager
async def made(**given: Any) -> AsyncIterator[Grammars]:
    """Grammars of the bundled model's vocabulary."""
    tokenizer = Tokenizer.from_pretrained(str(bundled_model()))
    opened = Grammars(tokenizer, tokenizer.vocab_size, [tokenizer.eos_token_id or 0], **given)
    try:
        yield opened
    finally:
        await opened.aclose()


def regex(text: str) -> StructuredOutputs:
    return StructuredOutputs(regex=text)


class Scripted:
    """Stand-in for SandboxProcess.compile: grammars in order of their compilation, which ends when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, size: int = 0) -> None:
        self.begun: list[str] = []
        self.gate = asyncio.Semaphore(0)
        self._size = size
        monkeypatch.setattr(SandboxProcess, "compile", self._compile)

    async def _compile(self, kind: str, source: str) -> tuple[str, int, int]:
        self.begun.append(source)
        await self.gate.acquire()
        return compiling.lower(kind, source), self._size, 0

    async def settle(self) -> None:
        """Let everything happen that can. The vocabulary is made on a thread before the first compilation."""
        before = -1
        while before != len(self.begun) or not self.begun:
            before = len(self.begun)
            await asyncio.sleep(0.05)


def resident(pid: int) -> int:
    try:
        pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    except FileNotFoundError:
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


async def test_grammars_that_explode_cost_nobody_anything() -> None:
    async with engine_with() as engine:
        await engine.generate(PROMPT, params({"regex": "[a-z]{3}"}))
        before, peak, peak_beside = resident(os.getpid()), 0, 0

        async def watch() -> None:
            nonlocal peak, peak_beside
            while True:
                peak = max(peak, resident(os.getpid()))
                for process in all_processes(engine):
                    peak_beside = max(peak_beside, resident(process))
                await asyncio.sleep(0.02)

        watching = asyncio.create_task(watch())
        explosive = [
            asyncio.create_task(engine.generate(PROMPT, params({"json": {"multipleOf": prime}}), tenant="one"))
            for prime in PRIMES
        ]
        for i in range(4):
            output = await engine.generate(PROMPT, params({"choice": [f"{i} yes", f"{i} no"]}), tenant="another")
            assert output.text in (f"{i} yes", f"{i} no")
            assert not explosive[1].done()
        for outcome in await asyncio.gather(*explosive, return_exceptions=True):
            assert isinstance(outcome, InvalidRequestError)
            assert outcome.param == "structured_outputs"
            assert str(outcome) == (
                "structured_outputs: the grammar's compilation failed: "
                "it takes more than 2 s of processor time or 256 MiB of memory"
            )
        watching.cancel()
        assert (await engine.generate(PROMPT, params({"choice": ["back"]}), tenant="one")).text == "back"
    assert peak - before < 64 * MIB
    assert peak_beside < 512 * MIB


def all_processes(engine: AsyncEngine) -> list[int]:
    made = engine._life.constraints._grammars
    running = [each._process for each in made._processes] if made else []
    return [process.pid for process in running if process is not None]


@pytest.mark.parametrize(
    "asked", [{"regex": f"([a-z]{{1,9}}{'b' * 60000} )" * 16}, {"grammar": "start: A\nA: /" + "(a|b)" * 200000 + "/\n"}]
)
async def test_a_large_grammar_is_served_or_refused(asked: dict[str, Any]) -> None:
    async with engine_with() as engine:
        (outcome,) = await asyncio.gather(engine.generate(PROMPT, params(asked)), return_exceptions=True)
        if isinstance(outcome, BaseException):
            assert isinstance(outcome, InvalidRequestError)
        else:
            assert outcome.token_ids
        assert (await engine.generate(PROMPT, params({"choice": ["back"]}))).text == "back"


async def test_equal_grammars_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Scripted(monkeypatch)
    async with made(sandbox=True) as opened:
        waiting = [asyncio.create_task(opened.compile(regex("a+"), tenant=f"{i}")) for i in range(200)]
        await script.settle()
        waiting[0].cancel()  # the one that began it
        waiting[7].cancel()
        await asyncio.sleep(0)
        script.gate.release()
        found = await asyncio.gather(*waiting, return_exceptions=True)
        assert [i for i, each in enumerate(found) if isinstance(each, asyncio.CancelledError)] == [0, 7]
        assert len({id(each) for each in found if isinstance(each, Grammar)}) == 1
        assert script.begun == ["a+"]


async def test_an_error_is_everybodys_own() -> None:
    async with made(sandbox=True) as opened:
        found = await asyncio.gather(*(opened.compile(regex("(")) for _ in range(3)), return_exceptions=True)
        assert all(type(each) is InvalidRequestError and each.param == "structured_outputs" for each in found)
        assert len({id(each) for each in found}) == 3


async def test_a_kept_grammar_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    async with engine_with() as engine:
        kept = params({"choice": ["kept"]}, n=3)
        await engine.generate(PROMPT, kept)
        with monkeypatch.context() as patched:
            script = Scripted(patched)
            slow = [
                asyncio.create_task(engine.generate(PROMPT, params({"regex": f"a{i}"}), tenant=f"{i}"))
                for i in range(24)
            ]
            await script.settle()
            assert len(script.begun) == 2
            output = await engine.generate(PROMPT, kept, tenant="0")
            assert [each.text for each in output.outputs] == ["kept"] * 3
            assert len(script.begun) == 2
            for _ in slow:
                script.gate.release()
            assert [(await each).text for each in slow] == [f"a{i}" for i in range(24)]


async def test_tenants_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that asks for many grammars has one compiled at a time, and lets each newcomer go first."""
    script = Scripted(monkeypatch)
    async with made(sandbox=True) as opened:
        tasks = [asyncio.create_task(opened.compile(regex(f"many{i}"), tenant="many")) for i in range(6)]
        await script.settle()
        assert script.begun == ["many0"]
        tasks.append(asyncio.create_task(opened.compile(regex("few0"), tenant="few")))
        await script.settle()
        assert script.begun == ["many0", "few0"]
        # A tenant that joins a grammar that waits as another tenant's has it compiled when it is the joining tenant's
        # turn.
        tasks += [asyncio.create_task(opened.compile(regex(each), tenant="few")) for each in ("many5", "few1")]
        script.gate.release()
        script.gate.release()
        await script.settle()
        assert sorted(script.begun[2:]) == ["many1", "many5"]
        for _ in tasks:
            script.gate.release()
        await asyncio.gather(*tasks)
        assert len(script.begun) == 8


async def test_a_grammar_that_nobody_waits_for_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Scripted(monkeypatch)
    async with made(sandbox=True) as opened:
        tasks = [asyncio.create_task(opened.compile(regex(f"{i}"), tenant="one")) for i in range(3)]
        await script.settle()
        tasks[1].cancel()
        await asyncio.sleep(0)
        script.gate.release()
        script.gate.release()
        await asyncio.gather(tasks[0], tasks[2])
        assert script.begun == ["0", "2"]
        assert not opened._pending
        assert not opened._waiting


async def test_grammars_that_wait_are_limited_by_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "_MOST_WAITING", 100_000)
    script = Scripted(monkeypatch)
    async with made(sandbox=True) as opened:
        tasks = [asyncio.create_task(opened.compile(regex("0"), tenant="one"))]
        await script.settle()
        tasks += [asyncio.create_task(opened.compile(regex(f"{i}"), tenant="one")) for i in range(1, 12)]
        await asyncio.sleep(0)
        tasks.append(asyncio.create_task(opened.compile(regex("a"), tenant="another")))
        await asyncio.sleep(0)
        for _ in tasks:
            script.gate.release()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        refused = [isinstance(each, EngineOverloadedError) for each in found]
        assert 0 < sum(refused[:-1]) < 11
        assert not refused[-1]


async def test_kept_grammars_are_limited_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "_KEPT_BYTES", 3 * MIB + 100_000)
    script = Scripted(monkeypatch, size=MIB)
    for _ in range(20):
        script.gate.release()
    async with made(sandbox=True) as opened:
        first = await opened.compile(regex("0"))
        for i in range(1, 3):
            await opened.compile(regex(f"{i}"))
        assert await opened.compile(regex("0")) is first
        await opened.compile(regex("3"))  # 1 is the oldest now
        assert await opened.compile(regex("0")) is first
        assert sum(each.bytes for each in opened._kept.values()) <= 3 * MIB + 100_000
        assert script.begun == ["0", "1", "2", "3"]
        await opened.compile(regex("1"))
        assert script.begun == ["0", "1", "2", "3", "1"]


async def test_the_size_of_a_grammar_is_measured() -> None:
    """The size lies within a factor of two of the resident memory of many like it."""
    async with made(sandbox=True) as opened:
        small = await opened.compile(regex("[a-z]{3}"))
        large = await opened.compile(StructuredOutputs(json={"multipleOf": 100003}))
        assert small.bytes < MIB // 4
        assert 8 * MIB < large.bytes < 64 * MIB
        with pytest.raises(InvalidRequestError, match=r"MiB of memory, 64 MiB are allowed|takes more than"):
            await opened.compile(StructuredOutputs(json={"multipleOf": 500009}))


async def test_memory_in_use_is_limited_by_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "_MOST_BYTES", 8 * MIB)
    async with made() as opened:
        held = [opened.hold(MIB, "one") for _ in range(4)]
        with pytest.raises(EngineOverloadedError, match="too much memory"):
            opened.hold(MIB, "one")
        held.append(opened.hold(2 * MIB, "another"))
        with pytest.raises(EngineOverloadedError):
            opened.hold(MIB, "another")
        held.clear()
        await opened.compile(regex("a"), tenant="one")
        assert len(opened._kept) == 1
        await asyncio.sleep(0)  # the event loop's own reference to the grammar goes
        opened.hold(4 * MIB, "one")  # what is kept for this tenant makes room for it
        assert not opened._kept


async def test_many_sequences_of_a_grammar_share_its_memory() -> None:
    async with engine_with(max_num_seqs=128) as engine:
        schema = {"json": {"enum": [f"value {i} of many" for i in range(4000)]}}
        await engine.generate(PROMPT, params(schema))
        before = resident(os.getpid())
        output = await engine.generate(PROMPT, params(schema, n=128))
        assert len(output.outputs) == 128
        assert resident(os.getpid()) - before < 128 * MIB


class Channel:
    """Stand-in for the core's channel: it keeps the last mask."""

    def __init__(self, words: int) -> None:
        self.mask = (ctypes.c_uint32 * words)()
        self.address = ctypes.addressof(self.mask)

    def write(self, position: int, allows_all: bool = False, forced: Sequence[int] = ()) -> None:
        self.position = position

    def post(self) -> None:
        pass

    def allowed(self) -> list[int]:
        bits = np.unpackbits(np.frombuffer(self.mask, np.uint8), bitorder="little")
        return [int(i) for i in np.flatnonzero(bits)]


def sequence_of(grammar: Grammar) -> tuple[Constraint, Channel]:
    tokenizer = Tokenizer.from_pretrained(str(bundled_model()))
    words = -(-tokenizer.vocab_size // 32)
    constraint = Constraint(grammar, words, 1, tokenizer.eos_token_id or 0, Reasoning(), forces=False)
    channel: Any = Channel(words)
    constraint.channel = channel
    constraint._next([])
    return constraint, channel


async def test_a_sequence_that_exhausts_its_grammar_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences of a grammar share its automaton: when that has reached its limit, the others get another one."""
    monkeypatch.setitem(compiling.LIMITS, "max_lexer_states", 700)
    exhausting = regex(r"x{3}[yz]{5}|(.|\n)*a(.|\n){400}")
    draw = random.Random(1)
    encode = Tokenizer.from_pretrained(str(bundled_model())).encode
    async with made() as opened, made() as fresh:
        grammar = await opened.compile(exhausting)
        wild, channel = sequence_of(grammar)
        calm, calm_channel = sequence_of(grammar)
        calm.work(encode("xxx", add_special_tokens=False))
        generation = grammar.generation
        with pytest.raises(InvalidRequestError, match="the grammar failed"):  # noqa: PT012
            wild.work(encode("a", add_special_tokens=False))
            for _ in range(700):
                wild.work([draw.choice(channel.allowed())])
        assert len(wild._history) > 20
        assert grammar.generation > generation
        more = encode("yz", add_special_tokens=False)
        calm.work(more)
        alone, alone_channel = sequence_of(await fresh.compile(exhausting))
        alone.work(encode("xxx", add_special_tokens=False))
        alone.work(more)
        assert calm_channel.allowed() == alone_channel.allowed()
        assert calm_channel.position == alone_channel.position
        assert (await opened.compile(exhausting)) is grammar
        sequence_of(grammar)


async def test_a_failed_grammar_that_takes_long_is_compiled_for_the_next_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(compiling.LIMITS, "max_lexer_states", 1500)
    monkeypatch.setattr(grammars, "_RENEWAL_S", -1.0)
    draw = random.Random(1)
    async with made() as opened:
        grammar = await opened.compile(regex(r"(.|\n)*a(.|\n){400}"))
        wild, channel = sequence_of(grammar)
        with pytest.raises(InvalidRequestError, match="too complex"):  # noqa: PT012
            for _ in range(300):
                wild.work([draw.choice(channel.allowed())])
        assert grammar.generation == 0
        assert await opened.compile(regex(r"(.|\n)*a(.|\n){400}")) is not grammar


async def test_closing_fails_what_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Scripted(monkeypatch)
    async with made(sandbox=True) as opened:
        tasks = [asyncio.create_task(opened.compile(regex(f"{i}"), tenant=f"{i}")) for i in range(4)]
        await script.settle()
        assert len(script.begun) == 2
        await opened.aclose()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(outcome, EngineClosedError)
        with pytest.raises(EngineClosedError):
            await opened.compile(regex("a"))


async def test_the_processes_end_with_the_engine() -> None:
    async with engine_with() as engine:
        await engine.generate(PROMPT, params({"choice": ["a"]}))
        (pid,) = all_processes(engine)
    assert resident(pid) == 0


async def test_without_an_interpreter_grammars_fail_and_the_rest_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "")
    async with engine_with() as engine:
        with pytest.raises(EngineError, match=r"no process could be started for grammars: .*sandbox=False"):
            await engine.generate(PROMPT, params({"choice": ["a"]}))
        assert len((await engine.generate(PROMPT, SamplingParams(max_tokens=3, ignore_eos=True))).token_ids) == 3
    async with engine_with(sandbox=False) as engine:
        assert (await engine.generate(PROMPT, params({"choice": ["a"]}))).text == "a"


async def test_without_a_sandbox_a_slow_compilation_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = grammars._compiled

    def slow(tokenizer: Any, kind: str, source: str) -> Any:
        if source == "slow":
            time.sleep(0.5)
        return compiled(tokenizer, kind, source)

    monkeypatch.setattr(grammars, "_TIME_LIMIT_S", 0.2)
    monkeypatch.setattr(grammars, "_compiled", slow)
    async with engine_with(sandbox=False) as engine:
        with pytest.raises(InvalidRequestError, match=r"takes longer than 0\.2 s to compile"):
            await engine.generate(PROMPT, params({"regex": "slow"}))
        assert len((await engine.generate(PROMPT, SamplingParams(max_tokens=3, ignore_eos=True))).token_ids) == 3
