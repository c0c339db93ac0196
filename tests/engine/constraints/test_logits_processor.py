"""Callables that change logits: they get the history and the logits, and decide the token as the core would."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from asyncengine import (
    AsyncEngine,
    EngineOverloadedError,
    InvalidRequestError,
    LogitsProcessorError,
    SamplingParams,
    _core,
)
from asyncengine.engine.constraints import callables
from asyncengine.engine.constraints.processors import ProcessedSequence
from asyncengine.engine.stream import RequestStream
from tests.engine.test_sampling_features import FEATURES, PROMPTS, SETTINGS, TOKENS, edited, params
from tests.engine.test_statistics import make_stream
from tests.engine.test_statistics import news as news_of
from tests.models import tiny

Logits = npt.NDArray[np.float32]


def keep(history: Sequence[int], logits: Logits) -> None:
    """Changes nothing."""


def no_neighbours(history: Sequence[int], logits: Logits) -> Logits:
    """No token within 3 of the last one; the most probable one that is left moves up."""
    low, high = max(0, history[-1] - 3), history[-1] + 4
    changed = logits.copy()
    changed[low:high] = -np.inf
    return changed


def reference(model: Any, prompt: list[int], feature: dict[str, Any]) -> list[int]:
    """Greedy tokens of ``no_neighbours``."""
    ids = list(prompt)
    while len(ids) < len(prompt) + TOKENS:
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1].float()
        ids.append(int(no_neighbours(ids, edited(ids, len(prompt), logits, feature).numpy()).argmax()))
    return ids[len(prompt) :]


async def callables_decide(
    path: Path, device: dict[str, Any], chunk: int, blocks: int, depth: int, kinds: Sequence[str]
) -> None:
    """Callables run beside rows of every other feature, alone with each of them, and with the same seeds as without
    one."""
    model = tiny.build_model("llama")
    model.save_pretrained(path)
    settings = SETTINGS | device | {"prefill_chunk_size": chunk, "num_kv_blocks": blocks, "steps_in_flight": depth}
    cases = [(prompt, FEATURES[kind]) for prompt in PROMPTS[:3] for kind in kinds]
    async with AsyncEngine.from_pretrained(path, progress=False, **settings) as engine:
        plain = [await engine.generate(prompt, params(**f)) for prompt, f in cases]
        changed = [params(**f, logits_processor=no_neighbours) for _, f in cases]
        jobs = [*zip((p for p, _ in cases), changed, strict=True), *((p, params(**f)) for p, f in cases)]
        outputs = await asyncio.gather(*(engine.generate(prompt, given) for prompt, given in jobs))
        assert (engine.stats().num_preemptions > 0) == (blocks == 9)
    for (prompt, feature), ours, other, alone in zip(
        cases, outputs[: len(cases)], outputs[len(cases) :], plain, strict=True
    ):
        assert list(ours.token_ids) == reference(model, prompt, feature), (prompt[:3], feature)
        assert other.token_ids == alone.token_ids
        if "logprobs" in feature:
            assert ours.outputs[0].logprobs is not None
            assert [entry.token_id for entry in ours.outputs[0].logprobs] == list(ours.token_ids)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("chunk", "blocks", "depth"), [(1, 40, 2), (7, 40, 1), (64, 40, 3), (64, 9, 2)])
async def test_callables_decide(tmp_path: Path, chunk: int, blocks: int, depth: int) -> None:
    await callables_decide(tmp_path, {}, chunk, blocks, depth, list(FEATURES))


async def test_logits_decide_the_token_behind_those_that_came_before_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A preemption repeats logits. The event loop may get them together with the token that the first ones led to."""
    tiny.build_model("llama").save_pretrained(tmp_path)
    news: list[_core.SequenceNews] = []
    feed = RequestStream.feed

    def noting(stream: RequestStream, told: _core.SequenceNews) -> None:
        news.append(told)
        feed(stream, told)

    monkeypatch.setattr(RequestStream, "feed", noting)
    async with AsyncEngine.from_pretrained(tmp_path, progress=False, **SETTINGS) as engine:
        await engine.generate(PROMPTS[0], params(logits_processor=keep))
    monkeypatch.undo()
    places = [(r.token, len(n.tokens)) for n in news for r in n.records]
    assert len(places) == TOKENS
    assert all(place == count for place, count in places)

    processed: list[tuple[list[int], bytes]] = []
    stream = make_stream(params(logits_processor=keep))
    sequence = ProcessedSequence(keep, [300], 400, _core.SamplingState())
    stream.process([sequence], lambda _, output, logits, fail: processed.append((list(output), logits)))

    def come(tokens: list[int], *records: tuple[int, bytes]) -> None:
        fields: list[Any] = [(_core.RecordKind.logits, *record) for record in records]
        stream.feed(news_of(tokens, 0, _core.FinishReason.none, records=tuple(map(_core.Record, fields))))

    come([], (0, b"first"))
    come([300], (0, b"first"))
    come([], (0, b"second"))
    come([301], (0, b"second"), (1, b"third"))
    assert processed == [([], b"first"), ([300], b"second"), ([300, 301], b"third")]


