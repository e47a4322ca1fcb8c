"""Leases that are ended from outside: for an operator who knows what no deadline has told yet."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

from penstock.core.lifecycle import State
from penstock.storage.values import Held

if TYPE_CHECKING:
    from penstock.core.job import Job
    from penstock.storage.base import Storage

__all__ = ["EndLeaseAnswer", "end_leases", "take_back"]

EndLeaseAnswer: TypeAlias = Literal["ended", "not_active", "not_found"]


async def end_leases(storage: Storage, queue: str, ids: Sequence[str]) -> list[EndLeaseAnswer]:
    """End the leases of active jobs as if their deadlines had passed, and rescue the jobs; an answer for each id.

    Two steps, the deadline and then a sweep: a holder that renews its lease in between is met in the next round.
    """
    found = [_held(job) for job in await storage.get(queue, ids)]
    await take_back(storage, queue, [lease for lease in found if isinstance(lease, Held)])
    return ["ended" if isinstance(one, Held) else one for one in found]


async def take_back(storage: Storage, queue: str, leases: Iterable[Held]) -> None:
    """Rescue the jobs of these leases now; those that were settled or renewed under another token are left alone."""
    left = set(leases)
    while left:
        held = sorted(left)
        await storage.extend(queue, held, worker="", lease_ms=0)
        while (await storage.sweep(queue)).more:
            pass
        jobs = await storage.get(queue, [lease.id for lease in held])
        left = {lease for lease, job in zip(held, jobs, strict=True) if _held(job) == lease}


def _held(job: Job | None) -> Held | EndLeaseAnswer:
    if job is None:
        return "not_found"
    return Held(job.id, job.token) if job.state is State.ACTIVE else "not_active"
