"""Limits of queues and groups: set them, show which groups they hold back, and admit jobs while there is room.

Members of a full group are blocked until it has room; the queue's own limits bound the number of leases.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec
from msgspec import UNSET, UnsetType

from penstock.core.job import NewJob
from penstock.core.lifecycle import EventType
from penstock.core.limits import EVERY_GROUP, GroupState, Limit, LimitsOfQueue, Obstacle
from penstock.errors import CostTooHigh
from penstock.storage.bounds import ADMITTED_AT_ONCE
from penstock.storage.sqlite import groups, statements
from penstock.storage.sqlite.queuerow import Group, View
from penstock.storage.sqlite.records import WAITING, Record
from penstock.storage.sqlite.unit import Unit
from penstock.storage.values import GroupPage

_COLUMNS: Final = 14
_COUNTED: Final = ("waiting", "active", "held", "blocked", "cost")

_sql = statements("groups")
_decoder: Final = msgspec.json.Decoder(Limit)


def head_of(unit: Unit, group: Group) -> Record | None:
    """Return the first blocked member. A member that this call enqueued has no row yet.

    ``None`` if the group's line is damaged and names a job that is not in it: ``check`` repairs the line.
    """
    id_, *row = unit.sql.execute(_sql["head"], (unit.queue.key, group.key)).fetchone() or (None,)
    if id_ is None:
        return None
    record = unit.adopt([row])[0] if row[0] is not None else unit.find([id_]).get(id_)
    return record if record is not None and record.group_role in groups.IN_LINE else None


def _admit(unit: Unit, record: Record) -> None:
    if not record.slot_hold:
        record.renumber(unit.draw(), lifo=record.lifo)
    groups.move(unit, record, "w")
    record.state, record.blocked_by, record.slot_hold, record.ready_at = WAITING, "", 0, unit.now_ms
    unit.note(EventType.UNBLOCKED, record, run=record.runs)
    unit.touch(record)


def _fill(unit: Unit, group: Group) -> int:
    """Admit blocked members while there is room. Return when to try again (0: time alone makes no room)."""
    admitted = 0
    while group.blocked:
        why, at = group.why_no_room(unit.now_ms)
        record = None if why else head_of(unit, group)
        if record is not None:
            why, at = group.why_no_room(unit.now_ms, cost=record.extras.cost, slot_hold=record.slot_hold)
        if why or record is None:
            return at
        if admitted == ADMITTED_AT_ONCE:
            return unit.now_ms
        _admit(unit, record)
        admitted += 1
    return 0


def fill_touched(unit: Unit) -> None:
    """Fill the touched groups in order, and write all changed ones."""
    for group in unit.touched_groups:
        look_at = _fill(unit, group) if group.key else 0
        if look_at and look_at <= (next_look(unit) or look_at):
            unit.wakes.add("w")  # Waiters know only the time that was the earliest when they began to wait.
        group.look_at = look_at
    unit.touched_groups = []
    for group in list(unit.groups.values()):
        if group.is_changed:
            _write(unit, group)


def _write(unit: Unit, group: Group) -> None:
    queue = unit.queue.key
    if group.started:
        unit.sql.execute(_sql["add_start"], (queue, group.key, unit.now_ms, group.started))
    if group.is_touched:
        group.over_at = _over_at(unit, group)
    if group.is_touched and 0 < group.over_at <= unit.now_ms:
        unit.sql.execute(_sql["drop"], (queue, group.key))
        group.look_at = group.over_at = 0
    else:
        unit.sql.execute(_sql["save"], (*msgspec.structs.astuple(group)[:_COLUMNS], queue))
    group.started = 0
    group.is_touched = group.is_changed = False


def _over_at(unit: Unit, group: Group) -> int:
    """Return when nothing of a group without members is left (0: it has members, or is paused)."""
    if group.waiting or group.active or group.held or group.blocked or group.paused or not group.key:
        return 0
    at = max(group.parked_until, unit.now_ms, group.full_again_at(unit.now_ms))
    if group.limit.rate is not None and group.starts:
        last = unit.sql.execute(_sql["last_start"], (unit.queue.key, group.key)).fetchone()[0]
        at = max(at, last + group.limit.rate.per_ms)
    return at


def next_look(unit: Unit) -> int | None:
    """Return when the first group must be filled again."""
    if not unit.queue.uses & groups.USES_GROUPS:
        return None
    at: int | None = unit.sql.execute(_sql["next_look"], (unit.queue.key,)).fetchone()[0]
    return at


def fill_due(unit: Unit, *, limit: int) -> int:
    """Fill the groups that are due. Return their number, at most ``limit``."""
    if not unit.queue.uses & groups.USES_GROUPS:
        return 0
    due = _touch_all(unit, "due", unit.now_ms, limit)
    if due:
        fill_touched(unit)
        unit.flush()
    return due


def fill_from(unit: Unit, key: str, *, limit: int) -> None:
    """Fill the groups after this key, because a shared limit has changed. Sweeps continue beyond ``limit``."""
    keys = unit.sql.execute(_sql["keys_after"], (unit.queue.key, key, limit)).fetchall()
    for (group_key,) in keys:
        groups.touch(unit, groups.group_of(unit, group_key))
    unit.queue.regroup = keys[-1][0] if len(keys) == limit else ""


def sweep_groups(unit: Unit, *, limit: int) -> int:
    """Run the time-based maintenance of groups. Return the largest number of groups of one kind."""
    if unit.queue.uses & groups.USES_LIMITS:
        _sweep_queue(unit)
    if not unit.queue.uses & groups.USES_GROUPS:
        return 0
    seen = fill_due(unit, limit=limit)
    if unit.queue.regroup:
        fill_from(unit, unit.queue.regroup, limit=limit)
    seen = max(seen, _touch_all(unit, "over", unit.now_ms, limit))
    fill_touched(unit)
    unit.flush()
    if not unit.sql.execute(_sql["any"], {"queue": unit.queue.key}).fetchone()[0]:
        unit.queue.uses &= ~groups.USES_GROUPS
    return limit if unit.queue.regroup else seen


def _sweep_queue(unit: Unit) -> None:
    """Stop checking the limits of a queue that has none and is not parked."""
    if groups.group_of(unit, "").parked_until <= unit.now_ms and groups.limit_of(unit, "") == Limit():
        unit.sql.execute(_sql["drop"], (unit.queue.key, ""))
        del unit.groups[""]
        unit.queue.uses &= ~groups.USES_LIMITS


def _touch_all(unit: Unit, which: str, *arguments: int) -> int:
    keys = unit.sql.execute(_sql[which], (unit.queue.key, *arguments)).fetchall()
    for (key,) in keys:
        groups.touch(unit, groups.group_of(unit, key))
    return len(keys)


def recount(unit: Unit, key: str, members: list[Record], *, repair: bool) -> bool:
    """Return whether the group's counts and line match its members. With ``repair``, correct them."""
    stored, right = groups.group_of(unit, key), Group(key)
    for record in members:
        groups.count(right, record.group_role, 1, record.extras.cost)
    in_line = [record for record in members if record.group_role in groups.IN_LINE]
    lined_up = set(unit.sql.execute(_sql["line"], (unit.queue.key, key)).fetchall())
    is_right = lined_up == {(*record.line, record.id) for record in in_line} and all(
        getattr(stored, name) == getattr(right, name) for name in _COUNTED
    )
    if repair and not is_right:
        for name in _COUNTED:
            setattr(stored, name, getattr(right, name))
        unit.sql.execute(_sql["clear_line"], (unit.queue.key, key))
        for record in in_line:
            groups.line_up(unit, record)
        groups.touch(unit, stored)
    return is_right


