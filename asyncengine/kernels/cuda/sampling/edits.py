"""Edits of logits before a token is drawn: penalties, biases and tokens that may not come.

The order is that of ``csrc/platform/cpu/logit_edits.h``. Edits are in place and touch the tokens alone that they are
about; only sets of allowed tokens take a pass over a row. A row that asks for nothing is not read.
"""

# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncengine._core import STEP_INPUT_LAYOUT, EntryKind, Need, RecordKind
from asyncengine.kernels.cuda.launch.compiling import kernel
from asyncengine.kernels.cuda.launch.programmatic import launch_options, wait
from asyncengine.kernels.cuda.sampling.features import KINDS, PENALTIES, SlotFeatures
from asyncengine.kernels.cuda.sampling.results import END_OF_RECORDS, NO_TOKEN, NOT_FINITE, store_word, store_words
from asyncengine.kernels.cuda.step.ingest import StepSource
from asyncengine.kernels.cuda.step.tensors import DeviceStep

EDIT_NEEDS = Need.penalties | Need.bias | Need.mask
EDITS = tl.constexpr(int(EDIT_NEEDS))
PARAMETERS = tl.constexpr(int(EntryKind.parameters))
PROCESSED = tl.constexpr(STEP_INPUT_LAYOUT["parameter.processed_logprobs"])
SCORE_ONLY = tl.constexpr(STEP_INPUT_LAYOUT["parameter.score_only"])
HEAD_WORDS = tl.constexpr(STEP_INPUT_LAYOUT["mask_head_words"])
NO_MASK = tl.constexpr(STEP_INPUT_LAYOUT["no_mask"])
_DEFERRED = tl.constexpr(STEP_INPUT_LAYOUT["deferred"])
FLAGS = tl.constexpr(STEP_INPUT_LAYOUT["parameter.flags"])
_LOGPROBS = tl.constexpr(int(Need.logprobs))
_MASK = tl.constexpr(int(Need.mask))
_LOGITS = tl.constexpr(int(Need.logits))
_LOGITS_RECORD = tl.constexpr(int(RecordKind.logits))
_LISTS = tl.constexpr(int(Need.bias))
_BIAS = tl.constexpr(int(EntryKind.bias))
_BANNED = tl.constexpr(int(EntryKind.banned_words))
_ENDS = tl.constexpr(int(EntryKind.end_tokens))
_ALLOWED = tl.constexpr(int(EntryKind.allowed_tokens))
_PRESENCE = tl.constexpr(STEP_INPUT_LAYOUT["parameter.presence_penalty"])
_FREQUENCY = tl.constexpr(STEP_INPUT_LAYOUT["parameter.frequency_penalty"])
_REPETITION = tl.constexpr(STEP_INPUT_LAYOUT["parameter.repetition_penalty"])
_PROMPT_LEN = tl.constexpr(STEP_INPUT_LAYOUT["parameter.prompt_len"])
_MIN_TOKENS = tl.constexpr(STEP_INPUT_LAYOUT["parameter.min_tokens"])
_NGRAM = tl.constexpr(STEP_INPUT_LAYOUT["parameter.no_repeat_ngram"])
_CHUNK = 1024
_TILE = 4096


@triton.jit
def of_kind(words: tl.tensor, places: tl.tensor, kind: tl.constexpr) -> tl.tuple:
    """A slot's entry: where its payload lies, and how many words it has."""
    return words + tl.load(places + 2 * kind), tl.load(places + 2 * kind + 1)


@triton.jit
def keeps_raw(needs: tl.tensor, flags: tl.tensor) -> tl.tensor:
    """Return whether a row's log probabilities are of logits that its edits change."""
    return ((needs & _LOGPROBS) != 0) & ((needs & EDITS) != 0) & ((flags & PROCESSED) == 0)


@triton.jit
def _ban(logits: tl.tensor, vocab: tl.tensor, token: tl.tensor, mask: tl.tensor) -> None:
    """A logit that is not finite stays: it ends its row, whichever tokens are banned."""
    mask = mask & (token >= 0) & (token < vocab)
    logit = tl.load(logits + token, mask=mask, other=0.0)
    tl.store(logits + token, tl.zeros_like(logit) - float("inf"), mask=mask & (logit < float("inf")))


