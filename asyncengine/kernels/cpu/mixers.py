"""Mixers with a state in native kernels: Mamba-2 and gated DeltaNet."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncengine._core import CpuKernels, CpuMixer, StepBatch
from asyncengine.kernels.cpu.base import BaseOps
from asyncengine.kernels.cpu.checks import check, check_rows, native_dtype
from asyncengine.kernels.ops import HandleT, LayerStates
from asyncengine.kernels.states import DeltaNet, Mamba2


class MixerOps(BaseOps[HandleT]):
    """The operations of BaseOps for layers with a recurrence, in native kernels."""

    _native: CpuKernels
    _mixers: dict[int, tuple[Mamba2 | DeltaNet, CpuMixer]]
    """Native mixers by the id of those that they were made of, which are kept."""

    def mamba2(self, x: Tensor, mixer: Mamba2, cache: LayerStates, batch: StepBatch) -> Tensor:
        return self._mix(x, mixer, cache, batch)

    def delta_net(self, x: Tensor, mixer: DeltaNet, cache: LayerStates, batch: StepBatch) -> Tensor:
        return self._mix(x, mixer, cache, batch)

    def _mix(self, x: Tensor, mixer: Mamba2 | DeltaNet, cache: LayerStates, batch: StepBatch) -> Tensor:
        check_rows(x, x.dtype, mixer.width)
        states = cache.states
        check(states, torch.uint8, (states.shape[0], states.shape[1]), "states")
        out = torch.empty(x.shape[0], mixer.inner, dtype=x.dtype)
        self._native.mix(
            native_dtype(x.dtype), self._native_mixer(mixer), x.data_ptr(), x.stride(0), x.shape[0], out.data_ptr(),
            states.data_ptr(), states.shape[1], batch,
        )  # fmt: skip
        return out

    def _native_mixer(self, mixer: Mamba2 | DeltaNet) -> CpuMixer:
        """The native mixer, whose tensors are checked the first time it is seen."""
        found = self._mixers.get(id(mixer))
        if found is None:
            found = self._mixers[id(mixer)] = mixer, _make(mixer)
        return found[1]


def _make(mixer: Mamba2 | DeltaNet) -> CpuMixer:
    delta, heads, conv = isinstance(mixer, DeltaNet), len(mixer.decay), mixer.conv
    if isinstance(mixer, DeltaNet):
        groups, dim, size = mixer.key_heads, mixer.value_dim, mixer.key_dim
        skip, norm_width, dt_range, norm_before_gate = None, dim, (0.0, 0.0), True
    else:
        groups, dim, size = mixer.groups, mixer.head_dim, mixer.state_size
        skip, norm_width, dt_range, norm_before_gate = mixer.skip, mixer.inner, mixer.dt_range, mixer.norm_before_gate
    channels = mixer.inner + 2 * groups * size
    if not conv.silu:
        raise ValueError("the convolution of a mixer must be activated")
    for name, tensor, shape in (
        ("the convolution", conv.weight, (len(conv.weight), channels)),
        ("its bias", conv.bias, (channels,)),
        ("decay", mixer.decay, (heads,)),
        ("dt_bias", mixer.dt_bias, (heads,)),
        ("skip", skip, (heads,)),
        ("norm", mixer.norm, (norm_width,)),
    ):
        if tensor is not None:
            check(tensor, torch.float32, shape, name)
    weight, bias, decay, dt_bias, own_skip, norm = (
        0 if tensor is None else tensor.data_ptr()
        for tensor in (conv.weight, conv.bias, mixer.decay, mixer.dt_bias, skip, mixer.norm)
    )
    return CpuMixer(
        delta, (heads, groups, dim, size), (weight, bias, len(conv.weight)), (decay, dt_bias, own_skip),
        (norm, mixer.eps), dt_range, norm_before_gate, mixer.state_dtype == torch.bfloat16,
    )  # fmt: skip
