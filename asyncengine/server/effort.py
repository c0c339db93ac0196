"""Settings for the length of a model's reasoning and answers, as far as its chat template takes them."""

from __future__ import annotations

from dataclasses import replace

from asyncengine.api.conversation import Conversation
from asyncengine.server.unserved import pass_over
from asyncengine.text.tokenizer import Tokenizer


def with_effort(chat: Conversation, effort: str, tokenizer: Tokenizer | None, field: str) -> Conversation:
    """Tell the template a degree, or whether to think, as far as it knows either. ``field`` is the request's."""
    if _knows("reasoning_effort", chat, tokenizer):
        return replace(chat, chat_template_kwargs={"reasoning_effort": effort, **chat.chat_template_kwargs})
    if effort == "none" or _knows("enable_thinking", chat, tokenizer):
        return with_thinking(chat, effort != "none", tokenizer)
    pass_over(f"{field}, which the chat template does not know")
    return chat


def with_verbosity(chat: Conversation, verbosity: str, tokenizer: Tokenizer | None, field: str) -> Conversation:
    """Tell the template how long the text should be, if it knows that. ``field`` is the request's."""
    if _knows("verbosity", chat, tokenizer):
        return replace(chat, chat_template_kwargs={"verbosity": verbosity, **chat.chat_template_kwargs})
    if verbosity != "medium":
        pass_over(f"{field}, which the chat template does not know")
    return chat


def with_thinking(chat: Conversation, enabled: bool, tokenizer: Tokenizer | None) -> Conversation:
    """A model without such a switch thinks or does not, as it always does."""
    if not _knows("enable_thinking", chat, tokenizer):
        return chat
    return replace(chat, chat_template_kwargs={"enable_thinking": enabled, **chat.chat_template_kwargs})


def _knows(variable: str, chat: Conversation, tokenizer: Tokenizer | None) -> bool:
    template = chat.chat_template or (tokenizer.template() if tokenizer is not None else None) or ""
    return variable in template
