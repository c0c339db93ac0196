"""An engine without a model: the API of AsyncEngine in memory, under the control of a test.

Tokens are characters. Every prompt is answered by ``answer``, repeated for ever, one token per step of
``step_s`` seconds. A test may hold all requests at a token (``hold``), fail them (``fail``) and see which
are open and which were aborted.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

from asyncengine._core import BlockMap, StepRecord, StepTokens
from asyncengine.api.conversation import Conversation
from asyncengine.api.logprobs import LogProb, TokenLogProbs
from asyncengine.api.outputs import CompletionOutput, FinishReason, RequestDelta, RequestOutput, RequestTiming, Usage
from asyncengine.api.request import Prompt, SamplingParams
from asyncengine.api.stats import EngineSnapshot, EngineStats, WakeRecord
from asyncengine.errors import (
    ContextLengthError,
    EngineClosedError,
    EngineDeadError,
    EngineOverloadedError,
    InvalidRequestError,
    RequestAbortedError,
)

END = -1
VOCABULARY = 0x110000


@dataclass(frozen=True)
class ModelInfo:
    name: str = "fake"
    architecture: str = "FakeForCausalLM"
    dtype: str = "float32"
    device: str = "fake"
    device_label: str = "fake (cuda:1)"
    max_model_len: int = 256
    vocab_size: int = VOCABULARY
    num_kv_blocks: int = 64
    block_size: int = 16
    kv_bytes_per_sequence: int = 65_536
    kv_capacity_tokens: int = 1024
    kv_capacity_sequences: float = 4.0
    num_parameters: int = 1_000_000
    states_in_words: str = "9 of 1.0 MiB, of which 5 are snapshots"


class Characters:
    """Stand-in for a tokenizers.Tokenizer."""

    decoder = None

    def id_to_token(self, token_id: int) -> str:
        return chr(token_id)

    def token_to_id(self, token: str) -> int | None:
        return ord(token) if len(token) == 1 else None

    def get_added_tokens_decoder(self) -> dict[int, object]:
        return {}

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(map(chr, ids))


class CharacterTokenizer:
    """Stand-in for a Tokenizer. A conversation is shown as ``FakeEngine`` does, whatever the template says."""

    backend = Characters()
    special_token_ids: frozenset[int] = frozenset()
    has_chat_template = True

    def __init__(self, chat_template: str = "{{ messages }}") -> None:
        self.chat_template = chat_template

    def template(self, *, with_tools: bool = False) -> str | None:
        return self.chat_template

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(map(chr, ids))


class FakeEngine:
    """``answer`` ends with end-of-sequence when ``ends`` is set, and goes round otherwise.

    ``repeat`` makes the text of a token that many times as long, to fill buffers with few tokens.
    """

    def __init__(
        self,
        answer: str = "Once upon a time 😀 there was a fox. ",
        *,
        ends: bool = False,
        step_s: float = 0.0,
        max_model_len: int = 256,
        repeat: int = 1,
        chat_template: str = "{{ messages }}",
    ) -> None:
        self.answer = [ord(c) for c in answer] + ([END] if ends else [])
        self.step_s = step_s
        self.repeat = repeat
        self.model_info = ModelInfo(max_model_len=max_model_len)
        self.tokenizer = CharacterTokenizer(chat_template)
        self.health = "ready"
        self.overloaded = False
        self.open: dict[str, FakeStream] = {}
        self.submitted: list[tuple[str, SamplingParams, int, str | None]] = []
        self.tenants: list[str | None] = []
        self.aborted: list[str] = []
        self.changed = asyncio.Condition()
        self.hold_at: int | None = None
        self.prompts: list[Prompt] = []
        self.snapshots = 0
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self._ids = itertools.count()
        self._released = asyncio.Event()

    async def start(self) -> None:
        """Do nothing: a fake engine needs no start."""

    def hold(self, at: int) -> None:
        """Requests stop before their token number ``at`` until ``release``."""
        self.hold_at = at
        self._released.clear()

    def release(self) -> None:
        self.hold_at = None
        self._released.set()

    async def wait_for(self, *, open: int | None = None, aborted: int | None = None) -> None:
        """Wait until so many requests are open, or so many were aborted."""
        async with self.changed:
            await self.changed.wait_for(
                lambda: (open is None or len(self.open) == open) and (aborted is None or len(self.aborted) == aborted)
            )

    def fail(self, error: Exception) -> None:
        """Every open request fails."""
        for stream in self.open.values():
            stream.error = error
            stream.failed.set()

    def die(self) -> None:
        self.health = "dead"
        self.fail(EngineDeadError("the executor failed: injected"))

    def engine_stats(self) -> list[EngineStats]:
        return [self.stats()]

    def stats(self) -> EngineStats:
        blocks = self.model_info.num_kv_blocks
        used = len(self.open)
        counts = {field.name: 0 for field in fields(EngineStats)} | {
            "num_requests_running": used,
            "prefix_cache_queries": self.prompt_tokens,
            "prompt_tokens": self.prompt_tokens,
            "generation_tokens": self.generation_tokens,
            "num_kv_blocks": blocks,
            "num_free_blocks": blocks - used,
        }
        del counts["kv_cache_usage"], counts["step_tokens"]  # the one is of the blocks, the other no count
        return EngineStats.of(counts, StepTokens((1, 8), (2, 1, 0), 6))

    def snapshot(self) -> EngineSnapshot:
        """Make a snapshot of an engine whose steps take a millisecond each."""
        self.snapshots += 1
        now = time.monotonic_ns()
        starts = range(now - 20_000_000, now - 2_000_000, 1_000_000)
        steps = (
            StepRecord(i, t - 900_000, t - 800_000, t - 700_000, t + 1_000_000, t + 1_100_000, 3, 3)
            for i, t in enumerate(starts)
        )
        wakes = (WakeRecord(t + 100_000, t + 150_000, t + 300_000) for t in starts)
        used = len(self.open)
        blocks = BlockMap(1, b"\xff" * used + bytes(64 - used), bytes(64), bytes(60) + b"\xff" * 4)
        return EngineSnapshot(now, self.stats(), tuple(steps), tuple(wakes), blocks)

    async def submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        tenant: str | None = None,
    ) -> FakeStream:
        self._check_health()
        ids = self._tokenize(prompt)
        limit, context = params.max_tokens, self.model_info.max_model_len
        if len(ids) + (limit or 1) > context:
            raise ContextLengthError(
                f"the prompt has {len(ids)} tokens and max_tokens is {limit}, the context has {context}",
                param="prompt" if len(ids) >= context else "max_tokens",
            )
        request_id = request_id or f"fake-{next(self._ids)}"
        assert request_id not in self.open
        stream = FakeStream(self, request_id, ids, params, limit or context - len(ids))
        self.open[request_id] = stream
        self.submitted.append((request_id, params, priority, cache_salt))
        self.tenants.append(tenant)
        self.prompts.append(prompt if isinstance(prompt, str | Conversation) else list(prompt))
        self.prompt_tokens += len(ids)
        await self._notify()
        return stream

    async def tokenize(self, prompt: Prompt, **options: Any) -> list[int]:
        self._check_health()
        return self._tokenize(prompt)

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        tenant: str | None = None,
    ) -> RequestOutput:
        stream = await self.submit(
            prompt, params, request_id=request_id, priority=priority, cache_salt=cache_salt, tenant=tenant
        )
        texts = [""] * params.n
        tokens: list[list[int]] = [[] for _ in texts]
        logprobs: list[list[TokenLogProbs]] = [[] for _ in texts]
        reasons = [FinishReason.LENGTH] * params.n
        try:
            async for delta in stream:
                texts[delta.index] += delta.text
                tokens[delta.index] += delta.token_ids
                logprobs[delta.index] += delta.logprobs or ()
                reasons[delta.index] = delta.finish_reason or FinishReason.LENGTH
        finally:
            await stream.aclose()
        assert delta.usage is not None
        assert delta.timing is not None
        outputs = tuple(
            CompletionOutput(
                i, texts[i], tuple(tokens[i]), reasons[i], logprobs=logprobs[i] if params.wants_logprobs else None
            )
            for i in range(params.n)
        )
        return RequestOutput(stream.request_id, tuple(stream.prompt_token_ids), outputs, delta.usage, delta.timing)

    async def aclose(self, drain: bool = True, timeout_s: float = 30.0) -> None:
        self.health = "closed"
        if not drain:
            self.fail(RequestAbortedError("the engine was closed"))

    async def closed(self, stream: FakeStream, *, aborted: bool) -> None:
        if self.open.pop(stream.request_id, None) is not None and aborted:
            self.aborted.append(stream.request_id)
        await self._notify()

    async def step(self, stream: FakeStream, number: int) -> None:
        """Pass the time of one step, or raise."""
        if stream.error is None and self.hold_at is not None and number >= self.hold_at:
            waits = [asyncio.ensure_future(e.wait()) for e in (self._released, stream.failed)]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for w in waits:
                    w.cancel()
        else:
            await asyncio.sleep(self.step_s)
        if stream.error is not None:
            raise stream.error

    async def _notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    def _check_health(self) -> None:
        if self.health == "dead":
            raise EngineDeadError("the executor failed: injected")
        if self.health != "ready":
            raise EngineClosedError("the engine is not accepting requests")
        if self.overloaded:
            raise EngineOverloadedError("the queue is full")

    def _tokenize(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return [ord(c) for c in prompt]
        if isinstance(prompt, Conversation) or isinstance(prompt[0], dict):
            messages: Any = prompt.messages if isinstance(prompt, Conversation) else prompt
            return [ord(c) for m in messages for c in f"{m['role']}: {m['content']}\n"]
        ids: list[Any] = list(prompt)
        for token in ids:
            if not 0 <= token < VOCABULARY:
                raise InvalidRequestError(f"prompt: token id {token} is not in the vocabulary", param="prompt")
        return ids


def fake_logprobs(token: int, params: SamplingParams) -> TokenLogProbs:
    """The token is the second of the most probable ones; a token that cannot come is the last."""
    others = (LogProb(token + 1, -0.5), LogProb(token, -1.0), LogProb(token + 2, -math.inf))
    named = tuple(LogProb(t, -3.0) for t in params.logprob_token_ids)
    return TokenLogProbs(token, -1.0, 2, others[: params.logprobs or 0], named)


class FakeStream:
    """Sequence i of a request starts at character i of the answer, so that n samples differ."""

    def __init__(self, engine: FakeEngine, request_id: str, ids: list[int], params: SamplingParams, limit: int) -> None:
        self.request_id = request_id
        self.prompt_token_ids: Sequence[int] = ids
        self.cached_tokens = len(ids) // 2
        self.engine = 0
        self.error: Exception | None = None
        self.failed = asyncio.Event()
        self._engine = engine
        self._params = params
        self._limit = limit
        self._deltas = self._generate()

    def __aiter__(self) -> AsyncIterator[RequestDelta]:
        return self._deltas

    async def aclose(self) -> None:
        await self._deltas.aclose()
        await self._engine.closed(self, aborted=True)

    async def _generate(self) -> AsyncGenerator[RequestDelta, None]:
        engine, n = self._engine, self._params.n
        arrived = time.monotonic()
        first = 0.0
        generated = 0
        running = dict.fromkeys(range(n), "")
        for number in range(self._limit):
            if not running:
                break
            await engine.step(self, number)
            first = first or time.monotonic()
            for index in list(running):
                token = engine.answer[(index + number) % len(engine.answer)]
                text = "" if token == END else chr(token) * engine.repeat
                reason = FinishReason.STOP if token == END else None
                if number == self._limit - 1:
                    reason = reason or FinishReason.LENGTH
                generated += 1
                engine.generation_tokens += 1
                delta = RequestDelta(self.request_id, index, text, [max(token, 0)], reason)
                if self._params.wants_logprobs:
                    delta.logprobs = [fake_logprobs(max(token, 0), self._params)]
                if reason is not None:
                    del running[index]
                    if not running:
                        delta.usage = Usage(len(self.prompt_token_ids), generated, self.cached_tokens)
                        delta.timing = RequestTiming(arrived, arrived, first, time.monotonic(), generated)
                        await engine.closed(self, aborted=False)
                yield delta
