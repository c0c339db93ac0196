"""Experts in MXFP4, as gpt-oss is published."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from asyncengine import SamplingParams
from asyncengine.config import EngineConfig
from asyncengine.errors import MissingWeightError, UnsupportedModelError, WeightMismatchError
from asyncengine.kernels.cpu.ops import CpuOps
from asyncengine.kernels.cuda.ops import CudaOps, CudaOptions
from asyncengine.models.weights.mxfp4 import unpack_mxfp4
from asyncengine.runner.steps.model_runner import CpuModelRunner, load_model
from tests.kernels.simulated_cuda import make_engine
from tests.models import tiny

PROMPT = [(11 * i + 5) % tiny.VOCAB_SIZE for i in range(30)]
EXPERTS, HIDDEN, INNER = 5, 64, 32


def random_bytes(*shape: int, low: int = 0, high: int = 256, seed: int = 0) -> Tensor:
    return torch.randint(low, high, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_are_those_of_transformers(dtype: torch.dtype) -> None:
    blocks, scales = random_bytes(3, 8, 4, 16), random_bytes(3, 8, 4, low=60, high=190, seed=1)
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=dtype).transpose(1, 2)
    assert torch.equal(torch.stack([unpack_mxfp4(b, s, dtype) for b, s in zip(blocks, scales, strict=True)]), theirs)


def load(path: Path, **settings: object) -> CpuModelRunner:
    config = EngineConfig.from_kwargs(str(path), {"num_kv_blocks": 16, "dtype": "float32"} | settings)
    return CpuModelRunner.load(config, ops=CpuOps(2))


def generated(path: Path, **settings: object) -> list[int]:
    driver = tiny.Driver(load(path, **settings), native=True)
    sequence = driver.add(PROMPT, 60)
    driver.run([sequence], 15, 7)
    return sequence.generated


@pytest.fixture
def packed(tmp_path: Path) -> tuple[Path, list[int]]:
    """A checkpoint whose experts are packed, and the continuation of PROMPT by transformers with what they unpack
    to."""
    model = tiny.build_model(
        "gpt-oss", hidden_size=HIDDEN, num_attention_heads=4, intermediate_size=INNER, num_hidden_layers=2
    )
    packed, state = {}, model.state_dict()
    for name in [name for name in state if name.endswith(("gate_up_proj", "down_proj"))]:
        rows, columns = (2 * INNER, HIDDEN) if name.endswith("gate_up_proj") else (HIDDEN, INNER)
        blocks = random_bytes(EXPERTS, rows, columns // 32, 16, seed=len(packed))
        scales = random_bytes(EXPERTS, rows, columns // 32, low=122, high=126, seed=len(packed) + 50)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        state[name].copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    dense = {name: t for name, t in tensors.items() if f"{name}_blocks" not in packed}
    save_file(dense | packed, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path, tiny.generate(model, PROMPT, 15)


def test_a_packed_checkpoint_is_read_as_it_lies(packed: tuple[Path, list[int]]) -> None:
    path, expected = packed
    assert generated(path) == expected
    assert len(generated(path, load_format="dummy", dtype="bfloat16")) == 15


def test_packed_tensors_that_are_missing_or_wrong_name_themselves(packed: tuple[Path, list[int]]) -> None:
    path, _ = packed
    tensors, name = load_file(path / "model.safetensors"), "model.layers.1.mlp.experts.down_proj_scales"
    save_file(tensors | {name: tensors[name].float()}, path / "model.safetensors")
    with pytest.raises(WeightMismatchError, match=f"{name} in .*: expected torch.uint8, found torch.float32"):
        load(path)
    save_file({other: tensors[other] for other in tensors if other != name}, path / "model.safetensors")
    with pytest.raises(MissingWeightError, match=name):
        load(path)


def test_other_packings_are_refused(packed: tuple[Path, list[int]]) -> None:
    path, _ = packed
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["quant_method"] = "gptq"
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match="gptq"):
        load(path)


async def test_codes_stay_as_they_are_on_a_gpu(packed: tuple[Path, list[int]]) -> None:
    """Their kernels give the tokens of transformers, and a weight takes 4 bits and its part of a scale."""
    path, expected = packed
    small = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "num_kv_blocks": 8, "max_model_len": 64}
    settings = small | {"dtype": "float32", "step_timeout_s": 600.0, "skip_tokenizer_init": True}
    async with make_engine(str(path), **settings) as engine:
        output = await engine.generate(PROMPT, SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))
    assert list(output.token_ids) == expected[:4]
    config = EngineConfig.from_kwargs(str(path), settings)
    coded, unpacked = (
        load_model(config, CudaOps(torch.device("cpu"), CudaOptions(expert_codes=keeps))) for keeps in (True, False)
    )
    numbers = 2 * EXPERTS * 3 * HIDDEN * INNER
    assert unpacked.owned_bytes - coded.owned_bytes == 4 * numbers - (numbers // 2 + numbers // 32)
    assert coded.num_parameters == unpacked.num_parameters
