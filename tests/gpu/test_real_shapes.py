"""Logits of the real shapes in bfloat16, against transformers in float32 on the same weights."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from asyncengine import _core
from asyncengine.config import EngineConfig
from asyncengine.kernels.cuda.linear.tables import PlanTable
from asyncengine.kernels.cuda.ops import CudaOps, CudaOptions
from asyncengine.kernels.cuda.trials import examine
from asyncengine.models.config import RawConfig
from asyncengine.models.registry import find_family
from asyncengine.models.weights.shard import WHOLE, Part
from asyncengine.models.weights.source import WeightSource
from asyncengine.runner.cuda_runner import CudaRunner
from asyncengine.runner.start.graphs import loaded_libcudart
from asyncengine.runner.start.prepare import make_steps
from asyncengine.runner.steps.device_steps import SAMPLING, step_buckets
from asyncengine.runner.steps.model_runner import LoadedModel
from tests.gpu.conftest import SHAPES

PROMPT, COUNT = 700, 4
CHUNKS = (128, 512)
"""Tokens of a step: with plans of the table, and with those for many rows."""


class StateDict:
    """A TensorSource over a model of transformers."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._tensors = model.state_dict()

    def get(self, name: str, *shape: int, part: Part = WHOLE) -> Tensor:
        assert self._tensors[name].shape == shape, name
        return self._tensors[name].clone()

    def get_transposed(self, name: str, *shape: int, part: Part = WHOLE) -> Tensor:
        return self._tensors[name].T


class Recorder:
    """A model that keeps its logits, step by step, although its steps are greedy and ranks would do."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.kept: list[Tensor] = []

    def run(self, batch: Any, caches: Any) -> Any:
        return self._model.run(batch, caches)

    def hidden(self, residual: Any, batch: Any) -> Tensor:
        return self._model.hidden(residual, batch)

    def logits(self, residual: Any, batch: Any) -> Tensor:
        logits = self._model.logits(residual, replace(batch, needs=SAMPLING))
        self.kept.append(logits[0].clone())
        return logits


def our_logits(directory: str, source: StateDict, prompt: list[int], chunk: int) -> tuple[list[Tensor], list[int]]:
    """Return the logits of the last token of the prompt and of COUNT - 1 after it, and these tokens. ``chunk`` tokens a
    step."""
    device = torch.device("cuda", 0)
    gpu = examine(device)
    plans = PlanTable.load(gpu.name)
    ops = CudaOps(device, CudaOptions(plans, gpu.dependent_launch, gpu=gpu))
    raw = RawConfig.load(SHAPES / directory)
    architecture, family = find_family(raw)
    config = EngineConfig(
        model=directory, dtype="bfloat16", max_num_seqs=2, max_num_batched_tokens=chunk, num_kv_blocks=64,
        max_model_len=1024, enforce_eager=True,
    )  # fmt: skip
    model_config = family.read_config(raw)
    recorder = Recorder(family.build(model_config, WeightSource(source), ops, 1024))
    loaded = LoadedModel(
        SHAPES / directory, architecture, model_config, torch.bfloat16, "cuda", 1024, recorder, 0, 0, 0, ()
    )
    native = _core.CudaDevice(loaded_libcudart(), 0)
    steps, buffers = make_steps(config, loaded, ops, native, 64)
    buckets = step_buckets(config, loaded, ops)
    runner = CudaRunner(loaded.info(config, 64), loaded.config, steps, native, buffers, buckets, None)
    loop = runner.make_step_loop(config, progress=False)
    recorder.kept.clear()
    loop.submit(_core.RequestSpec(id=1, prompt=prompt, max_tokens=COUNT))
    tokens: list[int] = []
    while len(tokens) < COUNT:
        loop.advance()
        for news in loop.drain()[0]:
            tokens += news.tokens
    assert loop.stop(5.0)
    chunks = -(-PROMPT // chunk)
    return recorder.kept[chunks - 1 : chunks - 1 + COUNT], tokens


@pytest.mark.parametrize("directory", ["gpt2", "qwen3-0.6b", "llama-3.1-8b"])
def test_logits_are_as_close_as_transformers_own(directory):
    config = transformers.AutoConfig.from_pretrained(SHAPES / directory)
    torch.manual_seed(0)
    with torch.device("cuda"):
        theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    prompt = torch.randint(config.vocab_size, (PROMPT,), generator=torch.Generator().manual_seed(1)).tolist()
    results = [our_logits(directory, StateDict(theirs), prompt, chunk) for chunk in CHUNKS]
    ids = [torch.tensor([prompt + tokens[:-1]], device="cuda") for _, tokens in results]
    with torch.inference_mode():
        rounded = [theirs(x).logits[0, -COUNT:].float() for x in ids]
        theirs.float()
        exact = [theirs(x).logits[0, -COUNT:].float() for x in ids]
    for (logits, _), their, wanted, chunk in zip(results, rounded, exact, CHUNKS, strict=True):
        ours = torch.stack(logits).float()
        error, their_error = ((x - wanted).norm() / wanted.norm() for x in (ours, their))
        print(f"{directory}, {chunk}: relative error {error:.4f}, of transformers in bfloat16 {their_error:.4f}")
        assert error < 1.5 * their_error + 1e-3
    del theirs
    gc.collect()
    torch.cuda.empty_cache()
