"""Filters of a row of logits by top-k, top-p and min-p: device functions of the sampler's kernels.

Elements rank by logit, descending, then by index, and top-k and top-p keep a beginning of this order. Where it ends is
narrowed down in three steps: from counts of the row's elements by bins of equal width in logits, which each tile makes
before anything is known of the others (``count_bins``), follow bins in which the end certainly lies
(``find_bounds``); the elements of these, the candidates, are listed and binned more finely; and the few of one fine
bin are compared one by one (``select``). Masses are fixed point, multiples of 2^-40 of the largest one: their sums are
exact in any order.

Every test of an element against a bound is made of one product and a comparison, and every bin of a difference before
a product: whether a compiler contracts to fused multiply-add, it gets the same result in every kernel.
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
MAX_BIN_RATE = tl.constexpr(float(1 << 20))
BOUNDS = tl.constexpr(8)
"""float32 words of a row's bounds, which ``load_bounds`` names."""

# int32 words of a row's state.
IS_FILTERED = tl.constexpr(0)
WANTED = tl.constexpr(1)
"""count of candidates that top-k keeps, 0 if all"""
NUM_LISTED = tl.constexpr(2)
STATE = tl.constexpr(4)


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
def weight_of(logit: tl.tensor, reference: tl.tensor, inverse_temperature: tl.tensor) -> tl.tensor:
    """Share of the reference's mass."""
    return tl.exp((logit - reference) * inverse_temperature)


@triton.jit
def mass_of(weight: tl.tensor) -> tl.tensor:
    return (weight * UNIT + 0.5).to(tl.int64)


