"""Sampling on the GPU: tokens of up to R rows of logits, drawn as ``csrc/platform/cpu_sampler.h`` says.

Like the CPU's, the draw is inverse cumulative mass in index order from one uniform number, Philox4x32-10 keyed by the
seed at counter ``position``: one random number per row is cheaper than a noise per logit, and both machines pick the
same token from the same logits unless the number falls within rounding of an edge. Masses are fixed point, multiples
of 2^-40 of the largest one, so their sums are exact and atomics in any order give the same result: a token depends on
nothing but the row's logits, its parameters, its seed and its position.

Launches, each over a fixed grid: ``_tiles_kernel`` (row, tile) reads the logits once and leaves a summary of each
tile, enough for greedy and plain temperature; ``_histogram_kernel`` (row, tile) sorts rows with top-k or top-p into
bins of equal width in logits; ``_collect_kernel`` (row, tile) lists the few elements of the bins where a filter ends
and adds up what is kept before them; ``_finish_kernel`` (row) finds the exact end among those listed, draws, and hands
the token on. Programs of rows that do not need a pass return at once.
"""

# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncengine.kernels.device_step import MAX_STOPS, DeviceStep
from asyncengine.kernels.triton_filters import (
    LAST_INDEX,
    MAX_VOCAB,
    NO_RANK,
    UNIT,
    apply_filters,
    find_ends,
    inverse,
    is_finite,
    load_parameters,
    load_scaling,
    logit_of,
    mass_of,
    rank_of,
    weigh,
)

_TILE = 4096
_BINS = 512
_LIST = 4096
"""Candidates that a row can list. If there are more (many equal logits), the search reads the whole row each time."""
_CHUNK = 512


# ---- passes over the logits, split over tiles ----


@triton.jit
def _tiles_kernel(
    logits: tl.tensor,
    row_stride: tl.tensor,
    vocab: tl.tensor,
    sample_slot: tl.tensor,
    temperature: tl.tensor,
    tile_rank: tl.tensor,
    tile_min: tl.tensor,
    tile_mass: tl.tensor,
    counts: tl.tensor,
    masses: tl.tensor,
    num_listed: tl.tensor,
    GREEDY: tl.constexpr,
    TILE: tl.constexpr,
    BINS: tl.constexpr,
) -> None:
    """Of each tile: the first rank and, with a temperature, the finite minimum and the mass relative to its maximum.

    Also clears what the row's other passes add to.
    """
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(sample_slot + row)
    if slot < 0:
        return
    index = tile * TILE + tl.arange(0, TILE)
    logit = tl.load(logits + row * row_stride + index, mask=index < vocab, other=float("-inf"))
    out = row * tl.num_programs(1) + tile
    tl.store(tile_rank + out, tl.max(rank_of(logit, index), 0))
    if not GREEDY:
        heat = tl.load(temperature + slot)
        if heat > 0:
            logit = tl.where(logit < float("inf"), logit, float("-inf"))
            maximum = tl.max(logit, 0)
            reference = tl.where(maximum > float("-inf"), maximum, 0.0)
            tl.store(tile_mass + out, tl.sum(tl.exp((logit - reference) * inverse(heat)), 0))
            tl.store(tile_min + out, tl.min(tl.where(logit > float("-inf"), logit, float("inf")), 0))
            if tile == 0:
                bins = tl.arange(0, BINS)
                tl.store(counts + row * BINS + bins, tl.zeros((BINS,), tl.int32))
                tl.store(masses + row * BINS + bins, tl.zeros((BINS,), tl.int64))
                tl.store(num_listed + row, 0)


