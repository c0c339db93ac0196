"""Deltas of chat completions as events."""

from __future__ import annotations

from collections.abc import Iterator

from asyncengine.api.outputs import FinishReason, RequestDelta, Usage
from asyncengine.server.generation import Job
from asyncengine.server.parsing import OutputParser, ParsedDelta, ToolCallDelta
from asyncengine.server.parsing.choose import Parsing, ReasoningTokens
from asyncengine.server.protocol import UsageBody
from asyncengine.server.sse import NO_USAGE, NULL_USAGE, ChunkFormat, encode, usage_field

_EMPTY = b'"delta":{"content":""}'
_ROLE = b'"delta":{"role":"assistant","content":""}'


class ChatFormat(ChunkFormat):
    """Chunks of a chat: each choice opens with the role and closes with an empty delta and the finish reason."""

    object = "chat.completion.chunk"
    before_text = b'"delta":{"content":'
    after_text = b"}"

    def __init__(self, job: Job, echo: str = "") -> None:
        """``echo``: a text that each choice begins with."""
        super().__init__(job)
        self._opened: set[int] = set()
        self._echo = self.before_text + encode(echo) + self.after_text if echo else b""

    def opening(self, index: int, usage: bytes, more: bytes = b"") -> bytes:
        """Return the first chunks of a choice; ``more`` are members of the first of them, a comma before each."""
        usage = self.usage_before(usage)
        echo = self._chunk(index, self._echo, usage) if self._echo else b""
        return self._chunk(index, _ROLE, usage + more) + echo

    def ending(self, index: int, delta: RequestDelta, usage: bytes, reason: str) -> bytes:
        """The last chunk of a choice, whose last delta this is."""
        return self._chunk(index, b'"delta":{}', usage, reason, stop_reason=delta.stop_reason)

    def usage_before(self, usage: bytes) -> bytes:
        """The usage member of a chunk that stands for no token, in place of ``usage``, if that has counts."""
        if usage in (NO_USAGE, NULL_USAGE):
            return usage
        prompt_tokens = sum(len(stream.prompt_token_ids) for stream in self.streams)
        cached_tokens = sum(stream.cached_tokens for stream in self.streams)
        return usage_field(self.usage_of([Usage(prompt_tokens, 0, cached_tokens)]))

    def events(self, index: int, delta: RequestDelta, usage: bytes) -> bytes:
        out = self.text(index, delta.text, usage) if delta.text else b""
        if index not in self._opened:
            self._opened.add(index)
            out = self.opening(index, usage) + out
        if delta.finish_reason is not None:
            out += self.ending(index, delta, usage, delta.finish_reason)
        return out


class DetailedFormat(ChatFormat):
    """Chunks with log probabilities, with the token ids that they stand for, or with both.

    The first chunk of the response also has the token ids of the prompt.
    """

    def __init__(self, job: Job, echo: str = "") -> None:
        super().__init__(job, echo)
        self._with_ids = bool(job.body.return_token_ids)
        self._logprobs = job.choice_logprobs

    def events(self, index: int, delta: RequestDelta, usage: bytes) -> bytes:
        return b"".join(self.pieces(index, delta, usage))

    def pieces(self, index: int, delta: RequestDelta, usage: bytes) -> Iterator[bytes]:
        out = b""
        if index not in self._opened:
            first = self._with_ids and not self._opened
            prompt = b',"prompt_token_ids":' + encode(self.streams[0].prompt_token_ids) if first else b""
            self._opened.add(index)
            out = self.opening(index, usage, prompt)
        prompt_ids = self.streams[0].prompt_token_ids  # a conversation is one prompt
        batches = iter(()) if self._logprobs is None else self._logprobs.chat(index, delta, prompt_ids)
        logprobs = next(batches, None)
        if delta.text or logprobs is not None or (self._with_ids and delta.token_ids):
            payload = self.before_text + encode(delta.text) + self.after_text
            if self._with_ids:
                payload += b',"token_ids":' + encode(delta.token_ids)
            out += self._chunk(index, payload, usage, logprobs=encode(logprobs))
        for logprobs in batches:
            yield out
            out = self._chunk(index, _EMPTY, usage, logprobs=encode(logprobs))
        if delta.finish_reason is not None:
            out += self.ending(index, delta, usage, delta.finish_reason)
        yield out


