"""StatePool in plain Python: dictionaries and ordered lists, slow and obviously right."""

from __future__ import annotations

import random
from collections import Counter

from asyncengine import _core


class CheckedStates:
    """A native StatePool and its model, side by side; every operation is compared.

    The model says how often each snapshot is pinned, which chain leads to it, which step read it last, and in which
    order snapshots are given away: worthless ones, the one that was given back last first, then least recently used
    ones.
    """

    def __init__(self, num_slots: int, num_snapshots: int) -> None:
        self.native = _core.StatePool(num_slots, num_slots + num_snapshots)
        self.first, self.num_snapshots = num_slots, num_snapshots
        self.worthless = list(range(num_slots, num_slots + num_snapshots))  # the next one first
        self.known: list[int] = []  # those that are not pinned, least recently used first
        self.pins: dict[int, int] = {}
        self.chains: dict[int, int] = {}  # by snapshot
        self.steps: dict[int, int] = {}  # by snapshot: the last that read it
        self.orders: dict[int, int] = {}  # by snapshot: when it was last given back, and not in its place
        self.retired = 0
        self.operations = 0
        self.saw: Counter[str] = Counter()  # how often the interesting things came up

    def take(self, step: int) -> int:
        self.operations += 1
        queue = self.worthless or self.known
        expected = queue[0] if queue and self.steps.get(queue[0]) != step else -1
        state = self.native.take(step)
        assert state == expected
        if state >= 0:
            queue.pop(0)
            self.saw["eviction"] += self.chains.pop(state, None) is not None
        self.saw["none to give"] += state < 0
        if state >= 0:
            self.pins[state] = 1
        return state

    def take_at_rest(self) -> None:
        """Takes one that no step reads which is not over."""
        self.operations += 1
        queue = self.worthless or self.known
        expected = queue[0] if queue and self.steps.get(queue[0], 0) <= self.retired else -1
        state = self.native.take_at_rest()
        assert state == expected
        if state >= 0:
            queue.pop(0)
            self.chains.pop(state, None)
            self.pins[state] = 1
        self.saw["one at rest" if state >= 0 else "none at rest"] += 1

    def retire(self, step: int) -> None:
        self.operations += 1
        self.native.retire(step)
        self.retired = step

    def pin(self, state: int) -> None:
        self.operations += 1
        self.native.pin(state)
        self._pin(state)

    def unpin(self, state: int, *, in_place: bool = False) -> None:
        self.operations += 1
        self.native.unpin(state, in_place)
        self._unpin(state, in_place=in_place)

    def enter(self, state: int, chain: int) -> None:
        self.operations += 1
        self.native.enter(state, chain)
        if chain not in self.chains.values():
            self.chains[state] = chain

    def find(self, chain: int) -> int:
        self.operations += 1
        state = self.native.find(chain)
        assert state == next((known for known, other in self.chains.items() if other == chain), -1)
        self.saw["found"] += state >= 0
        return state

    def use(self, state: int, step: int) -> None:
        self.operations += 1
        self.native.use(state, step)
        self._pin(state)
        self.steps[state] = step
        self._unpin(state)

    def forget(self, chain: int) -> None:
        self.operations += 1
        self.native.forget(chain)
        for state in [known for known, other in self.chains.items() if other == chain]:
            del self.chains[state]
            if state in self.known:
                self.known.remove(state)
                self.worthless.insert(0, state)

    def _pin(self, state: int) -> None:
        if state not in self.pins:
            (self.known if state in self.chains else self.worthless).remove(state)
        self.pins[state] = self.pins.get(state, 0) + 1

    def _unpin(self, state: int, *, in_place: bool = False) -> None:
        self.pins[state] -= 1
        if self.pins[state]:
            return
        del self.pins[state]
        if state in self.chains:
            if not in_place:
                self.orders[state] = self.operations
            self.known.append(state)
            self.known.sort(key=lambda known: self.orders.get(known, 0))
        else:
            self.worthless.insert(0, state)

    def check(self) -> None:
        """Counts add up, and native and model agree about every chain."""
        assert self.native.consistent()
        assert self.native.num_snapshots == self.num_snapshots
        assert self.native.num_pinned == len(self.pins)
        assert self.native.num_cached == len(self.chains)
        assert len(self.pins) + len(self.worthless) + len(self.known) == self.num_snapshots
        for state, chain in self.chains.items():
            assert self.native.find(chain) == state


def walk_states(num_slots: int, num_snapshots: int, rng: random.Random, operations: int) -> CheckedStates:
    """Snapshots that are taken, shared, entered, found, read and forgotten; at the end none is pinned."""
    states, step = CheckedStates(num_slots, num_snapshots), 1
    while states.operations < operations:
        chain, pinned = rng.randrange(1, 4 * num_snapshots + 4), sorted(states.pins)
        match rng.randrange(12):
            case 0 | 1:
                states.take(step) if rng.random() < 0.7 else states.take_at_rest()
            case 2 if num_snapshots:
                states.pin(num_slots + rng.randrange(num_snapshots))
            case 3 | 4 | 5 if pinned:
                states.unpin(rng.choice(pinned), in_place=rng.random() < 0.3)
            case 6 | 7 if fresh := [state for state in pinned if state not in states.chains]:
                states.enter(rng.choice(fresh), chain)
            case 8 if states.chains:
                states.use(rng.choice(sorted(states.chains)), step)
            case 9:
                states.forget(chain)
            case 10:
                step += 1
                states.retire(step - rng.randint(1, 3))
            case _:
                states.find(chain)
        states.check()
    while states.pins:
        states.unpin(next(iter(states.pins)))
    states.check()
    assert states.native.num_pinned == 0
    return states