@triton.jit
def _histogram_kernel(
    logits: tl.tensor,
    row_stride: tl.tensor,
    vocab: tl.tensor,
    sample_slot: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    tile_rank: tl.tensor,
    tile_min: tl.tensor,
    counts: tl.tensor,
    masses: tl.tensor,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    BINS: tl.constexpr,
) -> None:
    """Count (for top-k) and mass (for top-p) of the row's elements that have mass, by bin."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(sample_slot + row)
    if slot < 0:
        return
    heat, k = tl.load(temperature + slot), tl.load(top_k + slot)
    by_count, by_mass = (k > 0) & (k < vocab), tl.load(top_p + slot) < 1
    if (heat > 0) & (by_count | by_mass):
        is_valid, scaling = load_scaling(row, tl.num_programs(1), heat, tile_rank, tile_min, TILES, BINS)
        if is_valid:
            index = tile * TILE + tl.arange(0, TILE)
            logit = tl.load(logits + row * row_stride + index, mask=index < vocab, other=float("-inf"))
            mass, bin = weigh(logit, scaling, BINS)
            if by_count:
                tl.atomic_add(counts + row * BINS + bin, tl.full((TILE,), 1, tl.int32), mask=mass > 0, sem="relaxed")
            if by_mass:
                tl.atomic_add(masses + row * BINS + bin, mass, mask=mass > 0, sem="relaxed")


@triton.jit
def _collect_kernel(
    logits: tl.tensor,
    row_stride: tl.tensor,
    vocab: tl.tensor,
    sample_slot: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    tile_rank: tl.tensor,
    tile_min: tl.tensor,
    counts: tl.tensor,
    masses: tl.tensor,
    kept: tl.tensor,
    listed: tl.tensor,
    num_listed: tl.tensor,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    BINS: tl.constexpr,
    LIST: tl.constexpr,
) -> None:
    """Of each tile of a filtered row: the mass of what is kept for certain, and a list of what may be."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(sample_slot + row)
    if slot < 0:
        return
    heat, k, p, least = load_parameters(slot, temperature, top_k, top_p, min_p)
    if (heat > 0) & (((k > 0) & (k < vocab)) | (p < 1) | (least > 0)):
        is_valid, scaling = load_scaling(row, tl.num_programs(1), heat, tile_rank, tile_min, TILES, BINS)
        if is_valid:
            k_bin, _, low, high = find_ends(counts + row * BINS, masses + row * BINS, vocab, k, p, BINS)
            index = tile * TILE + tl.arange(0, TILE)
            logit = tl.load(logits + row * row_stride + index, mask=index < vocab, other=float("-inf"))
            mass, bin = weigh(logit, scaling, BINS)
            certain = (bin < low) & (mass.to(tl.float32) >= least)
            tl.store(kept + row * tl.num_programs(1) + tile, tl.sum(tl.where(certain, mass, 0), 0))
            possible = (((bin >= low) & (bin <= high)) | (bin == k_bin)).to(tl.int32)
            found = tl.sum(possible, 0)
            if found > 0:
                # Tiles append in any order: nothing that is made of the list depends on it.
                place = tl.atomic_add(num_listed + row, found, sem="relaxed") + tl.cumsum(possible, 0) - 1
                tl.store(listed + row * LIST + place, index, mask=(possible > 0) & (place < LIST))


# ---- the end of a row ----


@triton.jit
def _draw(
    logits: tl.tensor,
    vocab: tl.tensor,
    floor: tl.tensor,
    least_mass: tl.tensor,
    tile_mass: tl.tensor,
    tile_reference: tl.tensor,
    inverse_temperature: tl.tensor,
    seed: tl.tensor,
    position: tl.tensor,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
) -> tl.tensor:
    """The first kept element at which the running mass exceeds uniform * total."""
    counter = position.to(tl.uint32)
    zero = counter * 0
    high, low, _, _ = tl.philox(seed, counter, zero, zero, zero)
    uniform = (high.to(tl.uint64) << 32) | low.to(tl.uint64)
    target = tl.umulhi(uniform, tl.sum(tile_mass, 0).to(tl.uint64)).to(tl.int64)

    tiles = tl.arange(0, TILES)
    tile = tl.sum((tl.cumsum(tile_mass, 0) <= target).to(tl.int32), 0)
    target -= tl.sum(tl.where(tiles < tile, tile_mass, 0), 0)
    index = tile * TILE + tl.arange(0, TILE)
    logit = tl.load(logits + index, mask=index < vocab, other=float("-inf"))
    reference = tl.max(tl.where(tiles == tile, tile_reference, float("-inf")), 0)
    mass = mass_of(logit, reference, inverse_temperature)
    mass = tl.where((rank_of(logit, index) >= floor) & (mass.to(tl.float32) >= least_mass), mass, 0)
    # The tile's mass may be known in another scale, that of its own maximum.
    total, known = tl.sum(mass, 0), tl.max(tl.where(tiles == tile, tile_mass, 0), 0)
    target = (target.to(tl.float64) / known.to(tl.float64) * total.to(tl.float64)).to(tl.int64)
    target = tl.minimum(target, total - 1)
    return tile * TILE + tl.sum((tl.cumsum(mass, 0) <= target).to(tl.int32), 0)


