"""Firing: the slots that a sweep names become jobs. Whoever sweeps may do it; of many the store lets one through.

An app that fires has its enqueue middleware around that. A sweeper on its own has no app, and no middleware.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec
from msgspec.structs import replace

from penstock.core.job import EMPTY_EXTRAS, Enqueued
from penstock.core.schedule import AfterCompletion, Plan, unpack_plan
from penstock.core.text import get_logger
from penstock.errors import InvalidInput, JobError, StorageError, StorageFull
from penstock.storage.values import DueScheduler, Fired

if TYPE_CHECKING:
    from penstock.client.middleware import EnqueueChain
    from penstock.core.job import NewJob
    from penstock.storage.contract import Storage
    from penstock.storage.values import Swept


logger = get_logger("penstock.scheduler")

CAUGHT_UP_AT_ONCE: Final = 100
"""Missed slots of one scheduler that a sweep makes up for; the next one goes on."""

_STEADY_MS: Final = 60_000
"""A slot this near is left where it is: a clock set back by seconds must not fire the last one again."""

Fire: TypeAlias = Callable[[str, DueScheduler], Awaitable[int | None]]
"""Fires what of a scheduler of this queue is due: ``fire_due`` of some store and app."""


def job_of_slot(plan: Plan, name: str, slot_ms: int, *, repeats: bool = False) -> NewJob:
    """The job of a slot. Its id is made of both, so that it is the same whoever makes it."""
    extras = replace(plan.job.extras or EMPTY_EXTRAS, scheduler=name, slot_ms=slot_ms, repeats=repeats)
    return replace(plan.job, id=f"{name}:{_shown(slot_ms)}", extras=extras)


def _shown(slot_ms: int) -> str:
    slot = datetime.fromtimestamp(slot_ms // 1000, UTC).strftime("%Y-%m-%dT%H:%M:%S")
    return f"{slot}.{slot_ms % 1000:03}Z" if slot_ms % 1000 else f"{slot}Z"


async def sweep(
    storage: Storage,
    queue: str,
    *,
    limit: int = 1000,
    enqueue_chain: EnqueueChain | None = None,
    fire: Fire | None = None,
) -> Swept:
    """Sweep a queue once and fire what is due, through ``enqueue_chain``, or by ``fire``. The answer is as if the sweep
    had come after that.
    """
    swept = await storage.sweep(queue, limit=limit)
    if not swept.due:
        return swept
    waits = [] if swept.slot_wait_ms is None else [swept.slot_wait_ms]
    more, awaiting = swept.more or len(swept.due) >= limit, swept.awaiting
    for due in swept.due:
        next_ms = await (fire(queue, due) if fire else fire_due(storage, queue, due, enqueue_chain))
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


async def fire_due(
    storage: Storage, queue: str, due: DueScheduler, enqueue_chain: EnqueueChain | None = None
) -> int | None:
    """Fire what of one scheduler is due; the slot that comes next, if it is known. Compute a slot that lies ahead
    again: the clock was set back since.

    What the layers of ``enqueue_chain`` raise leaves the slot due, for the next sweep to try again.
    """
    try:
        plan = unpack_plan(due.spec)
        if due.slot_ms > due.now_ms:
            return await _compute_again(storage, queue, due, plan)
        return await _fire(storage, queue, due, plan, enqueue_chain)
    except msgspec.MsgspecError as error:
        logger.warning("queue %s: scheduler %r cannot be read and is left out: %s", queue, due.name, error)
    except (StorageFull, InvalidInput, JobError) as error:
        # Not this one's sweep alone: the slots of others, and all else that time brings, must not wait for it.
        logger.warning("queue %s: the slot of scheduler %r will be late: %s", queue, due.name, error)
    except StorageError:
        raise
    except Exception as error:
        if enqueue_chain is None:
            raise
        logger.warning("queue %s: enqueue middleware holds up scheduler %r: %r", queue, due.name, error)
    return None


async def _compute_again(storage: Storage, queue: str, due: DueScheduler, plan: Plan) -> int:
    """Return the slot that comes next, which takes the place of one that a clock ahead of its time has led to."""
    schedule, now_ms = plan.schedule, due.now_ms
    if schedule.repeat_ms is None:
        sooner_ms = schedule.next_after(now_ms)
        is_passed_over = (schedule.next_after(now_ms + _STEADY_MS) or due.slot_ms) < due.slot_ms
    else:
        sooner_ms = now_ms + schedule.repeat_ms
        is_passed_over = sooner_ms + _STEADY_MS < due.slot_ms
    if sooner_ms is None or not is_passed_over:
        return due.slot_ms
    if await storage.move_slot(queue, due.name, slot_ms=due.slot_ms, next_ms=sooner_ms):
        logger.warning(
            "queue %s: the clock was set back; the next slot of scheduler %r is %s, not %s",
            queue, due.name, _shown(sooner_ms), _shown(due.slot_ms),
        )  # fmt: skip
    return sooner_ms


async def _fire(
    storage: Storage, queue: str, due: DueScheduler, plan: Plan, enqueue_chain: EnqueueChain | None
) -> int | None:
    schedule, slot_ms, now_ms = plan.schedule, due.slot_ms, due.now_ms
    repeats = isinstance(schedule.timing, AfterCompletion)
    for _ in range(1 if schedule.missed == "skip" else CAUGHT_UP_AT_ONCE):
        shown_ms = schedule.newest_due(slot_ms, now_ms) if schedule.missed == "skip" else slot_ms
        next_ms = schedule.next_after(shown_ms)
        job = job_of_slot(plan, due.name, shown_ms, repeats=repeats)

        async def send(job: NewJob, slot_ms: int = slot_ms, next_ms: int = next_ms or 0) -> Fired:
            return await storage.fire(queue, due.name, slot_ms=slot_ms, next_ms=next_ms, job=job)

        answer = await (
            _through(enqueue_chain, queue, job, send) if enqueue_chain and enqueue_chain.layers else send(job)
        )
        if not answer.fired or next_ms is None:
            return None
        if next_ms > now_ms:
            return next_ms
        slot_ms = next_ms
    return slot_ms


async def _through(
    enqueue_chain: EnqueueChain, queue: str, job: NewJob, send: Callable[[NewJob], Awaitable[Fired]]
) -> Fired:
    """Whatever the layers make of the job, it stays that of its slot."""
    assert job.extras is not None
    own = job.extras
    fired = Fired(False)

    async def put(jobs: Sequence[NewJob]) -> list[Enqueued]:
        nonlocal fired
        [changed] = jobs
        extras = replace(
            changed.extras or EMPTY_EXTRAS, scheduler=own.scheduler, slot_ms=own.slot_ms, repeats=own.repeats
        )
        fired = await send(replace(changed, extras=extras))
        # Not fired: somebody else was first, and the job of the slot is in.
        return [fired.enqueued or Enqueued(job.id, "duplicate", None, 0)]

    await enqueue_chain.enqueue(queue, [job], put)
    return fired
