"""``limit``, ``limits`` and ``groups``: set limits, return them, and show which groups they hold back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec
from msgspec import UNSET, UnsetType

from penstock.core.job import NewJob
from penstock.core.lifecycle import EventType
from penstock.core.limits import EVERY_GROUP, GroupState, Limit, LimitsOfQueue, Reason
from penstock.errors import CostTooHigh
from penstock.storage.sqlite import admission, groups
from penstock.storage.sqlite.queuerow import Group, View
from penstock.storage.sqlite.statements import statements
from penstock.storage.sqlite.unit import Unit
from penstock.storage.values import GroupPage

_CONFIGURED = EventType.CONFIGURED.value

_sql = statements("groups")
_decoder: Final = msgspec.json.Decoder(Limit)


def set_limit(
    unit: Unit, group: str, limit: Limit | None, *, expected: Limit | UnsetType | None = UNSET
) -> bool:
    """Set or remove a limit, and admit the jobs that it allows. Return false if the present limit is not
    ``expected``."""
    if expected is not UNSET and limits(unit).get(group) != expected:
        return False
    if group != EVERY_GROUP and not groups.group_of(unit, group).is_stored:
        del unit.groups[group]  # The window and the bucket of the old limit do not count for the new one.
    if limit is None:
        unit.sql.execute(_sql["remove_limit"], (unit.queue.key, group))
    else:
        unit.sql.execute(_sql["set_limit"], (unit.queue.key, group, msgspec.json.encode(limit).decode()))
    data = msgspec.json.encode({"limit": limit}).decode()
    unit.notes.add_queue(_CONFIGURED, unit.now_ms, grp=group, data=data)
    unit.queue.uses |= groups.USES_GROUPS if group else groups.USES_LIMITS
    _reach(unit, group)
    return True


def _reach(unit: Unit, key: str) -> None:
    if key == EVERY_GROUP:
        unit.limits.clear()
        admission.fill_from(unit, "", limit=admission.AT_ONCE)
    else:
        groups.touch(unit, groups.reread(unit, key))
    if not key:
        unit.wakes.add("w")


def limits(at: Unit | View) -> LimitsOfQueue:
    """Return the limits that are set, by group."""
    return {key: _decoder.decode(value) for key, value in at.sql.execute(_sql["limits"], (at.queue.key,))}


def list_groups(unit: Unit, *, cursor: str = "", limit: int = 100, keys: Sequence[str] = ()) -> GroupPage:
    """Return the groups of these keys, where the empty key is the queue itself; without keys, a page of the groups
    that have a record. The cursor is the last key on it."""
    if keys:
        return GroupPage(
            [_state(unit, groups.group_of(unit, key)) if key else _queue_state(unit) for key in keys]
        )
    listed = [key for (key,) in unit.sql.execute(_sql["keys_after"], (unit.queue.key, cursor, limit + 1))]
    shown = [_state(unit, groups.group_of(unit, key)) for key in listed[:limit]]
    return GroupPage(shown, listed[limit - 1] if len(listed) > limit else "")


def _queue_state(unit: Unit) -> GroupState:
    queue, now_ms = unit.queue, unit.now_ms
    group = groups.group_of(unit, "")
    rate = group.limit.rate
    why: Reason = ""
    at = 0
    if queue.paused:
        why = "paused"
    elif group.parked_until > now_ms:
        why, at = "asked", group.parked_until
    elif group.is_full(queue.active):
        why = "concurrency"
    elif rate is not None and group.starts >= rate.count:
        why, at = "rate", group.first_start + rate.per_ms
    wait_ms = max(0, at - now_ms) if at else None
    return GroupState("", queue.waiting, queue.active, 0, queue.blocked, bool(queue.paused), why, wait_ms)


def _state(unit: Unit, group: Group) -> GroupState:
    why, at = group.why_full(unit.now_ms)
    if why not in ("paused", "asked"):
        why, at = "", 0
    head = admission.head_of(unit, group) if group.blocked else None
    if head is not None:
        why, at = group.why_full(unit.now_ms, cost=head.extras.cost, slot_hold=head.slot_hold)
    return GroupState(
        group.key,
        group.waiting,
        group.active,
        group.held,
        group.blocked,
        bool(group.paused),
        why,
        max(0, at - unit.now_ms) if at else None,
    )


def check_costs(unit: Unit, jobs: Sequence[NewJob]) -> None:
    """Raise ``CostTooHigh`` for a job that costs more than the bucket of its group can hold."""
    for job in jobs:
        if (why := cost_refused(unit, job)) is not None:
            raise CostTooHigh(
                f"{why}. Nothing was enqueued. Lower the job's cost, or give the group a larger bucket."
            )


def cost_refused(unit: Unit, job: NewJob) -> str | None:
    """Return why this job can never start; ``None`` if it can."""
    if job.extras is None or not job.extras.group:
        return None
    bucket = groups.limit_of(unit, job.extras.group).bucket
    if bucket is None or job.extras.cost <= bucket.capacity:
        return None
    return f"job {job.id} costs {job.extras.cost}; the bucket of its group {job.extras.group} holds {bucket.capacity}"
