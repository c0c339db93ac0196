"""Every family against transformers: the same tokens in float32, close logits in bfloat16."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from asyncengine.config import EngineConfig
from asyncengine.kernels.reference import ReferenceOps
from asyncengine.runner.model_runner import CpuModelRunner
from tests.models import tiny

COUNT = 20


def load(path: Path, **config: object) -> CpuModelRunner:
    settings = {"num_kv_blocks": 64, **config}
    return CpuModelRunner.load(EngineConfig.from_kwargs(str(path), settings), ops=ReferenceOps())


@pytest.fixture(scope="module", params=tiny.VARIANTS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """A saved variant with prompts and their continuations by transformers."""
    path = tmp_path_factory.mktemp(request.param)
    model = tiny.build_model(request.param)
    model.save_pretrained(path)
    draw = random.Random(1)
    prompts = [[draw.randrange(tiny.VOCAB_SIZE) for _ in range(n)] for n in (1, 13, 37)]
    return path, model, [(prompt, tiny.generate(model, prompt, COUNT)) for prompt in prompts]


@pytest.mark.parametrize("attention", ["native", "sdpa"])
def test_tokens_equal_transformers(checkpoint, attention):
    path, _, expected = checkpoint
    runner = load(path, dtype="float32", prefill_attention=attention)
    assert len({tuple(tokens) for _, tokens in expected}) > 1, "the continuations must depend on the prompt"
    prompts, continuations = [list(column) for column in zip(*expected, strict=True)]
    for prompt, tokens in expected:
        alone = tiny.Driver(runner)
        sequence = alone.add(prompt, len(prompt) + COUNT)
        alone.run([sequence], COUNT, 64)
        assert sequence.generated == tokens
    # Together: in chunks of 1, of 7, and of random sizes with some sequences left out of each step.
    for chunk in (1, 7, None):
        driver = tiny.Driver(runner)
        sequences = [driver.add(prompt, len(prompt) + COUNT) for prompt in prompts]
        driver.run(sequences, COUNT, chunk)
        assert [s.generated for s in sequences] == continuations