@pytest.mark.parametrize("depth", [1, 2, 3])
async def test_a_callable_that_changes_nothing_changes_no_token(tmp_path: Path, depth: int) -> None:
    tiny.build_model("qwen3").save_pretrained(tmp_path)
    sampled = {"temperature": 0.9, "top_k": 30, "top_p": 0.9, "min_p": 0.01, "seed": 7, "n": 3, "presence_penalty": 0.4}
    histories: list[list[int]] = []

    def look(history: Sequence[int], logits: Logits) -> None:
        assert logits.dtype == np.float32
        assert logits.flags.writeable
        histories.append(list(history))

    async with AsyncEngine.from_pretrained(tmp_path, progress=False, steps_in_flight=depth, **SETTINGS) as engine:
        plain = await engine.generate(PROMPTS[0], params(**sampled))
        same = await engine.generate(PROMPTS[0], params(**sampled, logits_processor=look))
    assert [s.token_ids for s in same.outputs] == [s.token_ids for s in plain.outputs]
    for sequence in same.outputs:
        for i in range(TOKENS):
            assert [*PROMPTS[0], *sequence.token_ids[:i]] in histories
    assert len(histories) == 3 * TOKENS


async def test_what_is_banned_stays_banned_and_ends_are_ends(tmp_path: Path) -> None:
    tiny.build_model("llama").save_pretrained(tmp_path)

    def five(history: Sequence[int], logits: Logits) -> None:
        logits[:] = -1.0
        logits[5] = 100.0

    async with AsyncEngine.from_pretrained(tmp_path, progress=False, **SETTINGS) as engine:
        free = await engine.generate(PROMPTS[0], params(logits_processor=five))
        banned = await engine.generate(PROMPTS[0], params(logits_processor=five, allowed_token_ids=[8, 9]))
        stopped = await engine.generate(PROMPTS[0], params(logits_processor=five, stop_token_ids=[5]))
    assert free.token_ids == (5,) * TOKENS
    assert banned.token_ids == (8,) * TOKENS
    assert (stopped.token_ids, stopped.finish_reason) == ((5,), "stop")


def raises(history: Sequence[int], logits: Logits) -> None:
    raise KeyError("planted")


def of_another_shape(history: Sequence[int], logits: Logits) -> Logits:
    return logits[:-1]


def nothing_left(history: Sequence[int], logits: Logits) -> None:
    logits[:] = -np.inf


def no_number(history: Sequence[int], logits: Logits) -> None:
    logits[3] = np.nan


def read_only(history: Sequence[int], logits: Logits) -> Logits:
    changed = logits.copy()
    changed.setflags(write=False)
    return changed


