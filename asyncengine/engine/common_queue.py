"""CommonQueue: the requests that wait in front of several engines, in the order in which one engine would serve them.

A request waits here until an engine can begin it soon. Then it goes to that engine and stays there. Of the engines with
room, a request goes to the one where the fewest tokens are left to compute before its own first token, with what waits
there and what its prefix cache lacks of the prompt.

An engine with free slots and blocks has room for prompts of as many tokens as its next steps compute. A full engine has
room for as many requests as it lately ended at a time: they wait in its own queue and take the slots that the next ones
leave, because the event loop hears of an end a step late. So a slot is seldom empty while requests wait, and no request
stands behind long outputs of one engine while another has a slot. With two simulated engines, steps of 5 ms and outputs
of 40 tokens, 58 of 64 slots were busy, as with all requests in the engines' own queues.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from asyncengine._core import SubmitResult
from asyncengine.engine.live_requests import LiveRequests
from asyncengine.engine.warmth import PIECE_TOKENS, Pieces, Warmth

if TYPE_CHECKING:
    from asyncengine._core import RequestSpec, StepLoop
    from asyncengine.config import EngineConfig
    from asyncengine.engine.life import Life

ROW_TOKENS = 32
"""A sequence that runs or waits holds up a new prompt as so many tokens of another prompt do, about."""
_RESERVED_SHARE = 8
"""The core keeps an eighth of the queue's limits back for requests that say so, and so does this queue."""
_MOST_HELD = 16
"""Requests that may wait for the engine that holds their prefix while others behind them go to another engine."""
_LOOK_S = 0.01
"""An engine that computes long prompts tells of no token meanwhile, so its queue is looked at from time to time."""


@dataclass(eq=False, slots=True)
class _Waiting:
    order: tuple[int, int]
    """The core's order: arrival, with priority and fairness, in ns; requests of the same time by key."""
    arrives_ns: int
    """Time at which the request counts as arrived, in ns of time.monotonic_ns()."""
    spec: RequestSpec
    pieces: Pieces

    @property
    def key(self) -> int:
        return self.order[1]


class _Load(NamedTuple):
    """Load of an engine, in sequences, requests, tokens and KV blocks."""

    running: int
    waiting: int
    queued_requests: int
    queued_tokens: int
    free_blocks: int

    @property
    def rows(self) -> int:
        return self.running + self.waiting


