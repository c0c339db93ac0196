"""The kinds of projection, the kernels that compute a projection, and their tiles.

A *site* is a kind of projection: its shape, what is fused with it, and the number of its rows. A *plan* is a kernel and
its tiles. Kernels know plans; ``choose.py`` knows which plan a site gets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from asyncengine.kernels.ops import Activation, Norm

MAX_ROWS = 256
"""Beyond, arithmetic binds and not memory: see ``plan_for_many_rows``."""
SKINNY_ROWS = 32

NormKind = Literal["none", "rms", "layer"]
PlanKind = Literal["vector", "skinny", "tiled", "tma", "coded", "direct", "cublas"]
WeightKind: TypeAlias = str
"""Name, in a site, of how weights are stored: one of the kinds of a format (see formats/base.py)."""
FusedActivation = Literal["silu_mul", "gelu", "gelu_tanh"]
Fused = FusedActivation | Literal["argmax"]
"""argmax is of a head whose rows are all sampled greedily. A tma plan gives the ranks of its tiles (see tma_ranks.py).
Without a tma plan the head gives logits, by the plan of its site without argmax."""


def fused_activation(activation: Activation | None) -> FusedActivation | None:
    """The activation, if the kernels of products compute it; None if it is a kernel of its own behind the product."""
    match activation:
        case "silu_mul" | "gelu" | "gelu_tanh":
            return activation
        case _:
            return None


class Site(NamedTuple):
    """A kind of projection. ``inner`` is K; ``columns`` N, for silu_mul that of the result."""

    columns: int
    inner: int
    rows: int
    """see round_rows"""
    norm: NormKind
    activation: Fused | None
    bias: bool
    add: bool
    weight: WeightKind = "bf16"

    @property
    def weight_rows(self) -> int:
        return self.columns * (2 if self.activation == "silu_mul" else 1)


def norm_kind(norm: Norm | None) -> NormKind:
    if norm is None:
        return "none"
    return "rms" if norm.bias is None else "layer"


@dataclass(frozen=True, slots=True)
class Plan:
    """A kernel of this folder and its tiles, or cuBLAS between kernels for the rest.

    For float8 weights cuBLAS stands for torch's scaled product. For weights in codes it stands for ``multiply`` of
    grouped.py, with tiles of ``rows`` if these are given.
    """

    kind: PlanKind
    columns: int = 0
    """rows of the weight in a program"""
    inner: int = 0
    """elements of K in a step: of the program, or of a warp in a skinny one"""
    warps: int = 4
    rows: int = 0
    """rows of x in a tile"""
    split: int = 1
    stages: int = 1
    """steps of K whose tiles are in shared memory; of a direct plan, tiles of K in a step of a warp"""
    ahead: int = 0
    """of a skinny plan, steps whose weights are loaded ahead of the wait, 0 for all; of a direct one, steps whose x
    is"""
    holds: bool = False
    """of a direct plan: loads of the next step stay ahead of the products of this one, whatever registers that takes"""
    fused_norm: bool = True
    """the norm, and for float8 weights the quantising of x, is part of the kernel and not one of its own"""

    @property
    def leaves_parts(self) -> bool:
        """True if the sum stays in parts for the norm that reads it next (see residual.py)."""
        return self.kind == "tma" and self.split > 1

    @property
    def prepares_norm(self) -> bool:
        """True if the kernel, when it adds to the residual, can prepare the norm that reads the sum (see
        residual.py)."""
        return self.kind in ("tma", "skinny", "direct") and not self.leaves_parts

    def ends_norm(self, norm: Norm) -> bool:
        """Return whether the kernel can end a norm that was prepared."""
        return self.kind == "tma" or (self.kind == "direct" and norm.bias is None)

    def shared_elements(self) -> int:
        """Elements in shared memory that the tiles of a program take; 0 if the program keeps them in registers."""
        return (self.rows + self.columns) * self.inner * self.stages if self.rows else 0

    def fits_head(self, columns: int, inner: int) -> bool:
        """Return whether persistent programs can make ranks by this plan: it has whole sums, and memory for a step to
        come."""
        whole = self.kind == "tma" and self.columns >= 64 and self.split == 1 and self.stages > 1
        return whole and self.fits(columns, inner, gated=False)

    def fits(self, columns: int, inner: int, gated: bool) -> bool:
        """Return whether the plan can multiply weights of this shape. The answer does not depend on a norm."""
        if self.kind == "cublas":
            return True
        if self.kind == "direct":
            return inner % self.inner == 0 and columns % 8 == 0
        if self.kind == "coded":
            return inner % self.inner == 0 and inner // self.inner >= self.split
        if self.kind == "tma" and (self.inner % 64 or inner % 8 or (gated and columns % 8)):
            return False  # copies are of 128 bytes or, at the end, 16, and of 8 rows of the gate and of up in turn
        if self.kind == "tma" and self.columns < 64 and self.inner < 16 * self.warps:
            return False  # each warp has a stretch of K
        if self.kind in ("tiled", "tma"):
            return self.split == 1 or inner % (self.split * self.inner) == 0
        if self.ahead * self.warps * self.inner > inner:
            return False  # whole steps are loaded without a mask
        return columns % (self.columns // 2 if gated else self.columns) == 0


CUBLAS = Plan("cublas", fused_norm=False)
INVARIANT = Plan("tiled", columns=64, inner=64, warps=4, rows=64, stages=4, fused_norm=False)
"""The same sums whatever the rows; fits any shape."""


def round_rows(rows: int) -> int:
    """The rows of the site that stands for as many: few sites, since each compiles kernels of its own."""
    return 1 if rows == 1 else max(8, 1 << (rows - 1).bit_length())
