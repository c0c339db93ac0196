"""Ranks share the heads of latent attention, and each keeps all latents: two of them have the tokens of one."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncengine import EngineConfig
from asyncengine.kernels.cuda.attention import expanded
from asyncengine.kernels.cuda.ops import CudaBatch, CudaOps
from asyncengine.kernels.cuda.step.tensors import DeviceStep, allocate_step
from asyncengine.kernels.float8_cache import with_inverses
from asyncengine.kernels.ops import Norm
from asyncengine.runner.describe import describe_model
from asyncengine.runner.state import memory
from asyncengine.runner.steps.model_runner import CpuModelRunner, load_model
from tests.kernels.interpreter import repair_interpreter
from tests.models import tiny

repair_interpreter()

BLOCKS = 4
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PROMPT = [(7 * i + 3) % tiny.VOCAB_SIZE for i in range(21)]


@pytest.fixture(scope="module", params=["deepseek-v3", "deepseek-v3-yarn"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Queries that are made of latents, and queries that are made of the residual, with biases."""
    path = tmp_path_factory.mktemp(request.param)
    tiny.build_model(request.param, num_hidden_layers=3).save_pretrained(path)
    return path


def config_of(path: Path, ranks: int, **config: Any) -> EngineConfig:
    settings = {"device": "cpu", "dtype": "float32", "max_model_len": 64, "max_num_seqs": 1, "num_kv_blocks": BLOCKS}
    return EngineConfig.from_kwargs(str(path), {**settings, "tensor_parallel_size": ranks, **config})


class Lockstep:
    """Ranks on one device. One of them computes at a time, since the interpreter of kernels is no more than one."""

    def __init__(self, ranks: int) -> None:
        self._turn = threading.Lock()
        self._products: list[Tensor] = [torch.empty(0)] * ranks
        self._barrier = threading.Barrier(ranks)

    def reduce(
        self, rank: int, product: Tensor, batch: CudaBatch, onto: Tensor | None = None, norm: Norm | None = None
    ) -> Tensor | None:
        """``Reduction`` for a rank."""
        self._products[rank] = product.clone()
        self._turn.release()
        try:
            self._barrier.wait()
            total = torch.stack(self._products).sum(0)
            self._barrier.wait()
        finally:
            self._turn.acquire()
        result = product.copy_(total) if onto is None else onto.add_(total)
        if norm is None:
            return None
        return torch.nn.functional.rms_norm(result, (result.shape[1],), norm.weight, norm.eps)

    def run(self, work: Sequence[Any]) -> list[Any]:
        def one(call: Any) -> Any:
            with self._turn, torch.inference_mode():
                try:
                    return call()
                except BaseException:
                    self._barrier.abort()
                    raise

        with ThreadPoolExecutor(len(work)) as threads:
            return list(threads.map(one, work))


def step_of(ids: list[int], context: int) -> DeviceStep:
    """A step of one row over the blocks in their order."""
    step = allocate_step(1, BLOCKS, 1, len(ids), DEVICE)
    positions = torch.arange(context, context + len(ids))
    for tensor, values in (
        (step.input_ids, torch.tensor(ids)), (step.positions, positions), (step.slot_mapping, positions),
        (step.token_slot, torch.zeros(len(ids))), (step.row_slot, torch.zeros(1)), (step.sample_slot, torch.zeros(1)),
        (step.row_query_start, torch.zeros(1)), (step.row_query_len, torch.tensor([len(ids)])),
        (step.row_context_len, torch.tensor([context])), (step.sample_index, torch.tensor([len(ids) - 1])),
        (step.slots.block_tables, torch.arange(BLOCKS)[None]),
    ):  # fmt: skip
        tensor.copy_(values)
    return step


def on_device(path: Path, ranks: int, *, float8: bool) -> list[Tensor]:
    """Logits of the last token of a first chunk, of a later one, and of a step of one token."""
    lockstep, ops = Lockstep(ranks), [CudaOps(DEVICE) for _ in range(ranks)]
    config = config_of(path, ranks)
    loads = [load_model(config, own, rank=rank) for rank, own in enumerate(ops)]
    caches = []
    for rank, (own, loaded) in enumerate(zip(ops, loads, strict=True)):
        if ranks > 1:
            own.reduction = partial(lockstep.reduce, rank)
        layers = loaded.config.num_layers
        scales = with_inverses(torch.full((layers, 2, 1), 2.0**-5)).to(DEVICE) if float8 else None
        caches.append(memory.allocate(config, loaded.config, BLOCKS, loaded.dtype, own, scales).layers)
        assert loaded.config.num_heads == 6 // ranks
        assert [cache[0].shape[2] for cache in caches[-1]] == [32 + 8] * layers, "each has all latents"

    def logits_of(rank: int, batch: CudaBatch) -> Tensor:
        model = loads[rank].model
        made = model.logits(model.run(batch, iter(caches[rank])), batch)
        assert isinstance(made, Tensor)
        return made

    found = []
    for ids, context in ((PROMPT[:12], 0), (PROMPT[12:20], 12), (PROMPT[20:], 20)):
        batch = CudaBatch(step_of(ids, context), single_token_rows=len(ids) == 1)
        parts = lockstep.run([partial(logits_of, rank, batch) for rank in range(ranks)])
        found.append(torch.cat(parts, 1) if loads[0].model.splits_head else parts[0])
    return found


@pytest.mark.sampled(3)
@pytest.mark.parametrize("float8", [False, True], ids=["", "float8"])
def test_two_ranks_on_devices_have_the_logits_of_one(
    checkpoint: Path, float8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expanded, "LEAST_TOKENS", 8)
    one, two = (on_device(checkpoint, ranks, float8=float8) for ranks in (1, 2))
    for a, b in zip(one, two, strict=True):
        torch.testing.assert_close(b[:, : tiny.VOCAB_SIZE], a[:, : tiny.VOCAB_SIZE], atol=1e-3, rtol=1e-3)


def test_two_ranks_on_the_cpu_keep_latents_in_float8(checkpoint: Path) -> None:
    """Scales are those of one rank, and memory is that of both: each keeps all latents."""
    made, bytes_per_block = [], []
    for ranks in (1, 2):
        config = config_of(checkpoint, ranks, kv_cache_dtype="fp8", cpu_threads=2)
        runner = CpuModelRunner.load(config)
        driver = tiny.Driver(runner, native=True)
        sequence = driver.add(PROMPT, 40)
        driver.run([sequence], 8, 7)
        made.append(sequence.generated)
        bytes_per_block.append(runner.info.kv_bytes_per_block)
        report = describe_model(config, "cpu")
        assert report.kv_bytes_per_token == runner.info.kv_bytes_per_block // runner.info.block_size
    assert made[0] == made[1]
    assert bytes_per_block[1] == 2 * bytes_per_block[0]
