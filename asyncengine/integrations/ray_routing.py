"""Decisions for replicas on Ray: which one a request goes to, and how many there should be. Plain functions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from asyncengine.engine.common_queue import ROW_TOKENS
from asyncengine.engine.warmth import Pieces, Warmth, pieces_of

_PROMPTS = ("messages", "prompt", "input")
_MOST_PARSED = 4 * 2**20
"""Bytes of a body that is looked into. Larger ones go where the load is least."""


def pieces_of_body(body: bytes) -> Pieces:
    """The prompt in the body of a request to any route, for the memory of a router."""
    try:
        request = msgspec.json.decode(body) if len(body) <= _MOST_PARSED else None
    except (msgspec.DecodeError, RecursionError):
        request = None
    if not isinstance(request, dict):
        return Pieces([], 0)
    prompt: Any = next((request[name] for name in _PROMPTS if request.get(name)), "")
    salt = request.get("cache_salt")
    try:
        return pieces_of(prompt, salt if isinstance(salt, str) else None)
    except TypeError:  # a list of lists, or of other things: its server says what is wrong
        return Pieces([], 0)


def order(loads: Mapping[Any, tuple[float, int]], memories: Mapping[Any, Warmth], pieces: Pieces) -> list[Any]:
    """Replicas, the one first that is soonest at the request's first token.

    ``loads``: for each replica the prompt tokens that wait there, and its requests.
    """

    def tokens_before(replica: Any) -> float:
        queued, requests = loads[replica]
        warm = memories[replica].matched(pieces) if replica in memories else 0
        return queued + ROW_TOKENS * requests + pieces.tokens - warm

    return sorted(loads, key=tokens_before)


def replicas_wanted(
    queued_tokens: Iterable[float], kv_usage: Iterable[float], most_queued_tokens: float, most_kv_usage: float
) -> int:
    """Replicas among which the waiting prompt tokens, and the used KV caches, stay below their limits each.

    ``queued_tokens`` and ``kv_usage`` have a number for each replica; a usage is a share of 1.
    """
    return max(1, math.ceil(sum(queued_tokens) / most_queued_tokens), math.ceil(sum(kv_usage) / most_kv_usage))
