"""Admission: letting blocked members of groups in while there is room, when a verb made it or time did.

And the queue's own limits, which say how many leases a claim may make.
"""

from __future__ import annotations

from typing import Final

import msgspec

from penstock.core.lifecycle import EventType
from penstock.core.limits import Limit
from penstock.storage.sqlite.groups import (
    USES_GROUPS,
    USES_LIMITS,
    count,
    group_of,
    limit_of,
    line_up,
    move,
    touch,
)
from penstock.storage.sqlite.queuerow import Group
from penstock.storage.sqlite.records import WAITING, Record
from penstock.storage.sqlite.statements import statements
from penstock.storage.sqlite.unit import Step

AT_ONCE: Final = 1000

_UNBLOCKED = EventType.UNBLOCKED.value
_COLUMNS: Final = 14
_COUNTED: Final = ("waiting", "active", "held", "blocked", "cost")

_sql = statements("groups")


def head_of(step: Step, group: Group) -> Record | None:
    """The first of its blocked members. One that came in this very call has no row yet."""
    id_, *row = step.sql.execute(_sql["head"], (step.queue.key, group.key)).fetchone() or (None,)
    if id_ is None:
        return None
    return step.adopt([row])[0] if row[0] is not None else step.find([id_]).get(id_)


def _admit(step: Step, record: Record) -> None:
    if not record.grip:
        record.renumber(step.draw(), lifo=record.lifo)
    move(step, record, "w")
    record.state, record.blocked_by, record.grip, record.ready_at = WAITING, "", 0, step.now_ms
    step.note(_UNBLOCKED, record, run=record.runs)
    step.touch(record)


def _fill(step: Step, group: Group) -> int:
    """Admit blocked members while there is room; when to look again (0: not because of the time)."""
    admitted = 0
    while group.blocked:
        why, at = group.why_full(step.now_ms)
        record = None if why else head_of(step, group)
        if record is not None:
            why, at = group.why_full(step.now_ms, cost=record.extras.cost, grip=record.grip)
        if why or record is None:
            return at
        if admitted == AT_ONCE:
            return step.now_ms
        _admit(step, record)
        admitted += 1
    return 0


def settle(step: Step) -> None:
    """Fill the groups that were touched, in that order, and write what has become of all of them."""
    for group in step.touched_groups:
        look_at = _fill(step, group) if group.key else 0
        if look_at and look_at <= (next_look(step) or look_at):
            step.wakes.add("w")  # Who waits knows of the first time there was when it asked.
        group.look_at = look_at
    step.touched_groups = []
    for group in list(step.groups.values()):
        if group.is_changed:
            _write(step, group)


def _write(step: Step, group: Group) -> None:
    queue = step.queue.key
    if group.started:
        step.sql.execute(_sql["add_start"], (queue, group.key, step.now_ms, group.started))
    if group.is_touched:
        group.over_at = _over_at(step, group)
    if group.is_touched and 0 < group.over_at <= step.now_ms:
        step.sql.execute(_sql["drop"], (queue, group.key))
        group.look_at = group.over_at = 0
    else:
        step.sql.execute(_sql["save"], (*msgspec.structs.astuple(group)[:_COLUMNS], queue))
    group.started = 0
    group.is_touched = group.is_changed = False


def _over_at(step: Step, group: Group) -> int:
    """When nothing of the group is left, if it has no members (0: it has, or is paused)."""
    if group.waiting or group.active or group.held or group.blocked or group.paused or not group.key:
        return 0
    at = max(group.parked_until, step.now_ms, group.full_again_at(step.now_ms))
    if group.limit.rate is not None and group.starts:
        last = step.sql.execute(_sql["last_start"], (step.queue.key, group.key)).fetchone()[0]
        at = max(at, last + group.limit.rate.per_ms)
    return at


