"""/v1/responses: OpenAI's Responses API. A response has items: reasoning, a message, calls of tools."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from asyncengine.api.checks import quoted
from asyncengine.api.conversation import Conversation
from asyncengine.api.outputs import FinishReason, RequestOutput
from asyncengine.api.request import Prompt, SamplingParams
from asyncengine.errors import InvalidRequestError
from asyncengine.server.config import ServerConfig
from asyncengine.server.effort import with_effort, with_verbosity
from asyncengine.server.engine_api import Engine
from asyncengine.server.errors import ApiError, bad_request
from asyncengine.server.fitting import fitted
from asyncengine.server.generation import Endpoint, Job
from asyncengine.server.parsing.choose import Parsing
from asyncengine.server.parts import Ending, Kind, Part, PartFormat, event
from asyncengine.server.preparing import prepare
from asyncengine.server.protocol import GenerationBody, sampling_params
from asyncengine.server.response_store import OwnResponses, StoredResponse
from asyncengine.server.responses_input import (
    DECODER,
    Item,
    ResponsesBody,
    add_items,
    decode,
    items_of,
    stored_item,
)
from asyncengine.server.responses_tools import TOOL_FIELDS, ChosenTool, ResponsesTool, tools_of
from asyncengine.server.sse import StreamFormat, encode
from asyncengine.server.turns import Turns, as_called, renamed
from asyncengine.text.tokenizer import Tokenizer

_IN_PROGRESS, _COMPLETED, _INCOMPLETE = "in_progress", "completed", "incomplete"
_PREFIXES = {"reasoning": "rs_", "message": "msg_", "function_call": "fc_", "custom_tool_call": "ctc_"}
_CALL_MEMBERS = {
    "function_call": ("arguments", "response.function_call_arguments"),
    "custom_tool_call": ("input", "response.custom_tool_call_input"),
}
"""Members and events by the type of a call: the member with its text, and the beginning of the names of its events."""
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
    tools: Sequence[ResponsesTool]
    top_logprobs: int = 0
    top_p: float
    truncation: str = "disabled"
    usage: ResponseUsage | None = None
    user: str | None
    metadata: dict[str, str]


@dataclass(slots=True)
class Kept:
    """Parts of a request that the format of its response needs."""

    own: OwnResponses
    items: list[bytes] = field(default_factory=list)
    """The conversation so far, as JSON."""
    spaces: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Namespaces and names in them of tools, by the model's names."""


