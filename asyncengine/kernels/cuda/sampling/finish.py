"""The end of a row's sampling: what its filter keeps exactly, the draw, and what becomes of the token."""

# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from asyncengine.kernels.cuda.launch.compiling import kernel
from asyncengine.kernels.cuda.launch.programmatic import wait
from asyncengine.kernels.cuda.sampling.filters import (
    BOUNDS,
    IS_FILTERED,
    LAST_INDEX,
    NO_RANK,
    NUM_LISTED,
    STATE,
    UNIT,
    WANTED,
    inverse,
    is_finite,
    load_bounds,
    load_candidates,
    load_parameters,
    logit_of,
    mass_of,
    rank_of,
    select,
    share,
    weight_of,
)
from asyncengine.kernels.cuda.sampling.results import NOT_FINITE, store_word


@triton.jit
def arrive(arrivals: tl.tensor, count: tl.tensor) -> tl.tensor:
    """Return whether this program is the last of ``count`` to come here, and sees the stores of the others."""
    # The barrier puts every thread's stores before the one thread that counts.
    tl.debug_barrier()
    is_last = tl.atomic_add(arrivals, 1, sem="acq_rel") == count - 1
    if is_last:
        tl.store(arrivals, 0)  # for the next launch: nobody else will come in this one
    return is_last


@triton.jit
def hand_on(
    row: tl.tensor,
    slot: tl.tensor,
    token: tl.tensor,
    is_valid: tl.tensor,
    stops: tl.tensor,
    last_token: tl.tensor,
    finished: tl.tensor,
    header: tl.tensor,
    out_words: tl.tensor,
    ring_stride: tl.tensor,
    STOPS: tl.constexpr,
) -> None:
    is_running = tl.load(finished + slot) == 0
    is_new = is_running & is_valid
    token = tl.where(is_new, token, NOT_FINITE)
    # A broken row ends its sequence as a stop token does: what is in flight of it must not run on an invalid token.
    ended = tl.max((tl.load(stops + slot * STOPS + tl.arange(0, STOPS)) == token).to(tl.int32), 0) > 0
    tl.store(last_token + slot, token, mask=is_new)
    tl.store(finished + slot, 1, mask=is_running & (ended | (is_valid == 0)))
    store_word(header, out_words, ring_stride, row, token)


@triton.jit
def token_of(rank: tl.tensor) -> tl.tensor:
    return ((rank & LAST_INDEX) ^ LAST_INDEX).to(tl.int32)


