"""Weights of experts as the GPU keeps them: those of all experts one below another, in one matrix for each product."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from asyncengine.kernels.cuda.experts.codes import stack_codes, stays_coded
from asyncengine.kernels.cuda.linear.handle import CudaLinear, pack
from asyncengine.kernels.experts import check_experts
from asyncengine.kernels.grouped import unpack
from asyncengine.kernels.ops import Activation, Experts
from asyncengine.kernels.weight import DENSE, GROUPED, PackedWeight, common_format, dense


def stack_experts(
    up: Sequence[Sequence[PackedWeight]],
    down: Sequence[PackedWeight],
    activation: Activation,
    up_biases: Sequence[Sequence[Tensor]] | None = None,
    down_biases: Sequence[Tensor] | None = None,
    *,
    keeps_codes: bool = True,
) -> Experts[CudaLinear]:
    """``Ops.make_experts``, with a handle for the first weights of all experts and one for the second.

    With ``keeps_codes`` int4 stays as it is where the kernels read it (codes.py); other weights in codes are unpacked.
    """
    check_experts(up, down)
    flat = [weight for weights in up for weight in weights]
    biases = None if up_biases is None else [bias for of_one in up_biases for bias in of_one]
    join = _coded if keeps_codes and stays_coded(flat) and stays_coded(down) else _unpacked
    return Experts((join(flat, biases),), (join(down, down_biases),), activation, len(up))


def _coded(weights: Sequence[PackedWeight], biases: Sequence[Tensor] | None) -> CudaLinear:
    rows = stack_codes(weights)
    return CudaLinear(rows, None if biases is None else torch.cat(tuple(biases)), len(rows))


def _dense(weight: PackedWeight) -> PackedWeight:
    if weight.format not in GROUPED:
        return weight
    return dense(unpack(weight).to(weight.inputs or torch.bfloat16))


def _unpacked(weights: Sequence[PackedWeight], biases: Sequence[Tensor] | None) -> CudaLinear:
    weights = [_dense(weight) for weight in weights]
    if common_format(weights) == DENSE:
        whole = _whole([weight.tensors["weight"] for weight in weights])
        if whole is not None:
            return CudaLinear(whole, None if biases is None else torch.cat(tuple(biases)), len(whole))
    return pack(weights, biases or [None] * len(weights)).exact()


def _whole(tensors: Sequence[Tensor]) -> Tensor | None:
    """The matrix of which these are the parts, in their order; None if they lie elsewhere."""
    first = tensors[0]
    if not all(t.is_contiguous() and t.dtype == first.dtype and t.shape[1] == first.shape[1] for t in tensors):
        return None
    storages = {t.untyped_storage().data_ptr() for t in tensors}
    follow = all(b.storage_offset() == a.storage_offset() + a.numel() for a, b in pairwise(tensors))
    if len(storages) > 1 or not follow:
        return None
    return first.as_strided((sum(map(len, tensors)), first.shape[1]), (first.shape[1], 1))
