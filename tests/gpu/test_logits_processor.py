"""Callables that change logits, on the GPU: the cases of the CPU, whatever the staging."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from asyncengine import AsyncEngine, InvalidRequestError
from tests.engine.constraints.test_logits_processor import callables_decide, keep
from tests.engine.test_sampling_features import FEATURES, PROMPTS, SETTINGS, params
from tests.models import tiny


@pytest.mark.parametrize(
    ("chunk", "blocks", "depth", "staging"),
    [(1, 40, 2, "ahead"), (7, 40, 1, "ahead"), (64, 40, 3, "mapped"), (64, 9, 2, "ahead"), (64, 40, 2, "pinned")],
)
def test_callables_decide(tmp_path: Path, chunk: int, blocks: int, depth: int, staging: str) -> None:
    device = {"device": "cuda", "staging": staging}
    asyncio.run(callables_decide(tmp_path, device, chunk, blocks, depth, list(FEATURES)))


def test_pageable_staging_serves_no_callable(tmp_path: Path) -> None:
    async def main() -> None:
        tiny.build_model("llama").save_pretrained(tmp_path)
        settings = SETTINGS | {"device": "cuda", "staging": "pageable"}
        async with AsyncEngine.from_pretrained(tmp_path, progress=False, **settings) as engine:
            with pytest.raises(InvalidRequestError, match="logits_processor"):
                await engine.generate(PROMPTS[0], params(logits_processor=keep))

    asyncio.run(main())
