"""Sums over the GPUs that hold a model together, the logits of them all, and the tokens that the first one samples.

They go through peer memory. Nothing needs the host, and a captured graph may be launched again: the number of a call is
kept on the GPU. A GPU whose peer never comes waits until the host sets a word in its memory (``Staging.released``), and
goes on with garbage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from asyncengine.errors import ConfigError
from asyncengine.kernels.cuda.comm.peers import ADDRESS_ROWS, FEW, FLAG_STRIDE, FLAGS_OF_RANK, GATHER, MANY
from asyncengine.kernels.cuda.comm.results import gather_kernel, share_kernel
from asyncengine.kernels.cuda.comm.sums import CHUNK, MAX_CHUNKS, sum_few_kernel, sum_many_kernel
from asyncengine.kernels.cuda.launch.programmatic import launch_options
from asyncengine.kernels.cuda.rows.norms import gains_or
from asyncengine.kernels.cuda.rows.tensors import empty_rows
from asyncengine.kernels.cuda.sampling.sample import Ranks
from asyncengine.kernels.cuda.step.tensors import Slots
from asyncengine.kernels.ops import Norm

FEW_ROWS = FEW.value
"""Rows of the largest sum that goes in packets. On two H200 256 rows are faster with flags (bench/log)."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """One GPU's part: what the others write to, and where they are. ``connect`` makes those of all GPUs."""

    rank: int
    ranks: int
    inbox: Tensor
    """[2, ranks, MANY, room] in the model's dtype"""
    packets: Tensor
    """int64 [2, ranks, FEW, room]: see sums.py"""
    flags: Tensor
    """int32 [ranks, FLAGS_OF_RANK, 32], of which the first word of each is the flag"""
    calls: Tensor
    """int32 [FEW + MANY + GATHER + 1]: numbers of the last calls of this GPU's programs, and of ``share``"""
    gathered: Tensor
    """Bytes for the logits of all ranks."""
    together: Tensor
    """int32 [1]: 0 while this GPU runs steps alone, or when it was released, and waits for nobody"""
    never: Tensor
    """int32 [1]: 0, in place of the host's word where there is none"""
    addresses: Tensor
    """int64 [7, ranks]: see peers.py"""
    pdl: bool = False

    def reduce(
        self, product: Tensor, batch: Any = None, onto: Tensor | None = None, norm: Norm | None = None
    ) -> Tensor | None:
        """Replace a product [T, N] by the sum over all GPUs, rounded once; with ``onto`` [T, N] add the sum to that.

        With a norm, its rows [T, N] of the result are returned. Raises ValueError for rows that do not fit.
        """
        rows, width = product.shape
        to = product if onto is None else onto
        if not product.is_contiguous() or to.stride(1) != 1 or to.shape != product.shape or to.dtype != product.dtype:
            raise ValueError(f"sums take contiguous rows, got {list(product.shape)} with strides {product.stride()}")
        normed = to if norm is None else empty_rows(rows, width, product.dtype, product.device)
        few = rows <= FEW_ROWS
        blocks, inbox = (FEW.value, self.packets) if few else (MANY.value, self.inbox)
        room = inbox.shape[3]
        numbers = triton.cdiv(rows, blocks) * width
        if (numbers * product.itemsize // 4 if few else numbers) > room or (few and width * product.itemsize % 4):
            raise ValueError(f"a product {list(product.shape)} does not fit into inboxes of {room:,} for {blocks}")
        if triton.cdiv(rows, blocks * CHUNK) > MAX_CHUNKS:
            raise ValueError(f"a sum has at most {blocks * CHUNK * MAX_CHUNKS} rows, got {rows}")
        operands = (product, to, *gains_or(norm, to), normed)
        strides = (rows, to.stride(0), normed.stride(0), room, 0.0 if norm is None else norm.eps)
        tile = triton.next_power_of_2(width)
        options: dict[str, Any] = {
            "RANK": self.rank, "RANKS": self.ranks, "ONTO": onto is not None, "NORM": norm is not None,
            "CENTER": norm is not None and norm.bias is not None, "WIDTH": width, "TILE": tile,
            "num_warps": min(16 if few or tile <= 4096 else 8, max(1, tile // 256)), **launch_options(self.pdl),
        }  # fmt: skip
        grid = (min(rows, blocks),)
        if few:
            sum_few_kernel[grid](
                *operands, self.addresses, self.packets, self.calls, self.together, *strides, **options
            )
        else:
            calls = self.calls[FEW.value :]
            sum_many_kernel[grid](
                *operands, self.addresses, self.inbox, self.flags, calls, self.together, *strides, CHUNK=CHUNK,
                MAX_CHUNKS=MAX_CHUNKS, **options,
            )  # fmt: skip
        return None if norm is None else normed

    def gather(self, part: Tensor | Ranks, columns: int) -> Tensor | Ranks:
        """Return the logits of all ranks [S, ranks * columns] on rank 0, of which each has a part [S, columns].

        Parts in float32, or what greedy sampling takes in place of them. The result lasts until the next call. On
        another rank it is void. Raises ValueError if it does not fit.
        """
        return Ranks(self._gather(part.tiles, columns)) if isinstance(part, Ranks) else self._gather(part, 0)

    def _gather(self, part: Tensor, offset: int) -> Tensor:
        rows, columns = part.shape
        size = rows * columns * self.ranks * part.itemsize
        if size > len(self.gathered) or part.stride(1) != 1:
            bound = f"{len(self.gathered):,} bytes"
            raise ValueError(f"{list(part.shape)} of each of {self.ranks} ranks do not fit into {bound}")
        tile = 1024
        gather_kernel[(min(GATHER.value, rows * triton.cdiv(columns, tile)),)](
            part, self.addresses, self.flags, self.calls[FEW.value + MANY.value :], self.together, rows, columns,
            part.stride(0), OFFSET=self.rank * offset, RANK=self.rank, RANKS=self.ranks, TILE=tile, num_warps=4,
            **launch_options(self.pdl),
        )  # fmt: skip
        return self.gathered[:size].view(part.dtype).view(rows, columns * self.ranks)

    def share(self, slots: Slots) -> None:
        """Give the tokens that rank 0 has sampled, and the ends that they are, to all GPUs' slots."""
        share_kernel[(1,)](
            slots.last_token, slots.finished, self.addresses, self.flags, self.calls[-1:], self.together,
            len(slots.last_token), RANK=self.rank, RANKS=self.ranks, TILE=1024, num_warps=4, **launch_options(self.pdl),
        )  # fmt: skip


def allocate(
    rank: int, ranks: int, rows: int, width: int, dtype: torch.dtype, device: torch.device, *, logits: int = 0,
    pdl: bool,
) -> Exchange:  # fmt: skip
    """Memory for sums of at most ``rows`` rows [N], and for so many logits. It is not connected: see ``connect``."""

    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    few, many = (
        int(triton.cdiv(most, blocks.value)) * width for most, blocks in ((min(rows, FEW_ROWS), FEW), (rows, MANY))
    )
    return Exchange(
        rank, ranks, zeros(2, ranks, MANY.value, many, dtype=dtype),
        zeros(2, ranks, FEW.value, -(-few * dtype.itemsize // 4), dtype=torch.int64),
        zeros(ranks, FLAGS_OF_RANK.value, FLAG_STRIDE.value), zeros(FEW.value + MANY.value + GATHER.value + 1),
        zeros(4 * logits, dtype=torch.uint8), zeros(1), zeros(1), zeros(ADDRESS_ROWS, ranks, dtype=torch.int64), pdl,
    )  # fmt: skip


def connect(exchanges: Sequence[Exchange], slots: Sequence[Slots] = (), released: int = 0) -> None:
    """Tell each GPU where the others' memory is, and their slots, if steps share tokens.

    ``released`` is the address of the host's word, in pinned memory; 0: there is none, and GPUs wait without end.
    """
    for exchange in exchanges:
        _tell(exchange, exchanges, slots, released)


def connect_alone(exchange: Exchange, slots: Slots | None = None) -> None:
    """Connect a GPU with itself, for steps that it runs alone."""
    ranks = exchange.ranks
    _tell(exchange, [exchange] * ranks, [] if slots is None else [slots] * ranks, 0)


def _tell(exchange: Exchange, all_ranks: Sequence[Exchange], slots: Sequence[Slots], released: int) -> None:
    nowhere = [exchange.calls.data_ptr()] * exchange.ranks
    rows = [
        *([tensor.data_ptr() for tensor in tensors] for tensors in zip(*map(_shown, all_ranks), strict=True)),
        [each.last_token.data_ptr() for each in slots] or nowhere,
        [each.finished.data_ptr() for each in slots] or nowhere,
        [released or exchange.never.data_ptr()] * exchange.ranks,
    ]
    exchange.addresses.copy_(torch.tensor(rows, dtype=torch.int64))


def _shown(exchange: Exchange) -> tuple[Tensor, ...]:
    """The tensors that others write to, in the order of addresses."""
    return exchange.inbox, exchange.packets, exchange.flags, exchange.gathered


def begin_together(exchanges: Sequence[Exchange]) -> None:
    """From the next launches on GPUs wait for each other. They must be at rest now, and when they launch."""
    for exchange in exchanges:
        exchange.flags.zero_()
        exchange.packets.zero_()
        exchange.calls.zero_()
        exchange.together.fill_(1)


def end_together(exchanges: Sequence[Exchange]) -> None:
    """From the next launches on each GPU runs alone again. They must be at rest now, and when they launch."""
    for exchange in exchanges:
        connect_alone(exchange)
        exchange.together.zero_()


def reach_peers(devices: Sequence[torch.device]) -> None:
    """Let every GPU read and write the others' memory. Raises ConfigError if one cannot."""
    for one in devices:
        for other in devices:
            if one == other:
                continue
            if not torch.cuda.can_device_access_peer(one, other):
                raise ConfigError(
                    f"tensor_parallel_size={len(devices)} needs GPUs that reach each other's memory: {one} cannot "
                    f"reach that of {other}"
                )
            # torch enables the access of a GPU when it first copies between the two.
            torch.zeros(1, device=one).copy_(torch.ones(1, device=other))
