"""/v1/completions: text or token ids in, text out; on request with token ids and log probabilities beside it."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import replace

import msgspec
from msgspec import UNSET, UnsetType

from asyncengine.api.logprobs import TokenLogProbs
from asyncengine.api.outputs import CompletionOutput, RequestDelta, RequestOutput
from asyncengine.api.request import MAX_N, Prompt, SamplingParams
from asyncengine.server.config import ServerConfig
from asyncengine.server.engine_api import Engine
from asyncengine.server.errors import bad_request
from asyncengine.server.generation import Endpoint, Job, joined
from asyncengine.server.infilling import Infill, infills, markers_of
from asyncengine.server.logprobs import CompletionLogProbs, JobLogProbs, PromptLogProb
from asyncengine.server.parsing.choose import Parsing
from asyncengine.server.protocol import BodyDecoder, GenerationBody, UsageBody, prompts_of, sampling_params
from asyncengine.server.sse import ChunkFormat, StreamFormat, encode
from asyncengine.server.unserved import COMPLETION
from asyncengine.text.detokenizer import IncrementalDetokenizer
from asyncengine.text.tokenizer import Tokenizer

_AT_ONCE = 4096
"""Log probabilities that become objects in one turn of the event loop: some 10 ms."""


class CompletionBody(GenerationBody, kw_only=True):
    prompt: str | list[str | int | list[int]] | None = None
    suffix: str | None = None
    best_of: int | None = None
    logprobs: int | bool | None = None
    echo: bool | None = None

    @property
    def chooses(self) -> bool:
        """True if more sequences are made than the answer has."""
        return self.best_of is not None and self.best_of > (self.n or 1)

    @property
    def tells_logprobs(self) -> bool:
        """True if the answer has log probabilities of its tokens."""
        return not (self.logprobs is None or self.logprobs is False) or bool(self.logprob_token_ids)


_DECODER = BodyDecoder(CompletionBody, COMPLETION)


class CompletionChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogProbs | None = None
    finish_reason: str
    stop_reason: str | int | None = None
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
            payload = b'"text":' + encode(delta.text)
            return self._chunk(index, payload, usage, delta.finish_reason, stop_reason=delta.stop_reason)
        return self.text(index, delta.text, usage) if delta.text else b""


class DetailedFormat(CompletionFormat):
    """Chunks with log probabilities, and with the token ids that they stand for.

    The first chunk of a choice also has the token ids of its prompt, and its text where that is echoed.
    """

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._job = job
        self._with_ids = bool(job.body.return_token_ids)
        self._logprobs = _told(job)
        self._opened: set[int] = set()

    def events(self, index: int, delta: RequestDelta, usage: bytes) -> bytes:
        return b"".join(self.pieces(index, delta, usage))

    def pieces(self, index: int, delta: RequestDelta, usage: bytes) -> Iterator[bytes]:
        is_first = index not in self._opened
        self._opened.add(index)
        stream = self.streams[index // self._job.params.n]
        text, ids = delta.text, stream.prompt_token_ids
        if is_first and _echoes(self._job):
            prompt = self._job.prompts[index // self._job.params.n]
            text = _echo(self._job, prompt, index, ids, stream.prompt_logprobs) + text
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
        yield self._chunk(index, payload, usage, delta.finish_reason, encode(logprobs), delta.stop_reason)


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
        _check_best_of(body)
        if body.suffix:
            _check_suffix(body)
        prompts: list[Prompt] = [""]
        if not (body.suffix and body.prompt == ""):  # a gap may be the beginning of a text
            prompts = prompts_of(body.prompt, config.max_sequences_per_request, "prompt")
        body.prompt = None
        return body, prompts

    def params(self, body: GenerationBody) -> SamplingParams:
        assert isinstance(body, CompletionBody)
        more = {"logprobs": None if body.logprobs is False else body.logprobs}
        if body.echo and more["logprobs"] is not None and body.prompt_logprobs is None:
            more["prompt_logprobs"] = more["logprobs"]
        params = sampling_params(body, **more)
        if not body.chooses:
            return params
        return replace(params, n=body.best_of or 1, logprobs=params.logprobs or 0)

    def prepare(
        self, body: GenerationBody, prompts: list[Prompt], tokenizer: Tokenizer | None, config: ServerConfig
    ) -> tuple[list[Prompt], SamplingParams, Parsing | None]:
        assert isinstance(body, CompletionBody)
        params = self.params(body)
        if body.suffix:
            ends = markers_of(tokenizer).ends
            if not params.ignore_eos:
                params = replace(params, stop_token_ids=tuple(dict.fromkeys((*params.stop_token_ids, *ends))))
        return prompts, params, None

    async def fit(self, engine: Engine, body: GenerationBody, prompts: list[Prompt]) -> list[Prompt]:
        assert isinstance(body, CompletionBody)
        if not body.suffix:
            return prompts
        made, body.suffix = await infills(engine, prompts, body.suffix), None
        return made

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
        i = 0
        for prompt, output in zip(job.prompts, outputs, strict=True):
            for sequence in (yield from _best(job, output)):
                if i:
                    yield b","
                yield from _choice(job, i, prompt, output, sequence)
                i += 1
        yield b"]" + end


def _check_best_of(body: CompletionBody) -> None:
    n, best_of = body.n or 1, body.best_of
    if best_of is None:
        return
    if not max(1, n) <= best_of <= MAX_N:
        raise bad_request(f"best_of must be in [n, {MAX_N}], and n is {n}; got {best_of}", "best_of")
    if body.chooses and body.stream:
        raise bad_request(
            "best_of cannot be streamed where it is more than n: the best are known at the end", "best_of"
        )


def _check_suffix(body: CompletionBody) -> None:
    if body.truncate_prompt_tokens is not None:
        raise bad_request("truncate_prompt_tokens conflicts with suffix", "truncate_prompt_tokens")
    if body.echo and body.tells_logprobs:
        raise bad_request("echo with log probabilities conflicts with suffix, which stands between the two", "echo")


def _best(job: Job, output: RequestOutput) -> Generator[bytes, None, Sequence[CompletionOutput]]:
    """Choose the sequences of the answer among those of a prompt, the highest mean log probability of a token first.

    Yields nothing, several times, where there is much to add up.
    """
    assert isinstance(job.body, CompletionBody)
    if not job.body.chooses:
        return output.outputs
    at_once = max(1, _AT_ONCE // (1 + (job.params.logprobs or 0) + len(job.params.logprob_token_ids)))
    means: dict[int, float] = {}
    for sequence in output.outputs:
        logprobs, total = sequence.logprobs or (), 0.0
        for first in range(0, len(logprobs), at_once):
            total += sum([token.logprob for token in logprobs[first : first + at_once]])
            yield b""
        means[sequence.index] = total / max(1, len(logprobs))
    best = sorted(output.outputs, key=lambda sequence: -means[sequence.index])
    return best[: job.body.n or 1]


def _choice(job: Job, index: int, prompt: Prompt, output: RequestOutput, sequence: CompletionOutput) -> Iterator[bytes]:
    """One choice of a response as JSON, in parts."""
    with_ids, text = job.body.return_token_ids, sequence.text
    if _echoes(job):
        text = _echo(job, prompt, index, output.prompt_token_ids, output.prompt_logprobs) + text
    choice = CompletionChoice(
        index=index,
        text=text,
        finish_reason=sequence.finish_reason,
        stop_reason=sequence.stop_reason,
        token_ids=sequence.token_ids if with_ids else UNSET,
        prompt_token_ids=output.prompt_token_ids if with_ids else UNSET,
    )
    document = encode(choice)
    if (told := _told(job)) is not None:
        begin, document = document.split(b'"logprobs":null')
        yield begin + b'"logprobs":'
        yield from _logprobs(told.completion(index, sequence, output.prompt_token_ids))
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


def _told(job: Job) -> JobLogProbs | None:
    """Log probabilities that the answer has: not those that only choose the best sequences."""
    assert isinstance(job.body, CompletionBody)
    return job.choice_logprobs if job.body.tells_logprobs else None


def _echo(
    job: Job, prompt: Prompt, index: int, ids: Sequence[int], logprobs: Sequence[TokenLogProbs | None] | None
) -> str:
    """The prompt of choice ``index`` as text, for the beginning of the choice's; its tokens are noted with it."""
    if isinstance(prompt, Infill):
        prompt = prompt.prefix
        ids = () if isinstance(prompt, str) else prompt  # type: ignore[assignment]  # completions have no messages
    if isinstance(prompt, str) and job.params.truncate_prompt_tokens is None:
        text = prompt
    else:
        # An unfinished character at its end comes with the output.
        text = IncrementalDetokenizer(job.tokenizer, job.params.skip_special_tokens).push(ids)
    if (told := _told(job)) is not None:
        told.echo(index, text, ids, logprobs)
    return text
