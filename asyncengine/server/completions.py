"""/v1/completions: text or token ids in, text out; on request with token ids and log probabilities beside it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec
from msgspec import UNSET, UnsetType

from asyncengine.api.logprobs import TokenLogProbs
from asyncengine.api.outputs import CompletionOutput, RequestDelta, RequestOutput
from asyncengine.api.request import Prompt, SamplingParams
from asyncengine.server.config import ServerConfig
from asyncengine.server.errors import bad_request
from asyncengine.server.generation import Endpoint, Job, joined
from asyncengine.server.logprobs import CompletionLogProbs, PromptLogProb
from asyncengine.server.protocol import BodyDecoder, GenerationBody, UsageBody, prompts_of, sampling_params
from asyncengine.server.sse import ChunkFormat, StreamFormat, encode
from asyncengine.server.unserved import COMPLETION
from asyncengine.text.detokenizer import IncrementalDetokenizer


class CompletionBody(GenerationBody, kw_only=True):
    prompt: str | list[str | int | list[int]] | None = None
    logprobs: int | bool | None = None
    echo: bool | None = None


_DECODER = BodyDecoder(CompletionBody, COMPLETION)


class CompletionChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogProbs | None = None
    finish_reason: str
    token_ids: Sequence[int] | UnsetType = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET
    prompt_logprobs: list[PromptLogProb] | None = None
    """The last member: ``Job.with_prompt_logprobs`` writes it."""


class Completion(msgspec.Struct, kw_only=True):
    id: str
    object: str = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: UsageBody
    service_tier: None = None
    kv_transfer_params: None = None


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
    """Chunks with log probabilities, and with the token ids that they stand for.

    The first chunk of a choice also has the token ids of its prompt, and its text where that is echoed.
    """

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._job = job
        self._with_ids = bool(job.body.return_token_ids)
        self._logprobs = job.choice_logprobs
        self._opened: set[int] = set()

    def events(self, index: int, delta: RequestDelta, usage: bytes) -> bytes:
        return b"".join(self.pieces(index, delta, usage))

    def pieces(self, index: int, delta: RequestDelta, usage: bytes) -> Iterator[bytes]:
        is_first = index not in self._opened
        self._opened.add(index)
        stream = self.streams[index // self._job.params.n]
        text, ids = delta.text, stream.prompt_token_ids
        if is_first and _echoes(self._job):
            text = _echo(self._job, index, ids, stream.prompt_logprobs) + text
        batches = iter(()) if self._logprobs is None else self._logprobs.completion(index, delta, ids)
        logprobs = next(batches, None)
        payload = b'"text":' + encode(text)
        if self._with_ids:
            payload += b',"token_ids":' + encode(delta.token_ids)
            if is_first:
                payload += b',"prompt_token_ids":' + encode(ids)
        elif not text and logprobs is None and delta.finish_reason is None:
            return
        for following in batches:
            yield self._chunk(index, payload, usage, logprobs=encode(logprobs))
            payload, logprobs = b'"text":""', following
        yield self._chunk(index, payload, usage, delta.finish_reason, encode(logprobs))


class Completions(Endpoint):
    id_prefix = "cmpl-"
    fields = _DECODER.fields
    chunk_format = CompletionFormat

    def chunks(self, job: Job) -> StreamFormat:
        return DetailedFormat(job) if job.detailed or _echoes(job) else super().chunks(job)

    def parse(self, raw: bytes | bytearray, config: ServerConfig) -> tuple[GenerationBody, list[Prompt]]:
        body = _DECODER.decode(raw)
        if body.max_tokens is None:
            body.max_tokens = config.default_max_tokens
        if body.logprobs is True:
            raise bad_request("logprobs must be an integer: how many tokens at each place", "logprobs")
        prompts, body.prompt = prompts_of(body.prompt, config.max_sequences_per_request, "prompt"), None
        return body, prompts

    def params(self, body: GenerationBody) -> SamplingParams:
        assert isinstance(body, CompletionBody)
        more = {"logprobs": None if body.logprobs is False else body.logprobs}
        if body.echo and more["logprobs"] is not None and body.prompt_logprobs is None:
            more["prompt_logprobs"] = more["logprobs"]
        return sampling_params(body, **more)

    def pieces(self, job: Job, outputs: list[RequestOutput]) -> Iterator[bytes]:
        usage = UsageBody.of([output.usage for output in outputs])
        whole = encode(
            Completion(
                id=job.id,
                created=job.created,
                model=job.model,
                system_fingerprint=job.fingerprint,
                choices=[],
                usage=usage,
            )
        )
        begin, end = whole.split(b'"choices":[]')  # no string has it: quotes within them have a backslash before them
        yield begin + b'"choices":['
        for i, (output, sequence) in enumerate((each, s) for each in outputs for s in each.outputs):
            if i:
                yield b","
            yield from _choice(job, i, output, sequence)
        yield b"]" + end


def _choice(job: Job, index: int, output: RequestOutput, sequence: CompletionOutput) -> Iterator[bytes]:
    """One choice of a response as JSON, in parts."""
    with_ids, text = job.body.return_token_ids, sequence.text
    if _echoes(job):
        text = _echo(job, index, output.prompt_token_ids, output.prompt_logprobs) + text
    choice = CompletionChoice(
        index=index,
        text=text,
        finish_reason=sequence.finish_reason,
        token_ids=sequence.token_ids if with_ids else UNSET,
        prompt_token_ids=output.prompt_token_ids if with_ids else UNSET,
    )
    document = encode(choice)
    if job.choice_logprobs is not None:
        begin, document = document.split(b'"logprobs":null')
        yield begin + b'"logprobs":'
        yield from _logprobs(job.choice_logprobs.completion(index, sequence, output.prompt_token_ids))
    yield from job.with_prompt_logprobs(document, output)


def _logprobs(batches: Iterable[CompletionLogProbs]) -> Iterator[bytes]:
    """CompletionLogProbs as JSON. It has lists side by side, so all but the first one wait until the last token."""
    names = CompletionLogProbs.__struct_fields__
    lists: dict[str, list[bytes]] = {name: [] for name in names}
    for batch in batches:
        for name in names:
            lists[name].append(encode(getattr(batch, name))[1:-1])
        yield b""
    for i, name in enumerate(names):
        yield b'%b"%b":[' % (b"," if i else b"{", name.encode())
        yield from joined(lists[name])
        yield b"]"
    yield b"}"


def _echoes(job: Job) -> bool:
    return isinstance(job.body, CompletionBody) and bool(job.body.echo)


def _echo(job: Job, index: int, ids: Sequence[int], logprobs: Sequence[TokenLogProbs | None] | None) -> str:
    """The prompt of choice ``index`` as text, for the beginning of the choice's; its tokens are noted with it."""
    prompt = job.prompts[index // job.params.n]
    if isinstance(prompt, str) and job.params.truncate_prompt_tokens is None:
        text = prompt
    else:
        # An unfinished character at its end comes with the output.
        text = IncrementalDetokenizer(job.tokenizer, job.params.skip_special_tokens).push(ids)
    if job.choice_logprobs is not None:
        job.choice_logprobs.echo(index, text, ids, logprobs)
    return text
