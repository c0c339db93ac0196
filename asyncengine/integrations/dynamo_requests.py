"""Requests and answers of NVIDIA Dynamo, which tokenizes and detokenizes outside the engine."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec

from asyncengine.api.outputs import RequestDelta
from asyncengine.api.request import SamplingParams
from asyncengine.errors import InvalidRequestError

T = TypeVar("T")
_SAMPLING = (
    "n", "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "include_stop_str_in_output",
)  # fmt: skip
_UNSERVED = {
    "": ("prefill_result", "bootstrap_info", "multi_modal_data", "encoder_result"),
    "sampling_options": ("best_of", "use_beam_search", "length_penalty"),
    "stop_conditions": ("max_thinking_tokens",),
    "output_options": ("prompt_logprobs",),
}
"""Fields of a request, and of its parts, that this engine refuses by name, but for their defaults."""
_HARMLESS = {"best_of": 1, "length_penalty": 1.0}


class _Request(msgspec.Struct):
    """Parts of a request that are looked at; Dynamo may leave out any, or send null."""

    sampling_options: dict[str, Any] | None = None
    stop_conditions: dict[str, Any] | None = None
    output_options: dict[str, Any] | None = None


class _Lists(msgspec.Struct):
    """Token ids of a request's settings."""

    stop_token_ids: list[int] | None = None
    stop_token_ids_hidden: list[int] | None = None
    logit_bias: dict[int, float] | None = None


def token_ids_of(request: Mapping[str, Any]) -> list[int]:
    """The prompt: a list, or the bytes of int32 numbers, little-endian. Raises InvalidRequestError."""
    ids = request.get("token_ids")
    if isinstance(ids, bytes | bytearray) and len(ids) % 4 == 0:
        numbers = array("i", bytes(ids))
        if sys.byteorder != "little":
            numbers.byteswap()
        return numbers.tolist()
    if not isinstance(ids, list):
        raise InvalidRequestError("token_ids must be a list of integers, or int32 numbers as bytes")
    return ids


def sampling_params(request: Mapping[str, Any]) -> SamplingParams:
    """The settings of a request. Dynamo itself looks for stop strings. Raises InvalidRequestError."""
    read = _convert(request, _Request)
    parts = {name: getattr(read, name) or {} for name in _UNSERVED if name} | {"": request}
    for part, names in _UNSERVED.items():
        for name in names:
            value = parts[part].get(name)
            if value is not None and value is not False and value != _HARMLESS.get(name):
                raise InvalidRequestError(f"{name} is not served", param=name)
    sampling, stops = parts["sampling_options"], parts["stop_conditions"]
    fields = {name: sampling[name] for name in _SAMPLING if sampling.get(name) is not None}
    if fields.get("top_k") == -1:
        fields["top_k"] = 0
    if guided := {key: value for key, value in (sampling.get("guided_decoding") or {}).items() if value is not None}:
        guided.pop("backend", None)
        fields["structured_outputs"] = guided
    lists = _convert({**sampling, **stops}, _Lists)
    ends = [*(lists.stop_token_ids or ()), *(lists.stop_token_ids_hidden or ())]
    return SamplingParams(
        max_tokens=stops.get("max_tokens"),
        min_tokens=stops.get("min_tokens") or 0,
        ignore_eos=bool(stops.get("ignore_eos")),
        stop_token_ids=list(dict.fromkeys(ends)),
        logit_bias=lists.logit_bias or {},
        logprobs=parts["output_options"].get("logprobs"),
        detokenize=False,
        **fields,
    )


def _convert(value: Mapping[str, Any], kind: type[T]) -> T:
    try:
        return msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError as e:
        raise InvalidRequestError(f"the request is malformed: {e}") from None


def cache_salt_of(request: Mapping[str, Any]) -> str | None:
    """Return the name that keeps a request's keys and values apart from those of others, or None."""
    found = (part.get("nvext") for part in (request, request.get("extra_args")) if isinstance(part, dict))
    return next((salt for nvext in found if isinstance(nvext, dict) and (salt := nvext.get("cache_salt"))), None)


def chunk_of(delta: RequestDelta, cached_tokens: int, token_bytes: Callable[[int], bytes] | None) -> dict[str, Any]:
    """A delta as Dynamo reads it. ``token_bytes`` names the tokens of log probabilities."""
    chunk: dict[str, Any] = {"token_ids": delta.token_ids, "index": delta.index}
    if delta.finish_reason is not None:
        chunk["finish_reason"] = str(delta.finish_reason)
    if (usage := delta.usage) is not None:
        chunk["completion_usage"] = {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
        }
    if delta.logprobs is not None:
        name = token_bytes or (lambda token: b"token_id:%d" % token)
        chunk["log_probs"] = [token.logprob for token in delta.logprobs]
        chunk["top_logprobs"] = [
            [
                {"rank": rank, "token_id": id, "logprob": value, "token": name(id).decode(errors="replace")}
                for rank, (id, value) in enumerate(token.top, 1)
            ]
            for token in delta.logprobs
        ]
    return chunk
