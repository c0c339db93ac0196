"""A conversation with everything that a chat template may make of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncengine.errors import InvalidRequestError

RESERVED = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template"}
)
"""Variables of templates that have a field of their own."""
MAX_TEMPLATE = 1 << 18
"""Characters of a template that comes with a request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A prompt made of messages, as a list of them is, with more for the template. Wrong: InvalidRequestError."""

    messages: Sequence[Mapping[str, Any]]
    """Messages, each with ``role``, and mostly ``content``; other members are the template's business."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Tools as OpenAI describes them: ``{"type": "function", "function": {"name": ..., ...}}``."""
    documents: Sequence[Mapping[str, Any]] = ()
    add_generation_prompt: bool = True
    """End with what begins the assistant's message."""
    continue_final_message: bool = False
    """End within the final message, which the output continues. Needs add_generation_prompt=False."""
    chat_template: str | None = None
    """Jinja source in place of the model's. It is a program: let those you trust give it, or the sandbox run it."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Further variables of the template, such as enable_thinking."""

    def __post_init__(self) -> None:
        for name in ("messages", "tools", "documents"):
            value = getattr(self, name)
            if not isinstance(value, list | tuple):
                raise _wrong(name, f"must be a list, got {type(value).__name__}")
            if not all(isinstance(each, Mapping) for each in value):
                raise _wrong(name, "must hold objects")
        if not self.messages:
            raise _wrong("messages", "must not be empty")
        for name in ("add_generation_prompt", "continue_final_message"):
            if not isinstance(getattr(self, name), bool):
                raise _wrong(name, "must be a boolean")
        if self.continue_final_message and self.add_generation_prompt:
            raise _wrong("continue_final_message", "excludes add_generation_prompt: true")
        if self.continue_final_message and not isinstance(self.messages[-1].get("content"), str):
            raise _wrong("continue_final_message", "needs a final message whose content is text")
        if self.chat_template is not None and not isinstance(self.chat_template, str):
            raise _wrong("chat_template", "must be text")
        if self.chat_template is not None and len(self.chat_template) > MAX_TEMPLATE:
            raise _wrong("chat_template", f"may have {MAX_TEMPLATE} characters")
        given = self.chat_template_kwargs
        if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
            raise _wrong("chat_template_kwargs", "must be an object")
        if taken := sorted(RESERVED & given.keys()):
            raise _wrong("chat_template_kwargs", f"must not hold {', '.join(taken)}: the request has fields for that")

    @property
    def is_plain(self) -> bool:
        """True if the list of messages alone describes the conversation."""
        options = (self.tools, self.documents, self.chat_template, self.chat_template_kwargs)
        return self.add_generation_prompt and not any(options)

    @property
    def continued(self) -> str:
        """The text that the output continues, if it does."""
        return str(self.messages[-1]["content"]) if self.continue_final_message else ""


def _wrong(param: str, message: str) -> InvalidRequestError:
    return InvalidRequestError(f"{param} {message}", param=param)
