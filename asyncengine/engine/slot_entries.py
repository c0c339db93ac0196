"""Options of a request beyond plain sampling: SamplingParams as entries of a slot update.

``csrc/core/step_input.h`` says what the entries hold.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from asyncengine._core import STEP_INPUT_LAYOUT, EntryKind, MaskChannel, Need, RequestExtras, SamplingState
from asyncengine.api.logprobs import record_words
from asyncengine.api.request import MAX_BAD_WORD_TOKENS, SamplingParams
from asyncengine.api.token_sets import TokenSet
from asyncengine.errors import InvalidRequestError

if TYPE_CHECKING:
    from asyncengine.api.model_info import ModelInfo

_NAMED = 10
"""Offending tokens that an error names."""


def request_extras(
    params: SamplingParams,
    prompt_len: int,
    ends: Sequence[int],
    model: ModelInfo,
    bad_words: Sequence[Sequence[int]] = (),
    masks: Sequence[MaskChannel] = (),
) -> RequestExtras:
    """``ends``: the tokens that end the sequence. ``bad_words``: the tokens of each.

    Raises InvalidRequestError for a token outside the vocabulary, and for too many tokens of words.
    """
    vocab = model.vocab_size
    _check_tokens("logit_bias", params.logit_bias, vocab)
    if params.allowed_token_ids is not None and max(_allowed(params)) >= vocab:
        _check_tokens("allowed_token_ids", params.allowed_token_ids, vocab)
    _check_tokens("logprob_token_ids", params.logprob_token_ids, vocab)
    words = _banned_words(bad_words, vocab)
    if params.allowed_token_ids is not None:
        _check_some_left(params, words, ends)
    scores = params.prompt_logprobs is not None and prompt_len > 1
    # A prompt that gives no token ends its sequence as those do whose records are the answer.
    records = params.wants_logprobs or scores or params.max_tokens == 0
    lists = bool(params.logit_bias) or params.allowed_token_ids is not None or params.min_tokens > 0
    penalties = params.penalized or bool(words) or params.no_repeat_ngram_size > 0
    history = penalties or scores
    needs = (Need.penalties if penalties else 0) | (Need.bias if lists else 0)
    needs |= Need.logprobs if records else 0
    result_words = record_words(_num_top(params) + len(params.logprob_token_ids)) if records else 0
    if params.logits_processor is not None:
        needs |= Need.logits
        result_words = max(result_words, 1 + vocab)
    if not needs and not masks:
        return RequestExtras()
    entries = [(EntryKind.parameters, _parameters(params, prompt_len))]
    if params.logit_bias:
        bias = [word for token, value in params.logit_bias.items() for word in (token, _bits(value))]
        entries.append((EntryKind.bias, bias))
    if words:
        entries.append((EntryKind.banned_words, [x for word in words for x in (len(word), *word)]))
    if params.min_tokens and ends:
        entries.append((EntryKind.end_tokens, list(ends)))
    if params.allowed_token_ids is not None:
        entries.append((EntryKind.allowed_tokens, _allowed(params).bitmap(vocab)))
    if params.logprob_token_ids:
        entries.append((EntryKind.named_tokens, list(params.logprob_token_ids)))
    return RequestExtras(
        needs=needs,
        entries=entries,
        history=history,
        result_words=result_words,
        score_from=max(0, params.logprob_start_len - 1) if scores else -1,
        masks=masks,
    )


def sampling_state(params: SamplingParams, seed: int) -> SamplingState:
    """The part of the parameters that draws a token."""
    return SamplingState(
        temperature=params.temperature, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p, seed=seed % 2**64
    )


def _num_top(params: SamplingParams) -> int:
    """Count the most probable tokens to report, for sampled tokens and prompt tokens alike."""
    return max(params.logprobs or 0, params.prompt_logprobs or 0)


def _parameters(params: SamplingParams, prompt_len: int) -> list[int]:
    layout = STEP_INPUT_LAYOUT
    flags = {
        "processed_logprobs": params.logprobs_mode == "processed_logprobs",
        "score_only": params.max_tokens == 0,
    }
    values = {
        "presence_penalty": _bits(params.presence_penalty),
        "frequency_penalty": _bits(params.frequency_penalty),
        "repetition_penalty": _bits(params.repetition_penalty),
        "prompt_len": prompt_len,
        "min_tokens": params.min_tokens,
        "no_repeat_ngram": params.no_repeat_ngram_size,
        "top_logprobs": _num_top(params) if params.wants_logprobs or params.prompt_logprobs is not None else -1,
        "flags": sum(layout[f"parameter.{name}"] for name, is_set in flags.items() if is_set),
    }
    words = [0] * layout["parameter_words"]
    for name, value in values.items():
        words[layout[f"parameter.{name}"]] = value
    return words


def _bits(value: float) -> int:
    """Return the bits of a float32 as a signed word."""
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


def _allowed(params: SamplingParams) -> TokenSet:
    assert isinstance(params.allowed_token_ids, TokenSet)  # which SamplingParams made it
    return params.allowed_token_ids


def _check_some_left(params: SamplingParams, words: Sequence[Sequence[int]], ends: Sequence[int]) -> None:
    """Raises InvalidRequestError where what is banned at the beginning leaves none of the allowed tokens."""
    banned = {word[0] for word in words if len(word) == 1} | set(ends if params.min_tokens else ())
    if all(token in banned for token in _allowed(params)):
        field = "bad_words" if words else "min_tokens"
        raise InvalidRequestError(
            f"allowed_token_ids: {field} bans every token that it allows", param="allowed_token_ids"
        )


def _check_tokens(param: str, tokens: Iterable[int], vocab: int) -> None:
    wrong = [token for token in tokens if token >= vocab]
    if wrong:
        named = ", ".join(map(str, wrong[:_NAMED])) + (", ..." if len(wrong) > _NAMED else "")
        raise InvalidRequestError(f"{param}: {named} are outside the vocabulary of {vocab}", param=param)


def _banned_words(words: Sequence[Sequence[int]], vocab: int) -> list[Sequence[int]]:
    """The words that may come: a tokenizer may have tokens that the model has not."""
    if sum(1 + len(word) for word in words) > MAX_BAD_WORD_TOKENS:
        raise InvalidRequestError(
            f"bad_words: at most {MAX_BAD_WORD_TOKENS} tokens in all are allowed, a word counting one more",
            param="bad_words",
        )
    return [word for word in words if max(word) < vocab]
