"""Log probabilities of prompts on the GPU: those of a full forward, by the checks of the CPU's tests."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.engine.test_scoring import continuations_are_scored, prompts_are_scored

ON_GPU: dict[str, Any] = {"device": "cuda", "dtype": "float32", "max_num_seqs": 16, "max_num_batched_tokens": 256}


@pytest.mark.parametrize(
    ("chunk", "depth", "blocks", "staging"),
    [(1, 2, 64, "ahead"), (7, 1, 64, "ahead"), (64, 3, 64, "ahead"), (64, 2, 9, "mapped"), (64, 2, 64, "pinned")],
)
def test_prompts_are_scored(chunk: int, depth: int, blocks: int, staging: str) -> None:
    asyncio.run(prompts_are_scored(ON_GPU | {"staging": staging}, chunk, depth, blocks))


@pytest.mark.parametrize("eager", [False, True])
def test_continuations_are_scored(eager: bool) -> None:
    asyncio.run(continuations_are_scored(ON_GPU | {"enforce_eager": eager}))
