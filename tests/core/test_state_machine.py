"""Block manager and scheduler against plain Python models, over more than 100,000 operations.

Hypothesis looks for short counterexamples; the random walks of long_run.py go long and far. Both drive the same checked
objects, which compare every operation with their model (block_model.py, scheduler_model.py).
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncengine import _core
from tests.amounts import examples

from . import long_run
from .block_model import CheckedBlocks
from .long_run import SALTS, WALKS, CachedChain, block_tokens, prefix_tokens, walk_blocks, walk_scheduler
from .scheduler_model import VOCAB, CheckedScheduler, Limits
from .state_model import walk_states

ENOUGH = 100_000
HYBRID = (
    *("move to the host", "stayed", "stored", "job", "failed job", "hung job", "token of a host row", "leaves"),
    "block found that a host row made",
)
operations: Counter[str] = Counter()  # of all tests in this file


class BlockManagerMachine(RuleBasedStateMachine):
    """Sequences that come, share prefixes, grow, publish and go, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.running: list[CachedChain] = []

    @initialize(
        num_blocks=st.integers(1, 10),
        prefix_caching=st.sampled_from([True, True, False]),
        window_groups=st.sampled_from([0, 0, 1, 2]),
    )
    def create(self, num_blocks: int, prefix_caching: bool, window_groups: int) -> None:
        self.blocks = CheckedBlocks(num_blocks, prefix_caching, window_groups)

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

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 99))
    def let_go(self, which: int) -> None:
        self.running[which % len(self.running)].let_go(self.blocks)

    @precondition(lambda self: any(chain.held for chain in self.running))
    @rule(which=st.integers(0, 99), parent=st.integers(1, 5), kind=st.integers(0, 3))
    def publish_anywhere(self, which: int, parent: int, kind: int) -> None:
        """Under a chain that may be gone, or again under another one, as forks do. Blocks of window groups are not."""
        held = sorted({block for chain in self.running for block in chain.held})
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


def is_possible(limits: Limits) -> bool:
    if limits.lanes and limits.snapshots is not None:
        return False
    if limits.num_host_states and (limits.snapshots is None or limits.num_host_blocks == 0):
        return False
    if limits.num_host_blocks == 0:
        return limits.lanes == 0
    return limits.prefix_caching and limits.max_num_batched_tokens >= limits.max_num_seqs + limits.lanes


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
            target_itl_ns=st.sampled_from([0, 0, 1, 3000]),
            num_host_blocks=st.sampled_from([0, 3, 40]),
            lanes=st.sampled_from([0, 1, 3]),
            layers=st.integers(1, 3),
            tenants=st.sampled_from([0, 2, 3]),
            window=st.sampled_from([0, 0, 1, 16, 30]),
            snapshots=st.sampled_from([None, None, 0, 1, 4]),
            num_host_states=st.sampled_from([0, 3, 8]),
        ).filter(is_possible)
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
        tenant=st.integers(0, 3),
        priority=st.integers(-1, 1),
    )
    def add(  # type: ignore[no-untyped-def]
        self, family, length, n, max_tokens, stops, order, salt, fails_at, tenant, priority
    ) -> None:
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
            tenant=min(tenant, self.scheduler.limits.tenants),
            priority=priority,
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

    @precondition(lambda self: self.scheduler.limits.num_host_blocks)
    @rule()
    def move(self) -> None:
        self.scheduler.move()

    @precondition(lambda self: self.scheduler.moves)
    @rule(which=st.integers(0, 3), done=st.sampled_from([True, True, True, False]))
    def end_move(self, which: int, done: bool) -> None:
        under_way = list(self.scheduler.moves)
        self.scheduler.end_move(under_way[which % len(under_way)], done)

    @precondition(lambda self: self.scheduler.state_moves)
    @rule(which=st.integers(0, 3), done=st.sampled_from([True, True, True, False]))
    def end_state_move(self, which: int, done: bool) -> None:
        under_way = list(self.scheduler.state_moves)
        self.scheduler.end_state_move(under_way[which % len(under_way)], done)

    @precondition(lambda self: self.scheduler.pending_jobs())
    @rule(which=st.integers(0, 3), done=st.sampled_from([True, True, True, False]))
    def end_job(self, which: int, done: bool) -> None:
        pending = self.scheduler.pending_jobs()
        self.scheduler.end_job(pending[which % len(pending)], done)

    @precondition(lambda self: self.scheduler.pending_jobs())
    @rule()
    def wait_for_jobs_in_vain(self) -> None:
        self.scheduler.wait_for_jobs_in_vain()

    @rule(rounds=st.integers(1, 8))
    def run(self, rounds: int) -> None:
        for _ in range(rounds):
            self.scheduler.schedule()
            if self.scheduler.flight:
                self.scheduler.commit()
            if self.scheduler.limits.lanes:
                self.scheduler.move()
                self.scheduler.end_jobs()

    def teardown(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.finish()
            operations["scheduler, hypothesis"] += self.scheduler.operations


TestBlockManagerMachine = BlockManagerMachine.TestCase
TestBlockManagerMachine.settings = settings(max_examples=examples(60), stateful_step_count=40)
TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=examples(100), stateful_step_count=40)


