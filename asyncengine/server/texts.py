"""/tokenize and /detokenize: the tokenizer's work alone."""

from __future__ import annotations

import asyncio
from typing import Annotated

import msgspec

from asyncengine.api.request import Prompt
from asyncengine.errors import ConfigError
from asyncengine.server.calls import Call, CallBody, Context, tokenizer_of
from asyncengine.server.chat import Chat
from asyncengine.server.config import ServerConfig
from asyncengine.server.engine_api import Engine
from asyncengine.server.errors import bad_request
from asyncengine.server.protocol import GenerationBody, JsonDecoder

_CHAT = Chat()
_AT_ONCE = 8192
"""Tokens that are looked up in one turn of the event loop: some milliseconds."""
_NO_MESSAGES = msgspec.Raw(b"null")


class TokenizeBody(CallBody, kw_only=True):
    """A prompt, or messages with the other fields of a chat completion, which go through the chat template.

    ``content`` with ``add_special`` is llama.cpp's form of a prompt: special tokens are added only where it says so.
    """

    prompt: str | None = None
    content: str | None = None
    add_special: bool | None = None
    messages: Annotated[msgspec.Raw, msgspec.Meta(extra_json_schema={"type": ["array", "null"]})] = msgspec.field(
        default_factory=lambda: _NO_MESSAGES
    )
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    return_token_strs: bool | None = None


class _Chat(TokenizeBody, kw_only=True):
    chat: GenerationBody
    prompts: list[Prompt]


class Tokens(msgspec.Struct, kw_only=True):
    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | None = None


class Tokenize(Call[TokenizeBody]):
    prompt_param = "prompt"
    _decoder = JsonDecoder(TokenizeBody, {"with_pieces": (None, False)})
    fields = _decoder.fields | _CHAT.fields

    def parse(self, raw: bytes | bytearray, config: ServerConfig) -> TokenizeBody:
        body = self._decoder.decode(raw)
        if body.content is not None:
            if body.prompt is not None:
                raise bad_request("either prompt or content is required, and not both", "content")
            body.prompt, body.add_special_tokens = body.content, bool(body.add_special)
        has_messages, body.messages = bytes(body.messages) != b"null", _NO_MESSAGES  # they would hold ``raw``
        if has_messages == (body.prompt is not None):
            raise bad_request("either prompt or messages is required, and not both", "prompt")
        if body.prompt == "":
            raise bad_request("prompt must not be empty", "prompt")
        if not has_messages:
            return body
        chat, prompts = _CHAT.parse(raw, config)
        return _Chat(
            model=body.model,
            return_token_strs=body.return_token_strs,
            truncate_prompt_tokens=body.truncate_prompt_tokens,
            truncation_side=body.truncation_side,
            chat=chat,
            prompts=prompts,
        )

    async def answer(self, engine: Engine, body: TokenizeBody, context: Context) -> Tokens:
        prompt: Prompt | None = body.prompt
        if isinstance(body, _Chat):
            ((prompt,), _, _) = _CHAT.prepare(body.chat, body.prompts, tokenizer_of(engine), context.config)
        assert prompt is not None
        tokens = await engine.tokenize(
            prompt,
            add_special_tokens=body.add_special_tokens is not False,
            truncate_prompt_tokens=body.truncate_prompt_tokens,
            truncation_side=body.truncation_side or "left",
        )
        answer = Tokens(tokens=tokens, count=len(tokens), max_model_len=engine.model_info.max_model_len)
        if body.return_token_strs:
            name, names = engine.tokenizer.backend.id_to_token, list[str]()
            for first in range(0, len(tokens), _AT_ONCE):
                names += [name(token) or "" for token in tokens[first : first + _AT_ONCE]]
                await asyncio.sleep(0)
            answer.token_strs = names
        return answer


class DetokenizeBody(CallBody, kw_only=True):
    tokens: list[int] | None = None
    skip_special_tokens: bool | None = None


class Text(msgspec.Struct):
    prompt: str


class Detokenize(Call[DetokenizeBody]):
    prompt_param = "tokens"
    _decoder = JsonDecoder(DetokenizeBody, {})
    fields = _decoder.fields

    def parse(self, raw: bytes | bytearray, config: ServerConfig) -> DetokenizeBody:
        body = self._decoder.decode(raw)
        if body.tokens is None:
            raise bad_request("tokens is required", "tokens")
        return body

    async def answer(self, engine: Engine, body: DetokenizeBody, context: Context) -> Text:
        assert body.tokens is not None
        try:
            text = await engine.detokenize(body.tokens, skip_special_tokens=bool(body.skip_special_tokens))
        except ConfigError:  # skip_tokenizer_init
            raise bad_request("this server's model has no tokenizer: it takes and gives token ids", "model") from None
        return Text(text)