class ResponseFormat(PartFormat):
    """Typed events, numbered in order. The last one has the whole response, which is stored before it is sent."""

    def __init__(self, job: Job, response: Response, kept: Kept) -> None:
        super().__init__(job)
        self.response = response
        self._kept = kept
        self._number = 0
        self._ids: list[str] = []  # of the parts
        self._tells_logprobs = job.choice_logprobs is not None

    def begin(self) -> bytes:
        return self._state("response.created") + self._state("response.in_progress")

    def opened(self, part: Part) -> bytes:
        self._ids.append(_PREFIXES[_type(part)] + uuid.uuid4().hex)
        item = self._item(part, _IN_PROGRESS)
        place = self._place(part)
        out = self._event("response.output_item.added", b',"output_index":%d,"item":%b' % (part.index, encode(item)))
        if part.kind is Kind.CALL:
            name = f"{_CALL_MEMBERS[_type(part)][1]}.delta"
        else:
            out += self._event("response.content_part.added", place + b',"part":' + encode(_content(part)))
            name = f"response.{_content(part)['type']}.delta"
            place += b',"logprobs":[]' if part.kind is Kind.TEXT and not self._tells_logprobs else b""
        part.head = b'event: %b\ndata: {"type":"%b"%b,"delta":' % (name.encode(), name.encode(), place)
        return out

    def grown(self, part: Part, text: str) -> bytes:
        number, self._number = self._number, self._number + 1
        if self._tells_logprobs and part.kind is Kind.TEXT:
            assert self.job.logprobs is not None
            told = [encode(each) for each in self.job.logprobs.told(part.tokens)]
            part.logprobs += told
            return part.head + encode(text) + b',"logprobs":[%b],"sequence_number":%d}\n\n' % (b",".join(told), number)
        return part.head + encode(text) + b',"sequence_number":%d}\n\n' % number

    def closed(self, part: Part) -> bytes:
        place, item = self._place(part), self._item(part)
        if part.kind is Kind.CALL:
            member, name = _CALL_MEMBERS[_type(part)]
            called = b',"name":' + encode(item["name"]) if _type(part) == "function_call" else b""
            out = self._event(f"{name}.done", place + called + b',"%b":%b' % (member.encode(), encode(item[member])))
        else:
            content = _content(part)
            logprobs = b',"logprobs":' + encode(content["logprobs"]) if part.kind is Kind.TEXT else b""
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
            part.logprobs.clear()  # the document has them
        outputs = {self._ids[part.index]: encode(self._item(part)) for part in self.parts}
        stored = StoredResponse(encode(self.response), tuple(self._kept.items), outputs)
        if self._kept.own.takes(stored.size):
            self._kept.own.put(self.response.id, stored)
        else:
            self.response.store = False

    def _item(self, part: Part, status: str | None = None) -> dict[str, Any]:
        """Return a part's item as its events and the response have it; while the item is in progress, without its
        contents."""
        begins = status is not None
        status = status or (_COMPLETED if part.complete else _INCOMPLETE)
        kind = _type(part)
        item: dict[str, Any] = {"id": self._ids[part.index], "type": kind, "status": status}
        if part.kind is Kind.REASONING:
            return item | {"summary": [], "content": [] if begins else [_content(part)]}
        if part.kind is Kind.TEXT:
            return item | {"role": "assistant", "content": [] if begins else [_content(part)]}
        assert part.call is not None
        named = {"call_id": part.call.id, "name": part.call.name}
        if (space := self._kept.spaces.get(part.call.name or "")) is not None:
            named |= {"namespace": space[0], "name": space[1]}
        return item | named | {_CALL_MEMBERS[kind][0]: part.text}

    def _place(self, part: Part) -> bytes:
        place = b',"item_id":"%b","output_index":%d' % (self._ids[part.index].encode(), part.index)
        return place if part.kind is Kind.CALL else place + b',"content_index":0'

    def _state(self, name: str) -> bytes:
        return self._event(name, b',"response":' + encode(self.response))

    def _event(self, name: str, members: bytes) -> bytes:
        number, self._number = self._number, self._number + 1
        return event(name, members + b',"sequence_number":%d' % number)


def _type(part: Part) -> str:
    """The type of its item."""
    if part.kind is Kind.CALL:
        return "custom_tool_call" if part.call is not None and part.call.custom else "function_call"
    return "reasoning" if part.kind is Kind.REASONING else "message"


def _content(part: Part) -> dict[str, Any]:
    """The only one of an item."""
    if part.kind is Kind.REASONING:
        return {"type": "reasoning_text", "text": part.text}
    logprobs = [msgspec.Raw(each) for each in part.logprobs]
    return {"type": "output_text", "text": part.text, "annotations": [], "logprobs": logprobs}


