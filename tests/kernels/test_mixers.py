"""Mamba-2 and gated DeltaNet in native kernels: as the plain recurrence, and bit for bit however a prompt is cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncengine._core import CpuKernels, StepBatch
from asyncengine.kernels.cpu.ops import CpuOps
from asyncengine.kernels.cpu.recurrent import delta_net, mamba2
from asyncengine.kernels.ops import LayerStates
from asyncengine.kernels.states import DeltaNet, Mamba2, ShortConv
from asyncengine.models.mixer_shapes import Delta, StateSpace

Mixer = Mamba2 | DeltaNet
ISAS = CpuKernels.available_isas()


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape)


def make_mamba(heads: int, dim: int, size: int, groups: int, half: bool, **settings: Any) -> Mamba2:
    shape = StateSpace(heads, dim, size, groups, 4, 1e-5, half=half)
    conv = ShortConv(drawn(4, shape.channels), drawn(shape.channels), silu=True)
    dtype = torch.bfloat16 if half else torch.float32
    how: Any = {"norm": 1 + 0.1 * drawn(shape.inner), **settings}
    return Mamba2(
        conv, -drawn(heads).exp(), drawn(heads), drawn(heads), dim, size, groups, (0.01, 2.0), eps=1e-5,
        state_dtype=dtype, **how,
    )  # fmt: skip


def make_delta(heads: int, dim: int, size: int, groups: int, half: bool) -> DeltaNet:
    channels = Delta(groups, heads, size, dim, 3).channels
    conv = ShortConv(drawn(3, channels), silu=True)
    dtype = torch.bfloat16 if half else torch.float32
    return DeltaNet(conv, -drawn(heads).exp(), drawn(heads), groups, size, dim, 1 + 0.1 * drawn(dim), 1e-6, dtype)


def make(name: str) -> Mixer:
    torch.manual_seed(3)
    made: dict[str, Callable[[], Mixer]] = {
        "mamba": lambda: make_mamba(4, 64, 16, 2, False),
        "mamba, odd sizes": lambda: make_mamba(3, 7, 5, 1, False, norm_before_gate=True),
        "mamba, bfloat16 states, no norm": lambda: make_mamba(4, 24, 9, 4, True, norm=None),
        "delta": lambda: make_delta(4, 64, 32, 2, False),
        "delta, odd sizes": lambda: make_delta(6, 11, 7, 3, False),
        "delta, bfloat16 states": lambda: make_delta(2, 40, 16, 1, True),
    }
    return made[name]()


MIXERS = (
    "mamba", "mamba, odd sizes", "mamba, bfloat16 states, no norm", "delta", "delta, odd sizes",
    "delta, bfloat16 states",
)  # fmt: skip


def states_of(mixer: Mixer, slots: int = 4) -> LayerStates:
    half = mixer.state_dtype == torch.bfloat16
    size = mixer.conv.weight.shape[0]
    if isinstance(mixer, DeltaNet):
        spec = Delta(mixer.key_heads, len(mixer.decay), mixer.key_dim, mixer.value_dim, size, half=half).spec
    else:
        shape = len(mixer.decay), mixer.head_dim, mixer.state_size, mixer.groups
        spec = StateSpace(*shape, size, mixer.eps, half=half).spec
    return LayerStates(torch.zeros(slots, spec.num_bytes, dtype=torch.uint8))


def batch_of(rows: list[tuple[int, int]]) -> StepBatch:
    """A step of rows (slot, tokens), those of one token first."""
    starts = [0]
    for _, tokens in rows:
        starts.append(starts[-1] + tokens)
    total, nothing = starts[-1], [0] * len(rows)
    batch = StepBatch([0] * total, [0] * total, [0] * total, starts, nothing, [[0]] * len(rows), [])
    batch.slots[:] = [slot for slot, _ in rows]
    return batch


def run(ops: CpuOps, mixer: Mixer, x: Tensor, states: LayerStates, rows: list[tuple[int, int]]) -> Tensor:
    batch: Any = batch_of(rows)
    if isinstance(mixer, DeltaNet):
        return ops.delta_net(x, mixer, states, batch)
    return ops.mamba2(x, mixer, states, batch)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", MIXERS)
def test_mixers_equal_the_plain_recurrence(name: str, isa: str) -> None:
    """Results in float32 and bfloat16, and the states behind them, for a batch that goes on from earlier states."""
    mixer, ops = make(name), CpuOps(2, isa)
    plain: Any = delta_net if isinstance(mixer, DeltaNet) else mamba2
    for dtype, tolerance in ((torch.float32, 2e-4), (torch.bfloat16, 3e-2)):
        expected, states = states_of(mixer), states_of(mixer)
        for rows in ([(2, 1), (0, 2), (3, 19)], [(3, 1), (1, 1), (2, 5)]):
            x = drawn(sum(tokens for _, tokens in rows), mixer.width).to(dtype)
            y = run(ops, mixer, x, states, rows)
            reference = plain(x, mixer, expected, batch_of(rows))
            torch.testing.assert_close(y, reference, atol=tolerance, rtol=tolerance)
        if mixer.state_dtype == torch.float32:
            kept, wanted = (cache.states.view(torch.float32) for cache in (states, expected))
            torch.testing.assert_close(kept, wanted, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", MIXERS)
def test_no_bit_depends_on_chunks_batches_or_threads(name: str, isa: str) -> None:
    mixer, length = make(name), 29
    x = drawn(length, mixer.width).bfloat16()
    whole = states_of(mixer)
    expected = run(CpuOps(1, isa), mixer, x, whole, [(1, length)])
    ops = CpuOps(3, isa)
    for chunks in ([1] * length, [2, 9, 1, 17]):
        states, parts, begin = states_of(mixer), [], 0
        for chunk in chunks:
            other = drawn(1 + 3, mixer.width).bfloat16()
            rows = [(0, 1), (1, chunk), (2, 3)] if chunk > 1 else [(0, 1), (1, 1), (2, 3)]
            step = torch.cat((other[:1], x[begin : begin + chunk], other[1:]))
            parts.append(run(ops, mixer, step, states, rows)[1 : 1 + chunk])
            begin += chunk
        assert torch.equal(torch.cat(parts), expected)
        assert torch.equal(states.states[1], whole.states[1])
        assert not states.states[3].any()


def test_wrong_tensors_are_refused() -> None:
    mixer, ops = make("delta"), CpuOps(1)
    assert isinstance(mixer, DeltaNet)
    states = states_of(mixer)
    with pytest.raises(ValueError, match="x must be"):
        run(ops, mixer, drawn(2, mixer.width - 1), states, [(0, 2)])
    with pytest.raises(ValueError, match="states must be those of the mixer"):
        run(ops, mixer, drawn(2, mixer.width), LayerStates(states.states[:, 16:].contiguous()), [(0, 2)])
    with pytest.raises(ValueError, match="x must be of the batch's tokens"):
        run(ops, mixer, drawn(3, mixer.width), states, [(0, 2)])
    for wrong in (mixer._replace(norm=mixer.norm[1:]), mixer._replace(conv=ShortConv(mixer.conv.weight))):
        with pytest.raises(ValueError, match=r"norm must be|must be activated"):
            run(ops, wrong, drawn(2, mixer.width), states, [(0, 2)])
