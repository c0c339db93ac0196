"""Sampling on the GPU: tokens of up to R rows of logits, drawn as ``csrc/platform/cpu/sampler.h`` says.

Like the CPU's, the draw is inverse cumulative mass in index order from one uniform number, Philox4x32-10 keyed by the
seed at counter ``position``: one random number per row is cheaper than a noise per logit, and both machines pick the
same token from the same logits unless the number falls within rounding of an edge. Masses are fixed point, multiples
of 2^-40 of the largest one, and what is summed in float32 is summed in an order of its own, so a token depends on
nothing but the row's logits, its parameters, its seed and its position.

Greedy sampling is one launch that reads the logits once; the program of a row that is done last ends the row. Where
the head has left ranks in place of logits, it is one that reads those. Any other batch takes three. ``_tiles_kernel``
reads all logits and leaves a summary of each tile, enough for greedy and plain temperature; of rows with a filter it
counts elements by bins, and the last program bounds where the filter ends. ``_collect_kernel`` reads the tiles that
have something to be kept in them, adds up what is above the bounds and lists what is between them. ``finish_kernel``
finds the exact end among those listed, draws, and hands the token on.
"""

# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncengine.kernels.cuda.gpu import describe
from asyncengine.kernels.cuda.launch.compiling import kernel
from asyncengine.kernels.cuda.launch.programmatic import launch_options, wait
from asyncengine.kernels.cuda.sampling.filters import (
    BOUNDS,
    IS_FILTERED,
    LAST_INDEX,
    MAX_VOCAB,
    NO_RANK,
    NUM_LISTED,
    STATE,
    WANTED,
    bin_grid,
    count_bins,
    find_bounds,
    inverse,
    is_finite,
    load_bounds,
    load_parameters,
    logit_of,
    mass_of,
    rank_of,
    weigh,
)
from asyncengine.kernels.cuda.sampling.finish import arrive, finish_kernel, hand_on, token_of
from asyncengine.kernels.cuda.step.layout import MAX_STOPS
from asyncengine.kernels.cuda.step.tensors import DeviceStep

_TILE = 4096
_BINS = 64
"""More of them make fewer candidates, but each costs every element of a filtered row a look in the first pass."""
_FINE = 1024
_LIST = 16384
"""Candidates that a row can list. If there are more (very many equal logits), its end is searched in the whole row."""
_CHUNK = 1024
_FEW = 64
_ROWS = 256
_PROGRAMS = 3
"""Programs of the second pass on each multiprocessor: as many as an H200 runs at once."""
_COLLECT_REGISTERS = 80
_FINISH_REGISTERS = 128
"""Registers per thread, so that three and two programs fit on a multiprocessor; spilled values are used once."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks by which greedy sampling chooses a step's tokens."""

    tiles: Tensor
    """int64 [R, tiles]: the greatest ``rank_of`` a logit in each tile of a row"""


# ---- passes over the logits, split over tiles ----