class Responses(Endpoint):
    """One request, of a client that sees ``own`` of the stored responses."""

    id_prefix = "resp_"
    fields = DECODER.fields

    def __init__(self, own: OwnResponses) -> None:
        self._kept = Kept(own)
        self._tools = msgspec.Raw(b"[]")
        self._size = 0  # bytes of the conversation, at most

    def parse(self, raw: bytes | bytearray, config: ServerConfig) -> tuple[GenerationBody, list[Prompt]]:
        body = decode(raw)
        self._size = len(raw)
        turns = Turns([])
        if body.previous_response_id is not None:
            self._begin_with(body.previous_response_id, turns)
        items, body.input = items_of(body.input, self._kept.own), None
        add_items(turns, items)
        if self._stores(body):
            self._kept.items += [encode(stored_item(item)) for item in items]
        messages = turns.messages
        if body.instructions:
            messages = [{"role": "system", "content": body.instructions}, *messages]
        return body, [Conversation(messages=messages)]

    def _begin_with(self, response_id: str, turns: Turns) -> None:
        stored = self._kept.own.get(response_id)
        if stored is None:
            raise bad_request(
                f"previous_response_id: there is no stored response {quoted(response_id)}",
                "previous_response_id",
                "previous_response_not_found",
            )
        self._size += sum(map(len, stored.items))
        self._kept.items = list(stored.items)
        try:
            add_items(turns, [msgspec.json.decode(item, type=Item) for item in stored.items])
        except ApiError as exc:
            message = f"previous_response_id: what was stored cannot go on: {exc.message}"
            raise bad_request(message, "previous_response_id") from None

    def _stores(self, body: ResponsesBody) -> bool:
        return body.store is not False and self._kept.own.takes(self._size)

    def params(self, body: GenerationBody) -> SamplingParams:
        assert isinstance(body, ResponsesBody)
        return sampling_params(body, logprobs=body.num_logprobs)

    def prepare(
        self, body: GenerationBody, prompts: list[Prompt], tokenizer: Tokenizer | None, config: ServerConfig
    ) -> tuple[list[Prompt], SamplingParams, Parsing | None]:
        (chat,) = prompts
        assert isinstance(body, ResponsesBody)
        assert isinstance(chat, Conversation)
        if body.reasoning is not None and body.reasoning.effort is not None:
            chat = with_effort(chat, body.reasoning.effort, tokenizer, "reasoning.effort")
        if body.text is not None and body.text.verbosity is not None:
            chat = with_verbosity(chat, body.text.verbosity, tokenizer, "text.verbosity")
        use, self._kept.spaces = tools_of(body.tools, body.tool_choice, body.parallel_tool_calls)
        # As text they have the size that they have in the body, where as objects they may have thirty times that.
        self._tools, body.tools = msgspec.Raw(encode(body.tools or ())), None
        try:
            prepared = prepare(chat, use, self.params(body), tokenizer, config)
        except ApiError as exc:
            raise renamed(exc, TOOL_FIELDS) from None
        return [prepared.prompt], prepared.params, prepared.parsing

    async def fit(self, engine: Engine, body: GenerationBody, prompts: list[Prompt]) -> list[Prompt]:
        assert isinstance(body, ResponsesBody)
        if body.truncation != "auto":
            return prompts
        context = engine.model_info.max_model_len
        return [await fitted(engine, prompts[0], context - (body.max_output_tokens or context // 8))]

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

    def pieces(self, job: Job, outputs: list[RequestOutput]) -> Iterator[bytes]:
        form = self._format(job)
        yield from form.taking(outputs[0])
        yield encode(form.response)

    def _format(self, job: Job) -> ResponseFormat:
        body, params = job.body, job.params
        assert isinstance(body, ResponsesBody)
        asked = body.reasoning
        form = body.text.format if body.text is not None else None
        verbosity = (body.text.verbosity if body.text is not None else None) or "medium"
        response = Response(
            id=job.id,
            created_at=job.created,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            model=job.model,
            parallel_tool_calls=body.parallel_tool_calls is not False,
            previous_response_id=body.previous_response_id,
            reasoning={"effort": asked.effort if asked else None, "summary": asked.summary if asked else None},
            store=self._stores(body),
            temperature=params.temperature,
            text={"format": {"type": "text"} if form is None else form.described(), "verbosity": verbosity},
            tool_choice=body.tool_choice or "auto",
            tools=self._tools,  # type: ignore[arg-type]  # their JSON
            top_logprobs=body.num_logprobs or 0,
            top_p=params.top_p,
            truncation=body.truncation or "disabled",
            user=body.user,
            metadata=body.metadata or {},
        )
        return ResponseFormat(job, response, self._kept)
