"""/v1/responses: OpenAI's Responses API. A response has items: reasoning, a message, calls of functions."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec

from asyncengine.checks import quoted
from asyncengine.conversation import Conversation
from asyncengine.errors import InvalidRequestError
from asyncengine.json_text import object_of
from asyncengine.request import FinishReason, Prompt, RequestOutput, SamplingParams
from asyncengine.server.config import ServerConfig
from asyncengine.server.effort import with_effort
from asyncengine.server.errors import ApiError, bad_request
from asyncengine.server.generation import Endpoint, Job
from asyncengine.server.parsing.choose import Parsing
from asyncengine.server.parts import Ending, Kind, Part, PartFormat, event
from asyncengine.server.preparing import prepare
from asyncengine.server.protocol import GenerationBody, sampling_params
from asyncengine.server.response_store import OwnResponses, StoredResponse
from asyncengine.server.responses_input import (
    DECODER,
    TOOL_FIELDS,
    ChosenTool,
    FunctionTool,
    ResponsesBody,
    add_input,
    decode,
    tools_of,
)
from asyncengine.server.sse import StreamFormat, encode
from asyncengine.server.turns import Turns, as_called
from asyncengine.tokenization import Tokenizer

_IN_PROGRESS, _COMPLETED, _INCOMPLETE = "in_progress", "completed", "incomplete"
_PREFIXES = {Kind.REASONING: "rs_", Kind.TEXT: "msg_", Kind.CALL: "fc_"}
_NAMES = {
    "max_tokens": "max_output_tokens",
    "prompt": "input",
    "messages": "input",
    "structured_outputs": "text.format",
    "response_format": "text.format",
}


class CachedTokens(msgspec.Struct):
    cached_tokens: int
    cache_write_tokens: int = 0


class ReasoningTokens(msgspec.Struct):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct):
    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class Response(msgspec.Struct, kw_only=True):
    """The document, of which events carry the state so far."""

    id: str
    object: str = "response"
    created_at: int
    status: str = _IN_PROGRESS
    completed_at: int | None = None
    background: bool = False
    error: dict[str, str] | None = None
    incomplete_details: dict[str, str] | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None = None
    model: str
    output: list[dict[str, Any]] = msgspec.field(default_factory=list)
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, str | None]
    service_tier: str = "default"
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | ChosenTool
    tools: Sequence[FunctionTool]
    top_logprobs: int = 0
    top_p: float
    truncation: str = "disabled"
    usage: ResponseUsage | None = None
    user: str | None
    metadata: dict[str, str]


class ResponseFormat(PartFormat):
    """Typed events, numbered in order. The last one has the whole response, which is stored before it is sent."""

    def __init__(self, job: Job, response: Response, turns: Turns, own: OwnResponses) -> None:
        super().__init__(job)
        self.response = response
        self._turns = turns
        self._own = own
        self._number = 0
        self._ids: list[str] = []  # of the parts

    def begin(self) -> bytes:
        return self._state("response.created") + self._state("response.in_progress")

    def opened(self, part: Part) -> bytes:
        self._ids.append(_PREFIXES[part.kind] + uuid.uuid4().hex)
        item = self._item(part, _IN_PROGRESS)
        name, place = "response.function_call_arguments.delta", self._place(part)
        out = self._event("response.output_item.added", b',"output_index":%d,"item":%b' % (part.index, encode(item)))
        if part.kind is not Kind.CALL:
            out += self._event("response.content_part.added", place + b',"part":' + encode(_content(part)))
            name = f"response.{_content(part)['type']}.delta"
            place += b',"logprobs":[]' if part.kind is Kind.TEXT else b""
        part.head = b'event: %b\ndata: {"type":"%b"%b,"delta":' % (name.encode(), name.encode(), place)
        return out

    def grown(self, part: Part, text: str) -> bytes:
        number, self._number = self._number, self._number + 1
        return part.head + encode(text) + b',"sequence_number":%d}\n\n' % number

    def closed(self, part: Part) -> bytes:
        place, item = self._place(part), self._item(part)
        if part.kind is Kind.CALL:
            whole = b',"name":%b,"arguments":%b' % (encode(item["name"]), encode(item["arguments"]))
            out = self._event("response.function_call_arguments.done", place + whole)
        else:
            content = _content(part)
            logprobs = b',"logprobs":[]' if part.kind is Kind.TEXT else b""
            whole = b',"text":' + encode(content["text"]) + logprobs
            out = self._event(f"response.{content['type']}.done", place + whole)
            out += self._event("response.content_part.done", place + b',"part":' + encode(content))
        return out + self._event(
            "response.output_item.done", b',"output_index":%d,"item":%b' % (part.index, encode(item))
        )

    def ended(self, ending: Ending) -> bytes:
        forced = self.job.parsing is not None and self.job.parsing.calls.forced
        out = self.empty_text() if not self.parts and not forced else b""
        response, usage = self.response, ending.usage
        if ending.reason is not FinishReason.STOP:
            reason = "timeout" if ending.reason is FinishReason.TIMEOUT else "max_output_tokens"
            response.status, response.incomplete_details = _INCOMPLETE, {"reason": reason}
        else:
            response.status, response.completed_at = _COMPLETED, int(time.time())
        response.output = [self._item(part) for part in self.parts]
        response.usage = ResponseUsage(
            usage.prompt_tokens,
            CachedTokens(usage.cached_tokens),
            usage.completion_tokens,
            ReasoningTokens(ending.reasoning_tokens),
            usage.total_tokens,
        )
        self._keep()
        return out + self._state(f"response.{response.status}")

    def failed(self, error: ApiError, request_id: str) -> bytes:
        message = error.message_for(request_id)
        self.response.status, self.response.error = "failed", {"code": "server_error", "message": message}
        self.cut()
        self.response.output = [self._item(part) for part in self.parts]
        told = b',"code":%b,"message":%b,"param":%b' % (encode(error.code), encode(message), encode(error.param))
        return self._state("response.failed") + self._event("error", told)

    def _keep(self) -> None:
        if not self.response.store:
            return
        for part in self.parts:
            match part.kind:
                case Kind.REASONING:
                    self._turns.reasoning(part.text)
                case Kind.TEXT:
                    self._turns.text("assistant", part.text)
                case Kind.CALL:
                    assert part.call is not None
                    arguments: str | dict[str, Any] | None = object_of(part.text or "{}")
                    arguments = part.text if arguments is None else arguments
                    self._turns.call(part.call.id or "", part.call.name or "", arguments)
        stored = StoredResponse(encode(self.response), encode(self._turns.messages))
        if self._own.takes(stored.size):
            self._own.put(self.response.id, stored)
        else:
            self.response.store = False

    def _item(self, part: Part, status: str | None = None) -> dict[str, Any]:
        """As its events and the response have it; while it is in progress, without what it holds."""
        begins = status is not None
        status = status or (_COMPLETED if part.complete else _INCOMPLETE)
        item: dict[str, Any] = {"id": self._ids[part.index], "status": status}
        match part.kind:
            case Kind.REASONING:
                return item | {"type": "reasoning", "summary": [], "content": [] if begins else [_content(part)]}
            case Kind.TEXT:
                content = [] if begins else [_content(part)]
                return item | {"type": "message", "role": "assistant", "content": content}
        assert part.call is not None
        call = {"call_id": part.call.id, "name": part.call.name, "arguments": part.text}
        return item | {"type": "function_call"} | call

    def _place(self, part: Part) -> bytes:
        place = b',"item_id":"%b","output_index":%d' % (self._ids[part.index].encode(), part.index)
        return place if part.kind is Kind.CALL else place + b',"content_index":0'

    def _state(self, name: str) -> bytes:
        return self._event(name, b',"response":' + encode(self.response))

    def _event(self, name: str, members: bytes) -> bytes:
        number, self._number = self._number, self._number + 1
        return event(name, members + b',"sequence_number":%d' % number)


def _content(part: Part) -> dict[str, Any]:
    """The only one of an item."""
    if part.kind is Kind.REASONING:
        return {"type": "reasoning_text", "text": part.text}
    return {"type": "output_text", "text": part.text, "annotations": [], "logprobs": []}


def no_response(response_id: str) -> ApiError:
    return ApiError(404, f"there is no stored response {quoted(response_id)}", param="response_id", code="not_found")


class Responses(Endpoint):
    """One request, of a client that sees ``own`` of the stored responses."""

    id_prefix = "resp_"
    fields = DECODER.fields

    def __init__(self, own: OwnResponses) -> None:
        self._own = own
        self._turns = Turns([])
        self._tools = msgspec.Raw(b"[]")
        self._size = 0  # bytes of the conversation, at most

    def parse(self, raw: bytes | bytearray, config: ServerConfig) -> tuple[GenerationBody, list[Prompt]]:
        body = decode(raw)
        self._size = len(raw)
        if body.previous_response_id is not None:
            self._turns = Turns(self._earlier(body.previous_response_id))
        add_input(self._turns, body.input)
        body.input = None
        messages = self._turns.messages
        if body.instructions:
            messages = [{"role": "system", "content": body.instructions}, *messages]
        return body, [Conversation(messages=messages)]

    def _earlier(self, response_id: str) -> list[dict[str, Any]]:
        stored = self._own.get(response_id)
        if stored is None:
            raise bad_request(
                f"previous_response_id: there is no stored response {quoted(response_id)}",
                "previous_response_id",
                "previous_response_not_found",
            )
        self._size += len(stored.conversation)
        messages: list[dict[str, Any]] = msgspec.json.decode(stored.conversation)
        return messages

    def params(self, body: GenerationBody) -> SamplingParams:
        return sampling_params(body)

    def prepare(
        self, body: GenerationBody, prompts: list[Prompt], tokenizer: Tokenizer | None, config: ServerConfig
    ) -> tuple[list[Prompt], SamplingParams, Parsing | None]:
        (chat,) = prompts
        assert isinstance(body, ResponsesBody)
        assert isinstance(chat, Conversation)
        if body.reasoning is not None and body.reasoning.effort is not None:
            chat = with_effort(chat, body.reasoning.effort, tokenizer, "reasoning.effort")
        use = tools_of(body)
        # As text they have the size that they have in the body, where as objects they may have thirty times that.
        self._tools, body.tools = msgspec.Raw(encode(body.tools or ())), None
        prepared = prepare(chat, use, self.params(body), tokenizer, config)
        return [prepared.prompt], prepared.params, prepared.parsing

    def name_as_asked(self, exc: InvalidRequestError, body: GenerationBody, grammar: str | None = None) -> None:
        super().name_as_asked(exc, body, grammar)
        assert isinstance(body, ResponsesBody)
        if grammar is not None and exc.param == grammar:
            exc.param, exc.args = as_called(TOOL_FIELDS, grammar), (as_called(TOOL_FIELDS, str(exc)),)
        elif exc.param in _NAMES and not (exc.param == "response_format" and body.text is None):
            name, exc.param = exc.param, _NAMES[exc.param]
            exc.args = (str(exc).replace(name, exc.param, 1),)

    def chunks(self, job: Job) -> StreamFormat:
        return self._format(job)

    def document(self, job: Job, outputs: list[RequestOutput]) -> Response:
        form = self._format(job)
        form.take(outputs[0])
        return form.response

    def _format(self, job: Job) -> ResponseFormat:
        body, params = job.body, job.params
        assert isinstance(body, ResponsesBody)
        asked = body.reasoning
        form = body.text.format if body.text is not None else None
        response = Response(
            id=job.id,
            created_at=job.created,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            model=job.model,
            parallel_tool_calls=body.parallel_tool_calls is not False,
            previous_response_id=body.previous_response_id,
            reasoning={"effort": asked.effort if asked else None, "summary": asked.summary if asked else None},
            store=body.store is not False and self._own.takes(self._size),
            temperature=params.temperature,
            text={"format": {"type": "text"} if form is None else form.described(), "verbosity": "medium"},
            tool_choice=body.tool_choice or "auto",
            tools=self._tools,  # type: ignore[arg-type]  # their JSON
            top_p=params.top_p,
            user=body.user,
            metadata=body.metadata or {},
        )
        return ResponseFormat(job, response, self._turns, self._own)
