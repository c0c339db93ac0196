"""Choice of the attention kernels for a kind of layer in a bucket of steps, of their tiles, and of the cut of their
work.

``describe`` decides, once, and gives an ``AttentionPlan``; ``str`` of one is a line for people. Nothing else asks for a
card, a batch-invariant engine or a block size. The kernels:

  few_keys      rows that are few or short: no work list, a row's keys are dealt to a fixed count of programs
  tma_decode    rows of one token, on a card with Hopper's tensor memory accelerator; of heads of 256 a few rows
  tma_prefill   rows of several tokens, likewise
  paged_decode  rows of one token, in steps that have no others
  paged         everything else; with fixed splits, in which alone results do not depend on the batch, all rows

A mixed step has a kernel for its rows of one token and one for the others. Only few_keys, paged_decode and paged cap
scores, and read keys and values in float8.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from asyncengine.kernels.cuda.attention.plan import AttentionPlan, AttentionShape, Cut, Kernel, Launch, LayerKind, Tile
from asyncengine.kernels.cuda.attention.work.items import ITEM_COST
from asyncengine.kernels.cuda.gpu import Gpu
from asyncengine.kernels.cuda.step.bucket import ANY_CONTEXT, Bucket


@dataclass(frozen=True, slots=True)
class Limits:
    """Upper limits of an engine's steps, and the mode of their computation."""

    max_rows: int
    max_tokens: int
    max_context: int
    """tokens of context and query of a row together"""
    block_size: int
    batch_invariant: bool = False


_WHOLE_TOKENS = 512
"""A row of so many tokens is not cut apart, if there are several: steps of Qwen3 take 626 us instead of 677 at 8 x 384,
643 instead of 683 at 8 x 448, and the same in pieces from 512 on. Longer ones are cut as small as teams allow."""
LATE_ROWS = 6
_LATE_COST = 36
"""Late teams are for steps of so many rows a team, and so many tiles, what starting their items costs included. Below,
their programs' first loads take longer than they gain: GPT-2 at 256 x 64 tokens 507 us and 535, at 256 x 200 830 and
808."""
_MAX_PIECES = 32
_LONG_PIECE = 16
"""Tiles of a piece of few_keys, one behind another at a microsecond each, for which a work list's even shares are not
worth its launch. Twice as many where keys are no query heads' in common, which paged_decode would read only once."""
_WIDE = 256
"""Elements of the largest heads whose results a thread of the usual tiles has registers for."""
FEWEST_WIDE_ROWS = 2
"""Decode steps of so many rows at least may take tma_decode for heads of 256. A lone row, whose programs would take 85
KiB of shared memory each, keeps few_keys (see ``_cut_tma_decode``). With ``sys.maxsize`` no step takes tma_decode."""
_INVARIANT_SPLITS = 8
"""Pieces of the longest context in batch-invariant mode: more would take more memory, fewer leave the GPU idle."""


def describe(bucket: Bucket, layer: LayerKind, gpu: Gpu, limits: Limits) -> AttentionPlan:
    """The plan for such layers in the steps of ``bucket`` on ``gpu``."""
    if limits.batch_invariant:
        launch = Launch("paged", fixed_tile(layer.shape, gpu), "any", stored=True)
        return AttentionPlan(layer, (launch,), Cut("fixed", _split_tokens(limits.max_context)))
    if bucket.single_token_rows or bucket.max_tokens == 1:
        return _describe_decode(bucket.max_rows, bucket.max_context, layer, gpu, limits.block_size)
    if 0 < bucket.max_context + bucket.max_tokens <= few_keys_context(bucket.max_tokens, layer.shape, gpu):
        return AttentionPlan(layer, (_few_keys(bucket.max_tokens, layer.shape, gpu, stored=True),), None)
    return _describe_mixed(layer, gpu, limits.block_size)


def describe_all(layer: LayerKind, gpu: Gpu, limits: Limits) -> set[AttentionPlan]:
    """The plans of all buckets that an engine may have."""
    rows = range(1, limits.max_rows + 1)
    buckets = [Bucket(n, n, True, context) for n in rows for context in (0, ANY_CONTEXT)]
    buckets += [Bucket(limits.max_rows, limits.max_tokens, False)]
    return {describe(bucket, layer, gpu, limits) for bucket in buckets}


