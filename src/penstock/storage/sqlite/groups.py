"""Groups: jobs that share a limit or an order. What each transition of a member means to the others.

A verb moves members from part to part; ``admission`` then lets in whom there is room for, and writes the groups. The
blocked members stand in a table of their own, written at once, because it is read again within the call.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import msgspec

from penstock.core.lifecycle import EventType
from penstock.core.limits import EVERY_GROUP, Limit
from penstock.storage.sqlite.queuerow import HOLDING, Group
from penstock.storage.sqlite.records import BLOCKED, Record
from penstock.storage.sqlite.statements import statements
from penstock.storage.sqlite.unit import Step

USES_LIMITS: Final = 1
USES_GROUPS: Final = 2
_AT_THE_FRONT: Final = 1

_BLOCKED = EventType.BLOCKED.value

_sql = statements("groups")
_unpack_limit: Final = lru_cache(256)(msgspec.json.Decoder(Limit).decode)


def limit_of(step: Step, key: str) -> Limit:
    """The limit of this group (of the queue itself, if the key is empty)."""
    limit = step.limits.get(key)
    if limit is None:
        rows: dict[str, str] = dict(step.sql.execute(_sql["limits_for"], (step.queue.key, key)).fetchall())
        value = rows.get(key) or (rows.get(EVERY_GROUP) if key else None)
        limit = step.limits[key] = Limit() if value is None else _unpack_limit(value)
    return limit


def group_of(step: Step, key: str) -> Group:
    """The group as it is now, read once per call."""
    group = step.groups.get(key)
    if group is None:
        row = step.sql.execute(_sql["load"], (step.queue.key, key)).fetchone()
        group = step.groups[key] = Group(key) if row is None else Group(*row)
        group.is_stored = row is not None
        _apply(step, group)
    return group


def reread(step: Step, key: str) -> Group:
    """The group under a limit that was just set."""
    step.limits.clear()
    group = group_of(step, key)
    _apply(step, group)
    return group


def _apply(step: Step, group: Group) -> None:
    group.limit = limit_of(step, group.key)
    _slide(step, group)
    group.refill(step.now_ms)


def _slide(step: Step, group: Group) -> None:
    """Starts that have left the window go."""
    rate, place = group.limit.rate, (step.queue.key, group.key)
    group.first_start = 0
    if not group.starts:
        return
    last = step.now_ms if rate is None else step.now_ms - rate.per_ms
    gone = step.sql.execute(_sql["left_window"], (*place, last)).fetchone()[0]
    if gone:
        step.sql.execute(_sql["slide"], (*place, last))
        group.starts -= gone
        group.is_changed = True
    if group.starts:
        group.first_start = step.sql.execute(_sql["first_start"], place).fetchone()[0]


def touch(step: Step, group: Group) -> None:
    """``admission.settle`` is to look at it."""
    group.is_changed = True
    if not group.is_touched:
        group.is_touched = True
        step.touched_groups.append(group)


def move(step: Step, record: Record, part: str) -> None:
    """Count a member over from its part to another."""
    extras = record.extras
    group = group_of(step, extras.group)
    if record.part in ("b", "k"):
        _step_out(step, record)
    count(group, record.part, -1, extras.cost)
    count(group, part, 1, extras.cost)
    record.part = part
    if part in ("b", "k"):
        line_up(step, record)
    step.queue.uses |= USES_GROUPS
    touch(step, group)


def count(group: Group, part: str, by: int, cost: int) -> None:
    """So many members more, or fewer, of that part."""
    match part:
        case "w":
            group.waiting += by
            group.cost += by * cost
        case "a":
            group.active += by
        case "b":
            group.blocked += by
        case "h":
            group.held += by
        case "k":
            group.blocked += by
            group.held += by
        case _:
            pass


def line_up(step: Step, record: Record) -> None:
    """Stand in the group's line of blocked members."""
    record.line = (0, 0, abs(record.place)) if record.grip else (1, record.priority, record.place)
    step.sql.execute(_sql["line_up"], (*record.line, step.queue.key, record.extras.group, record.id))


