"""Results of parsers of outputs, whatever the model's format."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class CallRules:
    """Rules of a request for the calls in its outputs."""

    most: int | None = None
    """Further calls are left out."""
    names: Collection[str] | None = None
    """Names of the tools, for formats in which any JSON might be a call. Given, any other name makes no call."""
    bare: Collection[str] = ()
    """Names of the tools without parameters: their arguments are ``{}``, whatever the model wrote."""
    live: bool = False
    """A grammar holds the output to calls: the pieces of a call are given as they come, and not as a whole."""
    forced: Collection[str] = ()
    """Names of the tools of which one must be called. Such an output has no content."""
    inputs: Collection[str] = ()
    """Names of custom tools: of their calls the input is given in place of the arguments that hold it."""


@dataclass(slots=True)
class ToolCallDelta:
    """A piece of a tool call. The first one of a call has its id and its name, all have a piece of its arguments."""

    index: int
    """Place of the call among the calls of its choice."""
    id: str | None
    name: str | None
    arguments: str
    """The pieces of a call, joined, are a JSON object, or its beginning if the output ended within the call. The pieces
    of a call of a custom tool are its input."""
    custom: bool = False
    """True if the call is of a custom tool."""


@dataclass(slots=True)
class ParsedDelta:
    """Addition of a piece of text to the message."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.tool_calls)


class OutputParser(ABC):
    """Reader of one choice. The results, joined, do not depend on the pieces in which the text comes.

    Text in no known form is content, and so is a call whose arguments are no JSON object. Nothing is raised for it, and
    nothing of it is lost but markers, white space beside them, and the beginning of a call that is cut before its name.
    """

    unfinished = False
    """True if the output ended within a call that was given."""

    @abstractmethod
    def push(self, text: str) -> ParsedDelta:
        """Return all that ``text`` completes; the rest is held back until its meaning is clear."""

    @abstractmethod
    def finish(self, *, cut: bool = False) -> ParsedDelta:
        """Return the text that was held back, at the end of the output. The parser is spent.

        ``cut``: the model had not ended its output. A call that is under way then is given as far as it has come.
        """


def new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


@dataclass(slots=True)
class ParsedCall:
    """A whole tool call."""

    id: str
    name: str
    arguments: str
    custom: bool = False


@dataclass(slots=True)
class ParsedOutput:
    """A whole output."""

    content: str
    reasoning: str
    tool_calls: list[ParsedCall]
    unfinished: bool = False
    """True if the output ended within the last call."""


def join(deltas: list[ParsedDelta]) -> ParsedOutput:
    """The pieces of one choice as a whole."""
    calls: list[ParsedCall] = []
    for piece in [piece for delta in deltas for piece in delta.tool_calls]:
        if piece.index == len(calls):
            calls.append(ParsedCall(piece.id or "", piece.name or "", piece.arguments, piece.custom))
        else:
            calls[piece.index].arguments += piece.arguments
    return ParsedOutput("".join([d.content for d in deltas]), "".join([d.reasoning for d in deltas]), calls)


def parse(parser: OutputParser, text: str, *, cut: bool = False) -> ParsedOutput:
    """A whole text; ``cut`` as in ``OutputParser.finish``."""
    output = join([parser.push(text), parser.finish(cut=cut)])
    output.unfinished = parser.unfinished
    return output
