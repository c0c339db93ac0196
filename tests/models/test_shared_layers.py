"""Layers that share keys and values compute no more of a prompt than is seen of them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncengine import AsyncEngine, SamplingParams
from asyncengine.config import EngineConfig
from asyncengine.kernels.cpu.ops import CpuOps
from asyncengine.kernels.ops import AttentionCall
from asyncengine.runner.steps.model_runner import CpuModelRunner
from tests.models import tiny

PROMPTS = [[(7 * i + 3 * n) % tiny.VOCAB_SIZE for i in range(n)] for n in (30, 17)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shared")
    tiny.build_model("gemma4-shared").save_pretrained(path)
    return path


class CountingOps(CpuOps):
    """Counts the rows of each attention, apart for layers that store keys and values and for those that share some."""

    def __init__(self, **how: Any) -> None:
        super().__init__(2, prefill_attention="sdpa", **how)
        self.rows: dict[bool, list[int]] = {False: [], True: []}

    def store_heads(self, call: AttentionCall[Any]) -> None:
        self.rows[call.layer.shares].append(len(call.heads))
        super().store_heads(call)


def run(path: Path, ops: CpuOps, chunk: int) -> tuple[list[list[int]], torch.Tensor]:
    settings = {"num_kv_blocks": 16, "dtype": "float32"}
    runner = CpuModelRunner.load(EngineConfig.from_kwargs(str(path), settings), ops=ops)
    driver = tiny.Driver(runner, native=True)
    sequences = [driver.add(prompt, 40) for prompt in PROMPTS]
    driver.run(sequences, 3, chunk)
    return [sequence.generated for sequence in sequences], torch.stack(driver.logits)


def test_a_prompt_costs_layers_that_share_one_row(checkpoint: Path) -> None:
    """Chunks of 10 tokens: the second sequence decodes twice beside or behind the last chunk of the first."""
    ops, slow = CountingOps(), CountingOps(fast_prefill=False)
    assert run(checkpoint, ops, 10)[0] == run(checkpoint, slow, 10)[0]
    steps = [20, 17, 11, 2, 1]
    assert ops.rows[False] == slow.rows[False] == slow.rows[True] == [rows for rows in steps for _ in range(3)]
    assert ops.rows[True] == [rows for rows in (1, 2, 2, 1) for _ in range(3)]


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_logits_have_the_same_bits(checkpoint: Path, chunk: int) -> None:
    fast, slow = (run(checkpoint, CpuOps(2, fast_prefill=on), chunk) for on in (True, False))
    assert fast[0] == slow[0]
    assert torch.equal(fast[1], slow[1])


def test_scored_prompts_and_forks_see_no_difference(checkpoint: Path) -> None:
    """Every token of a scored prompt is computed; siblings begin with the keys and values of one prompt."""

    preempted: list[int] = []

    async def outputs(**config: Any) -> Any:
        common = {"skip_tokenizer_init": True, "num_kv_blocks": 5, "max_num_seqs": 4, "prefill_chunk_size": 11}
        async with AsyncEngine.from_pretrained(
            str(checkpoint), device="cpu", progress=False, **common | config
        ) as engine:
            ways = [
                SamplingParams(max_tokens=6, temperature=0, prompt_logprobs=2, logprobs=1),
                SamplingParams(max_tokens=6, temperature=0.8, seed=4, n=3),
            ]
            jobs = [engine.generate(prompt, way) for prompt in PROMPTS for way in ways]
            found = await asyncio.gather(*jobs)
            preempted.append(engine._life.backend.step_loop.stats()["num_preemptions"])
            return [(o.prompt_logprobs, [(c.token_ids, c.logprobs) for c in o.outputs]) for o in found]

    assert asyncio.run(outputs()) == asyncio.run(outputs(fast_prefill=False, num_kv_blocks=64))
    assert preempted[0] > 0 == preempted[1]