def _describe_decode(rows: int, context: int, layer: LayerKind, gpu: Gpu, block_size: int) -> AttentionPlan:
    """Plan attention for steps of one-token rows, after so many tokens at most."""
    shape, tma = layer.shape, takes_tma_decode(rows, layer, gpu, block_size)
    if not _prefers_tma(rows, tma, shape) and context <= few_keys_context(rows, shape, gpu):
        return AttentionPlan(layer, (_few_keys(rows, shape, gpu, stored=layer.prepared),), None)
    if not tma:
        kernel: Kernel = "paged" if layer.prepared else "paged_decode"
        launch = Launch(kernel, paged_tiles(shape, gpu)[0], "one", stored=layer.prepared)
        return AttentionPlan(layer, (launch,), Cut("line"))
    tile, cut = _cut_tma_decode(rows, context, layer, gpu, block_size)
    return AttentionPlan(layer, (Launch("tma_decode", tile, "one", stored=layer.prepared),), cut)


def _prefers_tma(rows: int, tma: bool, shape: AttentionShape) -> bool:
    """Return whether tma_decode is there, and faster than few_keys for rows of any length.

    For a lone row it is (a step of Qwen3 at 288 tokens 532 us instead of 577, of the 8B 3,755 instead of 3,812) only if
    query heads share keys (of GPT-2 199 us instead of 194).
    """
    return tma and (rows > 1 or shape.group > 1)


def _describe_mixed(layer: LayerKind, gpu: Gpu, block_size: int) -> AttentionPlan:
    """Plan attention for steps with rows of several tokens. Kernels in Triton come first; tma_prefill runs beside
    tma_decode."""
    decode, prefill = paged_tiles(layer.shape, gpu)
    tma_one, tma_several = tma_decode_tile(layer, gpu, block_size), tma_prefill_tile(layer, gpu, block_size)
    launches = []
    if not tma_one:
        launches.append(Launch("paged", decode, "one", stored=True))
    if not tma_several:
        launches.append(Launch("paged", prefill, "several", stored=True))
    if tma_one:
        launches.append(Launch("tma_decode", tma_one, "one", stored=True))
    if tma_several:
        launches.append(Launch("tma_prefill", tma_several, "several", stored=True, beside=tma_one is not None))
    return AttentionPlan(layer, tuple(launches), Cut("line"))


# ---- contexts that have buckets of their own ----


def short_context(rows: int, layers: Sequence[LayerKind], gpu: Gpu, limits: Limits) -> int:
    """Decode steps of so many rows have another plan while no row has more tokens than this; 0 if they never do,
    or no layer attends.

    They take few_keys, or tma_decode without late teams. Layers with one plan for all contexts leave it to the others.
    """
    return min(filter(None, (_short_context(rows, layer, gpu, limits) for layer in layers)), default=0)


def _short_context(rows: int, layer: LayerKind, gpu: Gpu, limits: Limits) -> int:
    if limits.batch_invariant:
        return 0
    if _prefers_tma(rows, takes_tma_decode(rows, layer, gpu, limits.block_size), layer.shape):
        return late_context(rows, layer, gpu, limits.block_size) or 0
    return few_keys_context(rows, layer.shape, gpu)


def short_mixed_context(tokens: int, layers: Sequence[LayerKind], gpu: Gpu, limits: Limits) -> int:
    """Mixed steps of so many tokens take few_keys while no row has more tokens than this, its new ones included."""
    if limits.batch_invariant:
        return 0
    return min((few_keys_context(tokens, layer.shape, gpu) for layer in layers), default=0)


# ---- few_keys ----


def _few_keys(rows: int, shape: AttentionShape, gpu: Gpu, *, stored: bool) -> Launch:
    pieces = few_keys_pieces(rows, shape.num_heads, shape.head_dim, gpu.multiprocessors)
    return Launch("few_keys", few_keys_tile(shape), "any" if stored else "one", stored, pieces)


