"""Embeddings and classification on the GPU: the cases of the CPU, whatever the staging."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.engine.test_embeddings import (
    classes_are_those_of_transformers,
    embeddings_are_those_of_transformers,
    preempted_prompts_are_summed_up_anew,
)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize(("chunk", "staging"), [(1, "ahead"), (7, "mapped"), (64, "pinned")])
@pytest.mark.parametrize("variant", ["gpt2", "mistral-window", "qwen3"])
def test_embeddings_are_those_of_transformers(
    tmp_path: Path, variant: str, chunk: int, staging: str, depth: int
) -> None:
    device = {"device": "cuda", "staging": staging}
    asyncio.run(embeddings_are_those_of_transformers(tmp_path, device, variant, chunk, depth))


def test_a_preempted_prompt_is_summed_up_anew(tmp_path: Path) -> None:
    asyncio.run(preempted_prompts_are_summed_up_anew(tmp_path, {"device": "cuda"}))


@pytest.mark.parametrize("variant", ["gpt2", "llama", "qwen2"])
def test_classes_are_those_of_transformers(tmp_path: Path, variant: str) -> None:
    asyncio.run(classes_are_those_of_transformers(tmp_path, {"device": "cuda"}, variant, 7))