@pytest.mark.parametrize(("num_blocks", "window_groups"), [(1, 0), (5, 0), (40, 0), (8, 1), (30, 3)])
def test_block_manager_on_a_random_walk(num_blocks: int, window_groups: int) -> None:
    walked = walk_blocks(num_blocks, random.Random(num_blocks), 12_000, window_groups)
    operations["blocks, random walk"] += walked.operations
    if window_groups:
        assert min(walked.saw[what] for what in ("companion", "prefix of windows", "shorter prefix", "dropped")) > 4


@pytest.mark.parametrize("num_snapshots", [0, 1, 6, 40])
def test_snapshots_of_states_on_a_random_walk(num_snapshots: int) -> None:
    states = walk_states(3, num_snapshots, random.Random(num_snapshots), 6_000)
    operations["snapshots, random walk"] += states.operations
    assert states.saw["none to give"] or num_snapshots > 6
    assert not num_snapshots or (states.saw["eviction"] and states.saw["found"])


def test_a_pool_of_states_refuses_misuse() -> None:
    states = _core.StatePool(2, 3)
    for wrong in (lambda: states.pin(1), lambda: states.unpin(2), lambda: states.enter(2, 5), lambda: states.use(3, 1)):
        with pytest.raises(ValueError, match="snapshot"):
            wrong()
    assert states.take(1) == 2
    with pytest.raises(ValueError, match="a chain"):
        states.enter(2, 0)
    with pytest.raises(ValueError, match="a state for each slot"):
        _core.StatePool(2, 1)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", WALKS)
def test_scheduler_on_a_random_walk(name: str) -> None:
    lanes = WALKS[name].lanes
    scheduler = walk_scheduler(WALKS[name], random.Random(name), 25_000 if lanes else 9_000)
    operations["scheduler with host rows" if lanes else "scheduler, random walk"] += scheduler.operations
    # The walk went where it was meant to go.
    saw = scheduler.saw
    assert saw["abort"]
    assert saw["mixed step"] or scheduler.limits.max_num_seqs == 1
    assert saw["failure"]
    assert saw["failed step"]
    assert saw["surplus row"] or scheduler.limits.steps_in_flight == 1
    assert saw["cached prefix"] or not scheduler.limits.prefix_caching or scheduler.limits.snapshots == 0
    if scheduler.limits.snapshots is None:  # which begin at the end of a block, and share no other
        assert (saw["fork"] and saw["copy"]) or scheduler.limits.max_num_seqs == 1
    else:
        assert saw["fork"] or not scheduler.limits.snapshots
    assert saw["preemption"] or scheduler.limits.num_blocks > 12 or scheduler.limits.max_num_seqs == 1
    if scheduler.limits.num_host_blocks:
        assert all(saw[what] for what in ("block to the host", "block from the host", "failed move", "load"))
    if scheduler.limits.lanes:
        assert all(saw[what] for what in HYBRID)
    if scheduler.limits.window:
        assert (saw["let go"] > 0) == (not lanes)
    if scheduler.limits.snapshots is not None:
        assert saw["reset"]
        assert not scheduler.limits.snapshots or (saw["snapshot"] and saw["restored state"])
        kept = scheduler.limits.num_host_blocks and scheduler.limits.snapshots
        assert not kept or saw["went on where it was"]
    if scheduler.limits.num_host_states:
        assert all(saw[what] for what in ("state to the host", "state from the host", "failed move of a state"))
    if scheduler.limits.tenants:
        assert saw["gave way to a tenant"]


def test_a_long_run_says_what_it_did(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["long_run", "--operations", "5000", "--seed", "3"])
    monkeypatch.setattr(long_run, "OPERATIONS_OF_A_WALK", 1000)
    assert long_run.main() == 0
    *walks, summary = capsys.readouterr().out.splitlines()
    assert len(walks) >= 4
    assert any(" blocks" in walk for walk in walks)
    assert int(summary.split()[0].replace(",", "")) >= 5000


def test_a_request_that_starves_is_noticed() -> None:
    scheduler = CheckedScheduler(Limits(max_num_seqs=1))
    scheduler.add([1] * 5, max_tokens=30, order=1)
    starved = scheduler.requests[scheduler.add([2] * 5, max_tokens=30, order=1)]
    before = starved.allowed
    for order in (1, 2):
        scheduler.add([3], order=order)
    assert starved.allowed == before, "those that come after it are no excuse"
    scheduler.add([3], order=0)
    assert starved.allowed > before
    starved.allowed = 3
    with pytest.raises(AssertionError, match="request 2 starves"):
        scheduler.finish()


def test_enough_operations_were_checked(request: pytest.FixtureRequest) -> None:
    mine = [item for item in request.session.items if item.path == request.path]
    if len(mine) < 13 + len(WALKS) or request.session.testsfailed:
        pytest.skip("only a part of the file ran")
    of_host_rows = operations["scheduler with host rows"]
    assert of_host_rows >= ENOUGH, dict(operations)
    assert operations.total() - of_host_rows >= ENOUGH, dict(operations)
