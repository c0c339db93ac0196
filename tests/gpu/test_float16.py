"""float16 on a GPU: log probabilities of each kind of family near those of float32 by transformers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.engine.test_float16 import check_log_probabilities
from tests.models import tiny


@pytest.mark.parametrize("variant", ["gpt2", "llama-rope-llama3", "mistral-window", "gemma2", "gemma3", "cohere2"])
def test_log_probabilities_are_near_those_of_float32(tmp_path: Path, variant: str) -> None:
    asyncio.run(check_log_probabilities(tmp_path, tiny.build_model(variant, initializer_range=0.1), 20))
