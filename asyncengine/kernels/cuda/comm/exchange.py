"""Sums over the GPUs that hold a model together, and the tokens that the first one samples, through peer memory.

Every GPU writes its part into the others' inboxes, sets a flag there, waits for their flags, and adds all parts up in
the order of the ranks: all get the same bits. A block of a kernel exchanges with the blocks of its number alone, and
has memory of its own, so that calls of any size may follow each other. It uses the two halves of an inbox in turn: who
begins a call has the flags of the call before, and so the other has read what the call before that one brought.

Nothing of it needs the host, and a captured graph may be launched again: the number of a call is kept on the GPU. A GPU
whose peer never comes waits until the host sets a word in its memory (``Staging.released``), and goes on with garbage.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncengine.errors import ConfigError
from asyncengine.kernels.cuda.launch.compiling import kernel
from asyncengine.kernels.cuda.launch.programmatic import launch_options, start_next, wait
from asyncengine.kernels.cuda.step.tensors import Slots

BLOCKS = 64
"""Blocks of the largest call; more do not use the link better."""
_SMALL, _LARGE = 1024, 4096
"""Elements that a block takes at once: few of small parts, so that there are blocks enough to fill the link."""
_STRIDE = tl.constexpr(32)
"""Words from one flag to the next, each in a cache line of its own."""
_PATIENCE = tl.constexpr(512)
"""Looks at a flag between two looks at the host's word, which is far away."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """One GPU's part: what the others write to, and where they are. ``connect`` makes those of all GPUs."""

    rank: int
    ranks: int
    inbox: Tensor
    """[2, ranks, BLOCKS, room] in the model's dtype"""
    flags: Tensor
    """int32 [ranks, BLOCKS + 1, 32]: the first word of each is the number of the last call whose part is there; the
    last flag of a rank is of its tokens"""
    calls: Tensor
    """int32 [BLOCKS + 1]: numbers of the last calls of this GPU's blocks"""
    together: Tensor
    """int32 [1]: 0 while this GPU runs steps alone, and waits for nobody"""
    never: Tensor
    """int32 [1]: 0, in place of the host's word where there is none"""
    addresses: Tensor
    """int64 [5, ranks]: of all inboxes, flags, last tokens and ends, and in the last row of the host's word"""
    pdl: bool = False

    def reduce(self, product: Tensor, batch: object = None, onto: Tensor | None = None) -> None:
        """Replace a product [T, N] by the sum over all GPUs, rounded once; with ``onto`` [T, N] add the sum to that.

        Raises ValueError for a product that is larger than the inbox.
        """
        count = product.numel()
        to = product if onto is None else onto
        if not product.is_contiguous() or not to.is_contiguous() or to.shape != product.shape:
            raise ValueError(f"sums take contiguous rows, got {list(product.shape)} with strides {product.stride()}")
        tile = _SMALL if count <= BLOCKS * _SMALL else _LARGE
        blocks = min(BLOCKS, triton.cdiv(count, tile))
        room = self.inbox.shape[3]
        if triton.cdiv(triton.cdiv(count, tile), blocks) * tile > room:
            raise ValueError(f"a product of {count:,} elements does not fit into inboxes of {BLOCKS * room:,}")
        _reduce[(blocks,)](
            product, to, self.addresses, self.inbox, self.flags, self.calls, self.together, count, room,
            RANK=self.rank, RANKS=self.ranks, ONTO=onto is not None, TILE=tile, BLOCKS=BLOCKS, num_warps=tile // 256,
            **launch_options(self.pdl),
        )  # fmt: skip

    def share(self, slots: Slots) -> None:
        """Give the tokens that rank 0 has sampled, and the ends that they are, to all GPUs' slots."""
        _share[(1,)](
            slots.last_token, slots.finished, self.addresses, self.flags, self.calls, self.together,
            len(slots.last_token), RANK=self.rank, RANKS=self.ranks, BLOCKS=BLOCKS, TILE=1024, num_warps=4,
            **launch_options(self.pdl),
        )  # fmt: skip


def allocate(rank: int, ranks: int, most: int, dtype: torch.dtype, device: torch.device, *, pdl: bool) -> Exchange:
    """Memory for sums of at most ``most`` elements. It is not connected: see ``connect``."""
    room = int(triton.cdiv(triton.cdiv(most, _LARGE), BLOCKS)) * _LARGE

    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return Exchange(
        rank, ranks, zeros(2, ranks, BLOCKS, room, dtype=dtype), zeros(ranks, BLOCKS + 1, 32), zeros(BLOCKS + 1),
        zeros(1), zeros(1), zeros(5, ranks, dtype=torch.int64), pdl,
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
        [each.inbox.data_ptr() for each in all_ranks],
        [each.flags.data_ptr() for each in all_ranks],
        [each.last_token.data_ptr() for each in slots] or nowhere,
        [each.finished.data_ptr() for each in slots] or nowhere,
        [released or exchange.never.data_ptr()] * exchange.ranks,
    ]
    exchange.addresses.copy_(torch.tensor(rows, dtype=torch.int64))


