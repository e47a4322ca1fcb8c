"""``limit``: set limits, read them back, and see what they hold up."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Final

import msgspec
from msgspec import UNSET, UnsetType

from penstock.core.job import NewJob
from penstock.core.lifecycle import EventType
from penstock.core.limits import EVERY_GROUP, GroupState, Limit, LimitsOfQueue, Reason
from penstock.errors import CostTooHigh
from penstock.storage.sqlite import admission, groups
from penstock.storage.sqlite.queuerow import Group, find_queue
from penstock.storage.sqlite.statements import statements
from penstock.storage.sqlite.unit import Step
from penstock.storage.values import GroupPage

_CONFIGURED = EventType.CONFIGURED.value

_sql = statements("groups")
_decoder: Final = msgspec.json.Decoder(Limit)


def set_limit(step: Step, key: str, limit: Limit | None, *, expected: Limit | UnsetType | None) -> bool:
    """Set or remove a limit, and admit whom it lets in; ``False`` if it is not the one that is expected."""
    if expected is not UNSET and _known(step).get(key) != expected:
        return False
    if key != EVERY_GROUP and not groups.group_of(step, key).is_stored:
        del step.groups[
            key
        ]  # A window and a bucket it had are those of the old limit; these begin with the new one.
    if limit is None:
        step.sql.execute(_sql["remove_limit"], (step.queue.key, key))
    else:
        step.sql.execute(_sql["set_limit"], (step.queue.key, key, msgspec.json.encode(limit).decode()))
    data = msgspec.json.encode({"limit": limit}).decode()
    step.notes.add_queue(_CONFIGURED, step.now_ms, grp=key, data=data)
    step.queue.uses |= groups.USES_GROUPS if key else groups.USES_LIMITS
    _reach(step, key)
    return True


def _reach(step: Step, key: str) -> None:
    if key == EVERY_GROUP:
        step.limits.clear()
        admission.fill_from(step, "", limit=admission.AT_ONCE)
    else:
        groups.touch(step, groups.reread(step, key))
    if not key:
        step.wakes.add("w")


def limits(sql: sqlite3.Connection, namespace: str, queue: str) -> LimitsOfQueue:
    """The limits that were set, by group."""
    row = find_queue(sql, namespace, queue)
    return {} if row is None else _read(sql, row.key)


def _known(step: Step) -> LimitsOfQueue:
    return _read(step.sql, step.queue.key)


def _read(sql: sqlite3.Connection, queue: int) -> LimitsOfQueue:
    return {key: _decoder.decode(value) for key, value in sql.execute(_sql["limits"], (queue,))}


def list_groups(step: Step, *, cursor: str, limit: int) -> GroupPage:
    """A page of the groups that have a record; the cursor is the last key shown."""
    keys = [key for (key,) in step.sql.execute(_sql["keys_after"], (step.queue.key, cursor, limit + 1))]
    shown = [_state(step, groups.group_of(step, key)) for key in keys[:limit]]
    return GroupPage(shown, keys[limit - 1] if len(keys) > limit else "")


def read_groups(step: Step, keys: Sequence[str]) -> GroupPage:
    """Return the groups of these keys; the empty key is the queue itself."""
    return GroupPage(
        [_state(step, groups.group_of(step, key)) if key else _queue_state(step) for key in keys]
    )


def _queue_state(step: Step) -> GroupState:
    queue, now_ms = step.queue, step.now_ms
    group = groups.group_of(step, "")
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


def _state(step: Step, group: Group) -> GroupState:
    why, at = group.why_full(step.now_ms)
    if why not in ("paused", "asked"):
        why, at = "", 0
    head = admission.head_of(step, group) if group.blocked else None
    if head is not None:
        why, at = group.why_full(step.now_ms, cost=head.extras.cost, grip=head.grip)
    return GroupState(
        group.key,
        group.waiting,
        group.active,
        group.held,
        group.blocked,
        bool(group.paused),
        why,
        max(0, at - step.now_ms) if at else None,
    )


def check_costs(step: Step, jobs: Sequence[NewJob]) -> None:
    """Refuse a job that costs more than the bucket of its group can hold."""
    for job in jobs:
        if (why := cost_refused(step, job)) is not None:
            raise CostTooHigh(
                f"{why}. Nothing was enqueued: give it a lower cost, or the group a larger bucket."
            )


def cost_refused(step: Step, job: NewJob) -> str | None:
    """Why this job can never start, if it costs too much."""
    if job.extras is None or not job.extras.group:
        return None
    bucket = groups.limit_of(step, job.extras.group).bucket
    if bucket is None or job.extras.cost <= bucket.capacity:
        return None
    return f"job {job.id} costs {job.extras.cost}; the bucket of its group {job.extras.group} holds {bucket.capacity}"
