"""Firing: the slots that a sweep names become jobs. Whoever sweeps may do it; of many the store lets
one through.
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec.structs import replace

from penstock.core.annex import EMPTY_ANNEX
from penstock.core.schedule import AfterCompletion, Plan, unpack_plan
from penstock.errors import StorageFull

if TYPE_CHECKING:
    from penstock.core.job import NewJob
    from penstock.storage.base import Storage
    from penstock.storage.values import DueScheduler, Swept

__all__ = ["CAUGHT_UP_AT_ONCE", "job_of_slot", "sweep"]

logger = logging.getLogger("penstock.scheduler")

CAUGHT_UP_AT_ONCE: Final = 100
"""Missed slots of one scheduler that a sweep makes up for; the next one goes on."""


def job_of_slot(plan: Plan, name: str, slot_ms: int, *, repeats: bool = False) -> NewJob:
    """The job of a slot. Its id is made of both, so that it is the same whoever makes it."""
    annex = replace(plan.job.annex or EMPTY_ANNEX, scheduler=name, slot_ms=slot_ms, repeats=repeats)
    return replace(plan.job, id=f"{name}:{_shown(slot_ms)}", annex=annex)


def _shown(slot_ms: int) -> str:
    slot = datetime.fromtimestamp(slot_ms // 1000, UTC).strftime("%Y-%m-%dT%H:%M:%S")
    return f"{slot}.{slot_ms % 1000:03}Z" if slot_ms % 1000 else f"{slot}Z"


async def sweep(storage: Storage, queue: str, *, limit: int = 1000) -> Swept:
    """Sweep a queue once and fire what is due. The answer is as if the sweep had come after that."""
    swept = await storage.sweep(queue, limit=limit)
    if not swept.due:
        return swept
    waits = [] if swept.slot_wait_ms is None else [swept.slot_wait_ms]
    more, awaiting = swept.more or len(swept.due) >= limit, swept.awaiting
    for due in swept.due:
        next_ms = await _fire_one(storage, queue, due)
        if next_ms is None:  # It was somebody else, or a job's end says when: look again soon.
            awaiting = True
        else:
            waits.append(max(next_ms - due.now_ms, 0))
            more = more or next_ms <= due.now_ms
    slot_wait_ms = min(waits, default=None)
    if swept.wait_ms is not None:
        waits.append(swept.wait_ms)
    wait_ms = min(waits, default=None)
    return replace(swept, more=more, wait_ms=wait_ms, slot_wait_ms=slot_wait_ms, awaiting=awaiting)


async def _fire_one(storage: Storage, queue: str, due: DueScheduler) -> int | None:
    """Fire what of one scheduler is due; the slot that comes next, if it is known."""
    try:
        plan = unpack_plan(due.spec)
        return await _fire(storage, queue, due, plan)
    except msgspec.MsgspecError as error:
        logger.warning("queue %s: scheduler %r cannot be read and is left out: %s", queue, due.name, error)
    except StorageFull as error:
        logger.warning("queue %s: the slot of scheduler %r will be late: %s", queue, due.name, error)
    return None


async def _fire(storage: Storage, queue: str, due: DueScheduler, plan: Plan) -> int | None:
    schedule, slot_ms, now_ms = plan.schedule, due.slot_ms, due.now_ms
    repeats = isinstance(schedule.timing, AfterCompletion)
    for _ in range(1 if schedule.missed == "skip" else CAUGHT_UP_AT_ONCE):
        shown_ms = schedule.newest_due(slot_ms, now_ms) if schedule.missed == "skip" else slot_ms
        next_ms = schedule.next_after(shown_ms)
        job = job_of_slot(plan, due.name, shown_ms, repeats=repeats)
        answer = await storage.fire(queue, due.name, slot_ms=slot_ms, next_ms=next_ms or 0, job=job)
        if not answer.fired or next_ms is None:
            return None
        if next_ms > now_ms:
            return next_ms
        slot_ms = next_ms
    return slot_ms
