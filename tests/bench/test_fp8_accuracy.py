"""The comparison with float8 weights: what it makes of logits, and that both of its paths compute the same model."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import pytest
import torch
from fp8_accuracy import Of, Sequences, compare, continued, given, measure, perplexity
from torch import Tensor

from asyncengine import bundled_model
from asyncengine.config import EngineConfig
from asyncengine.kernels.cpu.reference import ReferenceOps
from asyncengine.kernels.cuda.ops import CudaOps
from asyncengine.kernels.ops import Ops
from asyncengine.runner.steps.model_runner import load_model
from tests.kernels.interpreter import repair_interpreter
from tests.models import tiny

repair_interpreter()


def test_figures_against_a_calculation_by_hand() -> None:
    exact = torch.tensor([[[0.0, math.log(3)], [2.0, 0.0]]])
    other = torch.tensor([[[0.0, 0.0], [2.0, 0.0]]])
    assert compare(exact, exact) == {"relative error": 0, "KL": 0, "equal tokens": 1}
    figures = compare(exact, other)
    assert figures["relative error"] == pytest.approx(math.log(3) / math.sqrt(math.log(3) ** 2 + 4))
    assert figures["KL"] == pytest.approx((0.25 * math.log(0.5) + 0.75 * math.log(1.5)) / 2)
    assert figures["equal tokens"] == 0.5
    assert perplexity(exact, torch.tensor([[0, 1]])) == pytest.approx(4 / 3)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("of", ["weights", "kv-cache"])
def test_the_bundled_model_in_plain_torch(of: Of) -> None:
    result = measure(bundled_model(), argparse.Namespace(device="cpu", rows=[2, 4], tokens=24), of)
    assert result["perplexity"]["fp8"] == pytest.approx(result["perplexity"]["bf16"], rel=0.05)
    assert 0.001 < result["prompts"]["relative error"] < 0.1
    assert result["noise, rows 2"]["relative error"] < 1e-5
    assert result["prompts"]["equal tokens"] > 0.8


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer, whose widths are multiples of 16: 261 rows are the scaled product's."""
    path = tmp_path_factory.mktemp("qwen3")
    config = tiny.DECODER | {"num_hidden_layers": 1, "intermediate_size": 80, "head_dim": 16}
    (path / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"], **config}))
    return path


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("rows", "tokens", "chunk"), [(3, 87, 87), (1, 4, 1), (5, 4, 1), (3, 12, 4)])
def test_kernels_are_as_exact_as_the_twin(qwen3: Path, rows: int, tokens: int, chunk: int) -> None:
    """A whole model. Not the same numbers: what bfloat16 rounds differently gets another float8, an eighth away."""
    ids = torch.randint(tiny.VOCAB_SIZE, (rows, tokens), generator=torch.Generator().manual_seed(1))

    def logits(ops: Ops, quantization: str) -> Tensor:
        config = EngineConfig(
            model=str(qwen3), load_format="dummy", dtype="bfloat16", max_model_len=tokens, quantization=quantization
        )
        model = Sequences(load_model(config, ops), ops, rows, tokens)
        return given(model, ids, chunk)

    cpu = torch.device("cpu")
    kernels = logits(CudaOps(cpu), "fp8")
    twin = logits(ReferenceOps(), "fp8")
    plain = logits(ReferenceOps(), "none")
    error, expected = (compare(plain, x)["relative error"] for x in (kernels, twin))
    assert 0.5 < error / expected < 1.3
    assert compare(twin, kernels)["relative error"] < 1.2 * expected
    assert compare(plain, logits(CudaOps(cpu), "none"))["relative error"] < 0.3 * expected


def test_greedy_continuations_are_what_logits_say(qwen3: Path) -> None:
    ops = ReferenceOps()
    config = EngineConfig(model=str(qwen3), load_format="dummy", dtype="float32", max_model_len=9)
    model = Sequences(load_model(config, ops), ops, 3, 9)
    ids = torch.randint(tiny.VOCAB_SIZE, (3, 5), generator=torch.Generator().manual_seed(2))
    tokens = continued(model, ids, 4)
    assert tokens.shape == (3, 4)
    logits = given(model, torch.cat((ids, tokens), 1), 9)
    assert torch.equal(logits[:, 4:-1].argmax(-1), tokens)
