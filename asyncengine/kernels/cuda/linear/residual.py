"""The residual of a step: its states, and the norms between two projections that need no kernel of their own.

A product that adds to the residual may leave its end to the norm which reads the residual next.

    state    what is still to be added                                left by
    plain    nothing                                                  leave_parts, put_off
    parts    parts of a sum; the kernel of the next norm adds them    read, settle
    put off  a product, not launched; it may prepare the next norm    read, settle
             or an addition of rows or a sum over ranks, not launched; it may make that norm

Only a plain residual takes another product: an operation that adds begins with ``settle``.

A product that prepares a norm stores its sums times the norm's weight, and by tile the sums of their squares. The
projection behind multiplies these, and at its end divides by the root, or takes off the mean. The result is as exact as
that of rows which are normed first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from asyncengine.kernels.cuda.linear.formats.base import Format, Matrix
from asyncengine.kernels.cuda.linear.plan import Plan
from asyncengine.kernels.cuda.rows.norms import norm_rows
from asyncengine.kernels.cuda.rows.tensors import empty_rows
from asyncengine.kernels.ops import Norm


@dataclass(frozen=True, slots=True)
class Unnormed:
    """Rows of a residual whose norm is left to the projection that reads them."""

    x: Tensor
    """bfloat16 [M, K]: times the norm's weight"""
    sums: Tensor
    """float32 [1, tiles, M] of squares, by tiles of columns; of a LayerNorm [2, tiles, M], then values"""
    eps: float

    @classmethod
    def allocate(cls, out: Tensor, tiles: int, norm: Norm) -> Unnormed:
        """Allocate the rows of a residual [M, K] that is made in so many tiles. Raises ValueError if the norm is not
        for it."""
        if norm.weight.shape != out.shape[1:] or out.dtype != torch.bfloat16:
            raise ValueError(f"a norm of {len(norm.weight)} does not fit {out.dtype} {list(out.shape)}")
        sums = torch.empty((1 if norm.bias is None else 2, tiles, len(out)), dtype=torch.float32, device=out.device)
        return cls(empty_rows(len(out), out.shape[1], out.dtype, out.device), sums, norm.eps)


def fold_norm(norm: Norm, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return two float32 [N] for a weight [N, K] behind a LayerNorm: its bias with the addition of the norm's bias, and
    the addition of a mean of 1 to the product."""
    assert norm.bias is not None
    wide = weight.float()
    folded = wide @ norm.bias.float()
    return folded if bias is None else folded + bias.float(), wide @ norm.weight.float()


class Operand(NamedTuple):
    """The left side of a product, and what the product's kernel does to it."""

    x: Matrix | Unnormed
    """[M, K]"""
    norm: Norm | None = None
    """Left to the kernel: all of the norm, or of Unnormed rows the end."""
    rows: Tensor | None = None
    """int64 [S]: the kernel takes these rows of x, or without it all of them."""


Addition = Callable[[Norm | None], Unnormed | Tensor | None]
"""Launches a product that adds to the residual. With a norm it prepares that norm, if it can, or returns normed
rows."""


class Residual:
    """x [T, H] and what is to be added to it."""

    __slots__ = ("_addition", "_norms", "_parts", "x")

    def __init__(self, x: Tensor) -> None:
        self.x = x
        self._parts: Tensor | None = None
        self._addition: Addition | None = None
        self._norms = False

    @property
    def state(self) -> Literal["plain", "parts", "put off"]:
        if self._addition is not None:
            return "put off"
        return "plain" if self._parts is None else "parts"

    def leave_parts(self, parts: Tensor) -> None:
        """plain to parts: float32 [P, T, H]."""
        assert self.state == "plain"
        self._parts = parts

    def put_off(self, addition: Addition, *, norms: bool = False) -> None:
        """plain to put off. ``norms``: the addition returns normed rows."""
        assert self.state == "plain"
        self._addition, self._norms = addition, norms

    def settle(self) -> Tensor:
        """Any state to plain: x, with all that was to be added."""
        self._launch(None)
        if self._parts is not None:
            self.x.copy_(self.x.float() + self._parts.sum(0))
            self._parts = None
        return self.x

    def read(self, norm: Norm, plan: Plan, form: Format, *, index: Tensor | None = None, pdl: bool = False) -> Operand:
        """Any state to plain: what a projection by this plan multiplies, so that it reads x through the norm.

        ``form`` is that of the weights. With an ``index`` int64 [S] the projection reads these rows alone, and parts
        stay parts.
        """
        if self._makes_norm and index is None and not form.own_rows:
            return Operand(self.read_by_kernel(norm, pdl=pdl))
        if self.state == "put off" and not self._norms and plan.ends_norm(norm) and index is None:
            unnormed = self.prepare(norm)
            assert unnormed is not None
            return Operand(unnormed, norm)
        self._launch(None)
        if form.own_rows:
            self.settle()
        if plan.fused_norm and self._parts is None:
            return Operand(self.x, norm, index)
        if form.own_rows:
            return Operand(form.make_rows(self.x, norm, pdl=pdl))
        return Operand(self.read_by_kernel(norm, index, pdl=pdl))

    def read_by_kernel(self, norm: Norm, index: Tensor | None = None, *, pdl: bool = False) -> Tensor:
        """Any state to plain: the norm of x by its own kernel, which adds up parts, or by that of a sum over ranks.

        With an ``index`` see ``read``.
        """
        if self._makes_norm and index is None:
            normed = self._launch(norm)
            assert isinstance(normed, Tensor)
            return normed
        self._launch(None)
        y = norm_rows(self.x, norm, index, self._parts, pdl=pdl)
        if index is None:
            self._parts = None
        return y

    def rows(self, norm: Norm | None, *, pdl: bool = False) -> tuple[Tensor, Norm | None]:
        """Any state to plain: the rows for a kernel that norms them itself, and the norm that is left to it, if any."""
        if norm is not None and (self._parts is not None or self._makes_norm):
            return self.read_by_kernel(norm, pdl=pdl), None
        return self.settle(), norm

    def prepare(self, norm: Norm) -> Unnormed | None:
        """put off to plain: the rows for a projection that ends the norm; None in other states, which stay."""
        unnormed = self._launch(norm)
        assert not isinstance(unnormed, Tensor)
        return unnormed

    @property
    def _makes_norm(self) -> bool:
        """True if what was put off returns normed rows."""
        return self.state == "put off" and self._norms

    def _launch(self, norm: Norm | None) -> Unnormed | Tensor | None:
        addition, self._addition = self._addition, None
        return None if addition is None else addition(norm)
