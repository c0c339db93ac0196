"""A request's deltas as server-sent events (SSE).

Everything but the text is constant for a choice, so it is encoded once: a chunk costs one JSON string
and two concatenations (about 0.3 µs), not an object graph.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from asyncengine.api.outputs import RequestDelta, Usage
from asyncengine.server.engine_api import RequestStream
from asyncengine.server.errors import ApiError
from asyncengine.server.protocol import UsageBody

if TYPE_CHECKING:
    from asyncengine.server.generation import Job

encode = msgspec.json.Encoder().encode
_NOT_FINISHED = b',"logprobs":null,"finish_reason":null}]'
NO_USAGE = b""
NULL_USAGE = b',"usage":null'


def usage_field(usage: UsageBody) -> bytes:
    """The usage member of a chunk, with the comma before it."""
    return b',"usage":' + encode(usage)


class StreamFormat(ABC):
    """Turns the deltas of one response into events. ``usage`` is a member built by this module."""

    end = b"data: [DONE]\n\n"
    """The event that a complete response ends with, whatever it holds."""
    streams: Sequence[RequestStream] = ()
    """Streams of the prompts, in their order, once the engine has taken them all."""

    @abstractmethod
    def events(self, index: int, delta: RequestDelta, usage: bytes) -> bytes:
        """The events of one delta; empty when there is nothing to say yet."""

    def pieces(self, index: int, delta: RequestDelta, usage: bytes) -> Iterator[bytes]:
        """``events`` in several parts, each of which takes some 10 ms at most where a delta holds very much."""
        yield self.events(index, delta, usage)

    def usage(self, usage: bytes) -> bytes:
        """The event that carries the final usage, of formats that have one."""
        return b""

    def usage_of(self, parts: list[Usage]) -> UsageBody:
        """The sum over the prompts, so far or in the end."""
        return UsageBody.of(parts)

    def failed(self, error: ApiError, request_id: str) -> bytes:
        """Return the end of a response that has begun and then fails."""
        return b"data: " + error.body(request_id) + b"\n\n"


class ChunkFormat(StreamFormat):
    """OpenAI's chunks, one for each delta of a choice."""

    object: str
    before_text: bytes
    after_text: bytes

    def __init__(self, job: Job) -> None:
        head = {"id": job.id, "object": self.object, "created": job.created, "model": job.model}
        head["system_fingerprint"] = job.fingerprint
        self._head = b"data: " + encode(head)[:-1] + b',"choices":['
        self._text_heads: dict[int, bytes] = {}

    def text(self, index: int, text: str, usage: bytes) -> bytes:
        """A chunk of text of one choice."""
        head = self._text_heads.get(index)
        if head is None:
            head = self._text_heads[index] = self._choice(index) + self.before_text
        return head + encode(text) + self.after_text + _NOT_FINISHED + usage + b"}\n\n"

    def usage(self, usage: bytes) -> bytes:
        """The chunk without choices that carries the final usage."""
        return self._head + b"]" + usage + b"}\n\n"

    def _choice(self, index: int) -> bytes:
        return self._head + b'{"index":%d,' % index

    def _chunk(
        self,
        index: int,
        payload: bytes,
        usage: bytes,
        reason: str | None = None,
        logprobs: bytes = b"null",
        stop_reason: str | int | None = None,
    ) -> bytes:
        """A chunk of one choice. The last one, which has a reason, also has the stop string or token, or null."""
        end = b',"logprobs":%b,"finish_reason":%b' % (logprobs, encode(reason))
        end += b"}]" if reason is None else b',"stop_reason":%b}]' % encode(stop_reason)
        return self._choice(index) + payload + end + usage + b"}\n\n"
