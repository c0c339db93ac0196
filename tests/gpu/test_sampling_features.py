"""Penalties, biases, bans and log probabilities in graphs: the cases of the CPU, on a GPU."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from asyncengine import AsyncEngine, RequestOutput, SamplingParams
from tests.engine.test_sampling_features import FEATURES, PROMPTS, SETTINGS, assert_logprobs, params, reference
from tests.models import tiny

ON_GPU = SETTINGS | {"device": "cuda"}


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize(("chunk", "blocks"), [(1, 40), (7, 40), (64, 40), (64, 9)])
def test_edits_are_those_of_transformers(tmp_path: Path, chunk: int, blocks: int, depth: int) -> None:
    async def main() -> None:
        model = tiny.build_model("llama")
        model.save_pretrained(tmp_path)
        settings = ON_GPU | {"prefill_chunk_size": chunk, "num_kv_blocks": blocks, "steps_in_flight": depth}
        cases = [(prompt, feature) for prompt in PROMPTS for feature in FEATURES.values()]
        async with AsyncEngine.from_pretrained(tmp_path, progress=False, **settings) as engine:
            outputs = await asyncio.gather(*(engine.generate(prompt, params(**f)) for prompt, f in cases))
            assert (engine.stats().num_preemptions > 0) == (blocks == 9)
        for (prompt, feature), output in zip(cases, outputs, strict=True):
            assert list(output.token_ids) == reference(model, prompt, feature), (prompt[:3], feature)

    asyncio.run(main())


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
@pytest.mark.parametrize("staging", ["ahead", "mapped", "pinned"])
def test_log_probabilities_are_those_of_log_softmax(tmp_path: Path, mode: str, staging: str) -> None:
    async def main() -> None:
        model = tiny.build_model("llama")
        model.save_pretrained(tmp_path)
        feature = {"logprobs": 7, "logprob_token_ids": [3, 50], "logprobs_mode": mode, "presence_penalty": 0.9}
        settings = ON_GPU | {"staging": staging, "num_kv_blocks": 9, "prefill_chunk_size": 7}
        async with AsyncEngine.from_pretrained(tmp_path, progress=False, **settings) as engine:
            given = params(temperature=0.7, seed=5, **feature)
            outputs = await asyncio.gather(*(engine.generate(prompt, given) for prompt in PROMPTS))
            assert engine.stats().num_preemptions > 0
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            assert_logprobs(model, output, prompt, feature, 0.7)

    asyncio.run(main())


def test_neighbours_change_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        tiny.build_model("qwen3").save_pretrained(tmp_path)
        sampled: dict[str, Any] = {"temperature": 1.0, "seed": 3, "n": 3}
        async with AsyncEngine.from_pretrained(tmp_path, progress=False, batch_invariant=True, **ON_GPU) as engine:

            async def tokens(given: SamplingParams) -> list[tuple[int, ...]]:
                output: RequestOutput = await engine.generate(PROMPTS[0], given)
                return [sequence.token_ids for sequence in output.outputs]

            cases = [params(**sampled), params(**sampled, frequency_penalty=1.0), params(logprobs=2)]
            alone = [await tokens(given) for given in cases]
            assert await asyncio.gather(*map(tokens, cases)) == alone
            assert alone[0] != alone[1]

    asyncio.run(main())
