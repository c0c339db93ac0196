"""Requests on their way into the core: checked, made into token ids and entries of a slot, and enqueued."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from asyncengine._core import RequestExtras, RequestSpec, SamplingState, SubmitResult
from asyncengine.api.request import Prompt, SamplingParams
from asyncengine.engine.life import Life
from asyncengine.engine.slot_entries import request_extras, sampling_state
from asyncengine.engine.stream import RequestStream
from asyncengine.engine.warmth import pieces_of
from asyncengine.errors import EngineOverloadedError, InvalidRequestError
from asyncengine.text.prompts import check_size, check_terms, check_vocabulary, hash_salt, kept_tokens, stop_tokens

if TYPE_CHECKING:
    from asyncengine.api.model_info import ModelInfo
    from asyncengine.engine.common_queue import CommonQueue


class Submission:
    """Checks a program's requests and enqueues them in the core."""

    def __init__(self, life: Life, seeds: random.Random, queue: CommonQueue | None = None) -> None:
        """``seeds`` are those of requests that bring none. ``queue`` gets the requests in place of the core."""
        self._life = life
        self._seeds = seeds
        self._queue = queue
        self.requests = life.requests if queue is None else queue
        """Owner of the requests that are submitted."""

    async def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        *,
        request_id: str | None,
        priority: int,
        cache_salt: str | None,
        tenant: str | None,
    ) -> RequestStream:
        """See ``AsyncEngine.submit``."""
        arrived = time.monotonic()
        life, requests = self._life, self.requests
        model = life.serving().model_info
        params = params if params is not None else SamplingParams()
        if not isinstance(params, SamplingParams):
            raise InvalidRequestError(f"params must be SamplingParams, got {type(params).__name__}", param="params")
        check_terms(priority, request_id=request_id, cache_salt=cache_salt, tenant=tenant)
        self._check_features(params)
        _check_generates(model)
        prompt_ids = await life.prompts.token_ids(prompt, kept_tokens(params.truncation, params, model))
        max_tokens = check_size(model, prompt_ids, params)
        check_vocabulary(prompt_ids, model.vocab_size)
        words = await life.prompts.words(params.bad_words, "bad_words")
        constraints = await life.constraints.constraints(params, prompt, prompt_ids, tenant)
        backend = life.serving()  # that may have taken a while
        ends = stop_tokens(model, params)
        if constraints and not model.eos_token_ids and constraints[0].end not in ends:
            ends.append(constraints[0].end)
        seed = params.seed if params.seed is not None else self._seeds.getrandbits(63)
        states = [sampling_state(params, seed + i) for i in range(params.n if params.logits_processor else 1)]
        processed = life.constraints.processed(params, prompt_ids, states)
        masks = [follower.channel for follower in constraints or processed]
        extras = request_extras(params, len(prompt_ids), ends, model, words, masks)
        key = requests.new_key()
        if request_id is None:
            request_id = f"req-{key}"
        requests.check_name(request_id)

        stream = RequestStream(requests, backend.tokenizer, key, request_id, prompt_ids, params, arrived)
        self.enqueue(
            stream,
            key,
            prompt_ids,
            n=params.n,
            max_tokens=max_tokens,
            priority=priority,
            cache_salt=cache_salt,
            tenant=tenant,
            sampling=states[0],
            stop_tokens=ends,
            extras=extras,
            asked=params.features,
        )
        if params.timeout is not None:
            stream.end_at(arrived + params.timeout)
        if constraints:
            stream.follow(constraints, life.constraints.advance)
        if processed:
            stream.process(processed, life.constraints.process)
        return stream

    def enqueue(
        self,
        stream: RequestStream,
        key: int,
        prompt_ids: list[int],
        *,
        priority: int,
        cache_salt: str | None,
        tenant: str | None,
        extras: RequestExtras,
        asked: Sequence[str],
        n: int = 1,
        max_tokens: int = 1,
        sampling: SamplingState | None = None,
        stop_tokens: Sequence[int] = (),
    ) -> None:
        """Hand request ``key`` to the core, or to the queue, and enter it among the live requests.

        ``asked`` names the fields that ask for more than plain sampling, for the error where they are not served.
        Raises InvalidRequestError, EngineOverloadedError, EngineClosedError, EngineDeadError.
        """
        place = self.requests.fair_share.place(tenant, priority)
        spec = RequestSpec(
            id=key,
            prompt=prompt_ids,
            n=n,
            max_tokens=max_tokens,
            priority=priority,
            salt=hash_salt(cache_salt),
            sampling=SamplingState() if sampling is None else sampling,
            stop_tokens=stop_tokens,
            delay_ns=place.delay_ns,
            reserved=place.reserved,
            tenant=place.tenant,
            extras=extras,
        )
        if self._queue is None:
            self._check_result(self._life.loaded().step_loop.submit(spec), asked)
        else:
            self._check_result(self._queue.check(spec, len(prompt_ids), place.reserved), asked)
        self.requests.enter(stream, key, tenant, priority, n, place)
        if self._queue is not None:
            self._queue.put(key, spec, pieces_of(prompt_ids, cache_salt), priority, place.delay_ns)

    def _check_features(self, params: SamplingParams) -> None:
        self._life.prompts.check_stop_strings(params)
        for name in ("logprobs", "prompt_logprobs"):
            asked, limit = getattr(params, name), self._life.config.max_logprobs
            if asked is not None and asked > limit:
                raise InvalidRequestError(f"{name} must be in [0, {limit}] (max_logprobs), got {asked}", param=name)

    def _check_result(self, result: SubmitResult, asked: Sequence[str]) -> None:
        config = self._life.config
        if result == SubmitResult.queue_full:
            raise EngineOverloadedError(
                f"the queue is full: max_queued_requests ({config.max_queued_requests}) or max_queued_tokens "
                f"({config.max_queued_tokens}) is reached; raise it, or use generate_many, which waits for room"
            )
        if result == SubmitResult.unserved:
            what, model = ", ".join(asked) or "this kind of request", self._life.model
            param = asked[0].partition("=")[0] if asked else "params"
            where = (
                "for a model whose layers keep a state" if model.num_state_slots else f"on this device ({model.device})"
            )
            raise InvalidRequestError(f"{what}: not served {where} yet", param=param)
        if result == SubmitResult.too_large:  # check_size has checked the tokens
            raise InvalidRequestError("the parameters ask for more than a step has room for", param="params")
        if result != SubmitResult.accepted:
            # It ended by itself, and a caller who only asks again keeps the loop from hearing of it.
            self._life.deliver()
            raise self._life.dead_or_closed()


def _check_generates(model: ModelInfo) -> None:
    """Raises InvalidRequestError for a model that classifies, or has no head."""
    if model.labels:
        raise InvalidRequestError(f"{model.architecture} classifies and generates no text: use classify()")
    if not model.generates:
        raise InvalidRequestError(f"{model.name} has no head and generates no text: use embed()")