def made_read_only(history: Sequence[int], logits: Logits) -> None:
    logits.setflags(write=False)


def resized(history: Sequence[int], logits: Logits) -> None:
    logits.resize(5, refcheck=False)


def reshaped(history: Sequence[int], logits: Logits) -> None:
    logits.shape = (1, len(logits))  # type: ignore[assignment]


def of_integers(history: Sequence[int], logits: Logits) -> Any:
    return logits.astype(np.int32)


def made_integers(history: Sequence[int], logits: Logits) -> None:
    logits.dtype = np.int32  # type: ignore[misc, assignment]


def leaves(history: Sequence[int], logits: Logits) -> None:
    raise SystemExit(3)


def interrupts(history: Sequence[int], logits: Logits) -> None:
    raise KeyboardInterrupt


class UnspeakableError(BaseException):
    def __repr__(self) -> str:
        raise SystemExit(4)


def unspeakable(history: Sequence[int], logits: Logits) -> None:
    raise UnspeakableError


def generates(history: Sequence[int], logits: Logits) -> Any:
    yield logits


async def awaits(history: Sequence[int], logits: Logits) -> Logits:
    return logits


class Unspeakable:
    def __repr__(self) -> str:
        raise ValueError("no")

    __str__ = __repr__


def returns_nonsense(history: Sequence[int], logits: Logits) -> Any:
    return Unspeakable()


MISTAKES: list[tuple[Any, str]] = [
    (raises, "planted"), (of_another_shape, "or return"), (nothing_left, "may come"), (no_number, "NaN"),
    (resized, r"\[5\]"), (reshaped, "or return"), (of_integers, "int32"), (made_integers, "int32"),
    (leaves, "SystemExit"), (interrupts, "KeyboardInterrupt"), (unspeakable, "UnspeakableError"),
    (generates, "generator"), (awaits, "coroutine"), (returns_nonsense, "Unspeakable"),
]  # fmt: skip


@pytest.mark.parametrize(("processor", "says"), MISTAKES)
async def test_a_callable_that_fails_ends_its_request_alone(tmp_path: Path, processor: Any, says: str) -> None:
    tiny.build_model("llama").save_pretrained(tmp_path)

    def late(history: Sequence[int], logits: Logits) -> Any:
        return processor(history, logits) if len(history) > len(PROMPTS[0]) + 3 else None

    async with AsyncEngine.from_pretrained(tmp_path, progress=False, **SETTINGS) as engine:
        other = asyncio.create_task(engine.generate(PROMPTS[1], params()))
        with pytest.raises(LogitsProcessorError, match=says) as failed:
            await engine.generate(PROMPTS[0], params(logits_processor=late))
        assert isinstance(failed.value.__cause__, KeyError) == (processor is raises)
        assert len((await other).token_ids) == TOKENS
        assert len((await engine.generate(PROMPTS[0], params(logits_processor=keep))).token_ids) == TOKENS


@pytest.mark.parametrize("processor", [read_only, made_read_only])
async def test_logits_that_cannot_be_written_to_count(tmp_path: Path, processor: Any) -> None:
    tiny.build_model("llama").save_pretrained(tmp_path)
    async with AsyncEngine.from_pretrained(tmp_path, progress=False, **SETTINGS) as engine:
        plain = await engine.generate(PROMPTS[0], params(allowed_token_ids=[8, 9, 150]))
        same = await engine.generate(PROMPTS[0], params(allowed_token_ids=[8, 9, 150], logits_processor=processor))
    assert same.token_ids == plain.token_ids


