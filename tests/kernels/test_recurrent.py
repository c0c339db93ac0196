"""Layers with a state on the GPU against the plain recurrence: results and states, whatever shares the step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from asyncengine.kernels.cpu import recurrent as plain
from asyncengine.kernels.cuda.gpu import H200, L40S
from asyncengine.kernels.cuda.ops import CudaBatch, CudaOps
from asyncengine.kernels.cuda.recurrent import chunks
from asyncengine.kernels.cuda.step.tensors import DeviceStep, allocate_step
from asyncengine.kernels.ops import LayerStates
from asyncengine.kernels.states import ShortConv, state_floats
from tests.amounts import sample_of
from tests.kernels.poison import poison_new_memory
from tests.kernels.test_mixers import MIXERS, batch_of, drawn, make, states_of

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
SLOTS = 4
POISON = 255
"""Bytes of NaN in float32 and in bfloat16."""
CONVOLUTIONS = {
    "plain": lambda: ShortConv(drawn(3, 40)),
    "with a bias, of eight tokens": lambda: ShortConv(drawn(8, 130), drawn(130)),
    "of two tokens, activated": lambda: ShortConv(drawn(2, 7), silu=True),
}
Rows = list[tuple[int, int, int]]
"""Slot, tokens and context of each row; a row of no tokens is inert."""


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_new_memory(monkeypatch)


def step_of(rows: Rows, device: torch.device, spare: int = 2) -> DeviceStep:
    """A step as ingest leaves it, with ``spare`` rows and tokens that it does not use."""
    tokens = sum(max(1, length) for _, length, _ in rows)
    step = allocate_step(SLOTS, 1, len(rows) + spare, tokens + spare, device)
    start = 0
    for row, (slot, length, context) in enumerate(rows):
        step.row_slot[row], step.row_query_start[row] = slot, start
        step.row_query_len[row], step.row_context_len[row] = length, context
        for i in range(length):
            step.token_slot[start + i], step.positions[start + i] = slot, context + i
        if not length:  # as of a sequence that met a stop token: it has its place, and does nothing
            step.positions[start] = context
        start += max(1, length)
    return step


class Run:
    """A layer on the device beside the plain recurrence, from step to step."""

    def __init__(self, layer: Any, device: torch.device) -> None:
        def moved(value: Any) -> Any:
            if isinstance(value, ShortConv):
                return value._replace(**{k: moved(v) for k, v in value._asdict().items()})
            return value.to(device) if isinstance(value, Tensor) else value

        self.layer, self.moved = layer, layer._replace(**{k: moved(v) for k, v in layer._asdict().items()})
        self.device, self.ops = device, CudaOps(device)
        self.is_conv = isinstance(layer, ShortConv)
        self.width = layer.weight.shape[1] if self.is_conv else layer.width
        if self.is_conv:
            self.expected = LayerStates(
                torch.zeros(SLOTS, ShortConv.state_bytes(*layer.weight.shape), dtype=torch.uint8)
            )
        else:
            self.expected = states_of(layer, SLOTS)
        self.states = LayerStates(torch.full_like(self.expected.states, POISON, device=device))

    def name(self) -> str:
        return {"ShortConv": "short_conv", "Mamba2": "mamba2", "DeltaNet": "delta_net"}[type(self.layer).__name__]

    def step(self, x: Tensor, rows: Rows, *, single: bool = False, spare: int = 2) -> tuple[Tensor, Tensor]:
        """Results of the tokens that are used: the device's, and the plain recurrence's."""
        step = step_of(rows, self.device, spare)
        used = (step.token_slot >= 0).cpu()
        inputs = torch.full((step.num_tokens, self.width + 3), float("nan"), dtype=x.dtype)  # rows are strided
        inputs[used, : self.width] = x
        inputs = inputs.to(self.device)[:, : self.width]
        run = getattr(self.ops, self.name())
        y = run(inputs, self.moved, self.states, CudaBatch(step, single_token_rows=single))
        assert not y[~used.to(self.device)].any(), "rows that are not used must be zeros"
        for slot, length, context in rows:
            if length and context == 0:
                self.expected.states[slot] = 0
        batch: Any = batch_of([(slot, length) for slot, length, _ in rows if length])
        return y[used.to(self.device)].cpu(), getattr(plain, self.name())(x, self.layer, self.expected, batch)

    def check_states(self, slots: list[int], tolerance: float) -> None:
        conv = self.layer if self.is_conv else self.layer.conv
        size, channels = conv.weight.shape
        parts = [(0, (size - 1) * channels, torch.float32, tolerance)]
        if not self.is_conv:
            numbers = self.layer.inner * getattr(self.layer, "key_dim", getattr(self.layer, "state_size", 0))
            half = self.layer.state_dtype == torch.bfloat16
            first = ShortConv.state_bytes(size, channels)
            parts.append((first, numbers, self.layer.state_dtype, 4e-2 if half else tolerance))
        for first, count, dtype, bound in parts:
            got, wanted = (
                state_floats(states.states.cpu(), first, count, dtype)[slots].float()
                for states in (self.states, self.expected)
            )
            torch.testing.assert_close(got, wanted, atol=bound, rtol=bound)


def layer_of(name: str) -> Any:
    torch.manual_seed(5)
    return make(name) if name in MIXERS else CONVOLUTIONS[name]()


LAYERS = [*MIXERS, *CONVOLUTIONS]
CASES = [
    *((name, torch.bfloat16) for name in LAYERS),
    *((name, torch.float32) for name in ("mamba, odd sizes", "delta, odd sizes", "plain")),
]


def tolerance_of(layer: Any, dtype: torch.dtype) -> float:
    """States in bfloat16 may be rounded to another neighbour where they differ by nearly nothing."""
    half = getattr(layer, "state_dtype", torch.float32) == torch.bfloat16
    return 3e-2 if dtype == torch.bfloat16 else 1e-2 if half else 2e-4


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
def test_mixed_steps_equal_the_plain_recurrence(device: torch.device, name: str, dtype: torch.dtype) -> None:
    """New sequences over what others left, chunks that go on, rows of one token, inert rows and unused ones."""
    run = Run(layer_of(name), device)
    tolerance = tolerance_of(run.layer, dtype)
    steps: list[Rows] = [
        [(2, 1, 0), (0, 2, 0), (3, 19, 0)],
        [(3, 1, 19), (1, 0, 7), (2, 5, 1), (0, 1, 2)],
        [(2, 3, 6), (0, 9, 0), (3, 1, 20)],
    ]
    for rows in steps:
        rows = sorted(rows, key=lambda row: row[1] > 1)  # those of one token come first, as the reference has them
        x = drawn(sum(length for _, length, _ in rows), run.width).to(dtype)
        y, expected = run.step(x, rows)
        torch.testing.assert_close(y, expected, atol=tolerance, rtol=tolerance)
    run.check_states([0, 2, 3], 1e-3)
    assert (run.states.states[1] == POISON).all(), "the state of an inert row was touched"


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
def test_decode_steps_equal_the_plain_recurrence(device: torch.device, name: str, dtype: torch.dtype) -> None:
    """Steps whose every row has one token, among unused rows, which touch no state."""
    run = Run(layer_of(name), device)
    tolerance = tolerance_of(run.layer, dtype)
    for i in range(6):
        rows = [(2, 1, i), (0, 1, max(0, i - 4)), (3, int(i < 4), i // 2)][: 2 + i % 2]
        x = drawn(sum(length for _, length, _ in rows), run.width).to(dtype)
        y, expected = run.step(x, rows, single=True, spare=1)
        torch.testing.assert_close(y, expected, atol=tolerance, rtol=tolerance)
    run.check_states([0, 2], 1e-3)
    assert (run.states.states[1] == POISON).all(), "the state of an unused slot was touched"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", LAYERS)
def test_no_bit_depends_on_chunks_or_company(device: torch.device, name: str) -> None:
    layer, length = layer_of(name), 13
    whole = Run(layer, device)
    x = drawn(length, whole.width).bfloat16()
    expected, _ = whole.step(x, [(1, length, 0)])
    for cut in sample_of(([1] * length, [2, 6, 1, 4]), ([2, 6, 1, 1, 3],)):
        run, parts, begin = Run(layer, device), [], 0
        for chunk in cut:
            single = chunk == 1
            rows = [(0, 1, 0), (1, chunk, begin), *([] if single else [(2, 3, 0)])]
            other = drawn(4, run.width).bfloat16()
            step = torch.cat((other[:1], x[begin : begin + chunk], *([] if single else [other[1:]])))
            parts.append(run.step(step, rows, single=single)[0][1 : 1 + chunk])
            begin += chunk
        assert torch.equal(torch.cat(parts), expected)
        run_states, whole_states = run.states.states[1], whole.states.states[1]
        assert torch.equal(run_states, whole_states)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["mamba", "mamba, odd sizes", "delta", "delta, odd sizes"])
def test_chunks_of_long_rows_equal_the_plain_recurrence(device: torch.device, name: str) -> None:
    """Rows of several chunks, of a part of one, and short ones beside them; states go on exactly where they ended."""
    run = Run(layer_of(name), device)
    for rows in ([(2, 1, 0), (3, 2, 0), (0, 100, 0)], [(2, 1, 1), (1, 0, 5), (0, 33, 100), (3, 70, 2)]):
        assert max(length for _, length, _ in rows) > chunks.LOOPED
        x = drawn(sum(length for _, length, _ in rows), run.width).bfloat16()
        y, expected = run.step(x, rows)
        torch.testing.assert_close(y, expected, atol=3e-2, rtol=3e-2)
    run.check_states([0, 2, 3], 1e-3 if device.type == "cpu" else 2e-2)  # on a GPU in tf32
    assert (run.states.states[1] == POISON).all(), "the state of an inert row was touched"


def test_which_rows_are_computed_in_chunks() -> None:
    """Never in float32, of states in bfloat16, in a batch-invariant engine, or on a card with little shared memory."""
    x, exact, half = torch.zeros(64, 8, dtype=torch.bfloat16), torch.float32, torch.bfloat16
    assert chunks.computes_chunks(x, exact, 128, H200, invariant=False)
    assert not chunks.computes_chunks(x, exact, 128, H200, invariant=True)
    assert not chunks.computes_chunks(x, half, 128, H200, invariant=False)
    assert not chunks.computes_chunks(x, exact, 256, H200, invariant=False)
    assert not chunks.computes_chunks(x, exact, 128, L40S, invariant=False)
    assert not chunks.computes_chunks(x.float(), exact, 128, H200, invariant=False)
    assert not chunks.computes_chunks(x[:32], exact, 128, H200, invariant=False)


def test_tensors_that_do_not_fit_are_refused(device: torch.device) -> None:
    run = Run(layer_of("delta"), device)
    with pytest.raises(ValueError, match="x must be"):
        run.ops.delta_net(drawn(3, run.width - 1).to(device), run.moved, run.states, CudaBatch(step_of([], device, 3)))
    narrow = LayerStates(run.states.states[:, 16:].contiguous())
    with pytest.raises(ValueError, match="states must be contiguous uint8"):
        run.ops.delta_net(drawn(3, run.width).to(device), run.moved, narrow, CudaBatch(step_of([], device, 3)))
    conv = ShortConv(drawn(9, 8).to(device))
    with pytest.raises(ValueError, match="8 tokens at most, got 9"):
        run.ops.short_conv(drawn(3, 8).to(device), conv, run.states, CudaBatch(step_of([], device, 3)))
