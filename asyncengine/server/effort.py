"""How much a model is to think, as far as its chat template can tell it."""

from __future__ import annotations

from dataclasses import replace

from asyncengine.conversation import Conversation
from asyncengine.server.errors import bad_request
from asyncengine.tokenization import Tokenizer


def with_effort(chat: Conversation, effort: str, tokenizer: Tokenizer | None, field: str) -> Conversation:
    """Of templates some know degrees, some whether or not. Raises ApiError 400 that names ``field`` if one knows none.

    "none" asks nothing of a model that knows none.
    """
    if _knows("reasoning_effort", chat, tokenizer):
        return replace(chat, chat_template_kwargs={"reasoning_effort": effort, **chat.chat_template_kwargs})
    if effort == "none" or _knows("enable_thinking", chat, tokenizer):
        return with_thinking(chat, effort != "none", tokenizer)
    raise bad_request(f"{field}: this model's chat template does not have it", field, "unsupported_parameter")


def with_thinking(chat: Conversation, enabled: bool, tokenizer: Tokenizer | None) -> Conversation:
    """A model without such a switch thinks or does not, as it always does."""
    if not _knows("enable_thinking", chat, tokenizer):
        return chat
    return replace(chat, chat_template_kwargs={"enable_thinking": enabled, **chat.chat_template_kwargs})


def _knows(variable: str, chat: Conversation, tokenizer: Tokenizer | None) -> bool:
    template = chat.chat_template or (tokenizer.template() if tokenizer is not None else None) or ""
    return variable in template
