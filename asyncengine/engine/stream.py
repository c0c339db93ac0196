"""RequestStream: one request on its way through the engine, from the event loop's side.

The engine feeds tokens as the step thread delivers them; a consumer takes deltas whenever it gets round to it.
Nothing waits for the consumer: what it has not taken yet is joined into one bigger delta per sequence.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import warnings
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol, Self

from asyncengine._core import FinishReason as Ended
from asyncengine._core import RecordKind, SequenceNews
from asyncengine.api.logprobs import LogProbs, PromptLogProbs, TokenLogProbs
from asyncengine.api.outputs import CompletionOutput, FinishReason, RequestDelta, RequestOutput, RequestTiming, Usage
from asyncengine.api.request import SamplingParams
from asyncengine.errors import (
    AsyncEngineError,
    EngineError,
    InvalidRequestError,
    NonFiniteLogitsError,
    RequestAbortedError,
    RequestTimeoutError,
    StepFailedError,
    UsageError,
)
from asyncengine.text.detokenizer import IncrementalDetokenizer
from asyncengine.text.stops import StopStringMatcher, stop_matcher

if TYPE_CHECKING:
    from asyncengine.engine.constraints.masks import Constraint
    from asyncengine.engine.constraints.processors import ProcessedSequence
    from asyncengine.text.tokenizer import Tokenizer

    Fail = Callable[[AsyncEngineError], None]
    Advance = Callable[[Constraint, Sequence[int], Fail], None]
    Process = Callable[[ProcessedSequence, Sequence[int], bytes, Fail], None]

_FAILURES: dict[Ended, Callable[[], EngineError]] = {
    Ended.failed: lambda: NonFiniteLogitsError("the model returned logits that are not finite for this request"),
    Ended.step_failed: lambda: StepFailedError("a step that computed this request failed; the log says how"),
}
# A look-up in an enum's class takes longer than most of what is done with a token.
_GOES_ON, _STOPS, _LOGPROBS, _LOGITS = Ended.none, Ended.stop, RecordKind.logprobs, RecordKind.logits
_WHOLE_AT_ONCE = 32
"""Tokens whose text is made together when only the end is waited for: few enough that the loop is not held up."""


class _SequenceState:
    """Text and tokens of one sequence, and how much of them has been taken."""

    __slots__ = (
        "_decoded",
        "_detokenizer",
        "_host_tokens",
        "_matcher",
        "_num_named",
        "_num_top",
        "_params",
        "_taken_host_tokens",
        "_taken_texts",
        "_taken_tokens",
        "_wants_logprobs",
        "finish_reason",
        "records",
        "stop_reason",
        "texts",
        "token_ids",
        "untaken",
    )

    def __init__(
        self, detokenizer: IncrementalDetokenizer, matcher: StopStringMatcher | None, params: SamplingParams
    ) -> None:
        self._params = params
        self._wants_logprobs = params.wants_logprobs
        self._num_top, self._num_named = params.logprobs or 0, len(params.logprob_token_ids)
        self._detokenizer = detokenizer
        self._matcher = matcher
        self.token_ids: list[int] = []
        self.texts: list[str] = []
        self.records: list[bytes] = []
        self._decoded = 0  # tokens whose text is made
        self._host_tokens = 0  # of those that came, made on the host
        self._taken_tokens = self._taken_texts = self._taken_host_tokens = 0
        self.untaken = False
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None

    def feed(self, tokens: list[int], finish: Ended, whole: bool, host_tokens: int) -> bool:
        """Take in tokens, of which ``host_tokens`` were made on the host, and perhaps the end; True if a stop string
        ended the sequence before the core did.

        With ``whole`` nobody looks at the text before the end, so it is made of many tokens at a time.
        """
        if self.finish_reason is not None:
            return False  # tokens that were under way when a stop string ended it
        self._host_tokens += host_tokens
        if self._matcher is not None:
            return self._feed_matcher(self._matcher, tokens, finish)
        self.token_ids += tokens
        if whole and finish is _GOES_ON and len(self.token_ids) - self._decoded < _WHOLE_AT_ONCE:
            return False
        self._decode(finish)
        if finish is not _GOES_ON:
            self._end(finish, self._detokenizer.flush())
        return False

    def _feed_matcher(self, matcher: StopStringMatcher, tokens: list[int], finish: Ended) -> bool:
        for i, token in enumerate(tokens):
            self.token_ids.append(token)
            text = self._text_of([token], finish if i == len(tokens) - 1 else _GOES_ON)
            if len(self.token_ids) < self._params.min_tokens:
                self._append(text)  # no stop string may end it, or begin to
                continue
            if token in matcher.stand_ins:
                text += matcher.stand_ins[token]
            text, stop = matcher.push(text)
            self._append(text)
            if stop is not None:
                self.finish_reason, self.stop_reason = FinishReason.STOP, stop
                return finish is _GOES_ON
        if finish is not _GOES_ON and not self._stops_in_rest(matcher):
            self._end(finish, matcher.flush())
        return False

    def _stops_in_rest(self, matcher: StopStringMatcher) -> bool:
        """Return whether the end of the text, a character that is not whole, completes a stop string."""
        rest, stop = matcher.push(self._detokenizer.flush())
        self._append(rest)
        if stop is not None:
            self.finish_reason, self.stop_reason = FinishReason.STOP, stop
        return stop is not None

    def expire(self) -> None:
        """The request's time is over: the sequence ends with what it has."""
        if self._matcher is None:
            self._decode(_GOES_ON)
            self._append(self._detokenizer.flush())
        elif self._stops_in_rest(self._matcher):
            return
        else:
            self._append(self._matcher.flush())
        self.finish_reason = FinishReason.TIMEOUT

    @property
    def host_tokens(self) -> int:
        """Number of ``token_ids`` that were made on the host. Tokens that a stop string left out do not count."""
        return min(self._host_tokens, len(self.token_ids))

    def take(self) -> tuple[str, list[int], LogProbs | None, int]:
        """Return the text, tokens, log probabilities and count of host tokens that are new since the last call."""
        text, tokens = "".join(self.texts[self._taken_texts :]), self.token_ids[self._taken_tokens :]
        logprobs = self.logprobs_of(self._taken_tokens) if self._wants_logprobs else None
        self._taken_texts, self._taken_tokens, self.untaken = len(self.texts), len(self.token_ids), False
        host_tokens = self.host_tokens - self._taken_host_tokens
        self._taken_host_tokens += host_tokens
        return text, tokens, logprobs, host_tokens

    def logprobs_of(self, first: int) -> LogProbs:
        """Return the log probabilities from token ``first`` on, without tokens that a stop string has left out."""
        return LogProbs(self.records[first : len(self.token_ids)], self._num_top, self._num_named)

    def _decode(self, finish: Ended) -> None:
        self._append(self._text_of(self.token_ids[self._decoded :], finish))
        self._decoded = len(self.token_ids)

    def _text_of(self, tokens: list[int], finish: Ended) -> str:
        if finish is _STOPS and not self._params.include_stop_str_in_output:
            tokens = tokens[:-1]  # the token that ended it is not part of the text
        return self._detokenizer.push(tokens)

    def _end(self, finish: Ended, rest: str) -> None:
        self._append(rest)
        stopped = finish is _STOPS and self._params.max_tokens != 0
        self.finish_reason = FinishReason.STOP if stopped else FinishReason.LENGTH
        if finish is _STOPS and self.token_ids and self.token_ids[-1] in self._params.stop_token_ids:
            self.stop_reason = self.token_ids[-1]

    def _append(self, text: str) -> None:
        if text:
            self.texts.append(text)