@kernel
def _tiles_kernel(
    logits: tl.tensor,
    row_stride: tl.tensor,
    vocab: tl.tensor,
    sample_slot: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    stops: tl.tensor,
    last_token: tl.tensor,
    finished: tl.tensor,
    arrivals: tl.tensor,
    tile_rank: tl.tensor,
    tile_min: tl.tensor,
    tile_mass: tl.tensor,
    tile_bins: tl.tensor,
    bounds: tl.tensor,
    row_state: tl.tensor,
    counts: tl.tensor,
    masses: tl.tensor,
    header: tl.tensor,
    out_words: tl.tensor,
    ring_stride: tl.tensor,
    ARGMAX: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    BINS: tl.constexpr,
    FINE: tl.constexpr,
    STOPS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Store for each tile the first rank; with a temperature, the mass relative to its maximum; with a filter, the
    finite minimum and counts by bins.

    Also clears what the row's other passes add to.
    """
    wait(PDL)
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    num_tiles = tl.num_programs(0)
    slot = tl.load(sample_slot + row)
    if not ARGMAX:
        state = row_state + row * STATE
        if tile == 0:
            tl.store(state + IS_FILTERED, 0)
    if slot < 0:
        return
    index = tile * TILE + tl.arange(0, TILE)
    logit = tl.load(logits + row * row_stride + index, mask=index < vocab, other=float("-inf"))
    logit = tl.where(logit < float("inf"), logit, float("inf"))  # NaN too
    maximum = tl.max(logit, 0)
    out = row * num_tiles + tile
    tl.store(tile_rank + out, rank_of(maximum, tl.min(tl.where(logit == maximum, index, LAST_INDEX), 0)))
    is_last = False
    if ARGMAX:
        is_last = arrive(arrivals + row, num_tiles)
    else:
        heat, k, p, least = load_parameters(slot, temperature, top_k, top_p, min_p)
        if heat > 0:
            reference = tl.where((maximum > float("-inf")) & (maximum < float("inf")), maximum, 0.0)
            tl.store(tile_mass + out, tl.sum(tl.exp((logit - reference) * inverse(heat)), 0))
            by_bins = ((k > 0) & (k < vocab)) | (p < 1)
            if by_bins | (least > 0):
                minimum = tl.min(tl.where(logit > float("-inf"), logit, float("inf")), 0)
                tl.store(tile_min + out, minimum)
                if by_bins & (maximum > float("-inf")) & (maximum < float("inf")):
                    _, rate = bin_grid(maximum, minimum, heat, BINS)
                    tl.store(tile_bins + out * BINS + tl.arange(0, BINS), count_bins(logit, maximum, rate, BINS))
                if tile == 0:
                    fine = tl.arange(0, FINE)
                    tl.store(counts + row * FINE + fine, tl.zeros((FINE,), tl.int32))
                    tl.store(masses + row * FINE + fine, tl.zeros((FINE,), tl.int64))
                    tl.store(state + NUM_LISTED, 0)
                is_last = arrive(arrivals + row, num_tiles)
    if is_last:
        first_tile = row * num_tiles
        if ARGMAX:
            tiles = tl.arange(0, TILES)
            ranks = tl.load(tile_rank + first_tile + tiles, mask=tiles < num_tiles, other=NO_RANK, cache_modifier=".cg")
            first = tl.max(ranks, 0)
            hand_on(
                row, slot, token_of(first), is_finite(first), stops, last_token, finished, header, out_words,
                ring_stride, STOPS,
            )  # fmt: skip
        else:
            is_filtered = find_bounds(
                vocab, num_tiles, load_parameters(slot, temperature, top_k, top_p, min_p), tile_rank + first_tile,
                tile_min + first_tile, tile_mass + first_tile, tile_bins + first_tile * BINS,
                bounds + row * BOUNDS, state + WANTED, TILES, BINS, FINE,
            )  # fmt: skip
            tl.store(state + IS_FILTERED, is_filtered.to(tl.int32))


@triton.jit
def _list_candidates(
    begin: tl.tensor,
    logits: tl.tensor,
    vocab: tl.tensor,
    bounds: tl.tuple,
    counts: tl.tensor,
    masses: tl.tensor,
    listed: tl.tensor,
    place: tl.tensor,
    TILE: tl.constexpr,
    LIST: tl.constexpr,
    FINE: tl.constexpr,
) -> None:
    """Bin the candidates of a tile and list them from ``place``.

    They are loaded again, from the L1 cache, and in parts: in registers, they would halve the programs that fit.
    """
    PART: tl.constexpr = TILE // 4
    for part in range(0, TILE, PART):
        index = begin + part + tl.arange(0, PART)
        logit = tl.load(logits + index, mask=index < vocab, other=float("-inf"))
        weight, _, fine = weigh(logit, bounds, FINE)
        is_candidate = fine < FINE
        one = is_candidate.to(tl.int32)
        tl.atomic_add(counts + fine, one, mask=is_candidate, sem="relaxed")
        tl.atomic_add(masses + fine, mass_of(weight), mask=is_candidate, sem="relaxed")
        # Tiles append in any order: nothing that is made of the list depends on it.
        at = place + tl.cumsum(one, 0) - 1
        tl.store(listed + at, index, mask=is_candidate & (at < LIST))
        place += tl.sum(one, 0)


@triton.jit
def _collect_tile(
    row: tl.tensor,
    tile: tl.tensor,
    logits: tl.tensor,
    row_stride: tl.tensor,
    vocab: tl.tensor,
    num_tiles: tl.tensor,
    least: tl.tensor,
    tile_rank: tl.tensor,
    bounds: tl.tensor,
    row_state: tl.tensor,
    counts: tl.tensor,
    masses: tl.tensor,
    above: tl.tensor,
    kept: tl.tensor,
    listed: tl.tensor,
    TILE: tl.constexpr,
    LIST: tl.constexpr,
    FINE: tl.constexpr,
) -> None:
    row_bounds = load_bounds(bounds + row * BOUNDS)
    out = row * num_tiles + tile
    highest = logit_of(tl.load(tile_rank + out))
    if highest * row_bounds[2] < row_bounds[3]:  # all of the tile is dropped
        tl.store(above + out, tl.zeros((), tl.int64))
        tl.store(kept + out, tl.zeros((), tl.int64))
    else:
        index = tile * TILE + tl.arange(0, TILE)
        logit = tl.load(logits + row * row_stride + index, mask=index < vocab, other=float("-inf"))
        weight, is_above, fine = weigh(logit, row_bounds, FINE)
        mass = mass_of(tl.where(is_above, weight, 0.0))
        mass_above = tl.sum(mass, 0)
        mass_kept = mass_above
        if least > 0:
            mass_kept = tl.sum(tl.where(weight >= least, mass, 0), 0)
        tl.store(above + out, mass_above)
        tl.store(kept + out, mass_kept)
        found = tl.sum((fine < FINE).to(tl.int32), 0)
        if found > 0:
            place = tl.atomic_add(row_state + row * STATE + NUM_LISTED, found, sem="relaxed")
            _list_candidates(
                tile * TILE, logits + row * row_stride, vocab, row_bounds, counts + row * FINE, masses + row * FINE,
                listed + row * LIST, place, TILE, LIST, FINE,
            )  # fmt: skip


@kernel(do_not_specialize=["rows"])
def _collect_kernel(
    logits: tl.tensor,
    row_stride: tl.tensor,
    vocab: tl.tensor,
    rows: tl.tensor,
    num_tiles: tl.tensor,
    sample_slot: tl.tensor,
    min_p: tl.tensor,
    tile_rank: tl.tensor,
    bounds: tl.tensor,
    row_state: tl.tensor,
    counts: tl.tensor,
    masses: tl.tensor,
    above: tl.tensor,
    kept: tl.tensor,
    listed: tl.tensor,
    TILE: tl.constexpr,
    LIST: tl.constexpr,
    FINE: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Store for each tile of a filtered row the mass above the candidates, the mass of it that min-p leaves, and the
    candidates.

    The programs share the tiles of filtered rows, so a batch without such rows costs next to nothing.
    """
    wait(PDL)
    for first_row in range(0, rows, ROWS):
        row = first_row + tl.arange(0, ROWS)
        flags = tl.load(row_state + row * STATE + IS_FILTERED, mask=row < rows, other=0)
        upto = tl.cumsum(flags, 0)
        units = tl.sum(flags, 0) * num_tiles
        for unit in range(tl.program_id(0), units, tl.num_programs(0)):
            # Backwards: what was read last is likely to be in the L2 cache still.
            place = units - 1 - unit
            chosen = (first_row + tl.sum((upto <= place // num_tiles).to(tl.int32), 0)).to(tl.int64)
            least = tl.load(min_p + tl.load(sample_slot + chosen))
            _collect_tile(
                chosen, place % num_tiles, logits, row_stride, vocab, num_tiles, least, tile_rank, bounds,
                row_state, counts, masses, above, kept, listed, TILE, LIST, FINE,
            )  # fmt: skip


# ---- ranks that the head has left ----


@kernel
def _first_kernel(
    ranks: tl.tensor,
    num_tiles: tl.tensor,
    sample_slot: tl.tensor,
    stops: tl.tensor,
    last_token: tl.tensor,
    finished: tl.tensor,
    header: tl.tensor,
    out_words: tl.tensor,
    ring_stride: tl.tensor,
    TILES: tl.constexpr,
    STOPS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Store for each row the token of the greatest of its ranks, which are int64 [rows, tiles]."""
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(sample_slot + row)
    if slot < 0:
        return
    tiles = tl.arange(0, TILES)
    first = tl.max(tl.load(ranks + row * num_tiles + tiles, mask=tiles < num_tiles, other=NO_RANK), 0)
    hand_on(
        row, slot, token_of(first), is_finite(first), stops, last_token, finished, header, out_words, ring_stride,
        STOPS,
    )  # fmt: skip


# ---- launches ----


def sample(
    logits: Tensor | Ranks,
    step: DeviceStep,
    header: Tensor,
    out_words: Tensor,
    *,
    needs: int,
    pdl: bool = False,
) -> None:
    """Draw a token for each row s with a slot = step.sample_slot[s] ≥ 0 from logits float32 [R, V].

    Temperature 0 takes the maximum, the lowest index of equals. Otherwise temperature, then top-k, top-p and min-p in
    this order, each on what the one before left; equal logits rank by index, so top-k keeps exactly k. A logit of -inf
    has no mass. The token is -1 if there is NaN or +inf among the logits or none is finite; the slot is then finished,
    and keeps its last token. Rows without a slot read and write nothing.

    A token goes to last_token[slot], and sets finished[slot] if it is among stops[slot]. A row whose slot was finished
    before gives -1 and leaves the slot alone. Either way the word (header[0] << 32) | (token & 0xffffffff) is stored,
    once and whole, at out_words[header[1], s]. header is int64 [2]: number of the step, and where in the ring its
    words go. out_words is int64 [ring, at least R], which may be host memory mapped into the device.

    needs: bits of _core.Need, those that rows may have (not checked). With 0 the temperatures of all rows are 0, and
    the parameters are not looked at; only then ranks do in place of the logits.
    """
    if isinstance(logits, Ranks):
        if needs:
            raise ValueError("ranks are for greedy sampling alone")
        _sample_first(logits.tiles, step, header, out_words, pdl)
        return
    if logits.dtype != torch.float32 or logits.dim() != 2 or logits.stride(1) != 1:
        raise ValueError(
            f"logits must be float32 [rows, vocabulary] with contiguous rows, "
            f"got {logits.dtype} {list(logits.shape)} with strides {logits.stride()}"
        )
    rows, vocab = logits.shape
    if not 0 < vocab <= MAX_VOCAB:
        raise ValueError(f"the vocabulary must have 1 to {MAX_VOCAB} tokens, got {vocab}")
    _check(rows, step, header, out_words)
    num_tiles = triton.cdiv(vocab, _TILE)
    tiles = max(16, triton.next_power_of_2(num_tiles))
    slots = step.slots

    def scratch(width: int, dtype: torch.dtype) -> Tensor:
        return torch.empty((rows, width if needs else 1), dtype=dtype, device=logits.device)

    tile_rank = torch.empty((rows, num_tiles), dtype=torch.int64, device=logits.device)
    tile_min, tile_mass = scratch(num_tiles, torch.float32), scratch(num_tiles, torch.float32)
    tile_bins = scratch(num_tiles * _BINS, torch.int32)
    bounds, row_state = scratch(BOUNDS.value, torch.float32), scratch(STATE.value, torch.int32)
    counts, masses = scratch(_FINE, torch.int32), scratch(_FINE, torch.int64)
    _tiles_kernel[(num_tiles, rows)](
        logits, logits.stride(0), vocab, step.sample_slot, slots.temperature, slots.top_k, slots.top_p, slots.min_p,
        slots.stops, slots.last_token, slots.finished, step.sample_arrivals,
        tile_rank, tile_min, tile_mass, tile_bins, bounds, row_state, counts, masses,
        header, out_words, out_words.stride(0),
        ARGMAX=needs == 0, TILE=_TILE, TILES=tiles, BINS=_BINS, FINE=_FINE, STOPS=MAX_STOPS,
        num_warps=8, **launch_options(pdl),
    )  # fmt: skip
    if not needs:
        return
    above, kept = scratch(num_tiles, torch.int64), scratch(num_tiles, torch.int64)
    listed, chosen = scratch(_LIST, torch.int32), scratch(_LIST, torch.int32)
    programs = min(rows * num_tiles, _PROGRAMS * describe(logits.device).multiprocessors)
    _collect_kernel[(programs,)](
        logits, logits.stride(0), vocab, rows, num_tiles, step.sample_slot, slots.min_p,
        tile_rank, bounds, row_state, counts, masses, above, kept, listed,
        TILE=_TILE, LIST=_LIST, FINE=_FINE, ROWS=_ROWS, num_warps=8, maxnreg=_COLLECT_REGISTERS, **launch_options(pdl),
    )  # fmt: skip
    finish_kernel[(rows,)](
        logits, logits.stride(0), vocab, num_tiles, step.sample_slot, step.sample_position, slots.temperature,
        slots.top_k, slots.top_p, slots.min_p, slots.seed, slots.stops, slots.last_token, slots.finished,
        tile_rank, tile_mass, bounds, row_state, counts, masses, above, kept, listed, chosen,
        header, out_words, out_words.stride(0),
        TILE=_TILE, TILES=tiles, CHUNK=_CHUNK, LIST=_LIST, FEW=_FEW, FINE=_FINE, STOPS=MAX_STOPS,
        num_warps=8, maxnreg=_FINISH_REGISTERS, **launch_options(pdl),
    )  # fmt: skip


def _sample_first(ranks: Tensor, step: DeviceStep, header: Tensor, out_words: Tensor, pdl: bool) -> None:
    if ranks.dtype != torch.int64 or ranks.dim() != 2 or not ranks.is_contiguous():
        raise ValueError(f"ranks must be contiguous int64 [rows, tiles], got {ranks.dtype} {list(ranks.shape)}")
    rows, num_tiles = ranks.shape
    _check(rows, step, header, out_words)
    slots = step.slots
    _first_kernel[(rows,)](
        ranks, num_tiles, step.sample_slot, slots.stops, slots.last_token, slots.finished,
        header, out_words, out_words.stride(0),
        TILES=max(16, triton.next_power_of_2(num_tiles)), STOPS=MAX_STOPS, num_warps=8, **launch_options(pdl),
    )  # fmt: skip


def _check(rows: int, step: DeviceStep, header: Tensor, out_words: Tensor) -> None:
    if len(step.sample_slot) < rows:
        raise ValueError(f"{rows} rows of logits, but the step samples {len(step.sample_slot)}")
    if header.dtype != torch.int64 or header.shape != (2,):
        raise ValueError(f"header must be int64 [2], got {header.dtype} {list(header.shape)}")
    if out_words.dtype != torch.int64 or out_words.dim() != 2 or out_words.shape[1] < rows:
        raise ValueError(f"out_words must be int64 [ring, at least {rows}], got {list(out_words.shape)}")
