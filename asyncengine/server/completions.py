"""/v1/completions: text or token ids in, text out; on request with token ids and log probabilities beside it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from asyncengine.request import Prompt, RequestDelta, RequestOutput, SamplingParams
from asyncengine.server import protocol
from asyncengine.server.config import ServerConfig
from asyncengine.server.errors import bad_request
from asyncengine.server.generation import Endpoint, Job
from asyncengine.server.logprobs import CompletionLogProbs
from asyncengine.server.protocol import BodyDecoder, GenerationBody, UsageBody, sampling_params
from asyncengine.server.sse import ChunkFormat, encode

_UNIMPLEMENTED: dict[str, tuple[object, ...]] = protocol.UNIMPLEMENTED | {
    "suffix": (None, ""),
    "add_special_tokens": (None, True),
}
_DEFAULT_MAX_TOKENS = 16


class CompletionBody(GenerationBody, kw_only=True):
    prompt: str | list[str | int | list[int]] | None = None
    logprobs: int | bool | None = None


_DECODER = BodyDecoder(CompletionBody, _UNIMPLEMENTED)


class CompletionChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogProbs | None = None
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
            return self._chunk(index, b'"text":' + encode(delta.text), usage, delta.finish_reason)
        return self.text(index, delta.text, usage) if delta.text else b""


class DetailedFormat(CompletionFormat):
    """Chunks with log probabilities, with the token ids that they stand for, or with both.

    The first chunk of a choice also has the token ids of its prompt.
    """

    def __init__(self, job: Job) -> None:
        super().__init__(job.id, job.created, job.model)
        self._n = job.params.n
        self._with_ids = bool(job.body.return_token_ids)
        self._logprobs = job.logprobs
        self._opened: set[int] = set()

    def events(self, index: int, delta: RequestDelta, usage: bytes) -> bytes:
        logprobs = None if self._logprobs is None else self._logprobs.completion(index, delta)
        payload = b'"text":' + encode(delta.text)
        if self._with_ids:
            payload += b',"token_ids":' + encode(delta.token_ids)
            if index not in self._opened:
                self._opened.add(index)
                payload += b',"prompt_token_ids":' + encode(self.streams[index // self._n].prompt_token_ids)
        elif not delta.text and logprobs is None and delta.finish_reason is None:
            return b""
        return self._chunk(index, payload, usage, delta.finish_reason, encode(logprobs))


class Completions(Endpoint):
    id_prefix = "cmpl-"
    chunk_format = CompletionFormat

    def chunks(self, job: Job) -> ChunkFormat:
        return DetailedFormat(job) if job.detailed else super().chunks(job)

    def parse(self, raw: bytes | bytearray, config: ServerConfig) -> tuple[GenerationBody, list[Prompt]]:
        body = _DECODER.decode(raw)
        if body.max_tokens is None:
            body.max_tokens = _DEFAULT_MAX_TOKENS
        if body.logprobs is True:
            raise bad_request("logprobs must be an integer: how many tokens at each place", "logprobs")
        prompts, body.prompt = _prompts(body, config.max_sequences_per_request), None
        return body, prompts

    def params(self, body: GenerationBody) -> SamplingParams:
        assert isinstance(body, CompletionBody)
        return sampling_params(body, logprobs=None if body.logprobs is False else body.logprobs)

    def document(self, job: Job, outputs: list[RequestOutput]) -> Completion:
        sequences = [(output, s) for output in outputs for s in output.outputs]
        with_ids, logprobs = job.body.return_token_ids, job.logprobs
        return Completion(
            id=job.id,
            created=job.created,
            model=job.model,
            choices=[
                CompletionChoice(
                    index=i,
                    text=s.text,
                    logprobs=None if logprobs is None else logprobs.completion(i, s) or CompletionLogProbs(),
                    finish_reason=s.finish_reason,
                    token_ids=s.token_ids if with_ids else UNSET,
                    prompt_token_ids=output.prompt_token_ids if with_ids else UNSET,
                )
                for i, (output, s) in enumerate(sequences)
            ],
            usage=UsageBody.of([output.usage for output in outputs]),
        )


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
