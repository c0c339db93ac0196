"""Block manager and scheduler against plain Python models, over more than 100,000 operations.

Hypothesis looks for short counterexamples; the random walks go long and far. Both drive the same checked objects, which
compare every operation with their model (block_model.py, scheduler_model.py).
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from .block_model import BLOCK_SIZE, CheckedBlocks
from .scheduler_model import VOCAB, CheckedScheduler, Limits

SALTS = 3
ENOUGH = 100_000
operations: Counter[str] = Counter()  # of all tests in this file


def block_tokens(kind: int) -> tuple[int, ...]:
    """One block of few kinds, the last of which differs from the first in one token only."""
    return (0,) * (BLOCK_SIZE - 1) + (7,) if kind == 3 else (kind,) * BLOCK_SIZE


def prefix_tokens(kinds: list[int]) -> tuple[int, ...]:
    return tuple(token for kind in kinds for token in block_tokens(kind))


class CachedChain:
    """A sequence as the scheduler would run it: matched prefix, own blocks after it, published in order."""

    def __init__(self, blocks: CheckedBlocks, kinds: list[int], salt: int) -> None:
        self.kinds = kinds
        self.held = blocks.match(prefix_tokens(kinds), salt)
        for block in self.held:
            blocks.retain(block)
        self.published = len(self.held)
        self.chain = blocks.native.root_chain(salt)
        for i in range(self.published):
            self.chain = blocks.index[self.chain, block_tokens(kinds[i])][1]

    def grow(self, blocks: CheckedBlocks) -> None:
        if len(self.held) < len(self.kinds) and blocks.native.num_free > 0:
            self.held.append(blocks.allocate())

    def publish(self, blocks: CheckedBlocks) -> None:
        if self.published < len(self.held):
            tokens = block_tokens(self.kinds[self.published])
            self.chain = blocks.publish(self.held[self.published], self.chain, tokens)
            self.published += 1

    def release(self, blocks: CheckedBlocks) -> None:
        for block in reversed(self.held):
            blocks.release(block)


class BlockManagerMachine(RuleBasedStateMachine):
    """Sequences that come, share prefixes, grow, publish and go, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.running: list[CachedChain] = []

    @initialize(num_blocks=st.integers(1, 10), prefix_caching=st.sampled_from([True, True, False]))
    def create(self, num_blocks: int, prefix_caching: bool) -> None:
        self.blocks = CheckedBlocks(num_blocks, prefix_caching)

    @rule(kinds=st.lists(st.integers(0, 3), max_size=5), salt=st.integers(0, SALTS - 1))
    def begin(self, kinds: list[int], salt: int) -> None:
        self.running.append(CachedChain(self.blocks, kinds, salt))

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 99))
    def grow(self, which: int) -> None:
        self.running[which % len(self.running)].grow(self.blocks)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 99))
    def publish(self, which: int) -> None:
        self.running[which % len(self.running)].publish(self.blocks)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 99))
    def end(self, which: int) -> None:
        self.running.pop(which % len(self.running)).release(self.blocks)

    @precondition(lambda self: self.blocks.held)
    @rule(which=st.integers(0, 99), parent=st.integers(1, 5), kind=st.integers(0, 3))
    def publish_anywhere(self, which: int, parent: int, kind: int) -> None:
        """Under a chain that may be gone, or again under another one, as forks do."""
        held = sorted(self.blocks.held)
        self.blocks.publish(held[which % len(held)], parent, block_tokens(kind))

    @rule(kinds=st.lists(st.integers(0, 3), max_size=5), salt=st.integers(0, SALTS - 1))
    def match(self, kinds: list[int], salt: int) -> None:
        self.blocks.match(prefix_tokens(kinds), salt)

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "blocks"):
            self.blocks.check()

    def teardown(self) -> None:
        if not hasattr(self, "blocks"):
            return
        for chain in self.running:
            chain.release(self.blocks)
        self.blocks.check()
        assert self.blocks.native.num_free == self.blocks.num_blocks
        operations["blocks, hypothesis"] += self.blocks.operations


