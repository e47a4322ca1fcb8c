"""Fire due slots of schedulers after a sweep. Any client may do it; the store lets one job per slot through.

The enqueue middleware of an app runs around it. A sweeper without an app has no middleware.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec
from msgspec.structs import replace

from penstock.core.job import EMPTY_EXTRAS, Enqueued
from penstock.core.schedule import AfterCompletion, ScheduleSpec, unpack_spec
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
"""The maximum number of missed slots of one scheduler that one sweep fires."""

_STEADY_MS: Final = 60_000
"""A slot this near is not moved: a clock set back by seconds must not fire the last slot again."""

Fire: TypeAlias = Callable[[str, DueScheduler], Awaitable[int | None]]
"""``fire_due`` of a store and an app: fires the due slots of a scheduler of a queue."""


def job_of_slot(spec: ScheduleSpec, name: str, slot_ms: int, *, repeats: bool = False) -> NewJob:
    """Return the job of a slot. Its id consists of the scheduler and the slot, so all clients make the same one."""
    extras = replace(spec.job.extras or EMPTY_EXTRAS, scheduler=name, slot_ms=slot_ms, repeats=repeats)
    return replace(spec.job, id=f"{name}:{_shown(slot_ms)}", extras=extras)


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
    """Sweep a queue once, and fire due slots through ``enqueue_chain`` or with ``fire``.

    Return the answer of the sweep, updated for the fired slots.
    """
    swept = await storage.sweep(queue, limit=limit)
    if not swept.due:
        return swept
    waits = [] if swept.slot_wait_ms is None else [swept.slot_wait_ms]
    more, awaiting = swept.more or len(swept.due) >= limit, swept.awaiting
    for due in swept.due:
        next_ms = await (fire(queue, due) if fire else fire_due(storage, queue, due, enqueue_chain))
        if next_ms is None:  # Another client fired it, or it depends on the end of a job: check again soon.
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
    """Fire the due slots of one scheduler, and return the next slot, if it is known.

    If the slot is in the future, the clock was set back, so compute it again. If a layer of ``enqueue_chain`` raises,
    the slot stays due, and the next sweep tries again.
    """
    try:
        spec = unpack_spec(due.spec)
        if due.slot_ms > due.now_ms:
            return await _compute_again(storage, queue, due, spec)
        return await _fire(storage, queue, due, spec, enqueue_chain)
    except msgspec.MsgspecError as error:
        logger.warning("queue %s: scheduler %r cannot be read and is skipped: %s", queue, due.name, error)
    except (StorageFull, InvalidInput, JobError) as error:
        # Other schedulers, and the rest of the maintenance, must not wait for this one.
        logger.warning("queue %s: the slot of scheduler %r will be late: %s", queue, due.name, error)
    except StorageError:
        raise
    except Exception as error:
        if enqueue_chain is None:
            raise
        logger.warning("queue %s: an enqueue middleware delays scheduler %r: %r", queue, due.name, error)
    return None


async def _compute_again(storage: Storage, queue: str, due: DueScheduler, spec: ScheduleSpec) -> int:
    """Return the next slot, which replaces one that was computed while the clock was ahead."""
    schedule, now_ms = spec.schedule, due.now_ms
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
    storage: Storage, queue: str, due: DueScheduler, spec: ScheduleSpec, enqueue_chain: EnqueueChain | None
) -> int | None:
    schedule, slot_ms, now_ms = spec.schedule, due.slot_ms, due.now_ms
    repeats = isinstance(schedule.timing, AfterCompletion)
    for _ in range(1 if schedule.missed == "skip" else CAUGHT_UP_AT_ONCE):
        shown_ms = schedule.newest_due(slot_ms, now_ms) if schedule.missed == "skip" else slot_ms
        next_ms = schedule.next_after(shown_ms)
        job = job_of_slot(spec, due.name, shown_ms, repeats=repeats)

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
    """Fire a job through the layers. It stays the job of its slot, whatever they change."""
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
        # Another client fired the slot first.
        return [fired.enqueued or Enqueued(job.id, "duplicate", None, 0)]

    await enqueue_chain.enqueue(queue, [job], put)
    return fired
