"""/v1/messages: Anthropic's Messages API. A message has blocks: thinking, text, uses of tools."""

from __future__ import annotations

from typing import Any

import msgspec

from asyncengine.api.conversation import Conversation
from asyncengine.api.json_text import object_of
from asyncengine.api.outputs import FinishReason, RequestOutput, Usage
from asyncengine.api.request import Prompt, SamplingParams
from asyncengine.errors import InvalidRequestError
from asyncengine.server.config import ServerConfig
from asyncengine.server.effort import with_effort, with_thinking
from asyncengine.server.errors import ApiError
from asyncengine.server.generation import Endpoint, Job
from asyncengine.server.messages_input import DECODER, TOOL_FIELDS, MessagesBody, conversation, decode, tools_of
from asyncengine.server.parsing.choose import Parsing
from asyncengine.server.parts import Ending, Kind, Part, PartFormat, event
from asyncengine.server.preparing import prepare
from asyncengine.server.protocol import GenerationBody, sampling_params
from asyncengine.server.sse import StreamFormat, encode
from asyncengine.server.turns import as_called
from asyncengine.text.tokenizer import Tokenizer

_PING = event("ping", b"")
_DELTAS = {
    Kind.REASONING: ("thinking_delta", "thinking"),
    Kind.TEXT: ("text_delta", "text"),
    Kind.CALL: ("input_json_delta", "partial_json"),
}


class MessageUsage(msgspec.Struct):
    input_tokens: int
    """Tokens of the prompt, without those from the prefix cache."""
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0

    @classmethod
    def of(cls, usage: Usage) -> MessageUsage:
        return cls(usage.prompt_tokens - usage.cached_tokens, usage.completion_tokens, usage.cached_tokens)


class Message(msgspec.Struct, kw_only=True):
    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: list[dict[str, Any]] = msgspec.field(default_factory=list)
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class MessageFormat(PartFormat):
    """Events with names."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.message = Message(id=job.id, model=job.model, usage=MessageUsage(0, 0, 0))
        self._stops = job.params.stop_strings
        thinking = job.body.thinking if isinstance(job.body, MessagesBody) else None
        self._omits_thinking = thinking is not None and thinking.display == "omitted"

    def begin(self) -> bytes:
        if self.streams:
            stream = self.streams[0]
            self.message.usage = MessageUsage.of(Usage(len(stream.prompt_token_ids), 0, stream.cached_tokens))
        return event("message_start", b',"message":' + encode(self.message)) + _PING

    def opened(self, part: Part) -> bytes:
        delta, member = _DELTAS[part.kind]
        part.head = (
            b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":"%b","%b":'
            % (part.index, delta.encode(), member.encode())
        )
        started = encode(self._block(part))
        return event("content_block_start", b',"index":%d,"content_block":%b' % (part.index, started))

    def grown(self, part: Part, text: str) -> bytes:
        if self._omits_thinking and part.kind is Kind.REASONING:
            return b""
        return part.head + encode(text) + b"}}\n\n"

    def closed(self, part: Part) -> bytes:
        return event("content_block_stop", b',"index":%d' % part.index)

    def ended(self, ending: Ending) -> bytes:
        message = self.message
        message.content = [self._block(part) for part in self.parts]
        message.usage = MessageUsage.of(ending.usage)
        if ending.reason is not FinishReason.STOP:  # this API has no name for an end by timeout
            message.stop_reason = "max_tokens"
        elif ending.stop_reason in self._stops:
            message.stop_reason, message.stop_sequence = "stop_sequence", str(ending.stop_reason)
        else:
            called = any(part.kind is Kind.CALL for part in self.parts)
            message.stop_reason = "tool_use" if called else "end_turn"
        delta = {"stop_reason": message.stop_reason, "stop_sequence": message.stop_sequence}
        out = event("message_delta", b',"delta":%b,"usage":%b' % (encode(delta), encode(message.usage)))
        return out + event("message_stop", b"")

    def failed(self, error: ApiError, request_id: str) -> bytes:
        return b"event: error\ndata: " + error.anthropic_body(request_id) + b"\n\n"

    def _block(self, part: Part) -> dict[str, Any]:
        match part.kind:
            case Kind.REASONING:
                return {"type": "thinking", "thinking": "" if self._omits_thinking else part.text, "signature": ""}
            case Kind.TEXT:
                return {"type": "text", "text": part.text}
        assert part.call is not None
        # An unfinished call has no arguments: stop_reason says that it is unfinished.
        return {"type": "tool_use", "id": part.call.id, "name": part.call.name, "input": object_of(part.text) or {}}


class Messages(Endpoint):
    id_prefix = "msg_"
    fields = DECODER.fields

    def __init__(self, *, counts: bool = False) -> None:
        """``counts``: the tokens of a request are asked for, and no output."""
        self._counts = counts

    def parse(self, raw: bytes | bytearray, config: ServerConfig) -> tuple[GenerationBody, list[Prompt]]:
        body = decode(raw, counts=self._counts)
        chat, body.messages, body.system = conversation(body), None, None
        return body, [chat]

    def params(self, body: GenerationBody) -> SamplingParams:
        return sampling_params(body)

    def prepare(
        self, body: GenerationBody, prompts: list[Prompt], tokenizer: Tokenizer | None, config: ServerConfig
    ) -> tuple[list[Prompt], SamplingParams, Parsing | None]:
        (chat,) = prompts
        assert isinstance(body, MessagesBody)
        assert isinstance(chat, Conversation)
        if body.output_config is not None and body.output_config.effort is not None:
            chat = with_effort(chat, body.output_config.effort, tokenizer, "output_config.effort")
        if body.thinking is not None:
            chat = with_thinking(chat, body.thinking.type != "disabled", tokenizer)
        use = tools_of(body)
        body.tools = None
        prepared = prepare(chat, use, self.params(body), tokenizer, config)
        return [prepared.prompt], prepared.params, prepared.parsing

    def name_as_asked(self, exc: InvalidRequestError, body: GenerationBody, grammar: str | None = None) -> None:
        super().name_as_asked(exc, body, grammar)
        assert isinstance(body, MessagesBody)
        if grammar is not None:
            exc.args = (as_called(TOOL_FIELDS, str(exc)),)
        if exc.param == "stop" and body.stop_sequences is not None:
            exc.param = "stop_sequences"
            exc.args = (str(exc).replace("stop", "stop_sequences", 1),)

    def chunks(self, job: Job) -> StreamFormat:
        return MessageFormat(job)

    def document(self, job: Job, outputs: list[RequestOutput]) -> Message:
        form = MessageFormat(job)
        form.take(outputs[0])
        return form.message