class Owner(Protocol):
    """The engine, as far as a stream knows it. ``key`` is the core's number of the request."""

    rank: int

    def check_loop(self) -> None:
        """Raise WrongLoopError unless the caller runs in the engine's event loop."""

    def forget(self, key: int) -> None:
        """The request has ended."""

    def drop(self, key: int) -> None:
        """The consumer has gone before the request's end."""

    def stop_sequence(self, key: int, index: int) -> None:
        """A stop string ended sequence ``index`` of the request before the core did."""

    def fail(self, key: int, error: AsyncEngineError) -> None:
        """The request cannot go on."""


class RequestStream:
    """Async iterator of RequestDelta; made by AsyncEngine.submit.

    Ends after the last delta of its last sequence. Raises EngineDeadError or RequestAbortedError when the request
    cannot be finished. Cancelling the task that iterates, or ``aclose()``, aborts the request; so does leaving an
    ``async with`` block. One consumer at a time: another that comes while one waits gets UsageError.
    """

    def __init__(
        self,
        owner: Owner,
        tokenizer: Tokenizer | None,
        key: int,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        arrived: float,
    ) -> None:
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self.owner = owner
        """The engine's side. It changes when the request goes from a queue to an engine."""
        self._key = key
        self._arrived = arrived
        self._params = params
        detokenizer = IncrementalDetokenizer.of(tokenizer if params.detokenize else None, params, prompt_token_ids)
        matcher = stop_matcher(tokenizer, params)
        self._sequences = [_SequenceState(detokenizer, matcher, params)]
        for _ in range(1, params.n):  # nothing has been pushed yet, so that a copy is as good as new
            twin = None if matcher is None else matcher.copy()
            self._sequences.append(_SequenceState(detokenizer.copy(), twin, params))
        self._unfinished = params.n
        self._untaken: list[int] = []  # indices of sequences with something new, in order of arrival
        self._whole = False  # collect(): nobody looks before the end
        self._waiter: asyncio.Future[None] | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._error: AsyncEngineError | None = None
        self._done = False  # nothing more will be fed
        self._scheduled = 0.0
        self._first_token = 0.0
        self._finished = 0.0
        self._constraints: Sequence[Constraint] = ()
        self._processed: Sequence[ProcessedSequence] = ()
        self._prompt_records: list[bytes] = []
        self.cached_tokens = 0
        """Prompt tokens found in the prefix cache; 0 until the request runs."""

    # ---- the engine's side ----

    @property
    def engine(self) -> int:
        """Number of the engine that serves the request, among those of ``AsyncEngine.engine_stats``; 0 before that."""
        return self.owner.rank

    @property
    def awaited(self) -> bool:
        """True if a task waits for the next news."""
        return self._waiter is not None

    def follow(self, constraints: Sequence[Constraint], advance: Advance) -> None:
        """Have ``advance`` told of the tokens of each sequence that goes on. Called by the engine only."""
        self._constraints, self._advance = constraints, advance

    def process(self, sequences: Sequence[ProcessedSequence], process: Process) -> None:
        """Have ``process`` get the logits of each token. Called by the engine only."""
        self._processed, self._process = sequences, process

    def end_at(self, when: float) -> None:
        """Give the request until ``when``, on the clock of time.monotonic(). Called by the engine only."""
        self._deadline = asyncio.get_running_loop().call_later(max(0.0, when - time.monotonic()), self._expire)

    def _expire(self) -> None:
        if not any(s.token_ids for s in self._sequences):
            seconds = f"{self._params.timeout:g} s"
            self.owner.fail(self._key, RequestTimeoutError(f"no token came within the timeout of {seconds}"))
            return
        for index, sequence in enumerate(self._sequences):
            if sequence.finish_reason is None:
                sequence.expire()
                if not sequence.untaken:
                    sequence.untaken = True
                    self._untaken.append(index)
        self._finished = time.monotonic()
        self._end()
        self.owner.drop(self._key)
        self._wake()

    def _end(self) -> None:
        """Nothing more will be fed."""
        self._done = True
        for sequence in self._processed:
            sequence.end()
        if self._deadline is not None:
            self._deadline.cancel()  # it would hold the request's memory until then
            self._deadline = None

    def feed(self, news: SequenceNews) -> None:
        """Take in what the step thread delivered for one sequence. Called by the engine only."""
        if self._done:
            return
        index, tokens = news.index, news.tokens
        if news.finish in _FAILURES:
            self.fail(self._failure(news.finish))
            return
        if not self._first_token and (tokens or news.finish is not _GOES_ON):
            self._first_token = news.first_ns * 1e-9
            self._scheduled = news.scheduled_ns * 1e-9
            self.cached_tokens = news.cached_tokens
        sequence = self._sequences[index]
        was_finished = sequence.finish_reason is not None
        logits = b""
        if news.logprobs and not was_finished:
            sequence.records += news.logprobs
        if news.records and not was_finished:
            for r in news.records:
                if r.kind is _LOGPROBS:
                    self._prompt_records.append(r.payload)
                elif r.kind is _LOGITS and r.token == len(tokens):  # else they are repeated, and their token is here
                    logits = r.payload
        if sequence.feed(tokens, news.finish, self._whole, news.host_tokens):
            self.owner.stop_sequence(self._key, index)
        # Records of a prompt come with each of its chunks, and are whole with the first token.
        if not sequence.untaken and not was_finished and (tokens or sequence.finish_reason is not None):
            sequence.untaken = True
            self._untaken.append(index)
        if sequence.finish_reason is not None and not was_finished:
            self._unfinished -= 1
            self._finished = max(self._finished, news.last_ns * 1e-9)
            if self._unfinished == 0:
                self._end()
                self.owner.forget(self._key)
        elif self._constraints and sequence.finish_reason is None:
            self._advance(self._constraints[index], tokens, partial(self.owner.fail, self._key))
        elif logits and sequence.finish_reason is None:
            self._process(self._processed[index], sequence.token_ids, logits, partial(self.owner.fail, self._key))
            if not tokens:
                return  # nothing that anybody waits for
        if not self._whole or self._done:
            self._wake()

    def _failure(self, finish: Ended) -> AsyncEngineError:
        contradiction = self._params.contradiction
        if finish is not Ended.failed or contradiction is None:
            return _FAILURES[finish]()
        allowing, banning = contradiction
        return InvalidRequestError(f"{allowing}: {banning} bans every token that it allows here", param=allowing)

    def fail(self, error: AsyncEngineError) -> None:
        """End the request with an error. Called by the engine only."""
        if not self._done:
            self._error = error
            self._end()
            self.owner.forget(self._key)
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # ---- the consumer's side ----

    def __aiter__(self) -> AsyncIterator[RequestDelta]:
        return self

    async def __anext__(self) -> RequestDelta:
        self._check_consumer()
        while not self._untaken:
            if self._error is not None:
                raise _copy(self._error) from self._error.__cause__
            if self._done:
                raise StopAsyncIteration
            await self._news()
        index = self._untaken.pop(0)
        sequence = self._sequences[index]
        text, tokens, logprobs, host_tokens = sequence.take()
        finish, stop = sequence.finish_reason, sequence.stop_reason
        delta = RequestDelta(self.request_id, index, text, tokens, finish, stop, None, None, logprobs, host_tokens)
        if self._done and self._error is None and not self._untaken:
            delta.usage, delta.timing = self._usage(), self._timing()
        return delta

    async def collect(self) -> RequestOutput:
        """Wait for the end and return everything; the same errors and the same cancellation as iterating."""
        self._check_consumer()
        self._whole = True
        while not self._done:
            await self._news()
        if self._error is not None:
            raise _copy(self._error) from self._error.__cause__
        self._untaken.clear()
        outputs = tuple(
            CompletionOutput(
                i,
                "".join(s.texts),
                tuple(s.token_ids),
                s.finish_reason,
                s.stop_reason,
                s.logprobs_of(0) if self._params.wants_logprobs else None,
            )
            for i, s in enumerate(self._sequences)
            if s.finish_reason is not None
        )
        return RequestOutput(
            self.request_id,
            tuple(self.prompt_token_ids),
            outputs,
            self._usage(),
            self._timing(),
            prompt_logprobs=self.prompt_logprobs,
        )

    @property
    def prompt_logprobs(self) -> Sequence[TokenLogProbs | None] | None:
        """Log probabilities of the prompt, as RequestOutput has them; complete when the first delta is there."""
        params = self._params
        if params.prompt_logprobs is None:
            return None
        found = LogProbs(list(self._prompt_records), params.prompt_logprobs, len(params.logprob_token_ids))
        missing = len(self.prompt_token_ids) - len(found)
        return PromptLogProbs(missing, found)

    def _check_consumer(self) -> None:
        self.owner.check_loop()
        if self._waiter is not None:  # a second one would take its place, and the first would wait for ever
            raise UsageError(f"another task is reading request {self.request_id}")

    async def _news(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        except asyncio.CancelledError:
            self.abort()
            raise
        finally:
            self._waiter = None

    def abort(self) -> None:
        """Give up: the request's blocks are free within two steps. Idempotent; nothing to do after the end."""
        if not self._done:
            self._end()
            self._error = RequestAbortedError(f"request {self.request_id} was closed before its end")
            self._untaken.clear()
            self.owner.drop(self._key)
            self._wake()  # another task may be waiting

    async def aclose(self) -> None:
        """``abort()``, for use with contextlib.aclosing."""
        self.abort()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.abort()

    def _usage(self) -> Usage:
        completion = sum(len(s.token_ids) for s in self._sequences)
        return Usage(len(self.prompt_token_ids), completion, self.cached_tokens)

    def _timing(self) -> RequestTiming:
        longest = max(self._sequences, key=lambda s: len(s.token_ids))
        return RequestTiming(
            self._arrived,
            self._scheduled,
            self._first_token,
            self._finished,
            len(longest.token_ids),
            longest.host_tokens,
            self.engine,
        )


def _copy(error: AsyncEngineError) -> AsyncEngineError:
    """Return a copy of an error for raising. The traceback of a stream's own error would hold the frames that hold the
    stream, and only the garbage collector would free them, prompt and all."""
    copy = type(error).__new__(type(error), *error.args)
    copy.__dict__.update(error.__dict__)
    return copy


def warn_unclosed(engine: object) -> None:
    """ResourceWarning for an engine that nobody closed."""
    with contextlib.suppress(Exception):
        warnings.warn(f"unclosed {engine!r}: use 'async with' or await aclose()", ResourceWarning, stacklevel=2)
