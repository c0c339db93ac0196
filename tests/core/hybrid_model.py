"""Host rows in plain Python: who decodes on the host, at which stage, and what a worker finds in the host's blocks."""

from __future__ import annotations

from collections import Counter

from asyncengine import _core

from .host_model import Event, HostModel, Move
from .scheduler_state import BLOCK_SIZE, HostRow, Job, ModelSequence, Row, State, Step

JOB_TIMEOUT = 1000
"""Nanoseconds of the harness's clock, which moves when a test says so."""

LEAST_LEFT = 8
"""A sequence with fewer tokens to come is not moved to the host."""


class HybridModel(HostModel):
    """The part of CheckedScheduler that has host rows. Without lanes there are none."""

    steps: int = 0
    host_tokens = 0
    failed_rows = 0
    made: frozenset[int] = frozenset()
    """Blocks of the host that a host row has filled, since something else came there."""

    def _hosted(self) -> list[ModelSequence]:
        return [s for s in self._sequences() if s.host is not None]

    # ---- operations ----

    def pending_jobs(self) -> list[ModelSequence]:
        return [s for s in self._hosted() if s.host.attended]

    def end_job(self, s: ModelSequence, done: bool = True) -> None:
        """A worker ends: it has stored the token's keys and values, and attended to all before it."""
        self.operations += 1
        job = s.host.job
        block, offset = job.blocks[job.position // BLOCK_SIZE], job.position % BLOCK_SIZE
        assert self.native.host_pins[block] == 1, "a worker writes to a block that is not the row's alone"
        self.host[block][offset] = s.kv[job.position] if done else -3
        if done:
            assert self._read_host(job.blocks, job.position + 1) == s.kv[: job.position + 1]
            self.made |= {block} if offset == BLOCK_SIZE - 1 else set()
        job.status = "done" if done else "failed"
        self.saw["job" if done else "failed job"] += 1
        self.native.end_job(s.host.slot, done)
        self._check_host_holders()

    def end_jobs(self) -> None:
        for s in self.pending_jobs():
            self.end_job(s)

    def wait_for_jobs_in_vain(self) -> None:
        """Let so much time pass that each job under way is late."""
        self.native.now += JOB_TIMEOUT
        self.move()

    # ---- what a step does ----

    def _see_results(self) -> None:
        """The next step that is planned takes in what is there."""
        for s in self._hosted() if len(self.flight) < self.limits.steps_in_flight else ():
            if s.state is State.HOSTED and s.host.phase == "attending" and s.host.job.status == "done":
                s.host.phase = "ready"

    def _find_lanes(self, step: Step) -> None:
        if not self.limits.lanes:
            return
        lanes = self.native.lanes
        by_slot = {s.host.slot: s for s in self._hosted()}
        native = {(request, index): blocks for request, index, *_, blocks in self.native.host_rows}
        posted = self.native.jobs[len(self.pending_jobs()) :]
        ending, used = [], Counter()
        was_ready = [s for s in by_slot.values() if s.state is State.HOSTED and s.host.phase == "ready"]
        for stage, lane, slot, position in lanes:
            s = by_slot[slot]
            h = s.host
            assert (s.state, h.phase, h.stage) == (State.HOSTED, "ready", stage)
            assert position == s.computed == len(s.truth) - 1
            assert lane == used[stage] < self.limits.lanes
            used[stage] += 1
            step.lanes.append((stage, s))
            if stage == 0:
                assert not h.leaves
                self._grow(s, native[s.request.id, s.index])
            if stage == self.limits.layers:
                ending.append(s)
                h.phase = "sampling"
            else:
                h.phase, h.job = "attending", Job(stage, position, h.blocks[: position // BLOCK_SIZE + 1])
                number, layer, step_number, at, blocks, cancelled = posted.pop(0)
                assert (number, layer, at, blocks, cancelled) == (slot, stage, position, h.job.blocks, False)
                assert step_number >= self.steps, "jobs come in the order of steps"
                self.steps = step_number
                s.in_flight += 1
            h.stage, h.waited = stage + 1, 0
        assert not posted, "a job of a row that is in no lane"
        assert lanes == sorted(lanes)
        for s in was_ready:
            h = s.host
            h.waited += h.phase == "ready" and not (h.leaves and h.stage == 0)
            assert h.waited <= 2 * self.limits.max_num_seqs, f"host row {s.key} starves"
        self._end_in_lanes(step.rows[len(step.rows) - len(ending) :], ending)

    def _end_in_lanes(self, rows: list[Row], ending: list[ModelSequence]) -> None:
        """Rows of those that are sampled in this step."""
        for row, s in zip(rows, ending, strict=True):
            assert row.sequence is s
            assert (row.query_len, row.context_len, row.sample, row.from_device) == (1, s.computed, True, True)
            assert row.blocks == []
            row.lane = True
            s.computed += 1
            s.in_flight += 1
            self.saw["token of a host row"] += 1

    def _grow(self, s: ModelSequence, blocks: list[int]) -> None:
        h = s.host
        full = s.computed == len(h.blocks) * BLOCK_SIZE
        assert blocks[: len(h.blocks)] == h.blocks
        assert len(blocks) == len(h.blocks) + full
        if full:
            self.host[blocks[-1]] = [-2] * BLOCK_SIZE
            self.made -= {blocks[-1]}
        h.blocks = blocks

    def _begin(self, transfer: int, block: int, host: int) -> Move:
        if not _core.HostPool.brings_in(transfer):
            self.made -= {host}
        self.saw["block found that a host row made"] += host in self.made
        return super()._begin(transfer, block, host)

    def _retire_lanes(self, step: Step) -> None:
        for stage, s in step.lanes:
            if stage == self.limits.layers:
                s.host.phase, s.host.stage = "ready", 0
            else:
                s.in_flight -= 1
                s.host.since = self.native.now

    def _expect_late_jobs(self) -> list[Event]:
        """Expect the events of rows whose job has failed, or is late, when the scheduler looks."""
        events: list[Event] = []
        if not self.limits.lanes:
            return events
        by_key = {(s.request.id, s.index): s for s in self._hosted()}
        for request, index, *_ in reversed(self.native.host_rows):
            s = by_key[request, index]
            h = s.host
            if s.state is not State.HOSTED or h.phase != "attending" or h.job.status == "done":
                continue
            late = not s.in_flight and self.native.now - h.since >= JOB_TIMEOUT
            if h.job.status == "failed":
                s.state = State.PREEMPTING
            elif late:
                self.saw["hung job"] += 1
                events += self._fail(s)
            self.failed_rows += late or h.job.status == "failed"
        return events

    # ---- what the scheduler has done with host rows ----

    def _see_hosted(self) -> None:
        if not self.limits.lanes:
            return
        native = {(request, index): rest for request, index, *rest in self.native.host_rows}
        before = {s for s in self._sequences() if s.state is State.RUNNING}
        for s in self._sequences():
            row = native.pop((s.request.id, s.index), None)
            if s.host is not None and row is None:
                self._see_end(s)
            elif s.host is None and row is not None:
                self._see_begin(s, before, *row)
            elif row is not None:
                self._see_progress(s, *row)
        assert not native
        for slot, *_, cancelled in self.native.jobs:
            assert cancelled == any(s.host.slot == slot and s.state is State.FINISHED for s in self._hosted())

    def _see_begin(
        self,
        s: ModelSequence,
        running: set[ModelSequence],
        slot: int,
        phase: str,
        stage: int,
        leaves: bool,
        blocks: list[int],
    ) -> None:
        assert (phase, stage, leaves, blocks) == ("draining", 0, False, [])
        assert s in running
        assert self._may_move(s)
        later = [other for other in running if other.key > s.key and other.host is None]
        assert not any(self._may_move(other) for other in later), "not the last one has moved"
        assert any(other.state is State.WAITING for other in self._sequences()), "nobody waits for its blocks"
        s.state, s.host = State.HOSTED, HostRow(slot, phase)
        self.saw["move to the host"] += 1

    def _may_move(self, s: ModelSequence) -> bool:
        promised = sum(-(-other.request.max_total // BLOCK_SIZE) for other in {*self._hosted(), s})
        pinned = sum(pins > 0 for pins in self.native.host_pins)
        return (
            s.on_device
            and len(s.truth) - s.computed == 1
            and s.request.max_total - len(s.truth) >= LEAST_LEFT
            and promised <= self.limits.num_host_blocks
            and -(-len(s.truth) // BLOCK_SIZE) <= self.limits.num_host_blocks - pinned
        )

    def _see_progress(
        self, s: ModelSequence, slot: int, phase: str, stage: int, leaves: bool, blocks: list[int]
    ) -> None:
        h = s.host
        assert slot == h.slot
        if s.state is not State.HOSTED:  # it only waits for steps and workers
            return
        if phase != h.phase:
            assert (h.phase, phase) in (("draining", "storing"), ("storing", "ready"))
            assert s.in_flight == 0
            if phase == "ready":
                assert s.computed == len(s.truth) - 1
                assert self._read_host(blocks, s.computed) == s.kv[: s.computed]
                h.blocks, s.blocks = blocks, []
                self.saw["stored"] += 1
            h.phase = phase
        assert (stage, blocks) == (h.stage, h.blocks)
        if leaves and not h.leaves:
            waits = any(other.state is State.WAITING for other in self._sequences())
            full = all(pins > 0 for pins in self.native.host_pins) and stage == 0
            assert not waits or full, "it goes back though others wait"
            self.saw["leaves"] += 1
        assert leaves or not h.leaves
        h.leaves = leaves

    def _see_end(self, s: ModelSequence) -> None:
        """The sequence is no host row any more: it has ended, goes on as if preempted, or has stayed on the device
        after all."""
        h, s.host = s.host, None
        assert not h.attended
        assert s.in_flight == 0
        if s.state is State.HOSTED and h.phase in ("draining", "storing"):
            s.state = State.RUNNING
            self.saw["stayed"] += 1
        elif s.state is State.HOSTED:
            assert (h.phase, h.stage, h.leaves) == ("ready", 0, True)
            s.state = State.PREEMPTING
        self._settle(s)

    # ---- invariants ----

    def _check_moved(self) -> None:
        """The scheduler has looked: nothing is left undone."""
        for s in self._hosted():
            h = s.host
            if s.state is not State.HOSTED:
                assert s.in_flight or s.loading or h.attended, f"{s.key} has ended, and holds what it held"
            else:
                assert h.phase != "draining" or s.in_flight
                assert not (h.phase == "ready" and h.stage == 0 and h.leaves)

    def _check_holders(self) -> None:
        super()._check_holders()
        self._check_host_holders()

    def _check_host_holders(self) -> None:
        """Pins are those of host rows and of copies under way; so nothing that a worker uses is free."""
        if not self.limits.lanes:
            return
        counts = Counter(block for s in self._hosted() for block in s.host.blocks)
        counts.update(self.native.pinned_by_tier)
        assert self.native.host_pins == [counts[block] for block in range(self.limits.num_host_blocks)]
        jobs = {slot: blocks for slot, _, _, _, blocks, _ in self.native.jobs}
        assert jobs == {s.host.slot: s.host.job.blocks for s in self.pending_jobs()}
        stats = self.native.stats
        assert stats["num_host_rows"] == len(self._hosted()) <= self.limits.max_num_seqs
        assert stats["host_row_tokens"] == self.host_tokens
        assert stats["failed_host_rows"] == self.failed_rows
        assert stats["moved_to_host"] == self.saw["stored"]

    def _read_host(self, blocks: list[int], length: int) -> list[int]:
        return [self.host[blocks[i // BLOCK_SIZE]][i % BLOCK_SIZE] for i in range(length)]
