"""Gated DeltaNet in one kernel for steps of single tokens, in Gluon, against the plain recurrence."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from asyncengine.kernels.cuda.gpu import H200, INTERPRETER, L40S
from asyncengine.kernels.cuda.ops import CudaOps, CudaOptions
from asyncengine.kernels.cuda.recurrent import delta_step
from tests.kernels.gluon_twin import AsyncCopy, run_in_torch
from tests.kernels.poison import poison_new_memory
from tests.kernels.test_mixers import drawn, make_delta
from tests.kernels.test_recurrent import POISON, Rows, Run

MIXERS = {
    "two heads of values for one of keys": (4, 64, 32, 2, False),
    "three, of states in bfloat16": (6, 32, 64, 2, True),
    "one": (3, 64, 32, 3, False),
}


@pytest.mark.parametrize("multiprocessors", [1, 4, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", MIXERS)
def test_decode_steps_equal_the_plain_recurrence(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, name: str, dtype: torch.dtype, multiprocessors: int
) -> None:
    """Sequences that begin, that go on and that end, over what others left, among unused rows, which touch nothing."""
    torch.manual_seed(4)
    layer = make_delta(*MIXERS[name])
    poison_new_memory(monkeypatch)
    if device.type == "cpu":
        run_in_torch(monkeypatch, "_delta_step_kernel", delta_step, async_copy=AsyncCopy)
    run = Run(layer, device)
    card = replace(INTERPRETER if device.type == "cpu" else run.ops.gpu, tma=True, multiprocessors=multiprocessors)
    assert delta_step.has_step(layer, card), "the case must be one for the kernel"
    run.ops = CudaOps(device, CudaOptions(gpu=card))
    tolerance = 3e-2 if dtype == torch.bfloat16 or layer.state_dtype == torch.bfloat16 else 2e-4
    for i in range(6):
        rows: Rows = [(2, 1, i), (0, 1, max(0, i - 4)), (3, int(i < 4), i // 2)][: 2 + i % 2]
        x = drawn(sum(length for _, length, _ in rows), run.width).to(dtype)
        y, expected = run.step(x, rows, single=True, spare=1)
        torch.testing.assert_close(y, expected, atol=tolerance, rtol=tolerance)
    run.check_states([0, 2], 1e-3)
    assert (run.states.states[1] == POISON).all(), "the state of an unused slot was touched"


def test_which_mixers_have_the_kernel() -> None:
    """Mixers of whole tiles whose states fit into shared memory have it, on a card with the instructions of Hopper."""
    assert delta_step.has_step(make_delta(32, 128, 128, 16, False), H200)
    assert delta_step.has_step(make_delta(32, 128, 128, 16, True), H200)
    assert not delta_step.has_step(make_delta(32, 128, 128, 16, False), L40S)
    assert not delta_step.has_step(make_delta(6, 11, 7, 3, False), H200)
    assert not delta_step.has_step(make_delta(2, 256, 128, 1, False), H200)
