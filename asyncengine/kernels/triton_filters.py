"""What top-k, top-p and min-p keep of a row of logits: device functions of the sampler's kernels.

Elements rank by logit, descending, then by index, and top-k and top-p keep a beginning of this order. Bins of equal
width in logits, pieces of the order, find the neighbourhood of its end; only the elements there, the candidates, are
looked at one by one. Masses are fixed point, multiples of 2^-40 of the largest one: their sums are exact in any order.
"""

# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

MAX_VOCAB = 1 << 20

INDEX_BITS = tl.constexpr(20)
LAST_INDEX = tl.constexpr(MAX_VOCAB - 1)
INF_KEY = tl.constexpr(0x7F800000)
NO_RANK = tl.constexpr(-0x7F800001 << 20)
UNIT = tl.constexpr(float(1 << 40))
SPAN = tl.constexpr(30.0)
"""Temperatures below the maximum at which a mass is certainly rounded to zero: e^-30 < 2^-41."""


# ---- one logit ----


@triton.jit
def rank_of(logit: tl.tensor, index: tl.tensor) -> tl.tensor:
    """Place in the ranking as one number: the higher logit, and of equals the lower index, is greater.

    NaN ranks with +inf, above all numbers.
    """
    logit = tl.where(logit < float("inf"), logit, float("inf"))
    bits = tl.where(logit == 0, 0.0, logit).to(tl.int32, bitcast=True)  # -0 equals +0
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (key.to(tl.int64) << INDEX_BITS) + (index ^ LAST_INDEX)


@triton.jit
def logit_of(rank: tl.tensor) -> tl.tensor:
    key = (rank >> INDEX_BITS).to(tl.int32)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def is_finite(rank: tl.tensor) -> tl.tensor:
    key = rank >> INDEX_BITS
    return (key < INF_KEY) & (key > -INF_KEY - 1)


@triton.jit
def inverse(temperature: tl.tensor) -> tl.tensor:
    return tl.minimum(1.0 / temperature, 1e38)  # finite: 0 times it is 0


@triton.jit
def mass_of(logit: tl.tensor, reference: tl.tensor, inverse_temperature: tl.tensor) -> tl.tensor:
    return (tl.exp((logit - reference) * inverse_temperature) * UNIT + 0.5).to(tl.int64)


@triton.jit
def bin_scale(maximum: tl.tensor, minimum: tl.tensor, temperature: tl.tensor, BINS: tl.constexpr) -> tl.tensor:
    return (BINS - 1) / tl.maximum(tl.minimum(maximum - minimum, SPAN * temperature), 1e-35)


@triton.jit
def bin_of(logit: tl.tensor, maximum: tl.tensor, scale: tl.tensor, BINS: tl.constexpr) -> tl.tensor:
    """Monotonic in the logit: the bins are pieces of the ranking, the highest first."""
    return tl.minimum((maximum - logit) * scale, BINS - 1).to(tl.int32)