def next_look(step: Step) -> int | None:
    """When the first group is to be looked at again."""
    if not step.queue.uses & USES_GROUPS:
        return None
    at: int | None = step.sql.execute(_sql["next_look"], (step.queue.key,)).fetchone()[0]
    return at


def look_again(step: Step, *, limit: int) -> int:
    """Fill groups whose time has come; how many there were, at most ``limit``."""
    if not step.queue.uses & USES_GROUPS:
        return 0
    due = _touch_all(step, "due", step.now_ms, limit)
    if due:
        settle(step)
        step.save(())
    return due


def fill_from(step: Step, key: str, *, limit: int) -> None:
    """Fill groups after this key: a limit they share has changed. Beyond ``limit``, it is for sweeps."""
    keys = step.sql.execute(_sql["keys_after"], (step.queue.key, key, limit)).fetchall()
    for (one,) in keys:
        touch(step, group_of(step, one))
    step.queue.regroup = keys[-1][0] if len(keys) == limit else ""


def sweep_groups(step: Step, *, limit: int) -> int:
    """What time brings to groups; at most how many there were of one kind."""
    if step.queue.uses & USES_LIMITS:
        _sweep_queue(step)
    if not step.queue.uses & USES_GROUPS:
        return 0
    seen = look_again(step, limit=limit)
    if step.queue.regroup:
        fill_from(step, step.queue.regroup, limit=limit)
    seen = max(seen, _touch_all(step, "over", step.now_ms, limit))
    settle(step)
    step.save(())
    if not step.sql.execute(_sql["any"], {"queue": step.queue.key}).fetchone()[0]:
        step.queue.uses &= ~USES_GROUPS
    return limit if step.queue.regroup else seen


def _sweep_queue(step: Step) -> None:
    """What was parked is no longer; without limits there is nothing to look for."""
    if group_of(step, "").parked_until <= step.now_ms and limit_of(step, "") == Limit():
        step.sql.execute(_sql["drop"], (step.queue.key, ""))
        del step.groups[""]
        step.queue.uses &= ~USES_LIMITS


def _touch_all(step: Step, which: str, *arguments: int) -> int:
    keys = step.sql.execute(_sql[which], (step.queue.key, *arguments)).fetchall()
    for (key,) in keys:
        touch(step, group_of(step, key))
    return len(keys)


def recount(step: Step, key: str, members: list[Record], *, repair: bool) -> bool:
    """Whether the group's counts and line are those of its members; if not, they are mended if asked."""
    stored, right = group_of(step, key), Group(key)
    for record in members:
        count(right, record.part, 1, record.extras.cost)
    in_line = [record for record in members if record.part in ("b", "k")]
    lined_up = set(step.sql.execute(_sql["line"], (step.queue.key, key)).fetchall())
    is_right = lined_up == {(*record.line, record.id) for record in in_line} and all(
        getattr(stored, name) == getattr(right, name) for name in _COUNTED
    )
    if repair and not is_right:
        for name in _COUNTED:
            setattr(stored, name, getattr(right, name))
        step.sql.execute(_sql["clear_line"], (step.queue.key, key))
        for record in in_line:
            line_up(step, record)
        touch(step, stored)
    return is_right


def allowance(step: Step, asked: int) -> tuple[int, int | None]:
    """How many leases the queue's own limits allow; if none, the time until they do (``None``: an end does it)."""
    if not step.queue.uses & USES_LIMITS:
        return asked, None
    queue, now_ms = group_of(step, ""), step.now_ms
    limit = queue.limit
    if queue.parked_until > now_ms:
        return 0, queue.parked_until - now_ms
    if limit.concurrency is not None:
        asked = min(asked, limit.concurrency - step.queue.active)
        if asked <= 0:
            return 0, None
    if limit.rate is not None:
        asked = min(asked, limit.rate.count - queue.starts)
        if asked <= 0:
            return 0, queue.first_start + limit.rate.per_ms - now_ms if queue.first_start else None
    return asked, None
