"""/v1/completions: text or token ids in, text out, and with ``return_token_ids`` ids beside it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from asyncengine.request import Prompt, RequestDelta, RequestOutput
from asyncengine.server import protocol
from asyncengine.server.config import ServerConfig
from asyncengine.server.errors import bad_request
from asyncengine.server.generation import Endpoint, Job
from asyncengine.server.protocol import BodyDecoder, GenerationBody, UsageBody
from asyncengine.server.sse import NOT_FINISHED, ChunkFormat, encode

_UNIMPLEMENTED: dict[str, tuple[object, ...]] = protocol.UNIMPLEMENTED | {
    "logprobs": (None, False),
    "suffix": (None, ""),
    "add_special_tokens": (None, True),
}
_DEFAULT_MAX_TOKENS = 16


class CompletionBody(GenerationBody, kw_only=True):
    prompt: str | list[str | int | list[int]] | None = None
    return_token_ids: bool | None = None


_DECODER = BodyDecoder(CompletionBody, _UNIMPLEMENTED)


class CompletionChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    logprobs: None = None
    finish_reason: str
    token_ids: Sequence[int] | UnsetType = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET


class Completion(msgspec.Struct, kw_only=True):
    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageBody


class CompletionFormat(ChunkFormat):
    """The last chunk of a choice may carry text."""

    object = "text_completion"
    before_text = b'"text":'
    after_text = b""

    def events(self, index: int, delta: RequestDelta, usage: bytes) -> bytes:
        if delta.finish_reason is not None:
            return self._last(index, b'"text":' + encode(delta.text), delta.finish_reason, usage)
        return self.text(index, delta.text, usage) if delta.text else b""


class TokenIdFormat(CompletionFormat):
    """Every chunk has the token ids that it stands for, the first of a choice those of its prompt too."""

    def __init__(self, job: Job) -> None:
        super().__init__(job.id, job.created, job.model)
        self._n = job.params.n
        self._opened: set[int] = set()

    def events(self, index: int, delta: RequestDelta, usage: bytes) -> bytes:
        payload = b'"text":' + encode(delta.text) + b',"token_ids":' + encode(delta.token_ids)
        if index not in self._opened:
            self._opened.add(index)
            payload += b',"prompt_token_ids":' + encode(self.streams[index // self._n].prompt_token_ids)
        if delta.finish_reason is not None:
            return self._last(index, payload, delta.finish_reason, usage)
        return self._choice(index) + payload + NOT_FINISHED + usage + b"}\n\n"


class Completions(Endpoint):
    id_prefix = "cmpl-"
    chunk_format = CompletionFormat

    def chunks(self, job: Job) -> ChunkFormat:
        return TokenIdFormat(job) if _wants_token_ids(job) else super().chunks(job)

    def parse(self, raw: bytes | bytearray, config: ServerConfig) -> tuple[GenerationBody, list[Prompt]]:
        body = _DECODER.decode(raw)
        if body.max_tokens is None:
            body.max_tokens = _DEFAULT_MAX_TOKENS
        prompts, body.prompt = _prompts(body, config.max_sequences_per_request), None
        return body, prompts

    def document(self, job: Job, outputs: list[RequestOutput]) -> Completion:
        sequences = [(output, s) for output in outputs for s in output.outputs]
        with_ids = _wants_token_ids(job)
        return Completion(
            id=job.id,
            created=job.created,
            model=job.model,
            choices=[
                CompletionChoice(
                    index=i,
                    text=s.text,
                    finish_reason=s.finish_reason,
                    token_ids=s.token_ids if with_ids else UNSET,
                    prompt_token_ids=output.prompt_token_ids if with_ids else UNSET,
                )
                for i, (output, s) in enumerate(sequences)
            ],
            usage=UsageBody.of([output.usage for output in outputs]),
        )


def _wants_token_ids(job: Job) -> bool:
    return isinstance(job.body, CompletionBody) and bool(job.body.return_token_ids)


def _prompts(body: CompletionBody, limit: int) -> list[Prompt]:
    """Text, token ids, or an array of either, as a list of prompts. Raises ApiError 400 for more than ``limit``."""
    prompt = body.prompt
    if prompt is None or prompt == "" or prompt == []:
        raise bad_request("prompt is required and must not be empty", "prompt")
    if isinstance(prompt, str):
        return [prompt]
    kinds = set(map(type, prompt))
    if kinds != {int} and len(prompt) > limit:
        raise bad_request(f"prompt: at most {limit} prompts in a request, got {len(prompt)}", "prompt")
    if len(kinds) > 1:
        raise bad_request("prompt must hold strings, token ids or arrays of ids, not a mixture", "prompt")
    if kinds == {int}:
        return [prompt]  # type: ignore[list-item]
    for i, item in enumerate(prompt):
        if not item:
            raise bad_request(f"prompt[{i}] is empty", f"prompt[{i}]")
    return prompt  # type: ignore[return-value]
