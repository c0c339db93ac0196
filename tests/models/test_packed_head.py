"""A head that is packed at load gives the logits of its rounded weights, and leaves a tied embedding as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from asyncengine.config import EngineConfig
from asyncengine.errors import ConfigError, UnsupportedModelError
from asyncengine.kernels.cpu.reference import ReferenceOps
from asyncengine.kernels.grouped import round_to_groups, unpack
from asyncengine.kernels.weight import BLOCKS, FLOAT8_GROUPS, INT8, PackedWeight, dense
from asyncengine.models.weights.checkpoint import Checkpoint
from asyncengine.models.weights.source import WeightSource
from asyncengine.runner.describe import describe_model
from asyncengine.runner.steps.model_runner import CpuModelRunner
from tests.models import tiny

PROMPT = [5, 9, 3, 70]
FORMS = {"int8": INT8, "fp8": FLOAT8_GROUPS}


def settings_of(path: Path, **settings: Any) -> EngineConfig:
    return EngineConfig.from_kwargs(
        str(path), {"device": "cpu", "dtype": "float32", "num_kv_blocks": 16, "cpu_threads": 2} | settings
    )


def run(path: Path, *, native: bool = True, **settings: Any) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens, and the logits [steps, V] that they were chosen by."""
    config = settings_of(path, **settings)
    driver = tiny.Driver(CpuModelRunner.load(config, ops=None if native else ReferenceOps()), native=True)
    sequence = driver.add(PROMPT, len(PROMPT) + 8)
    driver.run([sequence], 8, 64)
    return sequence.generated, torch.cat(driver.logits)


@pytest.mark.parametrize("bits", FORMS)
@pytest.mark.parametrize("tied", [False, True])
def test_logits_are_those_of_the_rounded_head(bits: str, tied: bool, tmp_path: Path) -> None:
    """The logits differ from those of the dense head, and plain torch gives the same."""
    model: Any = tiny.build_model("llama", tie_word_embeddings=tied)
    model.save_pretrained(tmp_path / "given")
    embedding = model.get_input_embeddings().weight.data.clone()
    model.config.tie_word_embeddings = False
    rounded = unpack(round_to_groups(FORMS[bits], model.lm_head.weight.data))
    model.lm_head.weight = torch.nn.Parameter(rounded)
    assert torch.equal(model.get_input_embeddings().weight.data, embedding)
    model.save_pretrained(tmp_path / "rounded")
    expected_tokens, expected = run(tmp_path / "rounded")
    for native in (True, False):
        tokens, logits = run(tmp_path / "given", native=native, head_quantization=bits)
        assert tokens == expected_tokens
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(run(tmp_path / "given")[1][0], expected[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tied", [False, True])
def test_models_says_how_the_head_lies(tied: bool, tmp_path: Path) -> None:
    """A packed head that was tied is there beside the embedding."""
    tiny.build_model("llama", tie_word_embeddings=tied).save_pretrained(tmp_path)
    before, after = (
        describe_model(settings_of(tmp_path, head_quantization=bits), "cpu", 1 << 30) for bits in ("none", "int8")
    )
    assert before.head_format is None
    assert after.head_format == "int8 in groups of 16 columns, decoded by native kernels"
    assert before.weight_bytes is not None
    assert after.weight_bytes is not None
    elements = tiny.VOCAB_SIZE * 48
    packed = elements + 4 * elements // 16
    assert after.weight_bytes - before.weight_bytes == packed - (0 if tied else 4 * elements)


def test_ranks_pack_their_part(tmp_path: Path) -> None:
    tiny.build_model("llama", vocab_size=256, tie_word_embeddings=True).save_pretrained(tmp_path)
    alone, together = (run(tmp_path, head_quantization="int8", tensor_parallel_size=ranks) for ranks in (1, 2))
    assert alone[0] == together[0]
    torch.testing.assert_close(alone[1], together[1], rtol=1e-4, atol=1e-4)


def test_heads_that_cannot_be_packed_are_refused(tmp_path: Path) -> None:
    tiny.build_model("llama").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="head_quantization=int8 is not implemented for LlamaForCausalLM"):
        CpuModelRunner.load(settings_of(tmp_path, head_quantization="int8", model_impl="transformers"))
    blocks = PackedWeight(BLOCKS, {"blocks": torch.zeros(4, 34, dtype=torch.uint8)}, 4, 32, torch.float32, 8)
    weights = WeightSource(Checkpoint(tmp_path, torch.float32), head_form=INT8)
    with pytest.raises(UnsupportedModelError, match="the head lies in blocks, and is packed already"):
        weights.tied_head(blocks)
    assert weights.tied_head(dense(torch.randn(4, 32))).format == INT8


def test_a_model_that_makes_no_tokens_has_no_head_to_pack(tmp_path: Path) -> None:
    tiny.build_model("llama").model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="has no head that makes tokens"):
        CpuModelRunner.load(settings_of(tmp_path, head_quantization="fp8"))