def begin_together(exchanges: Sequence[Exchange]) -> None:
    """From the next launches on GPUs wait for each other. They must be at rest now, and when they launch."""
    for exchange in exchanges:
        exchange.flags.zero_()
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


@triton.jit
def _peer(addresses: tl.tensor, row: tl.constexpr, rank: tl.constexpr, ranks: tl.constexpr, dtype: tl.constexpr):
    """Address that a row of the table holds for a rank, as a pointer."""
    return tl.multiple_of(tl.load(addresses + row * ranks + rank).to(tl.pointer_type(dtype)), 16)


@triton.jit
def _await(flag, call, together, addresses, RANKS: tl.constexpr):
    """Wait until a flag has come to this call, or nobody is to wait any more. Numbers of calls may wrap around."""
    released = _peer(addresses, 4, 0, RANKS, tl.int32)
    waits = tl.load(together) != 0
    looks = 0
    seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    while (seen - call < 0) & waits:
        seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
        looks += 1
        if looks % _PATIENCE == 0:
            waits = tl.load(released, volatile=True) == 0


@kernel
def _reduce(
    product, onto, addresses, inbox, flags, calls, together, count, room,
    RANK: tl.constexpr, RANKS: tl.constexpr, ONTO: tl.constexpr, TILE: tl.constexpr, BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Each block: send its range of the product, wait for the others', add up."""
    start_next(PDL)
    block = tl.program_id(0)
    tiles = tl.cdiv(tl.cdiv(count, TILE), tl.num_programs(0))
    first = block * tiles * TILE
    lane = tl.arange(0, TILE)
    wait(PDL)
    call = tl.load(calls + block) + 1
    half = call & 1
    own = ((half * RANKS + RANK) * BLOCKS + block).to(tl.int64) * room
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            there = _peer(addresses, 0, peer, RANKS, inbox.dtype.element_ty) + own
            for i in range(tiles):
                at = i * TILE + lane
                inside = first + at < count
                tl.store(there + at, tl.load(product + first + at, mask=inside), mask=inside)
    tl.debug_barrier()  # what all threads have sent comes before the flags
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            flag = _peer(addresses, 1, peer, RANKS, tl.int32) + (RANK * (BLOCKS + 1) + block) * _STRIDE
            tl.atomic_xchg(flag, call, sem="release", scope="sys")
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            _await(flags + (peer * (BLOCKS + 1) + block) * _STRIDE, call, together, addresses, RANKS)
    tl.debug_barrier()
    for i in range(tiles):
        at = i * TILE + lane
        inside = first + at < count
        total = tl.zeros([TILE], tl.float32)
        for peer in tl.static_range(RANKS):
            if peer == RANK:
                part = tl.load(product + first + at, mask=inside)
            else:
                came = inbox + ((half * RANKS + peer) * BLOCKS + block).to(tl.int64) * room
                part = tl.load(came + at, mask=inside, cache_modifier=".cg")
            total += part.to(tl.float32)
        if ONTO:
            total += tl.load(onto + first + at, mask=inside).to(tl.float32)
        tl.store(onto + first + at, total.to(onto.dtype.element_ty), mask=inside)
    tl.store(calls + block, call)


@kernel
def _share(
    tokens, ends, addresses, flags, calls, together, count,
    RANK: tl.constexpr, RANKS: tl.constexpr, BLOCKS: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rank 0 writes to the slots of the others, which have read theirs: they have exchanged products of this step."""
    wait(PDL)
    call = tl.load(calls + BLOCKS) + 1
    if RANK == 0:
        for peer in tl.static_range(1, RANKS):
            to_tokens = _peer(addresses, 2, peer, RANKS, tl.int32)
            to_ends = _peer(addresses, 3, peer, RANKS, tl.int32)
            for first in range(0, count, TILE):
                at = first + tl.arange(0, TILE)
                tl.store(to_tokens + at, tl.load(tokens + at, mask=at < count), mask=at < count)
                tl.store(to_ends + at, tl.load(ends + at, mask=at < count), mask=at < count)
        tl.debug_barrier()
        for peer in tl.static_range(1, RANKS):
            flag = _peer(addresses, 1, peer, RANKS, tl.int32) + BLOCKS * _STRIDE
            tl.atomic_xchg(flag, call, sem="release", scope="sys")
    else:
        _await(flags + BLOCKS * _STRIDE, call, together, addresses, RANKS)
    tl.store(calls + BLOCKS, call)
