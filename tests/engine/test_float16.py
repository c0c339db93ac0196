"""A model in float16 on the CUDA path: near the same weights in float32, with every kind of step."""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncengine import ConfigError, SamplingParams
from asyncengine.config import EngineConfig
from asyncengine.models.weights.checkpoint import choose_dtype
from asyncengine.runner.steps.model_runner import CpuModelRunner
from tests.kernels.simulated_cuda import make_engine
from tests.models import tiny

PROMPTS = [[(7 * i + 3) % tiny.VOCAB_SIZE for i in range(n)] for n in (1, 30)]


async def test_log_probabilities_are_near_those_of_float32(tmp_path: Path) -> None:
    await check_log_probabilities(tmp_path, tiny.build_model("qwen3", initializer_range=0.1, num_hidden_layers=2), 3)


async def check_log_probabilities(path: Path, model: Any, count: int) -> None:
    """Two prompts, of which one comes in two chunks, and steps of both.

    A log probability may differ by 0.02, or by three times as much as in transformers' own float16.
    """
    model.half().save_pretrained(path)
    model.set_attn_implementation("eager")  # another one leaves out soft caps in some versions of transformers
    own, exact = model, copy.deepcopy(model).float()
    config = {"max_num_seqs": 2, "max_num_batched_tokens": 32, "prefill_chunk_size": 16, "num_kv_blocks": 16}
    params = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True, logprobs=0)
    async with make_engine(str(path), dtype="float16", skip_tokenizer_init=True, **config) as engine:
        assert engine.model_info.dtype == "float16"
        assert engine.model_info.host_obstacle == "computes in float16"
        outputs = await asyncio.gather(*(engine.generate(prompt, params) for prompt in PROMPTS))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        ids = [*prompt, *output.token_ids]
        with torch.inference_mode():
            wanted, half = (
                which(torch.tensor([ids])).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
                for which in (exact, own)
            )
        error = (half - wanted).gather(1, torch.tensor(output.token_ids)[:, None]).abs().max()
        bound = max(0.02, 3 * float(error))
        for scores, token, logprobs in zip(wanted, output.token_ids, output.outputs[0].logprobs, strict=True):
            assert scores.max() - scores[token] < bound, "the greatest, or as good as that"
            assert abs(logprobs.logprob - scores[token]) < bound


def test_auto_is_the_dtype_of_the_checkpoint_on_a_gpu(tmp_path: Path) -> None:
    assert choose_dtype("auto", "float16", torch.device("cuda")) == torch.float16
    assert choose_dtype("auto", "float16") == torch.float32
    tiny.build_model("llama").half().save_pretrained(tmp_path)
    assert CpuModelRunner.load(EngineConfig(model=str(tmp_path), num_kv_blocks=16)).info.dtype == "float32"


def test_the_cpu_has_no_float16(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="dtype=float16 needs a GPU"):
        EngineConfig(model="m", dtype="float16", device="cpu")
    with pytest.raises(ConfigError, match="dtype=float16 needs a GPU"):
        CpuModelRunner.load(EngineConfig(model=str(tmp_path), dtype="float16"))