@triton.jit
def weigh(logit: tl.tensor, scaling: tl.tensor, BINS: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Mass and bin. What has no mass is in bin BINS, behind all others."""
    maximum, inverse_temperature, scale = scaling
    mass = mass_of(logit, maximum, inverse_temperature)
    return mass, tl.where(mass > 0, bin_of(logit, maximum, scale, BINS), BINS)


@triton.jit
def load_parameters(
    slot: tl.tensor, temperature: tl.tensor, top_k: tl.tensor, top_p: tl.tensor, min_p: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Temperature, k, p and the least mass."""
    return (
        tl.load(temperature + slot),
        tl.load(top_k + slot),
        tl.load(top_p + slot),
        tl.load(min_p + slot) * UNIT,
    )


@triton.jit
def load_scaling(
    row: tl.tensor,
    num_tiles: tl.tensor,
    temperature: tl.tensor,
    tile_rank: tl.tensor,
    tile_min: tl.tensor,
    TILES: tl.constexpr,
    BINS: tl.constexpr,
) -> tuple[tl.tensor, tuple[tl.tensor, tl.tensor, tl.tensor]]:
    """Whether the row is valid, and how its logits become masses and bins."""
    tiles = tl.arange(0, TILES)
    ranks = tl.load(tile_rank + row * num_tiles + tiles, mask=tiles < num_tiles, other=NO_RANK)
    minima = tl.load(tile_min + row * num_tiles + tiles, mask=tiles < num_tiles, other=float("inf"))
    first = tl.max(ranks, 0)
    maximum = logit_of(first)
    scale = bin_scale(maximum, tl.min(minima, 0), temperature, BINS)
    return is_finite(first), (maximum, inverse(temperature), scale)


# ---- where a filter ends ----


@triton.jit
def share(top_p: tl.tensor, mass: tl.tensor) -> tl.tensor:
    """The mass that top-p keeps at least: the least integer ≥ top_p * mass, and at least 1."""
    wanted = top_p.to(tl.float64) * mass.to(tl.float64)
    down = wanted.to(tl.int64)
    return tl.maximum(tl.where(down.to(tl.float64) < wanted, down + 1, down), 1)


@triton.jit
def find_ends(
    counts: tl.tensor, masses: tl.tensor, vocab: tl.tensor, k: tl.tensor, p: tl.tensor, BINS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Bin in which top-k ends and count above it; first and last bin in which top-p can end, given where top-k may.

    A filter that drops nothing ends in bin BINS + 1, behind BINS, the bin of what has no mass.
    """
    bins = tl.arange(0, BINS)
    k_bin, above = tl.full((), BINS + 1, tl.int32), tl.full((), 0, tl.int32)
    if (k > 0) & (k < vocab):
        count = tl.load(counts + bins)
        if k < tl.sum(count, 0):
            k_bin = tl.sum((tl.cumsum(count, 0) < k).to(tl.int32), 0)
            above = tl.sum(tl.where(bins < k_bin, count, 0), 0)
    low, high = k_bin, k_bin
    if p < 1:
        mass = tl.load(masses + bins)
        upto = tl.cumsum(mass, 0)
        low = tl.sum((upto < share(p, tl.sum(tl.where(bins < k_bin, mass, 0), 0))).to(tl.int32), 0)
        high = tl.sum((upto < share(p, tl.sum(tl.where(bins <= k_bin, mass, 0), 0))).to(tl.int32), 0)
    return k_bin, above, low, high


@triton.jit
def load_candidates(
    start: tl.tensor, source: tl.tensor, scaling: tl.tensor, CHUNK: tl.constexpr, BINS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Index, rank, mass and bin of the candidates from ``start``.

    source: the row's logits, how many candidates there are, their indices, and how many indices there are: none if the
    list was too short, and every element is a candidate.
    """
    logits, length, listed, in_list = source
    place = start + tl.arange(0, CHUNK)
    index = tl.where(place < in_list, tl.load(listed + place, mask=place < in_list, other=0), place)
    logit = tl.load(logits + index, mask=place < length, other=float("-inf"))
    mass, bin = weigh(logit, scaling, BINS)
    return index, rank_of(logit, index), mass, bin


@triton.jit
def search(
    floor: tl.tensor,
    wanted: tl.tensor,
    first_bin: tl.tensor,
    last_bin: tl.tensor,
    source: tl.tensor,
    scaling: tl.tensor,
    BY_MASS: tl.constexpr,
    CHUNK: tl.constexpr,
    BINS: tl.constexpr,
) -> tl.tensor:
    """The highest rank from which upwards the candidates of these bins have the wanted count or mass.

    From ``floor`` upwards they have it.
    """
    WAYS: tl.constexpr = 16
    LAST: tl.constexpr = 0x7FFFFFFFFFFFFFFF
    # The ranks that occur narrow the search from 52 bits to what tells the neighbours of a bin apart.
    least, most = tl.full((CHUNK,), LAST, tl.int64), tl.full((CHUNK,), NO_RANK, tl.int64)
    for start in range(0, source[1], CHUNK):
        _, rank, _, bin = load_candidates(start, source, scaling, CHUNK, BINS)
        present = (bin >= first_bin) & (bin <= last_bin)
        least = tl.minimum(least, tl.where(present, rank, LAST))
        most = tl.maximum(most, tl.where(present, rank, NO_RANK))
    low, high = tl.maximum(tl.min(least, 0), floor), tl.max(most, 0)
    while low < high:
        stride = (high - low + WAYS - 1) // WAYS
        probes = low + stride * (1 + tl.arange(0, WAYS).to(tl.int64))
        reached = tl.zeros((WAYS,), tl.int64)
        for start in range(0, source[1], CHUNK):
            _, rank, mass, bin = load_candidates(start, source, scaling, CHUNK, BINS)
            if not BY_MASS:
                mass = tl.full((CHUNK,), 1, tl.int64)
            present = ((bin >= first_bin) & (bin <= last_bin))[:, None] & (rank[:, None] >= probes[None, :])
            reached += tl.sum(tl.where(present, mass[:, None], 0), 0)
        passed = tl.sum((reached >= wanted).to(tl.int64), 0)
        high = tl.minimum(high, low + stride * (passed + 1) - 1)
        low += stride * passed
    return low


@triton.jit
def mass_from(
    floor: tl.tensor,
    first_bin: tl.tensor,
    last_bin: tl.tensor,
    least_mass: tl.tensor,
    source: tl.tensor,
    scaling: tl.tensor,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    CHUNK: tl.constexpr,
    BINS: tl.constexpr,
) -> tl.tensor:
    """Mass, by tile, of the candidates of these bins from rank ``floor`` upwards whose mass is not below the least."""
    found = tl.zeros((TILES,), tl.int64)
    PART: tl.constexpr = CHUNK // 4  # times TILES elements are in registers
    for start in range(0, source[1], PART):
        index, rank, mass, bin = load_candidates(start, source, scaling, PART, BINS)
        kept = (bin >= first_bin) & (bin <= last_bin) & (rank >= floor) & (mass.to(tl.float32) >= least_mass)
        here = (index // TILE)[:, None] == tl.arange(0, TILES)[None, :]
        found += tl.sum(tl.where(here & kept[:, None], mass[:, None], 0), 0)
    return found


@triton.jit
def apply_filters(
    vocab: tl.tensor,
    k: tl.tensor,
    p: tl.tensor,
    least_mass: tl.tensor,
    counts: tl.tensor,
    masses: tl.tensor,
    source: tl.tensor,
    scaling: tl.tensor,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    CHUNK: tl.constexpr,
    BINS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The lowest rank that top-k and top-p keep, and the mass by tile of the candidates that they and min-p keep."""
    bins = tl.arange(0, BINS)
    k_bin, above, low, high = find_ends(counts, masses, vocab, k, p, BINS)
    floor = tl.full((), NO_RANK, tl.int64)
    if k_bin < BINS:
        floor = search(floor, k - above, k_bin, k_bin, source, scaling, False, CHUNK, BINS)
    if p < 1:
        mass = tl.load(masses + bins)
        total = tl.sum(tl.where(bins < k_bin, mass, 0), 0)
        if k_bin < BINS:
            total += tl.sum(mass_from(floor, k_bin, k_bin, 0.0, source, scaling, TILE, TILES, CHUNK, BINS), 0)
        wanted = share(p, total) - tl.sum(tl.where(bins < low, mass, 0), 0)
        floor = search(floor, wanted, low, high, source, scaling, True, CHUNK, BINS)
    return floor, mass_from(floor, low, BINS - 1, least_mass, source, scaling, TILE, TILES, CHUNK, BINS)