class Hangs:
    """A callable that does not return until ``go_on`` is set."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.entered = 0

    def __call__(self, history: Sequence[int], logits: Logits) -> None:
        self.entered += 1
        self.go_on.wait(60)


def threads() -> int:
    return sum(thread.name == "asyncengine-logits" for thread in threading.enumerate())


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not true():  # noqa: ASYNC110 - threads end whenever they do
            await asyncio.sleep(0.02)


async def test_many_callables_that_hang_stop_no_other(tmp_path: Path) -> None:
    """Others run while callables hang, and after the requests of those were cancelled."""
    tiny.build_model("llama").save_pretrained(tmp_path)
    hangs = Hangs()
    settings = SETTINGS | {"max_num_seqs": 32, "num_kv_blocks": 200}
    async with AsyncEngine.from_pretrained(tmp_path, progress=False, **settings) as engine:
        stuck = [asyncio.create_task(engine.generate(PROMPTS[0], params(logits_processor=hangs))) for _ in range(20)]
        await until(lambda: hangs.entered == 20)
        output = await engine.generate(PROMPTS[1], params(logits_processor=keep))
        assert len(output.token_ids) == TOKENS
        for task in stuck:
            task.cancel()
        await asyncio.gather(*stuck, return_exceptions=True)
        output = await engine.generate(PROMPTS[1], params(logits_processor=keep))
        assert len(output.token_ids) == TOKENS
        hangs.go_on.set()
        await until(lambda: threads() <= 2)


async def test_a_callable_has_a_limit_of_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that are stuck are bounded: beyond the bound requests with callables are refused, and no others."""
    monkeypatch.setattr(callables, "TIME_LIMIT_S", 0.3)
    monkeypatch.setattr(callables, "MAX_THREADS", 4)
    tiny.build_model("llama").save_pretrained(tmp_path)
    hangs = Hangs()
    async with AsyncEngine.from_pretrained(tmp_path, progress=False, **SETTINGS) as engine:
        jobs = [engine.generate(PROMPTS[0], params(logits_processor=hangs)) for _ in range(6)]
        errors = await asyncio.gather(*jobs, return_exceptions=True)
        kinds = [type(error) for error in errors]
        assert kinds.count(LogitsProcessorError) == 4
        assert kinds.count(EngineOverloadedError) == 2
        assert any("longer than 0.3 s" in str(error) for error in errors)
        assert threads() == 4
        with pytest.raises(EngineOverloadedError, match="stuck"):
            await engine.generate(PROMPTS[0], params(logits_processor=keep))
        assert len((await engine.generate(PROMPTS[0], params())).token_ids) == TOKENS
        hangs.go_on.set()
        await until(lambda: threads() == 0)
        assert len((await engine.generate(PROMPTS[0], params(logits_processor=keep))).token_ids) == TOKENS


async def test_a_callable_that_hangs_holds_up_nobody_else(tmp_path: Path) -> None:
    tiny.build_model("llama").save_pretrained(tmp_path)
    go_on, entered = threading.Event(), threading.Event()

    def hang(history: Sequence[int], logits: Logits) -> None:
        entered.set()
        go_on.wait(30)

    async with AsyncEngine.from_pretrained(tmp_path, progress=False, **SETTINGS) as engine:
        stuck = asyncio.create_task(engine.generate(PROMPTS[0], params(logits_processor=hang)))
        await asyncio.to_thread(entered.wait, 30)
        outputs = await asyncio.gather(*(engine.generate(p, params(logits_processor=keep)) for p in PROMPTS))
        assert all(len(output.token_ids) == TOKENS for output in outputs)
        assert not stuck.done()
        stuck.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stuck
        go_on.set()


@pytest.mark.parametrize(
    "conflict",
    [
        {"structured_outputs": {"regex": "a"}},
        {"prompt_logprobs": 1},
        {"logprobs": 1, "logprobs_mode": "processed_logprobs"},
        {"max_tokens": 0},
    ],
)
def test_conflicts_are_refused_at_once(conflict: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="conflicts") as refused:
        SamplingParams(**conflict, logits_processor=keep)
    assert refused.value.param == "logits_processor"
    with pytest.raises(InvalidRequestError, match="callable"):
        SamplingParams(logits_processor="no callable")  # type: ignore[arg-type]
