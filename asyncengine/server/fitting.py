"""Conversations that are too long for the model's context: their oldest turns are left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from asyncengine.api.conversation import Conversation
from asyncengine.api.request import Prompt
from asyncengine.errors import ContextLengthError
from asyncengine.server.engine_api import Engine

_INSTRUCTIONS = ("system", "developer")


async def fitted(engine: Engine, prompt: Prompt, limit: int) -> Prompt:
    """``prompt``, a conversation, without as few of its oldest messages as leave at most ``limit`` tokens.

    Instructions at its beginning stay, and so does its last message. What stays begins with a user's message, unless
    none of those that do fit; a result of a tool goes with its call. If nothing fits, the shortest one is returned.
    Raises what the engine raises for a prompt.
    """
    chat = prompt if isinstance(prompt, Conversation) else Conversation(messages=list(prompt))  # type: ignore[arg-type]
    if await _fits(engine, prompt, limit):
        return prompt
    cuts = _cuts(chat.messages)
    low, high = 0, len(cuts)
    while low < high:
        middle = (low + high) // 2
        if await _fits(engine, _cut(chat, cuts[middle]), limit):
            high = middle
        else:
            low = middle + 1
    return _cut(chat, cuts[min(low, len(cuts) - 1)]) if cuts else prompt


async def _fits(engine: Engine, prompt: Prompt, limit: int) -> bool:
    try:
        return len(await engine.tokenize(prompt)) <= limit
    except ContextLengthError:
        return False


def _head(messages: Sequence[Mapping[str, Any]]) -> int:
    """The number of instructions at the beginning."""
    return next((i for i, message in enumerate(messages) if message["role"] not in _INSTRUCTIONS), len(messages))


def _cuts(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the places where the kept messages may begin: at each user's message but the first, then at each message
    but results."""
    roles = [message["role"] for message in messages]
    rest = range(_head(messages) + 1, len(messages))
    users = [i for i in rest if roles[i] == "user"]
    last = users[-1] if users else 0
    return users + [i for i in rest if i > last and roles[i] != "tool"]


def _cut(chat: Conversation, first: int) -> Prompt:
    """Return the conversation without the messages before ``first``, except for the instructions."""
    left = [*chat.messages[: _head(chat.messages)], *chat.messages[first:]]
    cut = replace(chat, messages=left)
    plain: Any = left if cut.is_plain else cut
    return plain  # type: ignore[no-any-return]
