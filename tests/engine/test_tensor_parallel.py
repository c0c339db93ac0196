"""Two ranks of one process hold the model together on the CPU: every feature gives what one rank gives."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncengine import (
    AsyncEngine,
    ConfigError,
    EngineConfig,
    SamplingParams,
    StepFailedError,
    StructuredOutputs,
    bundled_model,
    testing,
)
from asyncengine.runner.state.host_ranks import HostRanks
from asyncengine.runner.steps.model_runner import CpuModelRunner

SMALL: dict[str, Any] = {
    "device": "cpu", "cpu_threads": 2, "num_kv_blocks": 24, "max_model_len": 256, "max_num_seqs": 4,
    "max_num_batched_tokens": 64, "prefill_chunk_size": 24, "dtype": "float32", "progress": False,
}  # fmt: skip


def made(ranks: int, **config: Any) -> AsyncEngine:
    return AsyncEngine.from_pretrained(str(bundled_model()), tensor_parallel_size=ranks, **(SMALL | config))


async def outputs(engine: AsyncEngine, *, features: bool = True) -> list[Any]:
    """Greedy and seeded tokens of prompts in chunks, with sequences preempted and prefixes met again."""
    draw = random.Random(1)
    prompts = [[draw.randrange(300, 900) for _ in range(n)] for n in (1, 90, 33, 110, 7, 64)]
    params = [SamplingParams(max_tokens=12, temperature=i % 2, seed=i, ignore_eos=True) for i in range(len(prompts))]
    jobs = [engine.generate(prompt, own) for prompt, own in zip(prompts, params, strict=True)]
    found: list[Any] = [output.token_ids for output in await asyncio.gather(*jobs)]
    again = await engine.generate(prompts[1], params[1])
    assert again.token_ids == found[1]
    if features:
        ruled = SamplingParams(max_tokens=12, temperature=0, structured_outputs=StructuredOutputs(regex="[a-f]{8}"))
        scored = await engine.generate(prompts[2], SamplingParams(max_tokens=3, temperature=0, logprobs=2))
        vectors = (await engine.embed(prompts[:2])).vectors
        found += [(await engine.generate("Once", ruled)).text, scored.outputs[0].logprobs, vectors]
    return found


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"kv_cache_dtype": "fp8"},
        {"host_kv_memory_bytes": 64 << 20},
        {"quantization": "int8", "steps_in_flight": 1},
    ],
    ids=lambda config: ",".join(map(str, config)) or "plain",
)
def test_outputs_are_those_of_one_rank(config: dict[str, Any]) -> None:
    async def run(ranks: int) -> list[Any]:
        async with made(ranks, **config) as engine:
            assert engine.config.tensor_parallel_size == ranks
            if not config:
                return await outputs(engine)
            async with testing.no_leaks(engine):
                return await outputs(engine, features=False)

    one, two = (asyncio.run(run(ranks)) for ranks in (1, 2))
    if not config:
        np.testing.assert_allclose(one.pop(), two.pop(), atol=1e-5)
        for a, b in zip(one.pop(), two.pop(), strict=True):
            assert [entry.token_id for entry in a.top] == [entry.token_id for entry in b.top]
            assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
    assert one == two


class Failing:
    """A rank's model that raises at one of its steps."""

    def __init__(self, model: Any, at: int) -> None:
        self.model, self.left = model, at

    def run(self, batch: Any, caches: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("this rank fails")
        return self.model.run(batch, caches)

    def logits(self, residual: Any, batch: Any) -> Any:
        return self.model.logits(residual, batch)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_fails_ends_its_step_alone(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks: list[HostRanks] = []
    init = HostRanks.__init__

    def note(self: HostRanks, *args: Any) -> None:
        init(self, *args)
        ranks.append(self)

    monkeypatch.setattr(HostRanks, "__init__", note)

    async def main() -> None:
        async with made(2) as engine, testing.no_leaks(engine):
            params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
            first = await engine.generate([300, 301], params)
            models = ranks[-1]._models
            models[rank] = Failing(models[rank], 3)
            with pytest.raises(StepFailedError, match="step"):
                await engine.generate([300, 301], params)
            assert (await engine.generate([300, 301], params)).token_ids == first.token_ids

    asyncio.run(main())


def test_what_ranks_cannot_do_is_refused_by_name(tmp_path: Path) -> None:
    for size in (0, 65):
        with pytest.raises(ConfigError, match="tensor_parallel_size must be at"):
            EngineConfig(model="m", tensor_parallel_size=size)
    with pytest.raises(ConfigError, match="hybrid_attention needs tensor_parallel_size=1"):
        EngineConfig(model="m", tensor_parallel_size=2, hybrid_attention="auto", host_kv_memory_bytes=1 << 20)
    with pytest.raises(ConfigError, match="tensor_parallel_size=4: LlamaForCausalLM has 2 heads of queries or keys"):
        CpuModelRunner.load(EngineConfig(model=str(bundled_model()), tensor_parallel_size=4, device="cpu"))
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=2: .* runs modules of transformers"):
        CpuModelRunner.load(
            EngineConfig(model=str(bundled_model()), tensor_parallel_size=2, device="cpu", model_impl="transformers")
        )


def test_memory_is_that_of_all_ranks_together() -> None:
    infos = [
        CpuModelRunner.load(EngineConfig(model=str(bundled_model()), tensor_parallel_size=n, device="cpu")).info
        for n in (1, 2)
    ]
    assert infos[0].kv_bytes_per_block == infos[1].kv_bytes_per_block
    assert infos[0].num_kv_blocks == infos[1].num_kv_blocks
    assert infos[0].weight_bytes < infos[1].weight_bytes < 2 * infos[0].weight_bytes  # each has the embedding
