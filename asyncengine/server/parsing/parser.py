"""What a parser of outputs gives, whatever the model's format."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from dataclasses import dataclass, field


@dataclass(slots=True)
class ToolCallDelta:
    """A piece of a tool call. The first one of a call has its id and its name, all have a piece of its arguments."""

    index: int
    """Of the call among those of its choice."""
    id: str | None
    name: str | None
    arguments: str
    """JSON, as far as the model wrote JSON; the pieces of a call, joined, are its arguments."""


@dataclass(slots=True)
class ParsedDelta:
    """What a piece of text adds to the message."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.tool_calls)


class OutputParser(ABC):
    """Of one choice. What it gives, joined, does not depend on the pieces in which the text comes.

    Text in no known form is content. Nothing is raised for it, and nothing of it is lost but markers, and white space
    beside them.
    """

    @abstractmethod
    def push(self, text: str) -> ParsedDelta:
        """What ``text`` completes; the rest is held back until it is clear what it is."""

    @abstractmethod
    def finish(self) -> ParsedDelta:
        """What was held back, at the end of the text. The parser is spent."""


def new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


@dataclass(slots=True)
class ParsedCall:
    """A whole tool call."""

    id: str
    name: str
    arguments: str


@dataclass(slots=True)
class ParsedOutput:
    """A whole output."""

    content: str
    reasoning: str
    tool_calls: list[ParsedCall]


def join(deltas: list[ParsedDelta]) -> ParsedOutput:
    """The pieces of one choice as a whole."""
    calls: list[ParsedCall] = []
    for piece in [piece for delta in deltas for piece in delta.tool_calls]:
        if piece.index == len(calls):
            calls.append(ParsedCall(piece.id or "", piece.name or "", piece.arguments))
        else:
            calls[piece.index].arguments += piece.arguments
    return ParsedOutput("".join([d.content for d in deltas]), "".join([d.reasoning for d in deltas]), calls)


def parse(parser: OutputParser, text: str) -> ParsedOutput:
    """A whole text."""
    return join([parser.push(text), parser.finish()])
