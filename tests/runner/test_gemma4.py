"""Gemma 4 by the kernels of a GPU: in Triton's interpreter where there is none."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncengine import SamplingParams, testing
from asyncengine.config import EngineConfig
from asyncengine.kernels.cuda.experts.route import ROUTED_ROWS
from asyncengine.kernels.cuda.gpu import H200
from asyncengine.runner.plans import plan_steps
from asyncengine.runner.steps.device_steps import attention_kinds
from asyncengine.runner.steps.model_runner import read_model_config
from tests.kernels.simulated_cuda import make_engine
from tests.models import tiny

SMALL: dict[str, Any] = {
    "max_num_seqs": 3, "max_num_batched_tokens": 16, "num_kv_blocks": 7, "max_model_len": 64, "dtype": "float32",
    "step_timeout_s": 600.0, "skip_tokenizer_init": True,
}  # fmt: skip
PROMPTS = [[(7 * i + 3 * n) % tiny.VOCAB_SIZE for i in range(n)] for n in (36, 3)]
COUNT = 5
SHAPE = Path(__file__).resolve().parents[2] / "bench" / "shapes" / "gemma-4-26b-a4b"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("variant", ["gemma4", "gemma4-shared", "gemma4-experts"])
async def test_tokens_equal_transformers(tmp_path: Path, variant: str) -> None:
    """Chunks, a hit in the prefix cache and two samples of a prompt beside another, in a pool that is too small."""
    model = tiny.build_model(variant)
    model.save_pretrained(tmp_path)
    params = SamplingParams(max_tokens=COUNT, temperature=0, ignore_eos=True)
    engine = make_engine(str(tmp_path), **SMALL)
    async with engine, testing.no_leaks(engine):
        first = await engine.generate(PROMPTS[0], params)
        both, other = await asyncio.gather(
            engine.generate(PROMPTS[0], SamplingParams(max_tokens=COUNT, temperature=0, ignore_eos=True, n=2)),
            engine.generate(PROMPTS[1], params),
        )
        assert engine.stats().prefix_cache_hits > 0
    tokens = list(first.token_ids)
    assert tokens == tiny.followers(model, PROMPTS[0], tokens)
    assert [list(output.token_ids) for output in both.outputs] == [tokens] * 2
    assert list(other.token_ids) == tiny.followers(model, PROMPTS[1], other.token_ids)


def test_the_real_shape_has_plans_for_both_kinds_of_layer(tmp_path: Path) -> None:
    """Windows have eight heads of 256, the layers that see everything two of 512; all are prepared by a kernel."""
    shape = json.loads((SHAPE / "config.json").read_text())
    last = shape["layer_types"].index("full_attention") + 1  # layers repeat from there on
    shape |= {"num_hidden_layers": last, "layer_types": shape["layer_types"][:last]}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    config = EngineConfig(
        model=str(tmp_path), load_format="dummy", max_num_seqs=2, max_num_batched_tokens=32, max_model_len=2048
    )
    kinds = attention_kinds(read_model_config(config), torch.bfloat16)
    assert [(kind.shape.num_kv_heads, kind.shape.head_dim, kind.window) for kind in kinds] == [
        (2, 512, 0), (8, 256, 1024)
    ]  # fmt: skip
    for step in plan_steps(config, H200):
        assert len(step.attention) == 2
        assert all(line.startswith("rotary and store") for line in step.attention)
        names = {site.name for site in step.projections}
        assert names >= {"qkv", "o", "linear", "head"}
        assert ("router" in names) == (step.bucket.max_tokens > ROUTED_ROWS)