class _Place:
    """An engine, as the queue sees it."""

    def __init__(self, life: Life) -> None:
        self.life = life
        self.warmth = Warmth(0)
        self._live = 0
        self._leaving = 0

    @property
    def is_alive(self) -> bool:
        return self.life.health in ("ready", "draining") and not self.loop.error

    @property
    def loop(self) -> StepLoop:
        return self.life.loaded().step_loop

    def load(self) -> _Load:
        return _Load(*self.loop.load())

    def note_news(self) -> None:
        """Count the requests that ended since the last news."""
        self._leaving = max(self._live - len(self.life.requests), self._leaving // 2)
        self._live = len(self.life.requests)

    def note_given(self) -> None:
        self._live += 1

    def has_room(self, load: _Load, tokens: int) -> bool:
        """Return whether a prompt of so many tokens would soon begin here."""
        if load.waiting == 0 and load.running == 0:
            return True
        config = self.life.config
        if load.queued_tokens >= config.steps_in_flight * config.max_num_batched_tokens:
            return False
        free = load.free_blocks * self.life.model.block_size
        begins = load.rows < config.max_num_seqs and load.queued_tokens + tokens <= free
        return begins or load.waiting < self._leaving


class CommonQueue(LiveRequests):
    """The Owner of streams that wait. Engines behind it share its names, keys and fair shares."""

    def __init__(self, config: EngineConfig, lives: Sequence[Life]) -> None:
        """``config`` is that of each engine."""
        super().__init__(config.fair_share_s)
        self._config = config
        self._ageing_ns = int(config.priority_ageing_s * 1e9)
        self._places = [_Place(life) for life in lives]
        self._turns = itertools.count()
        self._waiting: list[_Waiting] = []
        self._waiting_by_key: dict[int, _Waiting] = {}
        self._look: asyncio.TimerHandle | None = None
        self._handing = False
        self.tokens = 0
        """Prompt tokens of the requests that wait."""
        for rank, life in enumerate(lives):
            life.requests.rank = rank
            life.requests.share_names(self)

    def open(self) -> None:
        """All engines have started."""
        self.loop = asyncio.get_running_loop()
        for place in self._places:
            model = place.life.model
            place.warmth = Warmth(model.kv_capacity_tokens // PIECE_TOKENS)
            place.life.after_news = partial(self._news, place)

    def close(self) -> None:
        """Look at the engines no more. Nothing waits."""
        for place in self._places:
            place.life.after_news = None
        if self._look is not None:
            self._look.cancel()

    def _news(self, place: _Place) -> None:
        place.note_news()
        self.hand_over()

    # ---- requests in ----

    def check(self, spec: RequestSpec, tokens: int, reserved: bool) -> SubmitResult:
        """Return the core's answer to a request of ``tokens`` prompt tokens, for the queues of all engines together."""
        places = self._alive()
        if not places:
            return SubmitResult.closed
        if (result := places[0].loop.check(spec)) != SubmitResult.accepted:
            return result
        loads = [place.load() for place in places]
        requests = len(self._waiting) + sum(load.queued_requests for load in loads)
        queued = self.tokens + sum(load.queued_tokens for load in loads)
        most_requests, most_tokens = (
            most + most // _RESERVED_SHARE + 1 if reserved else most
            for most in (self._config.max_queued_requests, self._config.max_queued_tokens)
        )
        full = requests >= most_requests or (queued > 0 and queued + tokens > most_tokens)
        return SubmitResult.queue_full if full else SubmitResult.accepted

    def put(self, key: int, spec: RequestSpec, pieces: Pieces, priority: int, delay_ns: int) -> None:
        """Request ``key`` has been entered: have it wait, or go to an engine at once."""
        arrives = time.monotonic_ns() + delay_ns
        waiting = _Waiting((arrives + priority * self._ageing_ns, key), arrives, spec, pieces)
        insort(self._waiting, waiting, key=_order)
        self._waiting_by_key[key] = waiting
        self.tokens += pieces.tokens
        self.hand_over()

    def forget(self, key: int) -> None:
        """The request has ended, or its consumer has gone."""
        super().forget(key)
        self._remove(key)

    def _remove(self, key: int) -> None:
        if (waiting := self._waiting_by_key.pop(key, None)) is not None:
            del self._waiting[bisect_left(self._waiting, waiting.order, key=_order)]
            self.tokens -= waiting.pieces.tokens

    # ---- requests out ----

    def hand_over(self) -> None:
        """Give requests to the engines that have room."""
        if self._handing or not self._waiting:
            return
        self._handing = True
        try:
            self._hand_over()
        finally:
            self._handing = False
        if self._waiting and self._look is None:
            self._look = asyncio.get_running_loop().call_later(_LOOK_S, self._look_again)

    def _look_again(self) -> None:
        self._look = None
        self.hand_over()

    def _hand_over(self) -> None:
        alive = self._alive()
        turn = next(self._turns) % max(1, len(alive))
        loads = {place: place.load() for place in alive[turn:] + alive[:turn]}
        held = 0
        while loads and held < min(_MOST_HELD, len(self._waiting)):
            waiting = self._waiting[held]
            tokens = waiting.pieces.tokens
            with_room = [place for place, load in loads.items() if place.has_room(load, tokens)]
            if not with_room:
                return  # nobody goes before it, so that it does not wait for ever
            place = _best(waiting.pieces, with_room, loads)
            if place is None:
                held += 1
                continue
            del loads[place]  # and back behind the others: those with as few tokens take turns
            if self._give(waiting, place):
                loads[place] = place.load()
        if not self._alive():
            for stream in self:
                stream.fail(self._places[0].life.dead_or_closed())

    def _give(self, waiting: _Waiting, place: _Place) -> bool:
        """Give a request to an engine. False: the engine does not take it."""
        waiting.spec.delay_ns = waiting.arrives_ns - time.monotonic_ns()
        result = place.loop.submit(waiting.spec)
        if result == SubmitResult.accepted:
            self._remove(waiting.key)
            self.give(waiting.key, place.life.requests)
            place.note_given()
            place.warmth.add(waiting.pieces)
        elif result != SubmitResult.queue_full:  # it ended by itself, and its requests have not heard of it
            place.life.deliver()
        return result == SubmitResult.accepted

    def _alive(self) -> list[_Place]:
        return [place for place in self._places if place.is_alive]


def _best(pieces: Pieces, with_room: Sequence[_Place], loads: dict[_Place, _Load]) -> _Place | None:
    """Return the engine for a prompt; None: one without room holds its prefix, and is worth waiting for.

    It is if the tokens there are fewer, and the sequences hardly more than at the best engine with room.
    """
    warm = {place: place.warmth.matched(pieces) for place in loads}

    def tokens_before(place: _Place) -> int:
        return loads[place].queued_tokens + ROW_TOKENS * loads[place].rows - warm[place]

    best, first = min(with_room, key=tokens_before), min(loads, key=tokens_before)
    worth = warm[first] > warm[best] and 3 * loads[first].rows <= 4 * loads[best].rows
    return None if worth and first not in with_room else best


def _order(waiting: _Waiting) -> tuple[int, int]:
    return waiting.order