class SchedulerMachine(RuleBasedStateMachine):
    """Requests and aborts at any moment, with any number of steps in flight."""

    @initialize(
        limits=st.builds(
            Limits,
            num_blocks=st.integers(2, 16),
            max_num_seqs=st.integers(1, 5),
            max_num_batched_tokens=st.integers(5, 48),
            prefill_chunk_size=st.sampled_from([0, 1, 7, 16, 33]),
            max_model_len=st.sampled_from([40, 96]),
            prefix_caching=st.booleans(),
            steps_in_flight=st.integers(1, 3),
        )
    )
    def create(self, limits: Limits) -> None:
        self.scheduler = CheckedScheduler(limits)

    @rule(
        family=st.integers(0, 2),
        length=st.integers(1, 90),
        n=st.sampled_from([1, 1, 2, 4]),
        max_tokens=st.integers(1, 40),
        stops=st.lists(st.integers(0, VOCAB - 1), max_size=2),
        order=st.integers(-3, 3),
        salt=st.integers(0, SALTS - 1),
        fails_at=st.sampled_from([None, None, None, 0, 3]),
    )
    def add(self, family, length, n, max_tokens, stops, order, salt, fails_at) -> None:  # type: ignore[no-untyped-def]
        longest = self.scheduler.limits.longest
        length = min(length, longest - 1)
        self.scheduler.add(
            [(family + i) % VOCAB for i in range(length)],
            n=n,
            max_tokens=min(max_tokens, longest - length),
            stop_tokens=stops,
            order=order,
            salt=salt,
            fails_at=fails_at,
        )

    @precondition(lambda self: self.scheduler.requests)
    @rule(which=st.integers(0, 99), index=st.sampled_from([None, None, 0, 1, 3]))
    def abort(self, which: int, index: int | None) -> None:
        requests = list(self.scheduler.requests)
        self.scheduler.abort(requests[which % len(requests)], index)

    @rule()
    def schedule(self) -> None:
        self.scheduler.schedule()

    @precondition(lambda self: self.scheduler.flight)
    @rule()
    def commit(self) -> None:
        self.scheduler.commit()

    @precondition(lambda self: self.scheduler.flight)
    @rule()
    def fail_step(self) -> None:
        self.scheduler.fail_step()

    @rule(rounds=st.integers(1, 8))
    def run(self, rounds: int) -> None:
        for _ in range(rounds):
            self.scheduler.schedule()
            if self.scheduler.flight:
                self.scheduler.commit()

    def teardown(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.finish()
            operations["scheduler, hypothesis"] += self.scheduler.operations


TestBlockManagerMachine = BlockManagerMachine.TestCase
TestBlockManagerMachine.settings = settings(max_examples=60, stateful_step_count=40)
TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=100, stateful_step_count=40)


@pytest.mark.parametrize("num_blocks", [1, 5, 40])
def test_block_manager_on_a_random_walk(num_blocks: int) -> None:
    rng = random.Random(num_blocks)
    blocks = CheckedBlocks(num_blocks)
    running: list[CachedChain] = []
    while blocks.operations < 12_000:
        match rng.randrange(10):
            case 0 | 1:
                kinds = [rng.randrange(4) for _ in range(rng.randrange(7))]
                running.append(CachedChain(blocks, kinds, rng.randrange(SALTS)))
            case 2 if running:
                running.pop(rng.randrange(len(running))).release(blocks)
            case 3 if blocks.held:
                blocks.publish(rng.choice(list(blocks.held)), rng.randrange(1, 50), block_tokens(rng.randrange(4)))
            case 4 | 5 | 6 if running:
                rng.choice(running).grow(blocks)
            case _ if running:
                rng.choice(running).publish(blocks)
        blocks.check()
    for chain in running:
        chain.release(blocks)
    blocks.check()
    assert blocks.native.num_free == num_blocks
    operations["blocks, random walk"] += blocks.operations


