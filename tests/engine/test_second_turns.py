"""Second turns of conversations with models whose layers keep a state: they compute their new tokens and few more."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncengine import AsyncEngine, SamplingParams, testing
from tests.models import stateful, tiny

LACKING = 256
"""Tokens that a turn computes at most beside its new ones."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stateful")
    stateful.save(path, positions=2048)
    return path


@pytest.fixture(autouse=True)
def family() -> Iterator[None]:
    with stateful.registered():
        yield


def greedy(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)


def engine_of(path: Path, **config: Any) -> AsyncEngine:
    sizes = {"max_num_seqs": 4, "max_model_len": 2048, "num_kv_blocks": 512, "state_snapshot_tokens": 0}
    return AsyncEngine.from_pretrained(str(path), device="cpu", cpu_threads=1, progress=False, **{**sizes, **config})


def snapshots_of(engine: AsyncEngine) -> int:
    return engine._life.loaded().step_loop.stats()["cached_snapshots"]


def text(count: int, step: int = 3) -> list[int]:
    return [step * i % tiny.VOCAB_SIZE for i in range(count)]


async def computed(engine: AsyncEngine, prompt: list[int]) -> int:
    """Generate for a prompt, and return how many of its tokens the engine says and shows that it computes.

    The answer equals that of the same prompt without the prefix cache.
    """
    steps = engine._life.loaded().step_loop.stats()["num_steps"]
    output = await engine.generate(prompt, greedy(4))
    steps = engine._life.loaded().step_loop.stats()["num_steps"] - steps
    tokens = len(prompt) - output.usage.cached_tokens
    # A step computes 32 tokens of a prompt, a few steps end at a snapshot, and others are those of the answer.
    assert steps - 4 - 6 <= -(-tokens // 32) <= steps, "cached_tokens is not what was left out"
    other = await engine.generate(prompt, greedy(4), cache_salt=f"{len(prompt)} {tokens}")
    assert (other.usage.cached_tokens, other.token_ids) == (0, output.token_ids)
    return tokens


@pytest.mark.parametrize("answer", [5, 100, 290, 700])
def test_the_next_turn_computes_its_new_tokens_and_few_more(path, answer):
    """An answer keeps its newest snapshot, behind a multiple of 256 tokens; a shorter one leaves its prompt's."""
    prompt, new = text(100), text(30, 7)

    async def main() -> None:
        async with engine_of(path, prefill_chunk_size=32) as engine, testing.no_leaks(engine):
            first = await engine.generate(prompt, greedy(answer))
            assert snapshots_of(engine) == (1 if answer < 157 else 2)
            turn = [*prompt, *first.token_ids, *new]
            assert await computed(engine, turn) <= len(new) + LACKING
            second = await engine.generate(turn, greedy(answer))
            assert await computed(engine, [*turn, *second.token_ids, *new]) <= len(new) + LACKING

    asyncio.run(main())


@pytest.mark.parametrize("reasoning", [10, 300, 600])
def test_a_template_that_drops_reasoning_costs_the_answer_and_no_more(path, reasoning):
    """The next prompt lacks what the first answer began with: its prompt's own snapshot serves, however long ago."""
    prompt, new, visible = text(500), text(40, 7), 30

    async def main() -> None:
        async with engine_of(path, prefill_chunk_size=32) as engine, testing.no_leaks(engine):
            history = prompt
            for _ in range(3):
                output = await engine.generate(history, greedy(reasoning + visible))
                before = len(history)
                history = [*history, *output.token_ids[reasoning:], *new]
                assert await computed(engine, history) <= len(history) - before + 16
                assert len(history) - before == visible + len(new)

    asyncio.run(main())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("drops", [0, 200])
@pytest.mark.parametrize("host", [None, 1 << 24])
def test_the_next_turn_after_preemptions_computes_few_tokens_too(path, drops, host):
    """Conversations whose sequences took blocks from each other keep what their next turns begin with."""
    prompts, new = [text(200, 3 + 2 * i) for i in range(3)], text(30, 7)
    room = {"num_kv_blocks": 72, "max_model_len": 1024, "host_kv_memory_bytes": host}

    async def main() -> None:
        async with engine_of(path, prefill_chunk_size=32, **room) as engine, testing.no_leaks(engine):
            outputs = await asyncio.gather(*(engine.generate(prompt, greedy(400)) for prompt in prompts))
            assert engine.stats().num_preemptions > 0
            # The one that ran last has its blocks still.
            last = outputs[-1]
            turn = [*prompts[-1], *last.token_ids[drops:], *new]
            lacking = len(last.token_ids) - drops if drops else LACKING
            assert await computed(engine, turn) <= len(new) + lacking + 16

    asyncio.run(main())


@pytest.mark.parametrize("blocks", [512, 100], ids=["blocks stay", "blocks leave"])
def test_the_next_turn_after_many_others_finds_its_state_on_the_host(path, blocks):
    """The device has room for four snapshots. Without a host tier the state is lost, though the blocks may be there."""
    prompts, new = [text(300, 3 + 2 * i) for i in range(9)], text(30, 7)

    async def main(host: int | None) -> tuple[int, int]:
        room = {"max_num_seqs": 2, "num_kv_blocks": blocks, "max_model_len": 1024, "host_kv_memory_bytes": host}
        async with engine_of(path, prefill_chunk_size=32, **room) as engine, testing.no_leaks(engine):
            outputs = []
            for prompt in prompts:
                outputs.append(await engine.generate(prompt, greedy(40)))
                await testing.settle(engine)
            turn = [*prompts[0], *outputs[0].token_ids, *new]
            tokens = await computed(engine, turn)
            return tokens, engine._life.loaded().step_loop.stats()["snapshots_from_host"]

    tokens, moved = asyncio.run(main(1 << 24))
    assert tokens <= 40 + len(new) + 16
    assert moved == 1
    assert asyncio.run(main(None)) == (300 + 40 + len(new), 0)
