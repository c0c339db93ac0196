"""Log probabilities as records: of the chosen token with its rank, of the most probable ones and of named ones.

One launch, after the sampler: each program leaves of its tile of a row what the last program of the row merges.
``csrc/platform/cpu/logprobs.h`` writes the same record on the CPU.

The k most probable tokens are found in two steps. A row is cut into groups of neighbouring tokens, and each tile leaves
the maximum of each of its groups. The k groups that rank first by their maxima have the k most probable tokens: a token
in another group has k tokens before it, the maxima of these. So of a row the last program looks at k groups alone.
"""

# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncengine._core import STEP_INPUT_LAYOUT, EntryKind, Need, RecordKind
from asyncengine.kernels.cuda.launch.compiling import kernel
from asyncengine.kernels.cuda.launch.programmatic import launch_options, wait
from asyncengine.kernels.cuda.sampling.edits import FLAGS, PARAMETERS, PROCESSED, SCORE_ONLY, keeps_raw, of_kind
from asyncengine.kernels.cuda.sampling.features import KINDS, SlotFeatures
from asyncengine.kernels.cuda.sampling.filters import LAST_INDEX, NO_RANK, inverse, rank_of
from asyncengine.kernels.cuda.sampling.finish import arrive, token_of
from asyncengine.kernels.cuda.sampling.results import END_OF_RECORDS, store_word, store_words
from asyncengine.kernels.cuda.step.ingest import StepSource
from asyncengine.kernels.cuda.step.tensors import DeviceStep

_LOGPROBS = tl.constexpr(int(Need.logprobs))
_NAMED = tl.constexpr(int(EntryKind.named_tokens))
_KIND = tl.constexpr(int(RecordKind.logprobs))
_TOP_LOGPROBS = tl.constexpr(STEP_INPUT_LAYOUT["parameter.top_logprobs"])
_TILE = 4096


@triton.jit
def _first(ranks: tl.tensor, count: tl.tensor, begin: tl.constexpr, SIZE: tl.constexpr) -> tl.tensor:
    """Indices of the first ``count`` of ranks that differ, in order, at the places from ``begin`` of int32 [SIZE]."""
    place = tl.arange(0, SIZE)
    found = tl.full([SIZE], LAST_INDEX, tl.int32)
    for i in range(0, count):
        best = tl.max(ranks)
        found = tl.where(place == begin + i, token_of(best), found)
        ranks = tl.where(ranks == best, NO_RANK, ranks)
    return found


