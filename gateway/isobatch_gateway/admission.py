"""Performs: admits a request by the limits of its service and its key, or says why not."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from isobatch_contracts.resource import StandardFallback, TierLimits
from isobatch_contracts.tiers import PoolName, Tier

from isobatch_gateway.fleet import Service
from isobatch_gateway.limits import Gate
from isobatch_gateway.orders import Order, Principal
from isobatch_gateway.outcomes import over_limit
from isobatch_gateway.refusals import Refusal

KeyGates = dict[tuple[str, Tier], Gate]


@dataclass(slots=True)
class Ticket:
    """The places that a request holds, and the pools it was admitted to."""

    pools: tuple[PoolName, ...]
    _gates: list[Gate] = field(default_factory=list)

    def hold(self, gate: Gate) -> None:
        """Note a place that was taken."""
        self._gates.append(gate)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Give the places back at the end of the block."""
        try:
            yield
        finally:
            while self._gates:
                self._gates.pop().leave()


async def admit(
    ticket: Ticket, order: Order, principal: Principal, service: Service, key_gates: KeyGates
) -> Refusal | None:
    """Take the places that `order` needs, waiting in the queues; None once it is admitted."""
    limited = _limited(order.tier, principal, service, key_gates)
    now = asyncio.get_running_loop().time()
    for gate, limits in limited:
        too_many = gate.admit_rate(limits, now)
        if too_many is not None:
            return over_limit(order.tier, too_many)
    for gate, limits in limited:
        full = await gate.enter(limits)
        if full is None:
            ticket.hold(gate)
        elif not (gate is service.gates[order.tier] and _overflows(ticket, order.tier, service)):
            return over_limit(order.tier, full)
    return None


def _limited(
    tier: Tier, principal: Principal, service: Service, key_gates: KeyGates
) -> list[tuple[Gate, TierLimits]]:
    found: list[tuple[Gate, TierLimits]] = []
    own = principal.limits.get(tier)
    if own is not None and principal.key_id is not None:
        found.append((key_gates.setdefault((principal.key_id, tier), Gate()), own))
    limits = service.table.tiers.limits.get(tier)
    if limits is not None:
        found.append((service.gates[tier], limits))
    return found


def _overflows(ticket: Ticket, tier: Tier, service: Service) -> bool:
    """Whether a standard request that found its pool full got a place in the strict pool."""
    tiers = service.table.tiers
    if tier is not Tier.STANDARD or tiers.standard_fallback is not StandardFallback.STRICT:
        return False
    if not service.has_ready(PoolName.STRICT):
        return False
    gate = service.gates[Tier.STRICT]
    limits = tiers.limits.get(Tier.STRICT)
    if limits is not None:
        # Strict requests that wait go first: standard takes free places only.
        if not gate.try_enter(limits):
            return False
        ticket.hold(gate)
    ticket.pools = (PoolName.STRICT,)
    return True