def _step_out(step: Step, record: Record) -> None:
    step.sql.execute(_sql["step_out"], (*record.line, step.queue.key, record.extras.group, record.id))


def block(step: Step, record: Record, *, grip: int = 0) -> None:
    """It waits for its group: in line, at the front (1), or holding its slot (2)."""
    record.state, record.blocked_by, record.grip = BLOCKED, "group", grip
    move(step, record, "k" if grip == HOLDING else "b")


def hold_back(step: Step, record: Record, *, keeps_number: bool) -> bool:
    """A job is to enter waiting. True: its group blocks it."""
    extras = record.extras
    if not extras.group:
        return False
    group, old = group_of(step, extras.group), record.part
    if old == "h" or (old == "a" and (keeps_number or group.is_strict)):
        is_full = old == "h" and group.is_full(group.waiting + group.active)
        if is_full or group.is_stopped(step.now_ms):
            block(step, record, grip=HOLDING if old == "h" or group.is_strict else _AT_THE_FRONT)
            return True
    else:
        leave(step, record)
        if group.blocked or group.why_full(step.now_ms, cost=extras.cost)[0]:
            block(step, record)
            return True
    record.grip = 0
    move(step, record, "w")
    return False


def start(step: Step, key: str, cost: int) -> bool:
    """A waiting member is to be leased: count it as active. False, and nothing changed, if it may not start."""
    group = group_of(step, key)
    if not group.can_start(cost, step.now_ms):
        return False
    count(group, "w", -1, cost)
    count(group, "a", 1, cost)
    group.charge(1, cost=cost, now_ms=step.now_ms)
    touch(step, group)
    return True


def end(step: Step, key: str) -> None:
    """An active member has ended."""
    group = group_of(step, key)
    group.active -= 1
    step.queue.uses |= USES_GROUPS
    touch(step, group)


def send_back(step: Step, record: Record) -> None:
    """A waiting member that may not start stands at the front of its group."""
    block(step, record, grip=_AT_THE_FRONT)
    step.note(_BLOCKED, record, run=record.runs)


def scheduled(step: Step, record: Record) -> None:
    """A member waits for a time to come, or for a signal: with it, in a strict group, the others."""
    if record.part == "a" and group_of(step, record.extras.group).is_strict:
        record.grip = HOLDING
        move(step, record, "h")
    elif record.part in ("a", "w"):
        move(step, record, "")


def wait_elsewhere(step: Step, record: Record) -> None:
    """A member waits for jobs it depends on: as for a time to come, and not in its group's line."""
    match record.part:
        case "k":
            move(step, record, "h")
        case "b":
            leave(step, record)
        case _:
            scheduled(step, record)


def line_up_again(step: Step, record: Record) -> None:
    """Its priority has changed, or its number."""
    if record.part in ("b", "k"):
        _step_out(step, record)
        line_up(step, record)
        touch(step, group_of(step, record.extras.group))


def leave(step: Step, record: Record) -> None:
    """It is a member no longer."""
    if record.part:
        move(step, record, "")
    record.grip = 0


def park(step: Step, key: str, *, until_ms: int) -> None:
    """Nothing is started before that: in the group, or, if the key is empty, in the queue. A time that has passed (0)
    lets it go on."""
    group = group_of(step, key)
    group.parked_until = until_ms
    step.queue.uses |= USES_GROUPS if key else USES_LIMITS
    touch(step, group)


def park_of(step: Step, record: Record, *, queue: bool, until_ms: int) -> None:
    """The same for the group of a job, or its queue. What is parked for longer stays so."""
    key = "" if queue else record.extras.group
    park(step, key, until_ms=max(group_of(step, key).parked_until, until_ms))
