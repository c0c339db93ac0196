"""Sharing an engine between tenants: a request is served later, the more of its tenant's are there already.

The core serves requests in the order of their arrival (of a class of priority). A request of a tenant with S live
sequences is served as if it had arrived S times ``share_s`` later, so one that comes meanwhile from a tenant with fewer
goes before it. A tenant's own requests of one priority are never served out of their order, so a tenant that is alone
notices nothing.

The order decides who starts. Slots and blocks that a tenant holds already are the core's affair
(csrc/core/preemption.cpp): the core gets a number for each tenant, and while several have requests, a tenant that
holds more than an equal share of the slots or of the KV blocks gives some back to those that wait.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Tenant:
    sequences: int = 0
    queues: dict[int, dict[int, int]] = field(default_factory=dict)
    """Arrival times of live requests, by priority and key, in ns of time.monotonic_ns(), ascending."""


@dataclass(frozen=True, slots=True)
class Place:
    """Arguments of StepLoop.submit."""

    delay_ns: int = 0
    reserved: bool = False
    tenant: int = 0
    """The tenant's number; 0: the core knows of none."""


class FairShare:
    """Counts the live requests of every tenant. A tenant without any leaves no record."""

    def __init__(self, share_s: float) -> None:
        """``share_s`` is the delay for each live sequence; with 0 nobody is delayed, and the core knows no tenants."""
        self._share_ns = int(share_s * 1e9)
        self._tenants: dict[str, _Tenant] = {}
        self._requests: dict[int, tuple[str, int, int]] = {}  # by key: tenant, priority, sequences

    def __len__(self) -> int:
        """Tenants that have something live."""
        return len(self._tenants)

    def place(self, tenant: str | None, priority: int) -> Place:
        """Return the place in the queue of a request submitted now; a request without a tenant is served in order of
        arrival."""
        if tenant is None or not self._share_ns:
            return Place()
        number = hash(tenant) % 2**64 or 1
        record = self._tenants.get(tenant)
        if record is None:
            return Place(reserved=True, tenant=number)
        now = time.monotonic_ns()
        arrives = now + record.sequences * self._share_ns
        queue = record.queues.get(priority)
        if queue:
            arrives = max(arrives, queue[next(reversed(queue))])
        return Place(delay_ns=arrives - now, tenant=number)

    def enter(self, key: int, tenant: str | None, priority: int, sequences: int, place: Place) -> None:
        """The core accepted request ``key`` at ``place``."""
        if tenant is None or not self._share_ns:
            return
        record = self._tenants.setdefault(tenant, _Tenant())
        record.sequences += sequences
        # The core's clock was read before this one, so the next request cannot come to stand before this one.
        record.queues.setdefault(priority, {})[key] = time.monotonic_ns() + place.delay_ns
        self._requests[key] = tenant, priority, sequences

    def leave(self, key: int) -> None:
        """Request ``key`` has ended. Nothing happens if it has no tenant."""
        if (request := self._requests.pop(key, None)) is None:
            return
        tenant, priority, sequences = request
        record = self._tenants[tenant]
        record.sequences -= sequences
        del record.queues[priority][key]
        if not record.queues[priority]:
            del record.queues[priority]
        if not record.queues:
            del self._tenants[tenant]
