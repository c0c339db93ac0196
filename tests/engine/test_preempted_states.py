"""Sequences that give way, of models whose layers keep a state: they go on where they were."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncengine import AsyncEngine, EngineStats, SamplingParams, testing
from asyncengine.text.tokenizer import placeholder_tokenizer
from tests.models import stateful, tiny

HOST = 1 << 24
PROMPTS = [[(3 + 2 * i) * j % tiny.VOCAB_SIZE for j in range(100 + 7 * i)] for i in range(4)]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    paths = {name: tmp_path_factory.mktemp(name) for name in ("attention", "states alone")}
    stateful.save(paths["attention"], positions=1024)
    tiny.build_model("mamba2", max_position_embeddings=512).save_pretrained(paths["states alone"])
    placeholder_tokenizer(tiny.VOCAB_SIZE).backend.save(str(paths["states alone"] / "tokenizer.json"))
    return paths


@pytest.fixture(autouse=True)
def family() -> Iterator[None]:
    with stateful.registered():
        yield


def greedy(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)


def run(path: Path, num_blocks: int, host: int | None = HOST) -> tuple[list[list[int]], EngineStats]:
    """Token ids of all answers, and statistics."""
    sizes = {"max_num_seqs": 4, "max_model_len": 512, "num_kv_blocks": num_blocks, "host_kv_memory_bytes": host}

    async def main() -> tuple[list[list[int]], EngineStats]:
        async with (
            AsyncEngine.from_pretrained(str(path), device="cpu", cpu_threads=1, progress=False, **sizes) as engine,
            testing.no_leaks(engine),
        ):
            outputs = await asyncio.gather(*(engine.generate(prompt, greedy(150)) for prompt in PROMPTS))
            await testing.settle(engine)
            return [list(output.token_ids) for output in outputs], engine.stats()

    return asyncio.run(main())


@pytest.mark.parametrize("name", ["attention", "states alone"])
def test_sequences_that_gave_way_compute_nothing_again(paths, name):
    """The host keeps their blocks, the last one with what it has, and the state behind all of them."""
    answers, stats = run(paths[name], num_blocks=40)
    assert stats.num_preemptions > 0, "the case must preempt"
    assert stats.resumed_states == stats.kept_states == stats.num_preemptions
    tokens = sum(len(prompt) + len(answer) - 1 for prompt, answer in zip(PROMPTS, answers, strict=True))
    assert stats.step_tokens.total == tokens, "tokens were computed twice"
    roomy, stats = run(paths[name], num_blocks=200, host=None)
    assert stats.num_preemptions == 0
    assert answers == roomy