def random_request(scheduler: CheckedScheduler, rng: random.Random, arrival: int) -> None:
    longest = scheduler.limits.longest
    family, length = rng.randrange(3), min(rng.choice([3, 17, 40, 90]) + rng.randrange(8), longest - 1)
    prompt = [(family + i) % VOCAB for i in range(length)]
    if rng.random() < 0.5:
        prompt[rng.randrange(length)] = rng.randrange(VOCAB)
    scheduler.add(
        prompt,
        n=rng.choice([1, 1, 1, 2, 4]),
        max_tokens=rng.randint(1, min(60, longest - length)),
        stop_tokens=[rng.randrange(VOCAB)] if rng.random() < 0.3 else [],
        order=arrival + 20 * rng.randrange(-1, 2),
        salt=rng.randrange(SALTS),
        fails_at=rng.randrange(6) if rng.random() < 0.05 else None,
    )


WALKS = {
    "roomy": Limits(num_blocks=64, max_num_seqs=8, max_num_batched_tokens=64),
    "tiny pool": Limits(num_blocks=7, max_num_seqs=6, max_num_batched_tokens=40),
    "one sequence": Limits(num_blocks=6, max_num_seqs=1, max_num_batched_tokens=16),
    "serial": Limits(num_blocks=14, steps_in_flight=1),
    "three in flight": Limits(num_blocks=9, steps_in_flight=3, max_num_seqs=5),
    "chunks of one": Limits(num_blocks=20, prefill_chunk_size=1, max_num_seqs=6),
    "chunks of seven": Limits(num_blocks=10, prefill_chunk_size=7, max_num_batched_tokens=33),
    "no prefix cache": Limits(num_blocks=11, prefix_caching=False),
}


@pytest.mark.parametrize("name", WALKS)
def test_scheduler_on_a_random_walk(name: str) -> None:
    rng = random.Random(name)
    scheduler = CheckedScheduler(WALKS[name])
    arrival = 0
    while scheduler.operations < 9_000:
        crowded = len(scheduler.requests) > 2 * scheduler.limits.max_num_seqs
        match rng.randrange(8):
            case 0 if not crowded:
                arrival += 1
                random_request(scheduler, rng, arrival)
            case 1 if scheduler.requests and rng.random() < 0.15:
                scheduler.abort(rng.choice(list(scheduler.requests)), rng.choice([None, 0, 1, 2]))
            case 2 | 3 | 4:
                scheduler.schedule()
            case _ if scheduler.flight and rng.random() < 0.01:
                scheduler.fail_step()
            case _ if scheduler.flight:
                scheduler.commit()
        if rng.random() < 0.002:
            scheduler.finish()
    scheduler.finish()
    operations["scheduler, random walk"] += scheduler.operations
    # The walk went where it was meant to go.
    saw = scheduler.saw
    assert saw["abort"]
    assert saw["mixed step"] or scheduler.limits.max_num_seqs == 1
    assert saw["failure"]
    assert saw["failed step"]
    assert saw["surplus row"] or scheduler.limits.steps_in_flight == 1
    assert saw["cached prefix"] or not scheduler.limits.prefix_caching
    assert (saw["fork"] and saw["copy"]) or scheduler.limits.max_num_seqs == 1
    assert saw["preemption"] or scheduler.limits.num_blocks > 12 or scheduler.limits.max_num_seqs == 1


def test_enough_operations_were_checked(request: pytest.FixtureRequest) -> None:
    mine = [item for item in request.session.items if item.path == request.path]
    if len(mine) < 4 + len(WALKS) or request.session.testsfailed:
        pytest.skip("only a part of the file ran")
    assert operations.total() >= ENOUGH, dict(operations)