@triton.jit
def _finish_kernel(
    logits: tl.tensor,
    row_stride: tl.tensor,
    vocab: tl.tensor,
    num_tiles: tl.tensor,
    sample_slot: tl.tensor,
    sample_position: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    seeds: tl.tensor,
    stops: tl.tensor,
    last_token: tl.tensor,
    finished: tl.tensor,
    tile_rank: tl.tensor,
    tile_min: tl.tensor,
    tile_mass: tl.tensor,
    counts: tl.tensor,
    masses: tl.tensor,
    kept: tl.tensor,
    listed: tl.tensor,
    num_listed: tl.tensor,
    header: tl.tensor,
    out_words: tl.tensor,
    ring_stride: tl.tensor,
    GREEDY: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    CHUNK: tl.constexpr,
    LIST: tl.constexpr,
    BINS: tl.constexpr,
    STOPS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(sample_slot + row)
    if slot < 0:
        return
    tiles = tl.arange(0, TILES)
    present = tiles < num_tiles
    partial = row * num_tiles + tiles
    ranks = tl.load(tile_rank + partial, mask=present, other=NO_RANK)
    first = tl.max(ranks, 0)
    is_running = tl.load(finished + slot) == 0
    is_valid = is_finite(first)
    token = ((first & LAST_INDEX) ^ LAST_INDEX).to(tl.int32)
    if not GREEDY:
        heat, k, p, least = load_parameters(slot, temperature, top_k, top_p, min_p)
        if (heat > 0) & is_running & is_valid:
            row_logits = logits + row * row_stride
            _, scaling = load_scaling(row, num_tiles, heat, tile_rank, tile_min, TILES, BINS)
            floor = tl.full((), NO_RANK, tl.int64)
            if ((k > 0) & (k < vocab)) | (p < 1) | (least > 0):
                found = tl.load(num_listed + row)
                is_listed = found <= LIST
                length, in_list = tl.where(is_listed, found, vocab), tl.where(is_listed, found, 0)
                source = (row_logits, length, listed + row * LIST, in_list)
                floor, mass = apply_filters(
                    vocab, k, p, least, counts + row * BINS, masses + row * BINS, source, scaling,
                    TILE, TILES, CHUNK, BINS,
                )  # fmt: skip
                mass += tl.load(kept + partial, mask=present, other=0)
                reference = tl.zeros((TILES,), tl.float32) + scaling[0]
            else:
                reference = logit_of(ranks)
                part = tl.load(tile_mass + partial, mask=present, other=0.0)
                mass = (part * tl.exp((reference - scaling[0]) * scaling[1]) * UNIT).to(tl.int64)
            token = _draw(
                row_logits, vocab, floor, least, mass, reference, scaling[1],
                tl.load(seeds + slot), tl.load(sample_position + row), TILE, TILES,
            )  # fmt: skip
    is_new = is_running & is_valid
    token = tl.where(is_new, token, -1)
    # A broken row ends its sequence as a stop token does: what is in flight of it must not run on an invalid token.
    ended = tl.max((tl.load(stops + slot * STOPS + tl.arange(0, STOPS)) == token).to(tl.int32), 0) > 0
    tl.store(last_token + slot, token, mask=is_new)
    tl.store(finished + slot, 1, mask=is_running & (ended | (is_valid == 0)))
    step, ring = tl.load(header), tl.load(header + 1)
    tl.store(out_words + ring * ring_stride + row, (step << 32) | (token.to(tl.int64) & 0xFFFFFFFF))


def sample(logits: Tensor, step: DeviceStep, header: Tensor, out_words: Tensor, *, greedy_only: bool) -> None:
    """Draw a token for each row s with a slot = step.sample_slot[s] ≥ 0 from logits float32 [R, V].

    Temperature 0 takes the maximum, the lowest index of equals. Otherwise temperature, then top-k, top-p and min-p in
    this order, each on what the one before left; equal logits rank by index, so top-k keeps exactly k. A logit of -inf
    has no mass. The token is -1 if there is NaN or +inf among the logits or none is finite; the slot is then finished,
    and keeps its last token. Rows without a slot read and write nothing.

    A token goes to last_token[slot], and sets finished[slot] if it is among stops[slot]. A row whose slot was finished
    before gives -1 and leaves the slot alone. Either way the word (header[0] << 32) | (token & 0xffffffff) is stored,
    once and whole, at out_words[header[1], s]. header is int64 [2]: number of the step, and where in the ring its
    words go. out_words is int64 [ring, at least R], which may be host memory mapped into the device.

    greedy_only: the temperatures of all rows are 0 (not checked); the parameters are not looked at.
    """
    _check(logits, step, header, out_words)
    rows, vocab = logits.shape
    num_tiles = triton.cdiv(vocab, _TILE)
    tiles = max(16, triton.next_power_of_2(num_tiles))
    slots = step.slots

    def scratch(width: int, dtype: torch.dtype) -> Tensor:
        return torch.empty((rows, 1 if greedy_only else width), dtype=dtype, device=logits.device)

    tile_rank = torch.empty((rows, num_tiles), dtype=torch.int64, device=logits.device)
    tile_min, tile_mass = scratch(num_tiles, torch.float32), scratch(num_tiles, torch.float32)
    counts, masses = scratch(_BINS, torch.int32), scratch(_BINS, torch.int64)
    kept, listed, num_listed = scratch(num_tiles, torch.int64), scratch(_LIST, torch.int32), scratch(1, torch.int32)
    _tiles_kernel[(rows, num_tiles)](
        logits, logits.stride(0), vocab, step.sample_slot, slots.temperature,
        tile_rank, tile_min, tile_mass, counts, masses, num_listed,
        GREEDY=greedy_only, TILE=_TILE, BINS=_BINS, num_warps=8,
    )  # fmt: skip
    if not greedy_only:
        _histogram_kernel[(rows, num_tiles)](
            logits, logits.stride(0), vocab, step.sample_slot, slots.temperature, slots.top_k, slots.top_p,
            tile_rank, tile_min, counts, masses,
            TILE=_TILE, TILES=tiles, BINS=_BINS, num_warps=8,
        )  # fmt: skip
        _collect_kernel[(rows, num_tiles)](
            logits, logits.stride(0), vocab, step.sample_slot, slots.temperature, slots.top_k, slots.top_p,
            slots.min_p, tile_rank, tile_min, counts, masses, kept, listed, num_listed,
            TILE=_TILE, TILES=tiles, BINS=_BINS, LIST=_LIST, num_warps=8,
        )  # fmt: skip
    _finish_kernel[(rows,)](
        logits, logits.stride(0), vocab, num_tiles, step.sample_slot, step.sample_position, slots.temperature,
        slots.top_k, slots.top_p, slots.min_p, slots.seed, slots.stops, slots.last_token, slots.finished,
        tile_rank, tile_min, tile_mass, counts, masses, kept, listed, num_listed,
        header, out_words, out_words.stride(0),
        GREEDY=greedy_only, TILE=_TILE, TILES=tiles, CHUNK=_CHUNK, LIST=_LIST, BINS=_BINS, STOPS=MAX_STOPS,
        num_warps=1 if greedy_only else 8,
    )  # fmt: skip


def _check(logits: Tensor, step: DeviceStep, header: Tensor, out_words: Tensor) -> None:
    if logits.dtype != torch.float32 or logits.dim() != 2 or logits.stride(1) != 1:
        raise ValueError(
            f"logits must be float32 [rows, vocabulary] with contiguous rows, "
            f"got {logits.dtype} {list(logits.shape)} with strides {logits.stride()}"
        )
    rows, vocab = logits.shape
    if not 0 < vocab <= MAX_VOCAB:
        raise ValueError(f"the vocabulary must have 1 to {MAX_VOCAB} tokens, got {vocab}")
    if len(step.sample_slot) < rows:
        raise ValueError(f"{rows} rows of logits, but the step samples {len(step.sample_slot)}")
    if header.dtype != torch.int64 or header.shape != (2,):
        raise ValueError(f"header must be int64 [2], got {header.dtype} {list(header.shape)}")
    if out_words.dtype != torch.int64 or out_words.dim() != 2 or out_words.shape[1] < rows:
        raise ValueError(f"out_words must be int64 [ring, at least {rows}], got {list(out_words.shape)}")