class ParsedFormat(ChatFormat):
    """Chunks with reasoning and tool calls, and with the details of ``DetailedFormat`` if they are asked for.

    Details go with the first chunk of a delta: log probabilities are those of all tokens, of calls and reasoning too.
    """

    def __init__(
        self, job: Job, parsing: Parsing, echo: str = "", *, with_reasoning: bool = True, with_functions: bool = False
    ) -> None:
        """``with_functions``: calls have OpenAI's older form."""
        super().__init__(job, echo)
        self._job = job
        self._parsing = parsing
        self._with_reasoning = with_reasoning
        self._with_functions = with_functions
        self._parsers: dict[int, tuple[OutputParser, ReasoningTokens | None]] = {}
        self._called: set[int] = set()
        self._with_ids = bool(job.body.return_token_ids)
        self._logprobs = job.choice_logprobs

    def usage_of(self, parts: list[Usage]) -> UsageBody:
        counts = [counter.count for _, counter in self._parsers.values() if counter is not None]
        return UsageBody.of(parts, sum(counts) if counts else None)

    def events(self, index: int, delta: RequestDelta, usage: bytes) -> bytes:
        return b"".join(self.pieces(index, delta, usage))

    def pieces(self, index: int, delta: RequestDelta, usage: bytes) -> Iterator[bytes]:
        out = b""
        if index not in self._parsers:
            out = self._open(index, usage)
        parser, counter = self._parsers[index]
        if counter is not None:
            counter.push(delta.token_ids)
        parsed = [parser.push(delta.text)] if delta.text else []
        if delta.finish_reason is not None:
            parsed.append(parser.finish(cut=delta.finish_reason != FinishReason.STOP))
        payloads = [payload for piece in parsed for payload in self._payloads(index, piece)]
        prompt_ids = self.streams[0].prompt_token_ids  # a conversation is one prompt
        batches = iter(()) if self._logprobs is None else self._logprobs.chat(index, delta, prompt_ids)
        logprobs = next(batches, None)
        ids = b',"token_ids":' + encode(delta.token_ids) if self._with_ids and delta.token_ids else b""
        if not payloads and (ids or logprobs is not None):
            payloads.append(_EMPTY)
        for payload in payloads:
            out += self._chunk(index, payload + ids, usage, logprobs=encode(logprobs))
            ids, logprobs = b"", None
        for logprobs in batches:
            yield out
            out = self._chunk(index, _EMPTY, usage, logprobs=encode(logprobs))
        if delta.finish_reason is not None:
            called = index in self._called and delta.finish_reason == FinishReason.STOP and not parser.unfinished
            called_as = "function_call" if self._with_functions else "tool_calls"
            out += self.ending(index, delta, usage, called_as if called else delta.finish_reason)
        yield out

    def _open(self, index: int, usage: bytes) -> bytes:
        prompt = self.streams[index // self._job.params.n].prompt_token_ids
        ids = b',"prompt_token_ids":' + encode(prompt) if self._with_ids and not self._parsers else b""
        tokenizer = self._job.tokenizer
        self._parsers[index] = (
            self._parsing.parser(tokenizer, prompt),
            self._parsing.reasoning_tokens(tokenizer, prompt),
        )
        return self.opening(index, usage, ids)

    def _payloads(self, index: int, parsed: ParsedDelta) -> list[bytes]:
        payloads = []
        if parsed.reasoning and self._with_reasoning:
            text = encode(parsed.reasoning)
            payloads.append(b'"delta":{"reasoning_content":%b,"reasoning":%b}' % (text, text))
        if parsed.content:
            payloads.append(self.before_text + encode(parsed.content) + self.after_text)
        if parsed.tool_calls:
            self._called.add(index)
            for piece in parsed.tool_calls:
                if self._with_functions:
                    payloads.append(b'"delta":{"function_call":%b}' % encode(_function(piece)))
                else:
                    payloads.append(b'"delta":{"tool_calls":[%b]}' % encode(_call(piece)))
        return payloads


def _call(piece: ToolCallDelta) -> dict[str, object]:
    kind, member = ("custom", "input") if piece.custom else ("function", "arguments")
    if piece.name is None:
        return {"index": piece.index, kind: {member: piece.arguments}}
    return {"index": piece.index, "id": piece.id, "type": kind, kind: {"name": piece.name, member: piece.arguments}}


def _function(piece: ToolCallDelta) -> dict[str, str]:
    return {"arguments": piece.arguments} if piece.name is None else {"name": piece.name, "arguments": piece.arguments}
