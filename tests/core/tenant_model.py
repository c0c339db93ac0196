"""Tenants in plain Python: who may be admitted next, and who gives way to whom."""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING, Any

from .scheduler_state import State

if TYPE_CHECKING:
    from asyncengine import _core

    from .scheduler_state import Limits, ModelRequest, ModelSequence

WHOLE = 1 << 16
"""A block; of one that k sequences hold, each holds WHOLE // k."""

Holdings = Counter[int]
"""Blocks of each tenant, in WHOLE."""


class TenantModel:
    """The part of CheckedScheduler that knows of tenants. Without at least two of them nothing is shared."""

    native: _core.SchedulerHarness
    limits: Limits
    requests: dict[int, ModelRequest]
    saw: Counter[str]
    flight: deque[Any]
    _sequences: Any
    _hosted: Any

    @property
    def _tenants(self) -> set[int]:
        return {request.tenant for request in self.requests.values()} - {0}

    @property
    def shared(self) -> bool:
        return len(self._tenants) > 1

    @property
    def _share(self) -> int:
        """Slots of a tenant."""
        return max(1, self.limits.max_num_seqs // max(1, len(self._tenants)))

    def _native_hosted(self) -> list[Any]:
        return self.native.host_rows if self.limits.lanes else []

    def _slots(self) -> Counter[int]:
        """Count the slots of each tenant, without the sequences that come back."""
        holders = [s for s in self._sequences() if s.state in (State.RUNNING, State.HOSTED)]
        return Counter(s.request.tenant for s in holders)

    def _holdings(self) -> Holdings:
        counts = self.native.ref_counts
        running = [s for s in self._sequences() if s.state is State.RUNNING]
        held: Holdings = Counter()
        for s in running:
            held[s.request.tenant] += sum(WHOLE // counts[block] for block in s.held)
        return held

    def _may_take(self, tenant: int, slots: Counter[int]) -> bool:
        return tenant == 0 or slots[tenant] < self._share

    def _next(self, queue: list[ModelSequence], slots: Counter[int]) -> ModelSequence:
        """Return the sequence that is admitted next, where nobody waits for blocks."""
        ordered = sorted(queue, key=lambda s: s.key)
        within = [s for s in ordered if self._may_take(s.request.tenant, slots)]
        rest = [s for s in ordered if s not in within]
        if not within:
            return rest[0]
        urgent = rest and rest[0].key < within[0].key and rest[0].request.priority < within[0].request.priority
        return rest[0] if urgent else within[0]

    def _check_admissions(self, admitted: list[ModelSequence], waiting: set[ModelSequence]) -> None:
        if not self.limits.roomy:
            return
        slots = self._slots()
        queue = [s for s in self._sequences() if s.state is State.WAITING or s in waiting]
        for s in admitted:
            assert s is self._next(queue, slots), "somebody was overtaken"
            self.saw["overtaken for a share"] += any(other.key < s.key for other in queue)
            queue.remove(s)
            slots[s.request.tenant] += 1

    def _check_victims(
        self,
        victims: list[ModelSequence],
        survivors: list[ModelSequence],
        running: set[ModelSequence],
        waiting: set[ModelSequence],
        holdings: Holdings,
    ) -> None:
        """Check that sequences beyond their tenant's share gave way first, then the last in order."""
        slots = Counter(s.request.tenant for s in running) + Counter(s.request.tenant for s in self._hosted())
        share_of_blocks = WHOLE * self.limits.num_blocks // len(self._tenants)
        firsts: dict[int, ModelSequence] = {}  # by tenant
        for s in sorted(running, key=lambda s: s.key):
            firsts.setdefault(s.request.tenant, s)
        for victim in victims:
            tenant = victim.request.tenant
            growth = WHOLE * sum(s.request.tenant == tenant for s in running)
            too_many = slots[tenant] > self._share or holdings[tenant] + growth > share_of_blocks
            beyond = tenant != 0 and victim is not firsts[tenant] and too_many
            assert beyond or all(s.key < victim.key for s in survivors), "it gave way out of its turn"
            self.saw["gave way to a tenant"] += beyond
        if self.limits.roomy and len(self.flight) < self.limits.steps_in_flight:
            assert victims == self._expected_victims(running, waiting, slots)

    def _expected_victims(
        self, running: set[ModelSequence], waiting: set[ModelSequence], slots: Counter[int]
    ) -> list[ModelSequence]:
        """Return the victims where nobody waits for blocks: a slot for each tenant that is within its share and
        waits."""
        firsts: dict[int, ModelSequence] = {}  # by tenant
        for s in sorted(waiting, key=lambda s: s.key):
            firsts.setdefault(s.request.tenant, s)
        within = [s for t, s in firsts.items() if self._may_take(t, slots)]
        if not within or self._next(list(waiting), slots) not in within:
            return []
        priority = min(within, key=lambda s: s.key).request.priority
        wanted = sum(s.request.tenant != 0 and s.request.priority <= priority for s in within)
        held, victims = slots.copy(), []
        for s in sorted(running, key=lambda s: s.key)[:0:-1]:
            lacking = wanted - (self.limits.max_num_seqs - held.total())
            tenant = s.request.tenant
            if lacking > 0 and tenant != 0 and held[tenant] > self._share and s.request.priority >= priority:
                held[tenant] -= 1
                victims.insert(0, s)
        return victims