def few_keys_tile(shape: AttentionShape) -> Tile:
    """Keys of a tile: two times 16 bytes of each half a thread. With once, Triton lays out heads and tiles differently.

    Heads of 64, whose tiles have twice the keys, have half as many programs.
    """
    elements = 4096 // shape.dtype.itemsize
    keys = max(8, elements // (2 * _power_of_2(shape.head_dim // 2)))
    if shape.head_dim > _WIDE:
        return Tile(1, keys, 4, 1, 4)
    return Tile(1, keys, 2, 1, 8 if shape.head_dim > 64 else 4)


def few_keys_pieces(rows: int, num_heads: int, head_dim: int, sms: int) -> int:
    """Programs that share a row's query head, at most: a power of two.

    As many as have room at once: then each has loaded its first tile when the projection ends. Half as many of heads
    of 64, whose tiles have twice the keys.
    """
    room = sms * (8 if 64 < head_dim <= _WIDE else 4)
    return min(_MAX_PIECES, 1 << max(0, (room // (rows * num_heads)).bit_length() - 1))


def few_keys_context(rows: int, shape: AttentionShape, gpu: Gpu) -> int:
    """Tokens of a row's context up to which few_keys is faster than a work list; 0 if it never is.

    A KV head's keys are read by each of its query heads, mostly from the L2 cache, and a row's programs are as many
    however long it is: with more programs than fit, or long rows, even shares and keys read once are worth more.
    """
    sms = gpu.multiprocessors
    fits = rows * shape.num_heads <= sms * (4 if shape.head_dim > 64 else 8)
    if shape.head_dim % 2 or not (fits or shape.group == 1):
        return 0
    piece = _LONG_PIECE * few_keys_tile(shape).keys * (2 if shape.group == 1 else 1)
    return piece * few_keys_pieces(rows, shape.num_heads, shape.head_dim, sms)


# ---- paged and paged_decode ----


def paged_tiles(shape: AttentionShape, gpu: Gpu) -> tuple[Tile, Tile]:
    """The tiles of rows of one token and of several, by the bytes of a KV tile.

    Decode waits for memory: small programs, of two warps, hide each other's first loads. At 64 sequences of 288 tokens
    four of them a multiprocessor, with two tiles of 32 keys of heads of 128 in flight each, take 24.7 us, where one of
    64 keys takes 26 and three programs of four warps with twice the keys take 32.
    Prefill waits for the tensor cores: two warp groups of 64 rows each, whose registers (250 a thread) leave
    no room for a second program. float32 is multiplied exactly, without tensor cores: small tiles. Keys in float8 are
    twice as many for decode, which are as many bytes in flight, but of heads of 64, for which registers would not do;
    prefill keeps them in float16 in shared memory.
    """
    width = max(16, _power_of_2(shape.head_dim))
    group = _power_of_2(shape.group)
    if shape.head_dim > _WIDE:
        return _tiles_of_widest(shape, gpu)
    if shape.dtype == torch.float32:
        keys = min(32, max(16, 4096 // width))
        return Tile(max(16, group), keys, 4, 2, 2), Tile(max(32, group), keys, 4, 1, 2)
    few, keys = (min(64, max(16, elements // width)) for elements in (8192 if shape.float8_cache else 4096, 8192))
    programs = 4 if width > 64 else 6
    # Triton keeps one stage less than it is told.
    prefill = _that_fits(Tile(max(128, group), keys, 8, 3, 1), shape, gpu)
    return Tile(max(16, group), few, 2, 3, programs), prefill


def _tiles_of_widest(shape: AttentionShape, gpu: Gpu) -> tuple[Tile, Tile]:
    """``paged_tiles`` of heads of 512: the results of 32 rows take half of the registers of eight warps.

    64 rows would be spilled to memory. A third stage has room in shared memory on Hopper and on A100.
    """
    few, rows = max(16, _power_of_2(shape.group)), max(32, _power_of_2(shape.group))
    if shape.dtype == torch.float32:
        return Tile(few, 16, 4, 2, 2), Tile(few, 16, 8, 1, 1)
    several = Tile(rows, 32, 8, 3, 1)
    if _shared_bytes(several, shape) > gpu.shared_bytes:
        several = replace(several, stages=2)
    return Tile(few, 16, 4, 3, 2), several


def fixed_tile(shape: AttentionShape, gpu: Gpu) -> Tile:
    """The tile of fixed splits, for all rows alike.

    A decode row wastes most of its 64 rows, but tensor cores with 64 rows still keep up with memory.
    """
    prefill = paged_tiles(shape, gpu)[1]
    if shape.dtype == torch.float32:
        return prefill
    if shape.head_dim > _WIDE:
        return prefill
    tile = replace(prefill, rows=max(64, _power_of_2(shape.group)), warps=4, programs_per_sm=2)
    return _that_fits(tile, shape, gpu)


def _that_fits(tile: Tile, shape: AttentionShape, gpu: Gpu) -> Tile:
    """The tile, or half its rows, or half its keys as well, whichever the shared memory of ``gpu`` holds first."""
    if _shared_bytes(tile, shape) > gpu.shared_bytes and tile.rows >= 2 * max(64, shape.group):
        tile = replace(tile, rows=tile.rows // 2, warps=tile.warps // 2)
    if _shared_bytes(tile, shape) > gpu.shared_bytes and tile.keys > 16:
        tile = replace(tile, keys=tile.keys // 2)
    return tile


def _shared_bytes(tile: Tile, shape: AttentionShape) -> int:
    """Shared memory of a program of bfloat16 on Ampere and Ada. Hopper takes a stage more, and has room for it.

    It holds queries, keys and values. The weights of wide heads cross it from warp to warp.
    """
    width = _power_of_2(shape.head_dim)
    weights = tile.rows * tile.keys if width > 128 else 0
    return 2 * ((tile.rows + 2 * (tile.stages - 1) * tile.keys) * width + weights)


def _split_tokens(max_context: int) -> int:
    return max(1, -(-max_context // (1024 * _INVARIANT_SPLITS))) * 1024


def _power_of_2(n: int) -> int:
    """The next one."""
    return 1 << (n - 1).bit_length()


# ---- tma_decode and tma_prefill ----


def _suits_tma(layer: LayerKind, gpu: Gpu, block_size: int, head_dims: tuple[int, ...] = (64, 128)) -> bool:
    """Return whether kernels in Gluon take such layers and blocks; each kernel has its own limits on head groups."""
    shape = layer.shape
    return (
        gpu.tma and shape.dtype == torch.bfloat16 and not shape.float8_cache and shape.head_dim in head_dims
        and block_size == 16 and not layer.softcap
    )  # fmt: skip


def takes_tma_decode(rows: int, layer: LayerKind, gpu: Gpu, block_size: int) -> bool:
    """Return whether tma_decode computes decode steps of so many rows.

    Tiles and registers of heads of 256 have room for one program a multiprocessor: they are for rows with a team each.
    """
    if layer.shape.head_dim != 256:
        return tma_decode_tile(layer, gpu, block_size) is not None
    teams = _tma_decode_tile(layer.shape, 1).count_teams(layer.shape, gpu.multiprocessors)
    suits = _suits_tma(layer, gpu, block_size, (256,)) and layer.shape.group <= 8
    return suits and FEWEST_WIDE_ROWS <= rows <= teams


def tma_decode_tile(layer: LayerKind, gpu: Gpu, block_size: int) -> Tile | None:
    """The tile of tma_decode for any count of rows, and beside prompts, four blocks of the cache; None if it is not for
    such layers or blocks."""
    if not _suits_tma(layer, gpu, block_size) or layer.shape.group > 8:
        return None
    return _tma_decode_tile(layer.shape, 2)


def _tma_decode_tile(shape: AttentionShape, programs_per_sm: int) -> Tile:
    """Two programs with 96 KiB of tiles in flight fill a multiprocessor's shared memory.

    A lone one may have twice that, but no more than six tiles: at 8 rows of 288 tokens GPT-2 takes 4.8 us with them and
    6.3 with twelve, Qwen3 4.7 and with three 6.2.
    """
    stages = min(6, (192 << 10) // programs_per_sm // (64 * shape.head_dim * 4))
    return Tile(16, 64, 4, stages, programs_per_sm)


def tma_prefill_tile(layer: LayerKind, gpu: Gpu, block_size: int) -> Tile | None:
    """The tile of tma_prefill; None if that is not for such layers or blocks.

    It has as many stages of keys and values as shared memory holds beside the queries of two units.
    """
    divides = layer.shape.group in (1, 2, 4, 8, 16)  # of a unit's rows each head has as many, eight at least
    if not _suits_tma(layer, gpu, block_size) or not divides or layer.window or layer.sinks:
        return None
    return Tile(128, 128, 8, 256 // layer.shape.head_dim, 1)


def _cut_tma_decode(rows: int, context: int, layer: LayerKind, gpu: Gpu, block_size: int) -> tuple[Tile, Cut]:
    """Return tile and cut for decode steps of so many rows, after so many tokens at most, which tma_decode computes.

    Rows that have a team each are cut apart, with as few programs as do. A lone row has a tile a program, 33 KiB at
    most: its projections use no shared memory, and a multiprocessor has to be empty before it divides cache and shared
    memory another way; with 96 KiB a layer of the 8B took 10 us longer.
    """
    alone, shared = (_tma_decode_tile(layer.shape, programs_per_sm) for programs_per_sm in (1, 2))
    if rows == 1:
        return replace(shared, stages=1), Cut("apart", shared.keys)
    for tile in (alone, shared):
        if rows <= tile.count_teams(layer.shape, gpu.multiprocessors):
            return tile, Cut("apart", _WHOLE_TOKENS)
    short = late_context(rows, layer, gpu, block_size)
    return shared, Cut("late" if short is not None and context > short else "line")


def late_context(rows: int, layer: LayerKind, gpu: Gpu, block_size: int) -> int | None:
    """Decode steps of so many rows are to have late teams if one has more tokens than this; None if never."""
    tile = tma_decode_tile(layer, gpu, block_size)
    teams = tile.count_teams(layer.shape, gpu.multiprocessors) if tile else 0
    if not tile or rows < LATE_ROWS * teams:
        return None
    return max(0, _LATE_COST * teams // rows - ITEM_COST) * tile.keys
