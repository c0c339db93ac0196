"""The scheduler against a plain Python model of everything it may touch.

The model executes the steps that the native scheduler plans: it moves copied blocks, writes every token of every row
into a table of KV contents and reads each row's whole context back through the row's blocks. It knows which sequence
is in which state, and so who may hold which block, who must be told what, and who comes next.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from asyncengine import _core

from .host_model import Move
from .hybrid_model import JOB_TIMEOUT
from .scheduler_state import BLOCK_SIZE, VOCAB, Limits, ModelRequest, ModelSequence, Row, State, Step
from .stateful_model import StatefulModel, StateMove
from .tenant_model import Holdings, TenantModel

__all__ = ["VOCAB", "CheckedScheduler", "Limits"]

STOP, LENGTH = _core.FinishReason.stop, _core.FinishReason.length
FAILED, STEP_FAILED = _core.FinishReason.failed, _core.FinishReason.step_failed
FED_IN_PLACE = 0
"""Token that executors feed where logits were not finite: no_row_is_fed_a_negative_token in tests/native holds them to
it."""

LEAST_CHUNK = 16
"""Tokens that the first prompt of a step gets, however long they take."""
COSTS = _core.StepCosts(
    *(
        [_core.CostPoint(tokens=n, base_ns=100 * n, context_ns=context_ns) for n, context_ns in points]
        for points in ([(1, 1), (64, 1)], [(1, 1), (64, 64)])
    )
)
"""A step takes 100 ns for each token, 1 ns for each that a token attends to."""


class CheckedScheduler(TenantModel, StatefulModel):
    """A native scheduler and its model, side by side; every operation is compared."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.native = _core.SchedulerHarness(
            _core.SchedulerConfig(
                num_blocks=limits.num_blocks,
                block_size=BLOCK_SIZE,
                max_num_seqs=limits.max_num_seqs,
                max_num_batched_tokens=limits.max_num_batched_tokens,
                prefill_chunk_size=limits.prefill_chunk_size,
                max_model_len=limits.max_model_len,
                prefix_caching=limits.prefix_caching,
                num_host_blocks=limits.num_host_blocks,
                num_host_states=limits.num_host_states,
                costs=COSTS,
                targets=_core.ItlTargets(ns=limits.target_itl_ns),
                hybrid=_core.HybridConfig(lanes=limits.lanes, layers=limits.layers, job_timeout_ns=JOB_TIMEOUT),
                window=limits.window,
                num_state_slots=0 if limits.snapshots is None else limits.max_num_seqs + limits.snapshots,
                state_snapshot_tokens=BLOCK_SIZE,
                answer_snapshot_tokens=BLOCK_SIZE,
            ),
            limits.steps_in_flight,
        )
        self.kv = [[-1] * BLOCK_SIZE for _ in range(limits.num_blocks)]
        self.host = [[-1] * BLOCK_SIZE for _ in range(limits.num_host_blocks)]
        self.states: list[list[int]] = [[-1]] * (limits.max_num_seqs + (limits.snapshots or 0))  # by state slot
        self.host_states: list[list[int]] = [[-1]] * limits.num_host_states
        self.moves: dict[int, list[Move]] = {}  # by transfer
        self.state_moves: dict[int, StateMove] = {}  # likewise
        self.requests: dict[int, ModelRequest] = {}
        self.flight: deque[Step] = deque()
        self.next_id = 0
        self.preemptions = 0
        self.operations = 0
        self.longest_share = 0.0  # of the steps that a request may take, those that it took
        self.saw: Counter[str] = Counter()  # how often the interesting things came up

    # ---- operations ----

    def add(
        self,
        prompt: Sequence[int],
        *,
        n: int = 1,
        max_tokens: int = 8,
        stop_tokens: Sequence[int] = (),
        order: int = 0,
        salt: int = 0,
        fails_at: int | None = None,
        tenant: int = 0,
        priority: int = 0,
    ) -> int:
        self.operations, self.next_id = self.operations + 1, self.next_id + 1
        terms = {"tenant": tenant, "priority": priority}
        spec = _core.RequestSpec(
            id=self.next_id, prompt=prompt, n=n, max_tokens=max_tokens, stop_tokens=stop_tokens, salt=salt, **terms
        )
        self.native.add(spec, order)
        number, total = self.next_id, len(prompt) + max_tokens
        request = ModelRequest(number, number, order, salt, len(prompt), total, tuple(stop_tokens), fails_at, **terms)
        for i in range(n):
            state = State.DORMANT if i else State.WAITING
            kv = [request.kv_of(token) for token in prompt]
            request.sequences.append(ModelSequence(request, i, list(prompt), kv, state))
        self._allow(request)
        self.requests[request.id] = request
        return request.id

    def abort(self, request_id: int, index: int | None = None) -> None:
        """All sequences of a request, or one."""
        self.operations += 1
        request = self.requests[request_id]
        self.native.abort(request_id, -1 if index is None else index)
        told, released = self.native.news()
        assert not told, "who aborts needs no telling"
        for sequence in request.sequences:
            if sequence.alive and index in (None, sequence.index):
                self._finish(sequence)
        if not request.sequences[0].alive:  # its siblings wait for nothing any more
            for sequence in request.sequences:
                if sequence.state is State.DORMANT:
                    sequence.state = State.WAITING
        self._see_hosted()
        assert sorted(released) == self._release()
        self.saw["abort"] += 1
        self._check_holders()

    def schedule(self) -> bool:
        """Plan a step and run it in the model; False if there was none."""
        self.operations += 1
        waiting = {s for s in self._sequences() if s.state is State.WAITING}
        running = {s for s in self._sequences() if s.state is State.RUNNING}
        self._see_results()
        holdings = self._holdings()
        planned = self.native.schedule()
        if planned is None:
            self._preempt([], running, waiting, holdings)
            full = len(self.flight) == self.limits.steps_in_flight
            moves = self.moves or self.state_moves or self.native.held_by_tier or self.native.loading or self._hosted()
            assert full or self.flight or moves or not self.requests, "nothing runs, though there is work"
        else:
            rows = [self._row(*row) for row in planned[0]]
            for row, slot in zip(rows, self.native.slots, strict=True):
                row.slot = slot
            self._preempt(rows, running, waiting, holdings)
            step = Step(rows, planned[1], [], set())
            self._find_lanes(step)
            self._check_order(rows, waiting, running, self.limits.lanes if step.lanes else 0)
            self._check_pace([row for row in rows if not row.lane])
            self._run(step)
            self.flight.append(step)
        self._see_hosted()
        self._check_holders()
        self._see_loading()
        return planned is not None

    def commit(self) -> None:
        """Retire the oldest step."""
        self.operations += 1
        step = self.flight.popleft()
        told, released = self.native.commit([row.token for row in step.rows if row.sample])
        expected: list[tuple[int, int, int, int]] = []
        self._retire_lanes(step)
        for row in step.rows:
            row.sequence.in_flight -= 1
            if row.sample and row.sequence.alive:
                self.host_tokens += row.lane and row.token >= 0
                expected += self._take(row.sequence, row.token)
        for row in step.rows:
            self._settle(row.sequence)
        self._count_step()
        self._see_hosted()
        assert told == expected
        assert sorted(released) == self._release()
        self._check_holders()

    def fail_step(self) -> None:
        """The oldest step failed: each request with a row in it ends, and nobody else."""
        self.operations += 1
        step = self.flight.popleft()
        for block in step.written:
            self.kv[block] = [-3] * BLOCK_SIZE  # nothing says what it left there
        for state in step.snapshots + [row.slot for row in step.rows]:
            self.states[state] = [-3]
        told, released = self.native.commit(None)
        expected: list[tuple[int, int, int, int]] = []
        self._retire_lanes(step)
        for row in step.rows:
            row.sequence.in_flight -= 1
        for s in [s for _, s in step.lanes] + [row.sequence for row in step.rows]:
            expected += self._fail(s) if s.alive else []
        for row in step.rows:
            self._settle(row.sequence)
        self._see_hosted()
        assert told == expected
        assert sorted(released) == self._release()
        self.saw["failed step"] += 1
        self._check_holders()

    def finish(self) -> None:
        """Nothing new comes: every request ends within a bounded number of steps and gives everything back."""
        bound = sum(2 * s.request.max_total + 8 for s in self._sequences()) * (self.limits.steps_in_flight + 1)
        bound *= self.limits.layers + 2 if self.limits.lanes else 1
        for _ in range(bound):
            while self.schedule():
                pass
            self.end_moves()
            self.end_jobs()
            if self.flight:
                self.commit()
            elif not self.requests and not self._hosted():
                break
        self.end_moves()
        assert not self.requests, f"requests still there after {bound} steps: {list(self.requests)}"
        assert self.native.quiescent
        assert self.native.consistent()
        assert self.native.free_blocks == self.limits.num_blocks

    # ---- the model ----

    def _sequences(self) -> list[ModelSequence]:
        return [s for r in self.requests.values() for s in r.sequences]

    def _allow(self, new: ModelRequest) -> None:
        """Set the number of steps that may pass until a request ends.

        The first in order gains a token at least in each round of the steps in flight: decode rows leave room for its
        prompt, and the others give way to it. While it has no slot, those that have one run to their end. So a request
        may take the rounds for all tokens that are before it, and for those of a full batch, and again for each
        request that is added later but goes before it.
        """
        limits = self.limits
        overtaken = new.tokens + limits.max_num_seqs * (limits.longest + 2)
        rounds = (limits.steps_in_flight + 1) * (4 if limits.num_host_blocks else 1)  # while blocks come, others go on
        rounds *= 4 * (limits.layers + 1) if limits.lanes else 1  # a host row passes a stage at a time
        rounds *= 4 if limits.tenants else 1  # sequences give way to other tenants, and are computed again
        new.allowed = rounds * (overtaken + sum(request.tokens for request in self.requests.values()))
        for request in self.requests.values():
            if new.order < request.order or new.tenant != request.tenant:
                request.allowed += rounds * overtaken

    def _count_step(self) -> None:
        for request in self.requests.values():
            request.steps += 1
            assert request.steps <= request.allowed, f"request {request.id} starves"
            self.longest_share = max(self.longest_share, request.steps / request.allowed)

    def _row(
        self, request: int, index: int, query: int, context: int, sample: bool, from_device: bool, blocks: list[int]
    ) -> Row:
        return Row(self.requests[request].sequences[index], query, context, sample, from_device, blocks)

    def _preempt(
        self, rows: list[Row], running: set[ModelSequence], waiting: set[ModelSequence], holdings: Holdings
    ) -> None:
        """Check the victims: the last in order of the sequences that are not in the step, but for those of other
        tenants."""
        count = self.native.preemptions - self.preemptions
        self.preemptions += count
        self.saw["preemption"] += count
        idle = sorted(running - {row.sequence for row in rows}, key=lambda s: s.key)
        assert len(idle) >= count
        victims = idle[len(idle) - count :]
        if self.shared:
            still = {self.requests[request].sequences[index] for request, index in self.native.running}
            hosted = {self.requests[request].sequences[index] for request, index, *_ in self._native_hosted()}
            victims = [s for s in idle if s not in still and s not in hosted]
            assert len(victims) == count
            survivors = [s for s in idle if s not in victims]
            self._check_victims(victims, survivors, running, waiting, holdings)
        for victim in victims:
            assert victim is not min(running, key=lambda s: s.key), "the first in order must make progress"
            victim.state = State.PREEMPTING
            self._settle(victim)

    def _run(self, step: Step) -> None:
        targets = [target for _, target in step.copies]
        assert len(set(targets)) == len(targets), "two copies into one block"
        assert not set(targets) & {source for source, _ in step.copies}, "a copy reads what another writes"
        for source, target in step.copies:
            self.kv[target] = list(self.kv[source])
            self.saw["copy"] += 1
        touched: set[tuple[int, int]] = set()
        on_device = [row for row in step.rows if not row.lane]
        self._copy_states(step)
        replaced, let_go = [], []
        for row in on_device:
            replaced += self._replaced(row)
            let_go += self._let_go(row)
            self._write(row, touched)
        assert len(replaced) == len(step.copies)
        step.held = replaced + let_go
        step.written = {block for block, _ in touched}
        for row in on_device:
            self._read_back(row)
        self._check_reuse(step)
        self._check_committed(step)
        for row in step.rows:  # samples last: a fork reads what its source has written in earlier steps only
            if row.sample:
                row.token = row.sequence.sample()
                row.sequence.append(row.token if row.token >= 0 else FED_IN_PLACE)
                row.sequence.on_device = True
                for sibling in row.sequence.request.sequences[1:] if row.sequence.index == 0 else ():
                    if sibling.state is State.DORMANT:
                        sibling.state = State.WAITING

    def _replaced(self, row: Row) -> list[int]:
        """Shared blocks that the row got copies of, in order to write to them."""
        s = row.sequence
        before = s.blocks if s.state is State.RUNNING else s.request.sequences[0].blocks
        if s.state is not State.RUNNING and (row.context_len % BLOCK_SIZE == 0 or self.limits.snapshots is not None):
            return []  # begins with a block of its own
        first = row.context_len // BLOCK_SIZE
        return [old for old, new in zip(before[first:], row.blocks[first:], strict=False) if old != new]

    def _is_forked(self, row: Row) -> bool:
        """The new sequence begins with blocks of its sibling."""
        s = row.sequence
        last = s.request.prompt_len - 1
        if self.limits.snapshots is not None:
            shared = last // BLOCK_SIZE
            first = s.request.sequences[0]
            pairs = zip(row.blocks[:shared], first.blocks, strict=False)  # its own window may be behind the sibling's
            shares = first.state is State.RUNNING and all(mine in (-1, other) for mine, other in pairs)
            return s.index > 0 and row.context_len == shared * BLOCK_SIZE > 0 and shares
        return s.index > 0 and row.context_len == last

    def _let_go(self, row: Row) -> list[int]:
        """Blocks that the row's sequence held before, and that no query sees from this row on."""
        s, window = row.sequence, 0 if self.limits.lanes else self.limits.window
        holes = row.blocks.count(-1)
        assert all(block == -1 for block in row.blocks[:holes]), "a hole behind a block"
        assert holes == 0 or (window and holes * BLOCK_SIZE <= row.context_len - window + 1), "a block is still seen"
        if s.state is not State.RUNNING:
            return []
        self.saw["let go"] += holes - s.blocks.count(-1)
        # No more than the window is held, with what rows in flight compute or the prefix cache is still to learn.
        behind = self.limits.steps_in_flight * self.limits.max_num_batched_tokens + 3 * BLOCK_SIZE
        most = window + row.query_len + behind
        assert not window or len(row.blocks) - holes <= -(-most // BLOCK_SIZE), "more is held than the window"
        return [block for block in s.blocks[:holes] if block >= 0]

    def _write(self, row: Row, touched: set[tuple[int, int]]) -> None:
        s = row.sequence
        end = row.context_len + row.query_len
        if s.state is State.RUNNING:
            assert row.context_len == s.computed
        else:
            assert s.state is State.WAITING
            forked = self._is_forked(row)
            assert row.context_len % BLOCK_SIZE == 0 or forked or self._goes_on(row)
            self.saw["went on where it was"] += self._goes_on(row)
            row.cached = 0 if forked else row.context_len // BLOCK_SIZE
            self.saw["cached prefix"] += row.cached > 0
            self.saw["fork"] += forked
            s.state = State.RUNNING
        assert s.wants_more
        assert row.query_len >= 1
        assert row.sample == (end == len(s.truth))
        assert row.from_device == (s.on_device and row.query_len == 1 and end == len(s.truth))
        assert len(row.blocks) >= -(-end // BLOCK_SIZE)
        for position in range(row.context_len, end):
            block, offset = row.blocks[position // BLOCK_SIZE], position % BLOCK_SIZE
            assert (block, offset) not in touched, "two rows write to one place"
            touched.add((block, offset))
            self.kv[block][offset] = s.kv[position]
        if self.limits.snapshots is not None:
            assert self.states[row.slot] == s.kv[: row.context_len], "the slot has the state of something else"
            self.states[row.slot] = s.kv[:end]
        s.blocks, s.computed = row.blocks, end
        s.in_flight += 1

    def _goes_on(self, row: Row) -> bool:
        """The sequence gave way, and computes nothing of what it had computed again."""
        return self.limits.snapshots is not None and row.context_len == row.sequence.left_at > 0

    def _read_back(self, row: Row) -> None:
        end = row.context_len + row.query_len
        first = max(0, row.context_len - self.limits.window + 1) if self.limits.window else 0
        for i in range(first // BLOCK_SIZE, -(-end // BLOCK_SIZE)):
            start = max(first, i * BLOCK_SIZE)
            length = min((i + 1) * BLOCK_SIZE, end) - start
            at = start % BLOCK_SIZE
            seen, right = self.kv[row.blocks[i]][at : at + length], row.sequence.kv[start : start + length]
            assert seen == right, f"block {row.blocks[i]} holds {seen}, sequence {row.sequence.key} wrote {right}"

    def _check_reuse(self, step: Step) -> None:
        """No step in flight touches for another sequence the blocks that this step writes."""
        fresh = {target for _, target in step.copies}
        for row in step.rows:
            fresh.update(row.blocks[row.context_len // BLOCK_SIZE :])
        for other in self.flight:
            for row in other.rows:
                mine = {b for r in step.rows if r.sequence is row.sequence for b in r.blocks}
                assert not fresh & (set(row.blocks) - mine), "a block is reused while a step in flight touches it"
            assert not fresh & {source for source, _ in other.copies}

    def _check_committed(self, step: Step) -> None:
        """The prefix cache offers no block that a step in flight, or this one, is still to write."""
        pending = step.written.union(*(other.written for other in self.flight))
        for row in step.rows:
            assert not pending & set(row.blocks[: row.cached])

    def _check_order(
        self, planned: list[Row], waiting: set[ModelSequence], running: set[ModelSequence], lanes: int
    ) -> None:
        limits, rows = self.limits, [row for row in planned if not row.lane]
        assert rows == planned[: len(rows)], "host rows come last"
        assert sum(row.query_len for row in rows) + lanes <= limits.max_num_batched_tokens
        assert len({row.sequence for row in planned}) == len(planned) <= limits.max_num_seqs
        if limits.prefill_chunk_size and not limits.target_itl_ns:
            assert all(row.query_len <= limits.prefill_chunk_size for row in rows)
        # Decode rows, then prompts of running sequences, then new sequences; each in order.
        ranks = [(0 if row.from_device else 1 if row.sequence in running else 2, row.sequence.key) for row in rows]
        admitted = [row.sequence for row in rows if row.sequence not in running]
        assert [rank for rank, _ in ranks] == sorted(rank for rank, _ in ranks)
        assert [r for r in ranks if r[0] < 2] == sorted(r for r in ranks if r[0] < 2)
        assert waiting.issuperset(admitted)
        if self.shared:
            self._check_admissions(admitted, waiting)
        elif not any(s.loading for s in self._sequences()) and not self.native.loading:
            left = [s.key for s in waiting.difference(admitted)]
            assert admitted == sorted(admitted, key=lambda s: s.key)
            assert not admitted or not left or admitted[-1].key < min(left), "somebody was overtaken"
        self.saw["mixed step"] += bool(ranks) and ranks[0][0] == 0 and ranks[-1][0] > 0
        # No sequence that can decode stands idle while there are blocks.
        if self.native.free_blocks > 0 and not self.moves:
            others = running - {row.sequence for row in rows}
            idle = [s for s in others if s.state is State.RUNNING and s.on_device and s.wants_more]
            assert not idle or self.shared, "a sequence within its share keeps others from what it waits for"

    def _check_pace(self, rows: list[Row]) -> None:
        """A step in which sequences decode ends in time, unless the least chunk is too much."""
        decodes = [row for row in rows if row.from_device]
        chunks = [row for row in rows if not row.from_device]
        if not self.limits.target_itl_ns or not decodes or not chunks:
            return
        attended = sum(row.context_len + row.query_len for row in decodes)
        attention = sum(row.query_len * (row.context_len + row.query_len / 2) for row in chunks)
        predicted = 100 * sum(row.query_len for row in rows) + attended + attention
        late = predicted > self.limits.target_itl_ns + 1  # times are rounded down
        # The prefix cache may give a new sequence a context that nobody reckoned with.
        assert not late or chunks[-1].query_len <= LEAST_CHUNK
        self.saw["paced step"] += not late

    def _take(self, sequence: ModelSequence, token: int) -> list[tuple[int, int, int, int]]:
        """The events that a sampled token must cause."""
        request = sequence.request
        if token < 0:
            self.saw["failure"] += 1
            return self._fail(sequence, FAILED)
        assert token == sequence.truth[request.prompt_len + sequence.emitted]
        sequence.emitted += 1
        total = request.prompt_len + sequence.emitted
        finish = STOP if token in request.stop_tokens else LENGTH if total == request.max_total else 0
        if finish:
            self.saw["surplus row"] += sequence.in_flight
            self._finish(sequence)
        return [(request.id, sequence.index, token, finish)]

    def _fail(self, sequence: ModelSequence, reason: int = STEP_FAILED) -> list[tuple[int, int, int, int]]:
        """The events of all of its request, which ends."""
        live = [s for s in sequence.request.sequences if s.alive]
        for s in live:
            self._finish(s)
        return [(s.request.id, s.index, -1, reason) for s in live]

    def _finish(self, sequence: ModelSequence) -> None:
        sequence.state = State.FINISHED
        self._settle(sequence)

    def _settle(self, sequence: ModelSequence) -> None:
        """Free a sequence's blocks once no step in flight touches them any more."""
        if sequence.in_flight or sequence.loading or sequence.host is not None:
            return
        if sequence.state not in (State.PREEMPTING, State.FINISHED):
            return
        sequence.left_at = sequence.computed if sequence.state is State.PREEMPTING else 0
        sequence.blocks, sequence.computed, sequence.on_device = [], 0, False
        sequence.state = State.WAITING if sequence.state is State.PREEMPTING else State.RELEASED

    def _release(self) -> list[int]:
        done = [r.id for r in self.requests.values() if all(s.state is State.RELEASED for s in r.sequences)]
        for request_id in done:
            del self.requests[request_id]
        return done