@triton.jit
def _store_logprobs(
    logits: tl.tensor,
    vocab: tl.tensor,
    inverse_heat: tl.tensor,
    chosen: tl.tensor,
    top: tl.tensor,
    named: tl.tensor,
    num_named: tl.tensor,
    num_tiles: tl.tensor,
    tile_max: tl.tensor,
    tile_sum: tl.tensor,
    tile_greater: tl.tensor,
    group_max: tl.tensor,
    begin: tl.tensor,
    room: tl.tensor,
    header: tl.tensor,
    out_words: tl.tensor,
    ring_stride: tl.tensor,
    TILES: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP: tl.constexpr,
    PAIRS: tl.constexpr,
) -> None:
    """The record of a row whose tiles are all there."""
    tiles = tl.arange(0, TILES)
    present = tiles < num_tiles
    maxima = tl.load(tile_max + tiles, mask=present, other=float("-inf"), cache_modifier=".cg")
    sums = tl.load(tile_sum + tiles, mask=present, other=0.0, cache_modifier=".cg")
    rank = 1 + tl.sum(tl.load(tile_greater + tiles, mask=present, other=0, cache_modifier=".cg"), 0)
    highest = tl.max(maxima, 0)
    there = maxima > float("-inf")
    total = tl.sum(tl.where(there, sums * tl.exp((maxima - highest) * inverse_heat), 0.0), 0)

    group = tl.arange(0, GROUPS)
    present = (group * GROUP < vocab) & (top > 0)
    peaks = tl.load(group_max + group, mask=present, other=float("-inf"), cache_modifier=".cg")
    groups = _first(tl.where(present, rank_of(peaks, group), NO_RANK), top, 0, TOP)
    index = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    candidate = (tl.arange(0, TOP)[:, None] < top) & (index < vocab)
    logit = tl.load(logits + index, mask=candidate, other=float("-inf"))
    token = _first(tl.where(candidate, rank_of(logit, index), NO_RANK), top, 1, PAIRS)
    pair = tl.arange(0, PAIRS)
    token = tl.where(pair == 0, chosen, token)
    is_named = (pair > top) & (pair <= top + num_named)
    token = tl.where(is_named, tl.load(named + pair - 1 - top, mask=is_named, other=0), token)
    logit = tl.load(logits + token, mask=(token >= 0) & (token < vocab), other=float("-inf"))
    value = (logit - highest) * inverse_heat - tl.log(total)
    payload = tl.interleave(token, value.to(tl.int32, bitcast=True))

    count = 2 * (1 + top + num_named)
    if room >= 2 + count:
        store_word(header, out_words, ring_stride, begin, 1 + count + (_KIND << 24))
        store_word(header, out_words, ring_stride, begin + 1, rank)
        word = tl.arange(0, 2 * PAIRS)
        store_words(header, out_words, ring_stride, begin + 2 + word, payload, word < count)
        if room > 2 + count:
            store_word(header, out_words, ring_stride, begin + 2 + count, END_OF_RECORDS)