def allowance(unit: Unit, wanted: int) -> tuple[int, int | None]:
    """Return the number of leases that the queue's limits allow; if 0, also when that changes (``None``: when a job
    ends)."""
    if not unit.queue.uses & groups.USES_LIMITS:
        return wanted, None
    queue, now_ms = groups.group_of(unit, ""), unit.now_ms
    limit = queue.limit
    if queue.parked_until > now_ms:
        return 0, queue.parked_until - now_ms
    if limit.concurrency is not None:
        wanted = min(wanted, limit.concurrency - unit.queue.active)
        if wanted <= 0:
            return 0, None
    if limit.rate is not None:
        wanted = min(wanted, limit.rate.count - queue.starts)
        if wanted <= 0:
            return 0, queue.first_start + limit.rate.per_ms - now_ms if queue.first_start else None
    return wanted, None


def set_limit(
    unit: Unit, group: str, limit: Limit | None, *, expected: Limit | UnsetType | None = UNSET
) -> bool:
    """Set or remove a limit, and admit the jobs that it allows. Return false if the current limit is not
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
    unit.notes.add_queue(EventType.CONFIGURED, unit.now_ms, grp=group, data=data)
    unit.queue.uses |= groups.USES_GROUPS if group else groups.USES_LIMITS
    _reach(unit, group)
    return True


def _reach(unit: Unit, key: str) -> None:
    if key == EVERY_GROUP:
        unit.limits.clear()
        fill_from(unit, "", limit=ADMITTED_AT_ONCE)
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
    why: Obstacle = ""
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
    why, at = group.why_no_room(unit.now_ms)
    if why not in ("paused", "asked"):
        why, at = "", 0
    head = head_of(unit, group) if group.blocked else None
    if head is not None:
        why, at = group.why_no_room(unit.now_ms, cost=head.extras.cost, slot_hold=head.slot_hold)
    wait_ms = max(0, at - unit.now_ms) if at else None
    counts = (group.waiting, group.active, group.held, group.blocked)
    return GroupState(group.key, *counts, bool(group.paused), why, wait_ms)


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
