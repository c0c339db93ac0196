"""Structured output on the GPU: the tokens of a plain loop, whatever the staging; masks that come late; neighbours."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import Sequence
from typing import Any

import jsonschema
import pytest

from asyncengine import AsyncEngine, InvalidRequestError, bundled_model
from asyncengine.engine.constraints.masks import Constraint
from tests.engine.constraints.test_structured import PROMPT, SCHEMA, RandomSchema, constrained_greedy, params

pytestmark = pytest.mark.alone
ON_GPU: dict[str, Any] = {"device": "cuda", "dtype": "float32", "max_num_seqs": 32, "max_num_batched_tokens": 256}


def engine_with(**config: Any) -> AsyncEngine:
    return AsyncEngine.from_pretrained(bundled_model(), progress=False, **ON_GPU | config)


@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
@pytest.mark.parametrize(
    ("staging", "depth", "blocks"),
    [("ahead", 2, 64), ("ahead", 1, 64), ("ahead", 3, 9), ("mapped", 2, 9), ("pinned", 2, 64)],
)
def test_tokens_are_those_of_a_plain_loop(
    monkeypatch: pytest.MonkeyPatch, staging: str, depth: int, blocks: int, late: bool
) -> None:
    """``late``: some masks take longer than a step, so that rows find none and are run again."""
    draw, work = random.Random(1), Constraint.work

    def slow(self: Constraint, tokens: Sequence[int]) -> None:
        time.sleep(draw.choice([0.0, 0.0005, 0.003]))
        work(self, tokens)

    async def main() -> None:
        prompts = [PROMPT, PROMPT + " there was a fox", "The sun"]
        settings = {"staging": staging, "steps_in_flight": depth, "num_kv_blocks": blocks, "max_model_len": 128}
        async with engine_with(**settings) as engine:
            asked = params(temperature=0.0, max_tokens=60, logprobs=1, structured_outputs={"json": SCHEMA})
            forced = params(max_tokens=60, structured_outputs={"json": SCHEMA})
            plain = params(temperature=0.0, max_tokens=60, ignore_eos=True)
            alone = [await engine.generate(prompt, plain) for prompt in prompts]
            kinds = [asked, plain, forced]
            outputs = await asyncio.gather(*(engine.generate(prompt, kind) for prompt in prompts for kind in kinds))
            assert (engine.stats().num_preemptions > 0) == (blocks == 9)
        for i, prompt in enumerate(prompts):
            ours, others, quick = outputs[3 * i : 3 * i + 3]
            assert list(ours.token_ids) == constrained_greedy(prompt, SCHEMA, 60)
            assert ours.outputs[0].logprobs is not None
            assert [data.token_id for data in ours.outputs[0].logprobs] == list(ours.token_ids)
            assert others.token_ids == alone[i].token_ids
            if quick.finish_reason == "stop":
                jsonschema.validate(json.loads(quick.text), SCHEMA)

    if late:
        monkeypatch.setattr(Constraint, "work", slow)
    asyncio.run(main())


def test_random_schemas_and_expressions() -> None:
    async def main() -> None:
        schemas = [RandomSchema(seed).schema for seed in range(200)]
        async with engine_with() as engine:
            asked = [params(seed=i, max_tokens=200, structured_outputs={"json": s}) for i, s in enumerate(schemas)]
            asked += [params(seed=i, structured_outputs={"regex": "[0-9]{3}-(ab|cd){2,9}"}) for i in range(20)]
            outputs = await asyncio.gather(*(engine.generate(PROMPT, p) for p in asked))
        whole = [o.finish_reason == "stop" for o in outputs]
        assert sum(whole) > 200
        for schema, output, is_whole in zip(schemas, outputs[:200], whole, strict=False):
            if is_whole:
                jsonschema.validate(json.loads(output.text), schema)
        assert all(re.fullmatch("[0-9]{3}-(ab|cd){2,9}", o.text) for o in outputs[200:])

    asyncio.run(main())


def test_pageable_staging_serves_no_masks() -> None:
    async def main() -> None:
        async with engine_with(staging="pageable") as engine:
            with pytest.raises(InvalidRequestError, match="structured_outputs"):
                await engine.generate(PROMPT, params(structured_outputs={"regex": "a"}))

    asyncio.run(main())
