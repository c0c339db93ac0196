"""/v1/chat/completions: a conversation in, the assistant's next message out."""

from __future__ import annotations

from typing import Any

import msgspec

from asyncengine.request import ChatMessage, Prompt, RequestDelta, RequestOutput
from asyncengine.server import protocol
from asyncengine.server.errors import bad_request
from asyncengine.server.generation import Endpoint, Job
from asyncengine.server.protocol import NOTHING, GenerationBody, UsageBody, unsupported
from asyncengine.server.sse import NOT_FINISHED, ChunkFormat

_UNIMPLEMENTED: dict[str, tuple[object, ...]] = protocol.UNIMPLEMENTED | {
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
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
    "return_token_ids": (None, False),
    "chat_template": (None,),
    "chat_template_kwargs": NOTHING,
    "documents": NOTHING,
}
#: OpenAI renamed system to developer; chat templates know the old name.
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


class ContentPart(msgspec.Struct):
    type: str
    text: str | None = None


class Message(msgspec.Struct):
    role: str
    content: str | list[ContentPart] | None = None
    tool_calls: list[Any] | None = None
    function_call: Any = None


class ChatBody(GenerationBody, kw_only=True):
    messages: list[Message] | None = None


class AssistantMessage(msgspec.Struct, kw_only=True):
    role: str = "assistant"
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: AssistantMessage
    logprobs: None = None
    finish_reason: str


class ChatCompletion(msgspec.Struct, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBody


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
            role = b'"delta":{"role":"assistant","content":""}'
            out = self._choice(index) + role + NOT_FINISHED + usage + b"}\n\n" + out
        if delta.finish_reason is not None:
            out += self._last(index, b'"delta":{}', delta.finish_reason, usage)
        return out


class Chat(Endpoint):
    id_prefix = "chatcmpl-"
    chunk_format = ChatFormat

    def parse(self, fields: dict[str, Any]) -> tuple[GenerationBody, list[Prompt]]:
        body = protocol.parse(fields, ChatBody, _UNIMPLEMENTED)
        if not body.messages:
            raise bad_request("messages is required and must not be empty", "messages")
        return body, [[_message(m, f"messages[{i}]") for i, m in enumerate(body.messages)]]

    def document(self, job: Job, outputs: list[RequestOutput]) -> ChatCompletion:
        sequences = [s for output in outputs for s in output.outputs]
        return ChatCompletion(
            id=job.id,
            created=job.created,
            model=job.model,
            choices=[
                ChatChoice(index=i, message=AssistantMessage(content=s.text), finish_reason=s.finish_reason)
                for i, s in enumerate(sequences)
            ],
            usage=UsageBody.of([output.usage for output in outputs]),
        )


def _message(message: Message, path: str) -> ChatMessage:
    """A turn with its content parts joined. Raises ApiError 400."""
    role = _ROLES.get(message.role)
    if role is None:
        known = ", ".join(_ROLES)
        raise bad_request(f"{path}.role must be one of {known}, got {message.role!r}", f"{path}.role")
    for name in ("tool_calls", "function_call"):
        if getattr(message, name):
            raise unsupported(f"{path}.{name}")
    content = message.content
    if content is None:
        raise bad_request(f"{path}.content is required", f"{path}.content")
    if isinstance(content, list):
        content = "".join(_text(part, f"{path}.content[{i}]") for i, part in enumerate(content))
    return {"role": role, "content": content}


def _text(part: ContentPart, path: str) -> str:
    if part.type != "text":
        raise bad_request(f"{path}.type: only text is supported, got {part.type!r}", f"{path}.type")
    if part.text is None:
        raise bad_request(f"{path}.text is required", f"{path}.text")
    return part.text