@triton.jit
def _penalize(
    logits: tl.tensor, parameters: tl.tensor, counts: tl.tensor, distinct: tl.tensor, found: tl.tensor,
    CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    presence = tl.load(parameters + _PRESENCE).to(tl.float32, bitcast=True)
    frequency = tl.load(parameters + _FREQUENCY).to(tl.float32, bitcast=True)
    repetition = tl.load(parameters + _REPETITION).to(tl.float32, bitcast=True)
    if (presence != 0) | (frequency != 0) | (repetition != 1):
        for start in range(0, found, CHUNK):
            i = start + tl.arange(0, CHUNK)
            token = tl.load(distinct + i, mask=i < found, other=0)
            count = tl.load(counts + token, mask=i < found, other=0)
            logit = tl.load(logits + token, mask=i < found, other=0.0)
            scaled = tl.where(logit > 0, tl.div_rn(logit, tl.zeros_like(logit) + repetition), logit * repetition)
            lowered = scaled - (frequency * (count >> 1).to(tl.float32) + presence)
            tl.store(logits + token, tl.where(count > 1, lowered, scaled), mask=i < found)


@triton.jit
def _ban_ngrams(
    logits: tl.tensor, vocab: tl.tensor, n: tl.tensor, history: tl.tensor, length: tl.tensor, CHUNK: tl.constexpr
) -> None:
    if (n > 0) & (length >= n):
        for start in range(0, length - n + 1, CHUNK):
            i = start + tl.arange(0, CHUNK)
            same = i + n <= length
            for j in range(0, n - 1):
                wanted = tl.load(history + length - (n - 1) + j)
                same = same & (tl.load(history + i + j, mask=same, other=-1) == wanted)
            token = tl.load(history + i + n - 1, mask=same, other=-1)
            _ban(logits, vocab, token, same)


@triton.jit
def _ban_words(
    logits: tl.tensor, vocab: tl.tensor, banned: tl.tensor, num_words: tl.tensor, history: tl.tensor, length: tl.tensor
) -> None:
    at = tl.zeros((), tl.int32)
    while at < num_words:
        size = tl.load(banned + at)
        word = banned + at + 1
        left = size - 1  # tokens before the one that is banned, compared from the last to the first
        same = (size > 0) & (left <= length)
        while (left > 0) & same:
            same = tl.load(word + left - 1) == tl.load(history + length - size + left)
            left -= 1
        if same:
            token = tl.load(word + size - 1)
            there = (token >= 0) & (token < vocab)
            there = there & (tl.load(logits + token, mask=there, other=0.0) < float("inf"))
            tl.store(logits + token, float("-inf"), mask=there)
        at += 1 + size


@kernel
def _edit_kernel(
    logits: tl.tensor,
    row_stride: tl.tensor,
    vocab: tl.tensor,
    sample_slot: tl.tensor,
    sample_position: tl.tensor,
    slot_needs: tl.tensor,
    words: tl.tensor,
    width: tl.tensor,
    places: tl.tensor,
    history: tl.tensor,
    max_len: tl.tensor,
    history_len: tl.tensor,
    counts: tl.tensor,
    distinct: tl.tensor,
    num_distinct: tl.tensor,
    board: tl.tensor,
    board_stride: tl.tensor,
    sample_mask: tl.tensor,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Each program edits a row; barriers lie between edits that may touch the same logit."""
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(sample_slot + row).to(tl.int64)
    if slot < 0:
        return
    needs = tl.load(slot_needs + slot)
    if (needs & EDITS) == 0:
        return
    if (needs & _MASK) != 0:
        head = tl.load(board + slot * board_stride, volatile=True)  # on the host, which may write it right now
        is_there = (head >= 0) & (head // 2 == tl.load(sample_position + row))
        tl.store(sample_mask + row, tl.where(is_there, 1 - head % 2, NO_MASK))
    logits += row * row_stride
    words += slot * width
    places += slot * 2 * KINDS
    history += slot * max_len
    parameters, _ = of_kind(words, places, PARAMETERS)
    length = tl.load(history_len + slot)
    if (needs & PENALTIES) != 0:
        _penalize(
            logits, parameters, counts + slot * vocab, distinct + slot * max_len, tl.load(num_distinct + slot), CHUNK
        )
        tl.debug_barrier()
    if (needs & _LISTS) != 0:
        pairs, count = of_kind(words, places, _BIAS)
        for start in range(0, count // 2, CHUNK):
            i = start + tl.arange(0, CHUNK)
            token = tl.load(pairs + 2 * i, mask=i < count // 2, other=-1)
            there = (token >= 0) & (token < vocab)
            bias = tl.load(pairs + 2 * i + 1, mask=there, other=0).to(tl.float32, bitcast=True)
            tl.store(logits + token, tl.load(logits + token, mask=there, other=0.0) + bias, mask=there)
        tl.debug_barrier()
    if (needs & PENALTIES) != 0:
        _ban_ngrams(logits, vocab, tl.load(parameters + _NGRAM), history, length, CHUNK)
        banned, num_words = of_kind(words, places, _BANNED)
        _ban_words(logits, vocab, banned, num_words, history, length)
    if (needs & _LISTS) != 0:
        generated = tl.load(sample_position + row) - tl.load(parameters + _PROMPT_LEN)
        if generated < tl.load(parameters + _MIN_TOKENS):
            ends, num_ends = of_kind(words, places, _ENDS)
            for start in range(0, num_ends, CHUNK):
                i = start + tl.arange(0, CHUNK)
                _ban(logits, vocab, tl.load(ends + i, mask=i < num_ends, other=-1), i < num_ends)


@triton.jit
def _is_set(bitmap: tl.tensor, index: tl.tensor, vocab: tl.tensor) -> tl.tensor:
    word = tl.load(bitmap + index // 32, mask=index < vocab, other=0, volatile=True)
    return ((word >> (index % 32)) & 1) != 0


@kernel
def _mask_kernel(
    logits: tl.tensor,
    row_stride: tl.tensor,
    vocab: tl.tensor,
    sample_slot: tl.tensor,
    sample_mask: tl.tensor,
    slot_needs: tl.tensor,
    words: tl.tensor,
    width: tl.tensor,
    places: tl.tensor,
    board: tl.tensor,
    board_stride: tl.tensor,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Ban what is not among the tokens that the slot allows, or that its mask allows."""
    wait(PDL)
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot = tl.load(sample_slot + row).to(tl.int64)
    if slot < 0:
        return
    needs = tl.load(slot_needs + slot)
    if (needs & (_LISTS | _MASK)) == 0:
        return
    index = tile * TILE + tl.arange(0, TILE)
    row_logits = logits + row * row_stride
    if (needs & _LISTS) != 0:
        allowed, count = of_kind(words + slot * width, places + slot * 2 * KINDS, _ALLOWED)
        if count * 32 >= vocab:
            _ban(row_logits, vocab, index, _is_set(allowed, index, vocab) == 0)
    applies = tl.load(sample_mask + row, mask=(needs & _MASK) != 0, other=0) == 1
    if applies:
        bitmap = board + slot * board_stride + HEAD_WORDS
        _ban(row_logits, vocab, index, _is_set(bitmap, index, vocab) == 0)


@kernel
def _keep_raw_kernel(
    logits: tl.tensor,
    row_stride: tl.tensor,
    vocab: tl.tensor,
    sample_slot: tl.tensor,
    slot_needs: tl.tensor,
    words: tl.tensor,
    width: tl.tensor,
    places: tl.tensor,
    raw: tl.tensor,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    wait(PDL)
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot = tl.load(sample_slot + row).to(tl.int64)
    if slot < 0:
        return
    parameters, _ = of_kind(words + slot * width, places + slot * 2 * KINDS, PARAMETERS)
    needs = tl.load(slot_needs + slot)
    if (needs & EDITS) == 0:
        return
    if keeps_raw(needs, tl.load(parameters + FLAGS)):
        index = tile * TILE + tl.arange(0, TILE)
        logit = tl.load(logits + row * row_stride + index, mask=index < vocab, other=0.0)
        tl.store(raw + row * vocab + index, logit, mask=index < vocab)


@kernel
def _withhold_kernel(
    sample_slot: tl.tensor,
    sample_mask: tl.tensor,
    slot_needs: tl.tensor,
    words: tl.tensor,
    width: tl.tensor,
    places: tl.tensor,
    finished: tl.tensor,
    logits: tl.tensor,
    row_stride: tl.tensor,
    vocab: tl.tensor,
    sample_records: tl.tensor,
    header: tl.tensor,
    out_words: tl.tensor,
    ring_stride: tl.tensor,
    records_begin: tl.tensor,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(sample_slot + row).to(tl.int64)
    if slot < 0:
        return
    needs = tl.load(slot_needs + slot)
    parameters, _ = of_kind(words + slot * width, places + slot * 2 * KINDS, PARAMETERS)
    if (tl.load(parameters + FLAGS, mask=(needs & _LOGPROBS) != 0, other=0) & SCORE_ONLY) != 0:
        tl.store(finished + slot, 1)
        store_word(header, out_words, ring_stride, row, NO_TOKEN)
    has_mask = (needs & _MASK) != 0
    if tl.load(sample_mask + row, mask=has_mask, other=0) == NO_MASK:
        tl.store(finished + slot, 1)
        if (needs & _LOGITS) == 0:
            store_word(header, out_words, ring_stride, row, NO_MASK)
        else:
            begin = records_begin + tl.load(sample_records + 2 * row)
            room = tl.load(sample_records + 2 * row + 1)
            if room > vocab:
                store_word(header, out_words, ring_stride, begin, vocab + (_LOGITS_RECORD << 24))
                for start in range(0, vocab, TILE):
                    i = start + tl.arange(0, TILE)
                    logit = tl.load(logits + row * row_stride + i, mask=i < vocab, other=0.0)
                    store_words(header, out_words, ring_stride, begin + 1 + i, logit, i < vocab)
                if room > vocab + 1:
                    store_word(header, out_words, ring_stride, begin + 1 + vocab, END_OF_RECORDS)
                store_word(header, out_words, ring_stride, row, _DEFERRED)
            else:
                store_word(header, out_words, ring_stride, row, NOT_FINITE)
    elif (needs & (_LOGITS | _LOGPROBS)) == _LOGITS:  # a token whose row has room for records, and that has none
        begin = records_begin + tl.load(sample_records + 2 * row)
        store_word(header, out_words, ring_stride, begin, END_OF_RECORDS)


def withhold(
    logits: Tensor,
    source: StepSource,
    step: DeviceStep,
    features: SlotFeatures,
    records_begin: int,
    *,
    pdl: bool = False,
) -> None:
    """Take back, after ``sample``, the tokens of rows that give none.

    Rows whose masks had not come rest until the host brings their tokens; prompts that are only scored have ended. Rows
    with Need.logits hand out their logits [N, V], float32, as a record behind word ``records_begin``.
    """
    _withhold_kernel[(len(logits),)](
        step.sample_slot, step.sample_mask, step.slots.needs, features.words, features.words.shape[1], features.places,
        step.slots.finished, logits, logits.stride(0), logits.shape[1], step.sample_records, source.header,
        source.outputs, source.outputs.shape[1], records_begin, TILE=_TILE, num_warps=4, **launch_options(pdl),
    )  # fmt: skip


def edit(logits: Tensor, board: Tensor, step: DeviceStep, features: SlotFeatures, *, pdl: bool = False) -> Tensor:
    """Edit logits float32 [N, V] in place as the slots of the step's samples ask, after ``follow``.

    ``board``: int32 [S, words], masks as ``csrc/core/mask_board.h`` says, in memory that the host writes to meanwhile.
    Returns logits [N, V] before the edits, of those rows alone whose log probabilities are of them.
    """
    rows, vocab = logits.shape
    if logits.dtype != torch.float32 or logits.stride(1) != 1 or vocab != features.counts.shape[1]:
        raise ValueError(
            f"logits must be float32 [rows, {features.counts.shape[1]}] with contiguous rows, "
            f"got {logits.dtype} {list(logits.shape)} with strides {logits.stride()}"
        )
    if len(step.sample_slot) < rows:
        raise ValueError(f"{rows} rows of logits, but the step samples {len(step.sample_slot)}")
    slots = step.slots
    tiles = (triton.cdiv(vocab, _TILE), rows)
    raw = torch.empty((rows, vocab), dtype=torch.float32, device=logits.device)
    width = features.words.shape[1]
    _keep_raw_kernel[tiles](
        logits, logits.stride(0), vocab, step.sample_slot, slots.needs, features.words, width, features.places, raw,
        TILE=_TILE, num_warps=8, **launch_options(pdl),
    )  # fmt: skip
    _edit_kernel[(rows,)](
        logits, logits.stride(0), vocab, step.sample_slot, step.sample_position, slots.needs, features.words, width,
        features.places, features.history, features.history.shape[1], features.history_len, features.counts,
        features.distinct, features.num_distinct, board, board.stride(0), step.sample_mask, CHUNK=_CHUNK, num_warps=8,
        **launch_options(pdl),
    )  # fmt: skip
    _mask_kernel[tiles](
        logits, logits.stride(0), vocab, step.sample_slot, step.sample_mask, slots.needs, features.words, width,
        features.places, board, board.stride(0), TILE=_TILE, num_warps=8, **launch_options(pdl),
    )  # fmt: skip
    return raw