@kernel
def _logprobs_kernel(
    logits: tl.tensor,
    row_stride: tl.tensor,
    vocab: tl.tensor,
    raw: tl.tensor,
    sample_slot: tl.tensor,
    sample_records: tl.tensor,
    arrivals: tl.tensor,
    slot_needs: tl.tensor,
    temperature: tl.tensor,
    last_token: tl.tensor,
    words: tl.tensor,
    width: tl.tensor,
    places: tl.tensor,
    sample_position: tl.tensor,
    history: tl.tensor,
    max_len: tl.tensor,
    tile_max: tl.tensor,
    tile_sum: tl.tensor,
    tile_greater: tl.tensor,
    group_max: tl.tensor,
    header: tl.tensor,
    out_words: tl.tensor,
    ring_stride: tl.tensor,
    records_begin: tl.tensor,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP: tl.constexpr,
    PAIRS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    wait(PDL)
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    num_tiles = tl.num_programs(0)
    slot = tl.load(sample_slot + row).to(tl.int64)
    if slot == -1:
        return
    is_scored = slot < 0
    slot = tl.where(is_scored, -2 - slot, slot)
    needs = tl.load(slot_needs + slot)
    if (needs & _LOGPROBS) == 0:
        return
    words += slot * width
    places += slot * 2 * KINDS
    parameters, _ = of_kind(words, places, PARAMETERS)
    flags = tl.load(parameters + FLAGS)
    place, room = records_begin + tl.load(sample_records + 2 * row), tl.load(sample_records + 2 * row + 1)
    if ((flags & SCORE_ONLY) != 0) & (is_scored == 0):
        if (tile == 0) & (room > 0):
            store_word(header, out_words, ring_stride, place, END_OF_RECORDS)
        return
    top = tl.minimum(tl.minimum(tl.maximum(tl.load(parameters + _TOP_LOGPROBS), 0), TOP), vocab)
    heat = tl.load(temperature + slot)
    is_heated = ((flags & PROCESSED) != 0) & (heat > 0) & (is_scored == 0)
    inverse_heat = inverse(tl.where(is_heated, heat, 1.0))
    row_logits = logits + row * row_stride
    if keeps_raw(needs, flags) & (is_scored == 0):
        row_logits = raw + row * vocab
    # A row that has given no token has no record either: what is made of its old token is not looked at.
    next_token = tl.load(history + slot * max_len + tl.load(sample_position + row), mask=is_scored, other=0)
    chosen = tl.where(is_scored, next_token, tl.load(last_token + slot))
    chosen = tl.minimum(tl.maximum(chosen, 0), vocab - 1)

    OF_TILE: tl.constexpr = TILE // GROUP
    group = tile * OF_TILE + tl.arange(0, OF_TILE)
    index = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    logit = tl.load(row_logits + index, mask=index < vocab, other=float("-inf"))
    peaks = tl.max(logit, 1)
    tl.store(group_max + row * num_tiles * OF_TILE + group, peaks, mask=(group * GROUP < vocab) & (top > 0))
    maximum = tl.max(peaks, 0)
    reference = tl.where(maximum > float("-inf"), maximum, 0.0)
    out = row * num_tiles + tile
    tl.store(tile_max + out, maximum)
    tl.store(tile_sum + out, tl.sum(tl.exp((logit - reference) * inverse_heat)))
    tl.store(tile_greater + out, tl.sum((logit > tl.load(row_logits + chosen)).to(tl.int32)))
    if arrive(arrivals + row, num_tiles):
        named, num_named = of_kind(words, places, _NAMED)
        first = row * num_tiles
        _store_logprobs(
            row_logits, vocab, inverse_heat, chosen, top, named, tl.minimum(num_named, PAIRS - 1 - TOP), num_tiles,
            tile_max + first, tile_sum + first, tile_greater + first, group_max + first * OF_TILE,
            place, room, header, out_words, ring_stride, TILES, GROUP, GROUPS, TOP, PAIRS,
        )  # fmt: skip


def _group_size(vocab: int, top: int) -> int:
    """Return a size for about as many groups as there are tokens in ``top`` of them: the last program ranks both."""
    return min(_TILE, max(16, 1 << round(math.log2(max(1, vocab / top)) / 2)))


def store_logprobs(
    logits: Tensor,
    raw: Tensor,
    source: StepSource,
    step: DeviceStep,
    features: SlotFeatures,
    records_begin: int,
    *,
    most: int = 20,
    most_named: int = 32,
    pdl: bool = False,
) -> None:
    """Store the record of each sample whose slot has Need.logprobs, after ``sample`` has drawn its token.

    It is of log-softmax(logits / temperature) with the logits [N, V] that ``edit`` left if the slot asks for processed
    ones, else of log-softmax of those before: ``raw`` is what ``edit`` returned. The records begin at word
    ``records_begin`` of the step's output. A region without room for the record stays as it is. ``most``: tokens beside
    the chosen one and the named ones, of which there are ``most_named``. Tokens of a prompt that are scored have the
    raw ones of the prompt's next token.
    """
    rows, vocab = logits.shape
    num_tiles = triton.cdiv(vocab, _TILE)
    slots = step.slots
    top_size = triton.next_power_of_2(max(1, most))
    group = _group_size(vocab, top_size)
    groups = num_tiles * (_TILE // group)

    def scratch(dtype: torch.dtype, width: int = 1) -> Tensor:
        return torch.empty((rows, num_tiles * width), dtype=dtype, device=logits.device)

    _logprobs_kernel[(num_tiles, rows)](
        logits, logits.stride(0), vocab, raw, step.sample_slot, step.sample_records, step.sample_arrivals, slots.needs,
        slots.temperature, slots.last_token, features.words, features.words.shape[1], features.places,
        step.sample_position, features.history, features.history.shape[1],
        scratch(torch.float32), scratch(torch.float32), scratch(torch.int32), scratch(torch.float32, _TILE // group),
        source.header, source.outputs, source.outputs.stride(0), records_begin,
        TILE=_TILE, TILES=max(16, triton.next_power_of_2(num_tiles)), GROUP=group,
        GROUPS=triton.next_power_of_2(groups), TOP=top_size,
        PAIRS=triton.next_power_of_2(1 + top_size + most_named), num_warps=8, **launch_options(pdl),
    )  # fmt: skip
