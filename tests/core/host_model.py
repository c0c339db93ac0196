"""The host tier in plain Python: what every block holds while blocks move to the host and back."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from asyncengine import _core

from .scheduler_state import BLOCK_SIZE, ModelSequence

Event = tuple[int, int, int, int]


@dataclass(eq=False)
class Move:
    block: int
    host: int
    content: list[int]  # of where it comes from, when it began


class HostModel:
    """The part of CheckedScheduler that moves blocks, beside the native tier. Blocks under way are garbage."""

    native: _core.SchedulerHarness
    limits: Any
    kv: list[list[int]]
    host: list[list[int]]
    moves: dict[int, list[Move]]
    saw: Counter[str]
    operations: int
    flight: deque[Any]

    if TYPE_CHECKING:  # what the other parts of CheckedScheduler have

        def _sequences(self) -> list[ModelSequence]: ...
        def _settle(self, sequence: ModelSequence) -> None: ...
        def _fail(self, sequence: ModelSequence) -> list[Event]: ...
        def _release(self) -> list[int]: ...
        def _expect_late_jobs(self) -> list[Event]: ...
        def _see_hosted(self) -> None: ...
        def _check_moved(self) -> None: ...
        def _see_state_moves(self) -> None: ...

    def move(self) -> bool:
        """The host tier takes in what has moved, and starts what is to move; False if it did neither."""
        self.operations += 1
        expected = self._expect_late_jobs()
        moved = self.native.move_blocks()
        told, released = self.native.news()
        assert Counter(told) == Counter(expected)
        under_way: dict[int, list[tuple[int, int]]] = {}
        for transfer, block, host in self.native.moves():
            under_way.setdefault(transfer, []).append((block, host))
        for transfer, pairs in under_way.items():
            if transfer not in self.moves:
                self.moves[transfer] = [self._begin(transfer, *pair) for pair in pairs]
        assert under_way.keys() == self.moves.keys()
        self._see_state_moves()
        self._see_hosted()
        self._see_loading()
        self._check_moved()
        assert sorted(released) == self._release()
        self._check_holders()
        return moved

    def end_move(self, transfer: int, done: bool = True) -> None:
        """A transfer is over, and the tier has heard of it."""
        for move in self.moves.pop(transfer):
            inwards = _core.HostPool.brings_in(transfer)
            source = self.host[move.host] if inwards else self.kv[move.block]
            assert source == move.content, "somebody wrote to a block while it was copied"
            target, place = (self.kv, move.block) if inwards else (self.host, move.host)
            target[place] = list(source) if done else [-2] * BLOCK_SIZE
            self.saw[("block from the host" if inwards else "block to the host") if done else "failed move"] += 1
        self.native.finish_moves(transfer, done)
        self.move()

    def refuse_moves(self, count: int) -> None:
        self.native.refuse_moves(count)
        self.move()

    def _begin(self, transfer: int, block: int, host: int) -> Move:
        if _core.HostPool.brings_in(transfer):
            self.kv[block] = [-2] * BLOCK_SIZE  # whoever reads it before the end reads this
            return Move(block, host, list(self.host[host]))
        self.host[host] = [-2] * BLOCK_SIZE
        return Move(block, host, list(self.kv[block]))

    def _see_loading(self) -> None:
        loading = set(self.native.loading)
        for s in self._sequences():
            was, s.loading = s.loading, (s.request.id, s.index) in loading
            self.saw["load"] += s.loading and not was and s.host is None
            if was:
                self._settle(s)

    def end_moves(self) -> None:
        """End moves until nothing is under way, and nothing more is to move."""
        while self.limits.num_host_blocks and (self.move() or self.moves):
            for transfer in list(self.moves):
                self.end_move(transfer)

    def _check_holders(self) -> None:
        """Reference counts are those of the sequences' tables and of copies under way."""
        holders = [s for s in self._sequences() if s.blocks]
        counts = Counter(block for s in holders for block in s.held)
        counts.update(block for step in self.flight for block in step.held)
        counts.update(self.native.held_by_tier)
        assert self.native.ref_counts == [counts[block] for block in range(self.limits.num_blocks)]
        assert self.native.free_blocks == self.limits.num_blocks - len(counts)
        assert len(holders) <= self.limits.max_num_seqs
        assert self.native.in_flight == len(self.flight)
