"""Two ranks on the CPU hold a model together: every family's logits and tokens are those of one rank, or it refuses."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncengine import ConfigError, EngineConfig, UnsupportedModelError
from asyncengine.models.config import RawConfig
from asyncengine.models.registry import find_family
from asyncengine.runner.steps.model_runner import CpuModelRunner
from tests.models import tiny

STATES = ("lfm2", "bamba", "falcon-h1", "granite-hybrid", "mamba2", "nemotron-h", "qwen3-next", "qwen3.5")
REFUSED = {
    "gpt-oss": "sinks", "gemma4": "other than attention", "olmo2": "over all heads", "olmo3": "over all heads",
    "olmoe": "over all heads", "minimax-m2": "over all heads",
    **dict.fromkeys(STATES, "other than attention"),
}  # fmt: skip
"""Families that one rank runs alone, by the beginning of a variant's name, and the reason."""

OTHERS = (
    "bloom-six-heads",
    "mpt-clipped",
    "falcon-groups",
    "falcon-alibi",
    "llama-odd-heads-biased",
    "qwen2-moe-window",
    "deepseek-v3-yarn",
    "glm4-moe-lite-mixed",
)
FIRST = {family: variant for variant, (family, _) in reversed(tiny.VARIANTS.items())}
"""The first variant of each family."""


def load(path: Path, ranks: int, **config: Any) -> CpuModelRunner:
    settings = {"num_kv_blocks": 16, "cpu_threads": 2, "tensor_parallel_size": ranks, **config}
    return CpuModelRunner.load(EngineConfig.from_kwargs(str(path), settings))


def decoded(runner: CpuModelRunner) -> tuple[list[list[int]], torch.Tensor]:
    draw = random.Random(1)
    driver = tiny.Driver(runner, native=True)
    sequences = [driver.add([draw.randrange(tiny.VOCAB_SIZE) for _ in range(n)], 64) for n in (1, 13, 37)]
    driver.run(sequences, 12, 16)
    return [sequence.generated for sequence in sequences], torch.stack(driver.logits)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("variant", [*sorted(FIRST.values()), *OTHERS])
def test_two_ranks_have_the_tokens_of_one(variant: str, tmp_path: Path) -> None:
    tiny.build_model(variant).save_pretrained(tmp_path)
    obstacle = next((why for name, why in REFUSED.items() if variant.startswith(name)), None)
    if obstacle is not None:
        with pytest.raises(ConfigError, match=f"tensor_parallel_size=2.*{obstacle}"):
            load(tmp_path, 2)
        return
    raw = RawConfig.load(tmp_path)
    model = find_family(raw)[1].read_config(raw)
    heads = model.num_heads if model.latent is not None else math.gcd(model.num_heads, model.num_kv_heads)
    ranks = next((n for n in (2, 3, 5, 7) if heads % n == 0), 2)
    if heads % ranks or model.intermediate_size % ranks:
        with pytest.raises((ConfigError, UnsupportedModelError), match=f"{ranks} (ranks|does not divide)"):
            load(tmp_path, ranks)
        return
    (one, exact), (two, logits) = (decoded(load(tmp_path, count, dtype="float32")) for count in (1, ranks))
    assert one == two
    torch.testing.assert_close(logits, exact, rtol=1e-4, atol=1e-4)
