"""The host tier of the KV cache: outputs are those of an engine with room for all, whatever moves meanwhile."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import asyncengine
from asyncengine import AsyncEngine, ConfigError, SamplingParams, testing
from asyncengine.api.stats import EngineStats

ROOMY: dict[str, Any] = {"max_num_seqs": 6, "max_model_len": 192, "num_kv_blocks": 400}
PRESSED: dict[str, Any] = ROOMY | {"num_kv_blocks": 18, "host_kv_memory_bytes": 16 << 20}

PROMPTS = [f"{topic} " * 12 + "and then" for topic in ("The river", "A clock", "Her garden", "Old ships", "The mill")]
PARAMS = [
    SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=50, temperature=0.9, seed=7, top_k=40, ignore_eos=True, n=2),
    SamplingParams(max_tokens=40, temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.4, ignore_eos=True),
    SamplingParams(max_tokens=40, temperature=0.7, seed=3, logprobs=3, ignore_eos=True),
]


async def answers(engine: AsyncEngine) -> list[Any]:
    """Return the outputs of each prompt with each kind of parameters, all at once, and then of the prompts once
    more."""
    jobs = [engine.generate(prompt, params) for prompt in PROMPTS for params in PARAMS]
    first = await asyncio.gather(*jobs)
    again = [await engine.generate(prompt, PARAMS[0]) for prompt in PROMPTS]
    return [
        (sequence.token_ids, sequence.logprobs, sequence.finish_reason)
        for output in (*first, *again)
        for sequence in output.outputs
    ]


def test_outputs_are_those_of_an_engine_with_room() -> None:
    async def main(config: dict[str, Any]) -> tuple[list[Any], Any]:
        model = str(asyncengine.bundled_model())
        async with AsyncEngine.from_pretrained(model, device="cpu", progress=False, **config) as engine:
            async with testing.no_leaks(engine):
                outputs = await answers(engine)
            return outputs, engine.stats()

    expected, roomy = asyncio.run(main(ROOMY))
    got, stats = asyncio.run(main(PRESSED))
    assert got == expected
    assert roomy.blocks_to_host == roomy.num_host_blocks == 0
    assert stats.num_preemptions > 0
    assert stats.blocks_to_host > 0
    assert stats.blocks_from_host > 0
    assert stats.host_cached_blocks <= stats.num_host_blocks


def test_cancelled_requests_give_back_what_was_coming_for_them() -> None:
    async def main() -> None:
        config = {"num_kv_blocks": 24, "max_num_seqs": 4, "max_model_len": 256, "host_kv_memory_bytes": 1 << 20}
        async with testing.SimulatedEngine(step_latency_us=300, **config) as engine:
            params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
            prompts = [[100 + family] * 150 for family in range(6)]
            for prompt in prompts:
                await engine.generate(prompt, params)
            async with testing.no_leaks(engine):
                for delay in range(30):
                    tasks = [asyncio.ensure_future(engine.generate(prompt, params)) for prompt in prompts]
                    await asyncio.sleep(delay * 2e-4)
                    for task in tasks:
                        task.cancel()
                    await asyncio.gather(*tasks, return_exceptions=True)
            output = await engine.generate(prompts[0], params)
            assert list(output.outputs[0].token_ids) == engine.expected_token_ids(prompts[0], params)
            assert engine.stats().blocks_from_host > 0

    asyncio.run(main())


def test_a_prefix_comes_back_from_the_disk_after_a_restart(tmp_path: Path) -> None:
    """A change that somebody wrote into a file is noticed, and the blocks are computed again."""
    model = str(asyncengine.bundled_model())
    config = PRESSED | {"disk_kv_path": str(tmp_path / "kv")}

    async def main(config: dict[str, Any]) -> tuple[list[Any], Any]:
        async with AsyncEngine.from_pretrained(model, device="cpu", progress=False, **config) as engine:
            outputs = [await engine.generate(prompt, PARAMS[0]) for prompt in PROMPTS]
            await testing.settle(engine)
            return [output.token_ids for output in outputs], engine.stats()

    expected, _ = asyncio.run(main(ROOMY))
    first, wrote = asyncio.run(main(config))
    again, read = asyncio.run(main(config))
    assert first == again == expected
    assert wrote.blocks_to_disk > 0
    assert read.blocks_from_disk > 0
    assert read.failed_disk_transfers == 0

    files = list((tmp_path / "kv").rglob("*.kv"))
    assert len(files) >= wrote.blocks_to_disk
    for path in files:
        content = bytearray(path.read_bytes())
        content[-5] ^= 1
        path.write_bytes(content)
    damaged, stats = asyncio.run(main(config))
    assert damaged == expected
    assert stats.failed_disk_transfers > 0
    assert stats.blocks_from_disk == 0


def test_a_fifo_in_place_of_a_file_holds_up_nobody(tmp_path: Path) -> None:
    """To open a FIFO for reading lasts until somebody opens it for writing, which nobody does."""
    model = str(asyncengine.bundled_model())
    config = PRESSED | {"disk_kv_path": str(tmp_path / "kv")}

    async def main(before: Callable[[], None]) -> tuple[list[Any], EngineStats]:
        async with AsyncEngine.from_pretrained(model, device="cpu", progress=False, **config) as engine:
            await asyncio.sleep(0.2)  # the files become known
            before()
            async with asyncio.timeout(60):
                outputs = [await engine.generate(prompt, PARAMS[0]) for prompt in PROMPTS]
                await testing.settle(engine)
            return [output.token_ids for output in outputs], engine.stats()

    def replace_files() -> None:
        for path in (tmp_path / "kv").rglob("*.kv"):
            path.unlink()
            os.mkfifo(path)

    expected, _ = asyncio.run(main(lambda: None))
    got, stats = asyncio.run(main(replace_files))
    assert got == expected
    assert stats.failed_disk_transfers > 0
    assert stats.blocks_from_disk == 0
    assert stats.num_requests_waiting == 0


@pytest.mark.parametrize("host_blocks", [34, 100])
def test_a_prefix_comes_back_whole_after_others_of_its_length(tmp_path: Path, host_blocks: int) -> None:
    """Blocks are evicted in the order in which they were used, from the device and from the host, be it no larger."""
    model, length, block_bytes = str(asyncengine.bundled_model()), 448, 6 * 2 * 2 * 32 * 16 * 4
    config = {
        "max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": length + 16, "num_kv_blocks": 34,
        "host_kv_memory_bytes": host_blocks * block_bytes, "disk_kv_path": str(tmp_path / "kv"),
    }  # fmt: skip
    draw = random.Random(5)
    prompt, *others = [draw.choices(range(3, 1000), k=length) for _ in range(12)]

    async def main() -> None:
        async with AsyncEngine.from_pretrained(model, device="cpu", progress=False, **config) as engine:
            assert engine.stats().num_host_blocks == host_blocks
            first = await engine.generate(prompt, greedy(1))
            for count in (3, 8):
                for other in others[:count]:
                    await engine.generate(other, greedy(1))
                    await all_has_moved(engine)
                before = engine.stats()
                again = await engine.generate(prompt, greedy(1))
                assert again.token_ids == first.token_ids
                after = engine.stats()
                # All blocks but the one whose last token is computed.
                assert after.blocks_from_host - before.blocks_from_host == length // 16 - 1
            assert after.blocks_from_disk - before.blocks_from_disk == length // 16 - 1

    asyncio.run(main())


def greedy(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)


async def all_has_moved(engine: AsyncEngine) -> None:
    """Wait until all blocks have moved to the host and to the disk."""
    before, now = None, engine.stats()
    while before is None or (before.blocks_to_host, before.blocks_to_disk) != (now.blocks_to_host, now.blocks_to_disk):
        await asyncio.sleep(0.05)
        before, now = now, engine.stats()


def test_a_directory_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    config = PRESSED | {"disk_kv_path": str(tmp_path / "file")}

    async def main() -> None:
        async with AsyncEngine.from_pretrained(
            str(asyncengine.bundled_model()), device="cpu", progress=False, **config
        ):
            raise AssertionError("it started")

    with pytest.raises(ConfigError, match="disk_kv_path cannot be used"):
        asyncio.run(main())
    with pytest.raises(ConfigError, match="disk_kv_path needs host_kv_memory_bytes"):
        AsyncEngine.from_pretrained("x", disk_kv_path=str(tmp_path))


def test_wrong_sizes_are_refused() -> None:
    async def main() -> None:
        config = {"host_kv_memory_bytes": 1000, "max_model_len": 64}
        async with AsyncEngine.from_pretrained(
            str(asyncengine.bundled_model()), device="cpu", progress=False, **config
        ):
            raise AssertionError("it started")

    with pytest.raises(ConfigError, match=r"host_kv_memory_bytes \(1,000\) must hold 1 KV blocks"):
        asyncio.run(main())
    with pytest.raises(ConfigError, match="host_kv_memory_bytes needs enable_prefix_caching"):
        AsyncEngine.from_pretrained("x", host_kv_memory_bytes=1 << 20, enable_prefix_caching=False)
    with pytest.raises(ConfigError, match="host_kv_memory_bytes must be at least 1"):
        AsyncEngine.from_pretrained("x", host_kv_memory_bytes=0)
