"""Weights in int4, int8 or float8 whose columns share scales in groups. Inputs stay in the model's dtype."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from asyncengine.kernels.cuda.gpu import Gpu
from asyncengine.kernels.cuda.linear.formats.base import Matrix, Packed, PlainInputs, as_tensor, join_biases
from asyncengine.kernels.cuda.linear.grouped import (
    DIRECT_ROWS,
    MAX_ROWS,
    TILE,
    TILE_COLUMNS,
    GroupedMatrix,
    in_tiles,
    multiply,
)  # fmt: skip
from asyncengine.kernels.cuda.linear.plan import Plan, Site, WeightKind, round_rows
from asyncengine.kernels.grouped import CODES, are_alike
from asyncengine.kernels.ops import Norm
from asyncengine.kernels.weight import INT4, PackedWeight

_CODED_INVARIANT = Plan("coded", 64, TILE, 4, 64, 1, 3, fused_norm=False)
_RARE_INVARIANT = Plan("cublas", rows=64, fused_norm=False)


def _in_small_groups(form: str) -> WeightKind:
    return f"{form} in small groups"


DIRECT_TILES: dict[WeightKind, int] = TILE_COLUMNS | {_in_small_groups(form): n for form, n in TILE_COLUMNS.items()}
"""Columns of a tile of the kinds of weight for which there is the kernel of direct.py."""


class Grouped(PlainInputs):
    """Implements ``Format`` for matrices of codes.

    ``coded``: the kernel of coded.py multiplies them, up to MAX_ROWS rows. With that, or with ``small_groups``, the
    kernel of direct.py multiplies int4 and int8 for few rows of 16 bits, on cards that have Gluon's kernels. Others,
    and more rows, are for ``product``, which chooses its kernels itself.
    """

    needs = "any GPU"
    prepares_norms = True

    def __init__(self, form: str, *, coded: bool = True, small_groups: bool = False) -> None:
        self._form, self.coded, self._small_groups = form, coded, small_groups
        rare = _in_small_groups(form) if small_groups else f"{form}, rare"
        self._kind = form if coded else rare
        self._wide_kind = f"{form} beside float32" if coded else f"{form}, rare"
        self.invariant = _CODED_INVARIANT if coded else _RARE_INVARIANT
        kinds = {self._kind} if small_groups else {self._kind, self._wide_kind}
        self.bits: Mapping[WeightKind, int] = dict.fromkeys(kinds, 4 if form == INT4 else 8)

    def runs_on(self, gpu: Gpu) -> bool:
        return True

    def pack(self, weights: Sequence[PackedWeight], biases: Sequence[Tensor | None]) -> Packed:
        if not are_alike(weights):
            raise ValueError("weights side by side must have groups, tables and orders of one kind")
        codes = torch.cat([weight.tensors["codes"].view(torch.uint8) for weight in weights])
        codes = in_tiles(self._form, codes).view(CODES[self._form])
        first, rows = weights[0].tensors, [weight.out_features for weight in weights]
        scales, offsets = (_by_group(weights, name) for name in ("scales", "offsets"))
        assert scales is not None
        matrix = GroupedMatrix(self._form, codes, scales, offsets, first.get("table"), first.get("order"))
        return Packed(matrix, join_biases(rows, biases), sum(rows))

    def make(self, weight: Tensor) -> Matrix:
        """The codes are bits of the weight: kernels take as long for any."""
        rows, columns = weight.shape
        codes = weight.view(torch.uint8)[:, : columns // 2 if self._form == INT4 else columns].contiguous()
        group = 32 if self._small_groups else TILE
        scales = torch.ones(max(1, columns // group), rows, device=weight.device)
        return GroupedMatrix(self._form, codes.view(CODES[self._form]), scales, None, None, None)

    def first_rows(self, weight: Matrix, count: int) -> Matrix:
        """There is no padding."""
        return weight

    def kind(self, dtype: torch.dtype) -> WeightKind:
        return self._wide_kind if dtype == torch.float32 else self._kind

    def fits(self, plan: Plan, x: Matrix, norm: Norm | None, index: Tensor | None) -> bool:
        return False

    def product(self, x: Matrix, weight: Matrix, bias: Tensor | None, dtype: torch.dtype, tile_rows: int = 0) -> Tensor:
        assert isinstance(weight, GroupedMatrix)
        return multiply(as_tensor(x), weight, bias, dtype, tile_rows=tile_rows)

    def add_product(self, to: Tensor, x: Matrix, weight: Matrix, bias: Tensor | None, tile_rows: int = 0) -> None:
        to += self.product(x, weight, bias, to.dtype, tile_rows)

    def takes_tma(self, site: Site) -> bool:
        return False

    def takes_library_alone(self, site: Site) -> bool:
        most = MAX_ROWS if self.coded else DIRECT_ROWS if self._small_groups else 0
        return site.rows > most

    def takes_library(self, site: Site) -> bool:
        return True

    def pattern(self, site: Site, gpu: Gpu) -> Plan | None:
        """K is split until there are programs for the card: several for each multiprocessor where they mostly wait for
        memory, which 4 bits and few rows make them do (bench/log/quantised.md).

        For few rows of weights in tiles each warp has tiles of K of its own, in a step one or two, while there are
        enough: as many bytes of int8 as of int4, but half the columns, so that registers have room for two at more
        rows.
        """
        if takes_direct(site, gpu):
            tile, rows = DIRECT_TILES[site.weight], max(8, round_rows(site.rows))
            many, wide = site.weight_rows > 64 * gpu.multiprocessors, 32
            if self._small_groups and (rows > 8 or self._form == INT4):  # registers have sums of each group
                wide = 16
            columns, warps = (wide, 4) if many else (wide if rows == 32 else 16, 8)
            units = 2 if rows * tile <= 8 * TILE and site.inner >= 2 * warps * tile else 1
            ahead = 0 if self._small_groups and self._form == INT4 and rows == 32 else 1
            return Plan("direct", columns, tile, warps, rows, 1, units, ahead, fused_norm=False)
        if not self.coded:
            return None
        columns, warps = (32, 2) if 8 < site.rows <= 32 else (64, 4)
        rows = min(64, max(8, round_rows(site.rows)))
        programs = -(-site.weight_rows // columns) * -(-site.rows // rows)
        wanted = gpu.multiprocessors * (3.5 if self._form == INT4 and site.rows <= 32 else 1.6)
        split, most = 1, min(8, site.inner // TILE // 4)
        while 2 * split <= most and programs * split < wanted:
            split *= 2
        return Plan("coded", columns, TILE, warps, rows, split, 3, fused_norm=False)


def takes_direct(site: Site, gpu: Gpu) -> bool:
    """Return whether the kernel of direct.py can multiply the site's weights: they lie in tiles, also those of the gate
    and of up by themselves."""
    return gpu.tma and site.weight in DIRECT_TILES and site.rows <= DIRECT_ROWS and site.columns % 8 == 0


def _by_group(weights: Sequence[PackedWeight], name: str) -> Tensor | None:
    """[K / G, N] of tensors [N_i, K / G], so that neighbouring rows of a group are neighbours; None if there are
    none."""
    if name not in weights[0].tensors:
        return None
    return torch.cat([weight.tensors[name] for weight in weights]).T.contiguous()