@triton.jit
def load_parameters(
    slot: tl.tensor, temperature: tl.tensor, top_k: tl.tensor, top_p: tl.tensor, min_p: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Temperature, k, p and the least share of the largest mass."""
    return (
        tl.load(temperature + slot),
        tl.load(top_k + slot),
        tl.load(top_p + slot),
        tl.load(min_p + slot),
    )


# ---- bins of a tile, and of a row ----


@triton.jit
def bin_grid(
    maximum: tl.tensor, minimum: tl.tensor, temperature: tl.tensor, BINS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return a grid of bins for logits of this range: the bins' width in temperatures, a power of two given by its
    exponent of a float32, and their number per logit.

    Bins begin at zero, so wider ones are made of whole narrower ones, whatever range these were chosen for. The first
    BINS - 1, from the maximum down, have all that has mass. |logit * rate| stays below 2^23: bin numbers are exact.
    """
    rate = tl.minimum(1.0 / temperature, MAX_BIN_RATE)
    span = tl.minimum(maximum - minimum, SPAN * temperature) / (BINS - 4)
    spacing = tl.maximum(tl.abs(maximum), tl.abs(minimum)) * (1.0 / (1 << 23))
    width = tl.maximum(tl.maximum(span, spacing) * rate, 1e-30)
    exponent = (width.to(tl.int32, bitcast=True) + 0x7FFFFF) >> 23
    return exponent, rate * ((254 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def count_bins(logit: tl.tensor, maximum: tl.tensor, rate: tl.tensor, BINS: tl.constexpr) -> tl.tensor:
    """Count the elements in each of the bins from the maximum's downwards and those above it, int32 [BINS].

    The last one takes all that is further below, which has no mass.
    """
    below = tl.floor(maximum * rate) - tl.floor(logit * rate)
    return tl.cumsum(tl.histogram(tl.minimum(below, BINS - 1).to(tl.int32), BINS), 0)


@triton.jit
def add_bins(
    ranks: tl.tensor,
    minima: tl.tensor,
    tile_bins: tl.tensor,
    num_tiles: tl.tensor,
    maximum: tl.tensor,
    exponent: tl.tensor,
    rate: tl.tensor,
    temperature: tl.tensor,
    BINS: tl.constexpr,
) -> tl.tensor:
    """The row's count_bins from those of its tiles. ranks and minima are addresses, since tiles come in parts."""
    PART: tl.constexpr = 16
    row_bin = tl.floor(maximum * rate).to(tl.int64) - tl.arange(0, BINS)
    counts = tl.zeros((BINS,), tl.int32)
    for start in range(0, num_tiles, PART):
        tile = start + tl.arange(0, PART)
        rank = tl.load(ranks + tile, mask=tile < num_tiles, other=NO_RANK, cache_modifier=".cg")
        there = is_finite(rank)
        highest = tl.where(there, logit_of(rank), 0.0)
        lowest = tl.load(minima + tile, mask=there, other=0.0, cache_modifier=".cg")
        tile_exponent, tile_rate = bin_grid(highest, lowest, temperature, BINS)
        # Bins of tiles have 25 bits: a shift by 31 leaves as much of one, its sign, as a longer one.
        shift = tl.minimum(exponent - tile_exponent, 31).to(tl.int64)
        last = tl.floor(highest * tile_rate).to(tl.int64)[:, None] - (row_bin[None, :] << shift[:, None])
        at = tile[:, None] * BINS + tl.minimum(last, BINS - 2)
        present = there[:, None] & (last >= 0)
        counts += tl.sum(tl.load(tile_bins + at, mask=present, other=0, cache_modifier=".cg"), 0)
    counts = tl.where(tl.arange(0, BINS) < BINS - 1, counts, 0)
    return tl.maximum(counts, tl.where(tl.arange(0, BINS) < BINS - 1, 0, tl.max(counts, 0)))


@triton.jit
def sum_bounds(
    upto: tl.tensor,
    maximum: tl.tensor,
    exponent: tl.tensor,
    rate: tl.tensor,
    temperature: tl.tensor,
    total: tl.tensor,
    BINS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The least and the greatest mass that the bins up to each can have, of ``total``, in units of the largest."""
    bins = tl.arange(0, BINS)
    count = (upto - tl.where(bins > 0, tl.gather(upto, tl.maximum(bins - 1, 0), 0), 0)).to(tl.float32)
    # The steepness of one temperature, unless that is below the temperature of the highest rate of bins.
    steepness = (exponent << 23).to(tl.float32, bitcast=True) * tl.maximum(temperature, 1.0 / MAX_BIN_RATE)
    steepness *= inverse(temperature)
    scaled = maximum * rate
    nearest = scaled - tl.floor(scaled) + bins.to(tl.float32) - 1.0
    slack = (tl.abs(scaled) + BINS) * (1.0 / (1 << 22))  # of the rounding of products with the rate
    least = count * tl.exp(-(nearest + 1.0 + slack) * steepness)
    most = count * tl.exp(-tl.maximum(nearest - slack, 0.0) * steepness)
    error = total * 1e-5  # of sums in float32
    low = tl.maximum(tl.cumsum(least, 0), total - (tl.cumsum(most, 0, reverse=True) - most))
    high = tl.minimum(tl.cumsum(most, 0), total - (tl.cumsum(least, 0, reverse=True) - least))
    return low - error, high + error


@triton.jit
def find_bounds(
    vocab: tl.tensor,
    num_tiles: tl.tensor,
    parameters: tl.tuple,
    ranks: tl.tensor,
    minima: tl.tensor,
    masses: tl.tensor,
    tile_bins: tl.tensor,
    bounds: tl.tensor,
    wanted: tl.tensor,
    TILES: tl.constexpr,
    BINS: tl.constexpr,
    FINE: tl.constexpr,
) -> tl.tensor:
    """Store a row's bounds, and how many of its candidates top-k keeps, 0 if that is all; from the row's tiles.

    Returns whether there is a filter to be applied: the row is valid, and k, p or min-p may drop something.
    """
    temperature, k, p, min_p = parameters
    tiles = tl.arange(0, TILES)
    present = tiles < num_tiles
    rank = tl.load(ranks + tiles, mask=present, other=NO_RANK, cache_modifier=".cg")
    first = tl.max(rank, 0)
    is_filtered = is_finite(first)
    if is_filtered:
        maximum, inverse_temperature = logit_of(first), inverse(temperature)
        minimum = tl.min(tl.load(minima + tiles, mask=present, other=float("inf"), cache_modifier=".cg"), 0)
        exponent, rate = bin_grid(maximum, minimum, temperature, BINS)
        bins = tl.arange(0, BINS)
        # The first and the last bin of the candidates. Bins behind all others mean that there are none.
        begin, end, taken = tl.full((), BINS, tl.int32), tl.full((), BINS, tl.int32), tl.full((), 0, tl.int32)
        if ((k > 0) & (k < vocab)) | (p < 1):
            upto = add_bins(ranks, minima, tile_bins, num_tiles, maximum, exponent, rate, temperature, BINS)
            is_cut = (k > 0) & (k < tl.max(upto, 0))
            if is_cut:
                end = tl.sum((upto < k).to(tl.int32), 0)
                begin = end
            if p < 1:
                part = tl.load(masses + tiles, mask=present, other=0.0, cache_modifier=".cg")
                reference = tl.where(is_finite(rank), logit_of(rank), maximum)
                total = tl.sum(part * tl.exp((reference - maximum) * inverse_temperature), 0)
                low, high = sum_bounds(upto, maximum, exponent, rate, temperature, total, BINS)
                end = tl.minimum(end, BINS - 2)
                least = tl.where(is_cut, tl.sum(tl.where(bins == end - 1, low, 0.0), 0), total * (1 - 1e-5))
                most = tl.where(is_cut, tl.sum(tl.where(bins == end, high, 0.0), 0), total * (1 + 1e-5))
                begin = tl.minimum(tl.sum((high < p * least).to(tl.int32), 0), end)
                last = tl.minimum(tl.sum((low < p * most).to(tl.int32), 0), end)
                end = tl.where(is_cut, end, last)
            taken = tl.where(is_cut, k - tl.sum(tl.where(bins == begin - 1, upto, 0), 0), 0)
        scaled = maximum * rate
        lower, upper = tl.floor(scaled) - end, tl.floor(scaled) - begin + 1
        if begin == BINS:
            # Min-p alone, whose end is known: what is two bins below it need not even be read.
            lower = scaled + tl.log(tl.maximum(min_p, 1e-37)) * rate / inverse_temperature - tl.abs(scaled) * 1e-6 - 2.0
            upper = lower
        tl.store(bounds, maximum)
        tl.store(bounds + 1, inverse_temperature)
        tl.store(bounds + 2, rate)
        tl.store(bounds + 3, lower)
        tl.store(bounds + 4, upper)
        tl.store(bounds + 5, tl.minimum(maximum, upper / rate))
        tl.store(bounds + 6, rate * FINE / (upper - lower + 1.0))
        tl.store(wanted, taken)
        is_filtered = (begin < BINS) | (min_p > 0)
    return is_filtered


# ---- candidates ----


@triton.jit
def load_bounds(
    bounds: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Maximum, inverse temperature, bins per logit; in bins, what is candidate or above, and what is above; where
    fine bins begin, and their number per logit."""
    return (
        tl.load(bounds),
        tl.load(bounds + 1),
        tl.load(bounds + 2),
        tl.load(bounds + 3),
        tl.load(bounds + 4),
        tl.load(bounds + 5),
        tl.load(bounds + 6),
    )


@triton.jit
def weigh(logit: tl.tensor, bounds: tl.tuple, FINE: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Share of the largest mass, whether the element is above all candidates, and a candidate's fine bin, or FINE."""
    maximum, inverse_temperature, rate, lower, upper, origin, fine_rate = bounds
    weight = weight_of(logit, maximum, inverse_temperature)
    scaled = logit * rate
    fine = tl.maximum(tl.minimum((origin - logit) * fine_rate, FINE - 1.0), 0.0).to(tl.int32)
    is_candidate = (scaled >= lower) & (scaled < upper) & (weight >= 0.5 / UNIT)
    return weight, scaled >= upper, tl.where(is_candidate, fine, FINE)


@triton.jit
def share(top_p: tl.tensor, mass: tl.tensor) -> tl.tensor:
    """The mass that top-p keeps at least: the least integer ≥ top_p * mass, and at least 1."""
    wanted = top_p.to(tl.float64) * mass.to(tl.float64)
    down = wanted.to(tl.int64)
    return tl.maximum(tl.where(down.to(tl.float64) < wanted, down + 1, down), 1)


@triton.jit
def load_candidates(
    start: tl.tensor,
    source: tl.tuple,
    bounds: tl.tuple,
    CHUNK: tl.constexpr,
    FINE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Index, rank, share of the largest mass and fine bin of the source's elements from ``start``.

    source: the row's logits, how many elements there are, their indices, and how many indices there are: none if a
    list was too short, and the whole row is the source.
    """
    logits, length, listed, in_list = source
    place = start + tl.arange(0, CHUNK)
    index = tl.where(place < in_list, tl.load(listed + place, mask=place < in_list, other=0), place)
    logit = tl.load(logits + index, mask=place < length, other=float("-inf"))
    weight, _, fine = weigh(logit, bounds, FINE)
    return index, rank_of(logit, index), weight, fine


@triton.jit
def search(
    wanted: tl.tensor,
    bin: tl.tensor,
    source: tl.tuple,
    bounds: tl.tuple,
    by_mass: tl.tensor,
    CHUNK: tl.constexpr,
    FINE: tl.constexpr,
) -> tl.tensor:
    """The highest rank from which upwards the elements of the fine bin have the wanted mass or count.

    If all of them do not, the lowest.
    """
    WAYS: tl.constexpr = 16
    LAST: tl.constexpr = 0x7FFFFFFFFFFFFFFF
    # The ranks that occur narrow the search from 52 bits to what tells the neighbours of a bin apart.
    least, most = tl.full((CHUNK,), LAST, tl.int64), tl.full((CHUNK,), NO_RANK, tl.int64)
    for start in range(0, source[1], CHUNK):
        _, rank, _, fine = load_candidates(start, source, bounds, CHUNK, FINE)
        least = tl.minimum(least, tl.where(fine == bin, rank, LAST))
        most = tl.maximum(most, tl.where(fine == bin, rank, NO_RANK))
    low, high = tl.min(least, 0), tl.max(most, 0)
    while low < high:
        stride = (high - low + WAYS - 1) // WAYS
        probes = low + stride * (1 + tl.arange(0, WAYS).to(tl.int64))
        reached = tl.zeros((WAYS,), tl.int64)
        for start in range(0, source[1], CHUNK):
            _, rank, weight, fine = load_candidates(start, source, bounds, CHUNK, FINE)
            mass = tl.where(by_mass, mass_of(weight), 1)
            present = (fine == bin)[:, None] & (rank[:, None] >= probes[None, :])
            reached += tl.sum(tl.where(present, mass[:, None], 0), 0)
        passed = tl.sum((reached >= wanted).to(tl.int64), 0)
        high = tl.minimum(high, low + stride * (passed + 1) - 1)
        low += stride * passed
    return low


@triton.jit
def compare_all(
    wanted: tl.tensor,
    bin: tl.tensor,
    source: tl.tuple,
    bounds: tl.tuple,
    by_mass: tl.tensor,
    FEW: tl.constexpr,
    FINE: tl.constexpr,
) -> tl.tensor:
    """Find the rank that ``search`` finds, from at most FEW elements, each compared with each: no round trips to the L2
    cache."""
    _, rank, weight, fine = load_candidates(0, source, bounds, FEW, FINE)
    mass = tl.where(fine == bin, tl.where(by_mass, mass_of(weight), 1), 0)
    reached = tl.sum(tl.where(rank[None, :] >= rank[:, None], mass[None, :], 0), 1)
    lowest = tl.min(tl.where(fine == bin, rank, 0x7FFFFFFFFFFFFFFF), 0)
    return tl.maximum(tl.max(tl.where((fine == bin) & (reached >= wanted), rank, NO_RANK), 0), lowest)


@triton.jit
def select(
    wanted: tl.tensor,
    bin: tl.tensor,
    source: tl.tuple,
    chosen: tl.tensor,
    bounds: tl.tuple,
    by_mass: tl.tensor,
    CHUNK: tl.constexpr,
    LIST: tl.constexpr,
    FEW: tl.constexpr,
    FINE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Find the rank that ``search`` finds, and the mass of the bin's elements from it upwards. ``chosen`` lists the
    bin."""
    found = tl.full((), 0, tl.int32)
    for start in range(0, source[1], CHUNK):
        index, _, _, fine = load_candidates(start, source, bounds, CHUNK, FINE)
        here = (fine == bin).to(tl.int32)
        place = found + tl.cumsum(here, 0) - 1
        tl.store(chosen + place, index, mask=(here > 0) & (place < LIST))
        found += tl.sum(here, 0)
    tl.debug_barrier()
    is_listed = found <= LIST
    bin_source = (source[0], tl.where(is_listed, found, source[1]), chosen, tl.where(is_listed, found, source[3]))
    if found <= FEW:
        floor = compare_all(wanted, bin, bin_source, bounds, by_mass, FEW, FINE)
    else:
        floor = search(wanted, bin, bin_source, bounds, by_mass, CHUNK // 4, FINE)
    mass_above = tl.zeros((CHUNK,), tl.int64)
    for start in range(0, bin_source[1], CHUNK):
        _, rank, weight, fine = load_candidates(start, bin_source, bounds, CHUNK, FINE)
        mass_above += tl.where((fine == bin) & (rank >= floor), mass_of(weight), 0)
    return floor, tl.sum(mass_above, 0)
