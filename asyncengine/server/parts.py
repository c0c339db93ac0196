"""An output as a row of parts: reasoning, text and calls of tools, each open until the next one begins.

/v1/responses calls them output items, /v1/messages content blocks. Both write the same parts, each in events of its
own, and a response without streaming is what its events add up to.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

from asyncengine.api.outputs import FinishReason, RequestDelta, RequestOutput, Usage
from asyncengine.server.generation import Job
from asyncengine.server.logprobs import PlacedToken
from asyncengine.server.parsing import OutputParser, ParsedDelta, ToolCallDelta
from asyncengine.server.parsing.choose import ReasoningTokens
from asyncengine.server.sse import StreamFormat, encode


class Kind(Enum):
    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


@dataclass(slots=True)
class Part:
    """``text`` is the text so far, of a call its arguments."""

    kind: Kind
    index: int
    """Place of the part in the output."""
    call: ToolCallDelta | None = None
    """The first news of a call, which has its id and name."""
    pieces: list[str] = field(default_factory=list)
    complete: bool = True
    """False: the output ended in the middle of it."""
    head: bytes = b""
    """Beginning of an event with news of this part, up to the text."""
    tokens: list[PlacedToken] = field(default_factory=list)
    """Tokens of the last news of a text, where the request asks for log probabilities."""
    logprobs: list[bytes] = field(default_factory=list)
    """Log probabilities of the tokens so far, as JSON."""

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class Ending:
    """End of an output: the reason, and counts of tokens."""

    reason: FinishReason
    stop_reason: str | int | None
    usage: Usage
    reasoning_tokens: int


def event(name: str, members: bytes) -> bytes:
    """One event with a name, which its data repeats; ``members`` are those after the type, a comma before each."""
    return b'event: %b\ndata: {"type":%b%b}\n\n' % (name.encode(), encode(name), members)


class UnsaidTokens:
    """Tokens whose text a parser holds back, in their order."""

    def __init__(self) -> None:
        self._pieces: list[tuple[str, PlacedToken | None]] = []  # None: of this text the token was given before

    def add(self, token: PlacedToken) -> None:
        self._pieces.append((token.text, token))

    def clear(self) -> None:
        """All that was held back belongs to no text."""
        self._pieces.clear()

    def take(self, text: str) -> list[PlacedToken]:
        """The tokens of ``text``, which the parser has given. Tokens before it are forgotten: they are markers."""
        start = "".join([piece for piece, _ in self._pieces]).rfind(text)
        if start < 0:
            self.clear()
            return []
        end, at = start + len(text), 0
        taken: list[PlacedToken] = []
        left: list[tuple[str, PlacedToken | None]] = []
        for piece, token in self._pieces:
            begin, at = at, at + len(piece)
            if begin >= end:
                left.append((piece, token))
                continue
            if token is not None and (at > start or (begin == start and not piece)):  # without text: of a character
                taken.append(token)
            if at > end:
                left.append((piece[end - begin :], None))
        self._pieces = left
        return taken


class PartFormat(StreamFormat):
    """Makes parts of a response's only choice, and has a subclass write them."""

    end = b""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.parts: list[Part] = []
        self._parser: OutputParser | None = None
        self._reasoning: ReasoningTokens | None = None
        self._open: Part | None = None
        self._call = -1  # the index of the call that the open part is
        self._begun = False
        self._unsaid: UnsaidTokens | None = None  # with log probabilities alone
        self._prompt: Sequence[int] = ()

    @abstractmethod
    def begin(self) -> bytes:
        """Return the events that come before all parts."""

    @abstractmethod
    def opened(self, part: Part) -> bytes:
        """A part begins. Sets its ``head``."""

    @abstractmethod
    def grown(self, part: Part, text: str) -> bytes:
        """A part has more text."""

    @abstractmethod
    def closed(self, part: Part) -> bytes:
        """A part is done."""

    @abstractmethod
    def ended(self, ending: Ending) -> bytes:
        """All parts are done."""

    def events(self, index: int, delta: RequestDelta, usage: bytes) -> bytes:
        out = b"" if self._begun else self._start()
        if self._reasoning is not None:
            self._reasoning.push(delta.token_ids)
        if self._parser is None:
            out += self._add_text(Kind.TEXT, delta.text)
        elif delta.text:
            out += self._add(self._parser.push(delta.text))
        return out if delta.finish_reason is None else out + self._finish(delta, delta.finish_reason)

    def pieces(self, index: int, delta: RequestDelta, usage: bytes) -> Iterator[bytes]:
        """``events``, or with log probabilities one event or more for each token that adds to the output."""
        logprobs = self.job.choice_logprobs
        if logprobs is None:
            yield self.events(index, delta, usage)
            return
        unsaid = self._unsaid = self._unsaid or UnsaidTokens()
        yield b"" if self._begun else self._start()
        if self._reasoning is not None:
            self._reasoning.push(delta.token_ids)
        for tokens in logprobs.placed(delta, self._prompt):
            out = b""
            for token in tokens:
                unsaid.add(token)
                if self._parser is None:
                    out += self._add_text(Kind.TEXT, token.text)
                elif token.text:
                    out += self._add(self._parser.push(token.text))
            yield out
        if delta.finish_reason is not None:
            yield self._finish(delta, delta.finish_reason)

    def _start(self) -> bytes:
        self._read_after(self.streams[0].prompt_token_ids)
        return self.begin()

    def _finish(self, delta: RequestDelta, reason: FinishReason) -> bytes:
        out = b""
        if self._parser is not None:
            out = self._add(self._parser.finish(cut=reason != FinishReason.STOP))
        assert delta.usage is not None
        reasoned = 0 if self._reasoning is None else self._reasoning.count
        return out + self._end(Ending(reason, delta.stop_reason, delta.usage, reasoned))

    def take(self, output: RequestOutput) -> None:
        """A whole output, in place of its deltas."""
        for _ in self.taking(output):
            pass

    def taking(self, output: RequestOutput) -> Iterator[bytes]:
        """``take``, in several parts each of which takes some 10 ms at most. They are empty."""
        (sequence,) = output.outputs
        self._read_after(output.prompt_token_ids)
        ids, reason, stopped_by = list(sequence.token_ids), sequence.finish_reason, sequence.stop_reason
        delta = RequestDelta("", 0, sequence.text, ids, reason, stopped_by, output.usage)
        delta.logprobs = sequence.logprobs
        for _ in self.pieces(0, delta, b""):
            yield b""

    def _read_after(self, prompt: Sequence[int]) -> None:
        """The output is read as what comes after this prompt."""
        self._begun, self._prompt = True, prompt
        if self.job.parsing is not None:
            self._parser = self.job.parsing.parser(self.job.tokenizer, prompt)
            self._reasoning = self.job.parsing.reasoning_tokens(self.job.tokenizer, prompt)

    def empty_text(self) -> bytes:
        """A part of text with nothing in it."""
        return self._begin(Part(Kind.TEXT, len(self.parts))) + self._close()

    def cut(self) -> None:
        """The output has failed: the part that is open stays as it is."""
        if self._open is not None:
            self._open.complete = False

    def _add(self, parsed: ParsedDelta) -> bytes:
        out = b""
        out += self._add_text(Kind.REASONING, parsed.reasoning)
        out += self._add_text(Kind.TEXT, parsed.content)
        if self._unsaid is not None and parsed.tool_calls and not parsed.content:
            self._unsaid.clear()
        for call in parsed.tool_calls:
            if call.index != self._call:
                out += self._close()
                self._call = call.index
                out += self._begin(Part(Kind.CALL, len(self.parts), call))
            assert self._open is not None
            out += self._grow(self._open, call.arguments)
        return out

    def _add_text(self, kind: Kind, text: str) -> bytes:
        if not text:
            return b""
        out = b""
        if self._open is None or self._open.kind is not kind:
            out = self._close() + self._begin(Part(kind, len(self.parts)))
        assert self._open is not None
        if self._unsaid is not None:
            self._open.tokens = self._unsaid.take(text)
        return out + self._grow(self._open, text)

    def _begin(self, part: Part) -> bytes:
        self._open = part
        self.parts.append(part)
        return self.opened(part)

    def _grow(self, part: Part, text: str) -> bytes:
        if not text:
            return b""
        part.pieces.append(text)
        return self.grown(part, text)

    def _close(self) -> bytes:
        part, self._open = self._open, None
        return b"" if part is None else self.closed(part)

    def _end(self, ending: Ending) -> bytes:
        if self._open is not None:
            unfinished = self._parser is not None and self._parser.unfinished
            self._open.complete = ending.reason is FinishReason.STOP and not unfinished
        return self._close() + self.ended(ending)
