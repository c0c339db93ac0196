"""Source of a model's weights: the model asks for each by name and shape, whatever its format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from asyncengine.errors import UnsupportedModelError
from asyncengine.kernels.grouped import are_alike, group_size, round_to_groups
from asyncengine.kernels.weight import DENSE, GROUPED, PackedWeight, dense, tensors_of
from asyncengine.models.weights.formats.base import Dense, TensorSource, WeightFormat
from asyncengine.models.weights.formats.packed import to_dense
from asyncengine.models.weights.mxfp4 import BLOCK, pack_mxfp4, unpack_mxfp4
from asyncengine.models.weights.shard import Cut, Shard


class WeightsOfKind(NamedTuple):
    """Projections of one format."""

    format: str
    """a name of kernels/weight.py"""
    group: int
    """Columns that share a scale; 0 in formats without groups."""
    parameters: int


class WeightSource:
    """The tensors of a checkpoint, in their format, and the parts of them that a rank takes.

    Shapes are those of whole tensors. A tensor that is missing raises MissingWeightError, one of another shape
    WeightMismatchError, and one that cannot be cut for the ranks UnsupportedModelError.
    """

    def __init__(
        self,
        tensors: TensorSource,
        form: WeightFormat | None = None,
        shard: Shard | None = None,
        *,
        head_form: str | None = None,
    ) -> None:
        """``head_form``: INT8 or FLOAT8_GROUPS, in which ``packed_head`` packs a head; None: heads stay dense."""
        self._tensors = tensors
        self._head_form = head_form
        self.head_kind: WeightsOfKind | None = None
        """The format of a head that was packed."""
        self._format = form or Dense()
        self._shard = shard or Shard()
        self._kinds: Counter[tuple[str, int]] = Counter()

    def own(self, count: int) -> int:
        """The count of a rank's heads, of ``count`` in the model."""
        return count // self._shard.ranks

    def own_heads(self, tensor: Tensor) -> Tensor:
        """The rows of a tensor [heads, ...] that belong to the rank's heads."""
        return self._shard.part("rows").of(tensor)

    @property
    def dtype(self) -> torch.dtype:
        """The model's dtype."""
        return self._tensors.dtype

    def stored(self) -> dict[str, Tensor] | None:
        """All tensors in host memory, as a checkpoint stores them and by its names; None for random ones."""
        return self._tensors.stored()

    def weight(
        self,
        module: str,
        out_features: int,
        in_features: int,
        *,
        cut: Cut = "whole",
        blocks: int = 1,
        rows: tuple[int, int] | None = None,
        order: Tensor | None = None,
        head_rows: int = 0,
        transposed: bool = False,
    ) -> PackedWeight:
        """The weight of a projection.

        ``blocks`` matrices of one size may lie one below another, of which a rank takes rows by themselves. With
        ``rows`` it is a part of the module's weight, and with an ``order`` of rows in heads of ``head_rows`` another:
        see ``Part``.
        ``transposed``: a dense checkpoint holds it as [in_features, out_features].
        """
        part = self._shard.part(cut, blocks)._replace(rows=rows, order=order, head_rows=head_rows)
        shape = (out_features, in_features)
        made = self._format.weight(self._tensors, module, shape, part, transposed=transposed)
        group = group_size(made) if made.format in GROUPED else 0
        self._kinds[made.format, group] += made.out_features * made.in_features
        return made

    def kinds(self) -> tuple[WeightsOfKind, ...]:
        """The formats of the projections that were asked for, the one of the most parameters first."""
        return tuple(WeightsOfKind(*kind, count) for kind, count in self._kinds.most_common())

    def side_by_side(self, weights: Sequence[PackedWeight]) -> list[PackedWeight]:
        """Weights that share their input, in one format: those that differ in theirs are unpacked."""
        if are_alike(weights):
            return list(weights)
        return [
            weight if weight.format == DENSE else dense(to_dense(weight, self._tensors.dtype)) for weight in weights
        ]

    def bias(
        self,
        module: str,
        out_features: int,
        *,
        cut: Cut = "whole",
        blocks: int = 1,
        rows: tuple[int, int] | None = None,
        order: Tensor | None = None,
        head_rows: int = 0,
    ) -> Tensor:
        """The bias of a projection whose weight is cut in this way.

        Products of columns are added up over the ranks: the first rank has the bias, the others have zeros.
        """
        part = self._shard.part("whole" if cut == "columns" else cut, blocks)
        part = part._replace(rows=rows, order=order, head_rows=head_rows)
        bias = self._tensors.get(f"{module}.bias", out_features, part=part)
        return torch.zeros_like(bias) if cut == "columns" and self._shard.rank else bias

    def table(self, module: str, rows: int, width: int, *, cut: Cut = "whole") -> PackedWeight:
        """The matrix of an embedding or of a head."""
        return self._format.table(self._tensors, module, (rows, width), self._shard.part(cut))

    @property
    def packs_head(self) -> bool:
        """Return whether a head is to be packed."""
        return self._head_form is not None

    def head(self, module: str, rows: int, width: int, *, cut: Cut = "whole") -> PackedWeight:
        """The matrix of a head that is no embedding, packed if heads are to be."""
        if self._head_form is None:
            return self.table(module, rows, width, cut=cut)
        before = self._tensors.owned_bytes
        whole = self.table(module, rows, width, cut=cut)
        packed = self.packed_head(whole)
        self._tensors.release(whole.tensors["weight"], before)
        return self._tensors.keep(packed)

    def tied_head(self, table: PackedWeight) -> PackedWeight:
        """The matrix of a head that is an embedding, or a part of one: the same one, or packed a copy."""
        return self._tensors.keep(self.packed_head(table)) if self.packs_head else table

    def packed_head(self, table: PackedWeight) -> PackedWeight:
        """A dense matrix in the form of heads. Raises UnsupportedModelError for one in blocks of GGUF."""
        assert self._head_form is not None
        if table.format != DENSE:
            raise UnsupportedModelError(f"head_quantization: the head lies in {table.format}, and is packed already")
        made = round_to_groups(self._head_form, table.tensors["weight"])
        self.head_kind = WeightsOfKind(made.format, group_size(made), made.out_features * made.in_features)
        return replace(made, inputs=self._tensors.dtype)

    def divides(self, rows: int) -> bool:
        """Return whether several ranks can share the rows of a head, in parts of a multiple of 8."""
        return self._shard.ranks > 1 and rows % (8 * self._shard.ranks) == 0

    def own_rows(self, table: PackedWeight) -> PackedWeight:
        """The rank's part of the rows of a dense matrix that is there as a whole: a view."""
        [whole] = tensors_of([table], "weight", DENSE)
        return dense(self._shard.part("rows").of(whole))

    def expert_matrices(
        self, name: str, count: int, rows: int, columns: int, order: Tensor | None = None, *, mxfp4: bool = False
    ) -> Tensor:
        """The matrices [count, rows, columns] of a tensor with those of all experts, their rows in an ``order``.

        A dense checkpoint holds them as [count, columns, rows]; one in MXFP4 as name_blocks and name_scales.
        """
        self._refuse_ranks(name)
        if not mxfp4:
            whole = self._tensors.get(name, count, columns, rows).transpose(1, 2)
            return (whole if order is None else whole[:, order]).contiguous()
        blocks, scales = self._read_mxfp4(name, count, rows, columns)
        dtype = self._tensors.dtype
        out = torch.empty(count, rows, columns, dtype=dtype, device=blocks.device)
        for matrix, own, factors in zip(out, blocks, scales, strict=True):
            whole = unpack_mxfp4(own, factors, dtype)
            matrix.copy_(whole if order is None else whole[order])
        self._tensors.owned_bytes += out.nbytes
        return out

    def expert_codes(
        self, name: str, count: int, rows: int, columns: int, parts: Sequence[Tensor]
    ) -> list[list[PackedWeight]]:
        """The matrices of a tensor in MXFP4 as they are stored, of each expert one for each of ``parts``: indices of
        rows."""
        self._refuse_ranks(name)
        blocks, scales = self._read_mxfp4(name, count, rows, columns)
        made = [
            [pack_mxfp4(own[part], factors[part]) for part in parts]
            for own, factors in zip(blocks, scales, strict=True)
        ]
        self._tensors.owned_bytes += blocks.nbytes + scales.nbytes
        return made

    def _refuse_ranks(self, name: str) -> None:
        if self._shard.ranks > 1:
            raise UnsupportedModelError(f"{name} cannot be cut for {self._shard.ranks} ranks")

    def _read_mxfp4(self, name: str, count: int, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        if columns % BLOCK:
            raise UnsupportedModelError(f"{name} in MXFP4 has rows of {columns}, which are no blocks of {BLOCK}")
        blocks = self._tensors.uint8(f"{name}_blocks", count, rows, columns // BLOCK, BLOCK // 2)
        return blocks, self._tensors.uint8(f"{name}_scales", count, rows, columns // BLOCK)

    def float32(self, name: str, count: int) -> Tensor:
        """A vector [count] in float32, whatever the model's dtype is."""
        return self._tensors.float32(name, count)

    def tensor(self, name: str, *shape: int) -> Tensor:
        """A tensor that is no matrix of a product, as a norm's, in the model's dtype. Each rank has the whole."""
        return self._tensors.get(name, *shape)