@triton.jit
def _keep(
    p: tl.tensor,
    least: tl.tensor,
    total: tl.tensor,
    mass_above: tl.tensor,
    wanted_count: tl.tensor,
    counts: tl.tensor,
    masses: tl.tensor,
    kept: tl.tensor,
    source: tl.tuple,
    chosen: tl.tensor,
    bounds: tl.tuple,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    LIST: tl.constexpr,
    FEW: tl.constexpr,
    FINE: tl.constexpr,
) -> tl.tensor:
    """The lowest rank that top-k and top-p keep. Adds the candidates that they and min-p keep to the tiles' masses."""
    bins = tl.arange(0, FINE)
    mass = tl.load(masses + bins)
    floor = tl.full((), NO_RANK, tl.int64)
    for by_mass in range(0, 2):  # top-k, then top-p: compiled once, as the larger half of the kernel
        if by_mass > 0:
            amount, wanted = mass, share(p, total) - mass_above
            is_limited = p < 1
        else:
            amount, wanted = tl.load(counts + bins).to(tl.int64), wanted_count.to(tl.int64)
            is_limited = wanted_count > 0
        if is_limited:
            bin = tl.sum((tl.cumsum(amount, 0) < wanted).to(tl.int32), 0)
            mass_of_bin = tl.zeros((), tl.int64)
            if bin < FINE:  # else only what has no mass is dropped
                wanted -= tl.sum(tl.where(bins < bin, amount, 0), 0)
                tl.debug_barrier()  # the list of the chosen is written anew
                end, mass_of_bin = select(wanted, bin, source, chosen, bounds, by_mass > 0, CHUNK, LIST, FEW, FINE)
                floor = tl.maximum(floor, end)
            total = mass_above + tl.sum(tl.where(bins < bin, mass, 0), 0) + mass_of_bin
    for start in range(0, source[1], CHUNK):
        index, rank, weight, fine = load_candidates(start, source, bounds, CHUNK, FINE)
        is_kept = (fine < FINE) & (rank >= floor) & (weight >= least)
        tl.atomic_add(kept + index // TILE, mass_of(weight), mask=is_kept)
    tl.debug_barrier()
    return floor


@triton.jit
def _draw(
    logits: tl.tensor,
    vocab: tl.tensor,
    floor: tl.tensor,
    least: tl.tensor,
    lowest: tl.tensor,
    rate: tl.tensor,
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
    weight = weight_of(logit, reference, inverse_temperature)
    is_kept = (logit * rate >= lowest) & (rank_of(logit, index) >= floor) & (weight >= least)
    mass = tl.where(is_kept, mass_of(weight), 0)
    # The tile's mass may be known in another scale, that of its own maximum.
    total, known = tl.sum(mass, 0), tl.max(tl.where(tiles == tile, tile_mass, 0), 0)
    target = (target.to(tl.float64) / known.to(tl.float64) * total.to(tl.float64)).to(tl.int64)
    target = tl.minimum(target, total - 1)
    return tile * TILE + tl.sum((tl.cumsum(mass, 0) <= target).to(tl.int32), 0)


@kernel
def finish_kernel(
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
    tile_mass: tl.tensor,
    bounds: tl.tensor,
    row_state: tl.tensor,
    counts: tl.tensor,
    masses: tl.tensor,
    above: tl.tensor,
    kept: tl.tensor,
    listed: tl.tensor,
    chosen: tl.tensor,
    header: tl.tensor,
    out_words: tl.tensor,
    ring_stride: tl.tensor,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    CHUNK: tl.constexpr,
    LIST: tl.constexpr,
    FEW: tl.constexpr,
    FINE: tl.constexpr,
    STOPS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(sample_slot + row)
    if slot < 0:
        return
    tiles = tl.arange(0, TILES)
    present = tiles < num_tiles
    partial = row * num_tiles + tiles
    ranks = tl.load(tile_rank + partial, mask=present, other=NO_RANK)
    first = tl.max(ranks, 0)
    is_valid = is_finite(first)
    token = token_of(first)
    heat, _, p, least = load_parameters(slot, temperature, top_k, top_p, min_p)
    if (heat > 0) & is_valid:
        row_logits = logits + row * row_stride
        maximum, inverse_temperature = logit_of(first), inverse(heat)
        part = tl.load(tile_mass + partial, mask=present, other=0.0)
        reference = tl.where(is_finite(ranks), logit_of(ranks), maximum)
        mass = (part * tl.exp((reference - maximum) * inverse_temperature) * UNIT).to(tl.int64)
        floor = tl.full((), NO_RANK, tl.int64)
        lowest, rate = tl.full((), float("-inf"), tl.float32), tl.full((), 1.0, tl.float32)
        state = row_state + row * STATE
        if tl.load(state + IS_FILTERED) > 0:
            row_bounds = load_bounds(bounds + row * BOUNDS)
            lowest, rate = row_bounds[3], row_bounds[2]
            found = tl.load(state + NUM_LISTED)
            is_listed = found <= LIST
            length, in_list = tl.where(is_listed, found, vocab), tl.where(is_listed, found, 0)
            floor = _keep(
                p, least, tl.sum(mass, 0), tl.sum(tl.load(above + partial, mask=present, other=0), 0),
                tl.load(state + WANTED), counts + row * FINE, masses + row * FINE, kept + row * num_tiles,
                (row_logits, length, listed + row * LIST, in_list), chosen + row * LIST, row_bounds,
                TILE, CHUNK, LIST, FEW, FINE,
            )  # fmt: skip
            mass = tl.load(kept + partial, mask=present, other=0, cache_modifier=".cg")
            reference = tl.zeros((TILES,), tl.float32) + maximum
        token = _draw(
            row_logits, vocab, floor, least, lowest, rate, mass, reference, inverse_temperature,
            tl.load(seeds + slot), tl.load(sample_position + row), TILE, TILES,
        )  # fmt: skip
    hand_on(row, slot, token, is_valid, stops, last_token, finished, header, out_words, ring_stride, STOPS)
