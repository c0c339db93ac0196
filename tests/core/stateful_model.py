"""States of sequences in plain Python: what every state slot holds while states are copied, to the host as well."""

from __future__ import annotations

from dataclasses import dataclass

from asyncengine import _core

from .hybrid_model import HybridModel
from .scheduler_state import ModelRequest, Step


@dataclass(eq=False)
class StateMove:
    state: int
    host: int
    content: list[int]  # of where it comes from, when it began


class StatefulModel(HybridModel):
    """The part of CheckedScheduler that knows of states. A state is the tokens that it was computed from."""

    states: list[list[int]]
    host_states: list[list[int]]
    state_moves: dict[int, StateMove]
    requests: dict[int, ModelRequest]

    def _copy_states(self, step: Step) -> None:
        """Copies of states have no order among each other."""
        copies, slots = self.native.state_copies, self.limits.max_num_seqs
        sources, targets = ({pair[i] for pair in copies} for i in range(2))
        assert len(targets) == len(copies), "two copies into one state"
        assert not sources & targets, "a copy reads what another writes"
        for source, target in copies:
            self.states[target] = [] if source < 0 else self.states[source]
            kind = "snapshot" if target >= slots else "reset" if source < 0 else "restored state"
            self.saw[kind] += 1
        step.snapshots = [target for target in targets if target >= slots]
        step.begun_with = [source for source in sources if source >= slots]

    def _check_holders(self) -> None:
        super()._check_holders()
        if self.limits.snapshots is None:
            return
        stats = self.native.stats
        written = {state for step in self.flight for state in step.snapshots}
        others = sum(len(request.sequences) > 1 for request in self.requests.values())
        others += len(self.state_moves) + len(self.native.loading)
        assert stats["num_snapshots"] == self.limits.snapshots >= stats["cached_snapshots"]
        assert len(written) <= stats["pinned_snapshots"] <= len(written) + others
        assert stats["num_host_snapshots"] == self.limits.num_host_states >= stats["cached_host_snapshots"]

    def _see_state_moves(self) -> None:
        if not self.limits.num_host_states:
            return
        under_way = {transfer: (state, host) for transfer, state, host in self.native.moves(states=True)}
        assert self.state_moves.keys() <= under_way.keys()
        for transfer in under_way.keys() - self.state_moves.keys():
            self.state_moves[transfer] = self._begin_state(transfer, *under_way[transfer])

    def _begin_state(self, transfer: int, state: int, host: int) -> StateMove:
        assert state >= self.limits.max_num_seqs, "only snapshots move"
        assert not any(state in step.snapshots for step in self.flight), "a step in flight writes what moves"
        if not _core.HostPool.brings_in(transfer):
            self.host_states[host] = [-2]
            return StateMove(state, host, self.states[state])
        assert not any(state in step.begun_with for step in self.flight), "a step in flight reads what is written over"
        self.states[state] = [-2]  # whoever reads it before the end reads this
        return StateMove(state, host, self.host_states[host])

    def end_state_move(self, transfer: int, done: bool = True) -> None:
        """A transfer is over, and the tier has heard of it."""
        move, inwards = self.state_moves.pop(transfer), _core.HostPool.brings_in(transfer)
        source = self.host_states[move.host] if inwards else self.states[move.state]
        assert source == move.content, "somebody wrote to a state while it was copied"
        target, place = (self.states, move.state) if inwards else (self.host_states, move.host)
        target[place] = source if done else [-2]
        self.saw[("state from the host" if inwards else "state to the host") if done else "failed move of a state"] += 1
        self.native.finish_moves(transfer, done, states=True)
        self.move()

    def refuse_state_moves(self, count: int) -> None:
        self.native.refuse_moves(count, states=True)
        self.move()

    def end_moves(self) -> None:
        """End moves of blocks and states until nothing is under way, and nothing more is to move."""
        while True:
            super().end_moves()
            if not self.state_moves:
                return
            for transfer in list(self.state_moves):
                self.end_state_move(transfer)
