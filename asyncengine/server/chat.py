"""/v1/chat/completions: a conversation in, the assistant's next message out."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from asyncengine.request import ChatMessage, Prompt, RequestDelta, RequestOutput, SamplingParams, quoted
from asyncengine.server import protocol
from asyncengine.server.config import ServerConfig
from asyncengine.server.errors import bad_request
from asyncengine.server.generation import Endpoint, Job
from asyncengine.server.logprobs import ChatLogProbs, PromptLogProb
from asyncengine.server.protocol import (
    NOTHING,
    BodyDecoder,
    GenerationBody,
    UsageBody,
    sampling_params,
    unsupported,
)
from asyncengine.server.sse import ChunkFormat, StreamFormat, encode

_UNIMPLEMENTED: dict[str, tuple[object, ...]] = protocol.UNIMPLEMENTED | {
    "echo": (None, False),
    "tools": NOTHING,
    "tool_choice": (None, "none", "auto"),
    "functions": NOTHING,
    "function_call": (None, "none", "auto"),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "web_search_options": (None,),
    "reasoning_effort": (None, "none"),
    "add_generation_prompt": (None, True),
    "continue_final_message": (None, False),
    "add_special_tokens": (None, False),
    "chat_template": (None,),
    "chat_template_kwargs": NOTHING,
    "documents": NOTHING,
}
_MAX_PARTS = 16_384
"""Messages of a conversation, and parts of their contents, together at most."""
#: OpenAI renamed system to developer; chat templates know the old name.
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


class ContentPart(msgspec.Struct):
    type: str
    text: str | None = None


class Message(msgspec.Struct):
    role: str
    content: str | list[ContentPart] | None = None
    tool_calls: list[msgspec.Raw] | None = None
    function_call: dict[str, msgspec.Raw] | None = None


class ChatBody(GenerationBody, kw_only=True):
    messages: list[Message] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


_DECODER = BodyDecoder(ChatBody, _UNIMPLEMENTED)


class AssistantMessage(msgspec.Struct, kw_only=True):
    role: str = "assistant"
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: AssistantMessage
    logprobs: ChatLogProbs | None = None
    finish_reason: str
    token_ids: Sequence[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBody
    prompt_token_ids: Sequence[int] | UnsetType = UNSET
    prompt_logprobs: list[PromptLogProb] | UnsetType = UNSET


_ROLE = b'"delta":{"role":"assistant","content":""}'


class ChatFormat(ChunkFormat):
    """Each choice opens with the role and closes with an empty delta and the finish reason."""

    object = "chat.completion.chunk"
    before_text = b'"delta":{"content":'
    after_text = b"}"

    def __init__(self, response_id: str, created: int, model: str) -> None:
        super().__init__(response_id, created, model)
        self._opened: set[int] = set()

    def events(self, index: int, delta: RequestDelta, usage: bytes) -> bytes:
        out = self.text(index, delta.text, usage) if delta.text else b""
        if index not in self._opened:
            self._opened.add(index)
            out = self._chunk(index, _ROLE, usage) + out
        if delta.finish_reason is not None:
            out += self._chunk(index, b'"delta":{}', usage, delta.finish_reason)
        return out


class DetailedFormat(ChatFormat):
    """Chunks with log probabilities, with the token ids that they stand for, or with both.

    The first chunk of the response also has the token ids of the prompt.
    """

    def __init__(self, job: Job) -> None:
        super().__init__(job.id, job.created, job.model)
        self._with_ids = bool(job.body.return_token_ids)
        self._logprobs = job.choice_logprobs

    def events(self, index: int, delta: RequestDelta, usage: bytes) -> bytes:
        out = b""
        if index not in self._opened:
            first = self._with_ids and not self._opened
            prompt = b',"prompt_token_ids":' + encode(self.streams[0].prompt_token_ids) if first else b""
            self._opened.add(index)
            out = self._chunk(index, _ROLE, usage + prompt)
        logprobs = None if self._logprobs is None else self._logprobs.chat(index, delta)
        if delta.text or logprobs is not None or (self._with_ids and delta.token_ids):
            payload = self.before_text + encode(delta.text) + self.after_text
            if self._with_ids:
                payload += b',"token_ids":' + encode(delta.token_ids)
            out += self._chunk(index, payload, usage, logprobs=encode(logprobs))
        if delta.finish_reason is not None:
            out += self._chunk(index, b'"delta":{}', usage, delta.finish_reason)
        return out


class Chat(Endpoint):
    id_prefix = "chatcmpl-"
    chunk_format = ChatFormat

    def chunks(self, job: Job) -> StreamFormat:
        return DetailedFormat(job) if job.detailed else super().chunks(job)

    def params(self, body: GenerationBody) -> SamplingParams:
        assert isinstance(body, ChatBody)
        if body.top_logprobs and not body.logprobs:
            raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
        return sampling_params(body, logprobs=body.top_logprobs or 0 if body.logprobs else None)

    def parse(self, raw: bytes | bytearray, config: ServerConfig) -> tuple[GenerationBody, list[Prompt]]:
        body = _DECODER.decode(raw)
        messages, body.messages = body.messages, None  # they would live as long as the request
        if not messages:
            raise bad_request("messages is required and must not be empty", "messages")
        parts = len(messages) + sum([len(m.content) for m in messages if type(m.content) is list])
        if parts > _MAX_PARTS:
            raise bad_request(f"messages: at most {_MAX_PARTS} messages and content parts, got {parts}", "messages")
        return body, [[_message(i, m) for i, m in enumerate(messages)]]

    def document(self, job: Job, outputs: list[RequestOutput]) -> ChatCompletion:
        sequences = [s for output in outputs for s in output.outputs]
        with_ids, logprobs = job.body.return_token_ids, job.choice_logprobs
        return ChatCompletion(
            id=job.id,
            created=job.created,
            model=job.model,
            choices=[
                ChatChoice(
                    index=i,
                    message=AssistantMessage(content=s.text),
                    logprobs=None if logprobs is None else logprobs.chat(i, s) or ChatLogProbs([]),
                    finish_reason=s.finish_reason,
                    token_ids=s.token_ids if with_ids else UNSET,
                )
                for i, s in enumerate(sequences)
            ],
            usage=UsageBody.of([output.usage for output in outputs]),
            prompt_token_ids=outputs[0].prompt_token_ids if with_ids else UNSET,
            prompt_logprobs=job.prompt_logprobs(outputs[0]),
        )


def _message(i: int, message: Message) -> ChatMessage:
    """Turn ``i`` with its content parts joined. Raises ApiError 400."""
    role = _ROLES.get(message.role)
    content = message.content
    if role is None:
        known, path = ", ".join(_ROLES), f"messages[{i}].role"
        raise bad_request(f"{path} must be one of {known}, got {quoted(message.role)}", path)
    if message.tool_calls or message.function_call:
        raise unsupported(f"messages[{i}].{'tool_calls' if message.tool_calls else 'function_call'}")
    if content is None:
        raise bad_request(f"messages[{i}].content is required", f"messages[{i}].content")
    if isinstance(content, list):
        if not content:
            raise bad_request(f"messages[{i}].content must have at least one part", f"messages[{i}].content")
        content = "".join([_text(i, k, part) for k, part in enumerate(content)])
    return {"role": role, "content": content}


def _text(i: int, k: int, part: ContentPart) -> str:
    if part.type != "text":
        path = f"messages[{i}].content[{k}].type"
        raise bad_request(f"{path}: only text is supported, got {quoted(part.type)}", path)
    if part.text is None:
        path = f"messages[{i}].content[{k}].text"
        raise bad_request(f"{path} is required", path)
    return part.text
