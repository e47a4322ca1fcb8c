"""Groups: jobs that share a limit or an order, and the effects of each member's transitions on the others.

A verb moves members from role to role; ``limits`` then admits those for whom there is room, and writes the
groups. The blocked members have their own table. It is written immediately, because the same call reads it again.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import msgspec

from penstock.core.lifecycle import EventType
from penstock.core.limits import EVERY_GROUP, Limit
from penstock.storage.sqlite import statements
from penstock.storage.sqlite.queuerow import HOLDING, Group
from penstock.storage.sqlite.records import BLOCKED, GROUP, Record
from penstock.storage.sqlite.unit import Unit

USES_LIMITS: Final = 1
USES_GROUPS: Final = 2
IN_LINE: Final = ("b", "k")
"""The roles of blocked members (see ``Record.group_role``)."""
_AT_THE_FRONT: Final = 1

_sql = statements("groups")
_unpack_limit: Final = lru_cache(256)(msgspec.json.Decoder(Limit).decode)


def limit_of(unit: Unit, key: str) -> Limit:
    """Return the limit of this group, or of the queue if the key is empty."""
    limit = unit.limits.get(key)
    if limit is None:
        rows: dict[str, str] = dict(unit.sql.execute(_sql["limits_for"], (unit.queue.key, key)).fetchall())
        value = rows.get(key) or (rows.get(EVERY_GROUP) if key else None)
        limit = unit.limits[key] = Limit() if value is None else _unpack_limit(value)
    return limit


def group_of(unit: Unit, key: str) -> Group:
    """Return the group as it is now. Each call reads it once."""
    group = unit.groups.get(key)
    if group is None:
        row = unit.sql.execute(_sql["load"], (unit.queue.key, key)).fetchone()
        group = unit.groups[key] = Group(key) if row is None else Group(*row)
        group.is_stored = row is not None
        _apply(unit, group)
    return group


def reread(unit: Unit, key: str) -> Group:
    """Read the limit of a group again, and return the group with it."""
    unit.limits.clear()
    group = group_of(unit, key)
    _apply(unit, group)
    return group


def _apply(unit: Unit, group: Group) -> None:
    group.limit = limit_of(unit, group.key)
    _slide(unit, group)
    group.refill(unit.now_ms)


def _slide(unit: Unit, group: Group) -> None:
    """Drop the starts that have left the window."""
    rate, place = group.limit.rate, (unit.queue.key, group.key)
    group.first_start = 0
    if not group.starts:
        return
    last = unit.now_ms if rate is None else unit.now_ms - rate.per_ms
    gone = unit.sql.execute(_sql["left_window"], (*place, last)).fetchone()[0]
    if gone:
        unit.sql.execute(_sql["slide"], (*place, last))
        group.starts -= gone
        group.is_changed = True
    if group.starts:
        group.first_start = unit.sql.execute(_sql["first_start"], place).fetchone()[0]


def touch(unit: Unit, group: Group) -> None:
    """Have ``limits.fill_touched`` fill the group."""
    group.is_changed = True
    if not group.is_touched:
        group.is_touched = True
        unit.touched_groups.append(group)


def move(unit: Unit, record: Record, role: str) -> None:
    """Count a member in another role."""
    extras = record.extras
    group = group_of(unit, extras.group)
    if record.group_role in IN_LINE:
        _step_out(unit, record)
    count(group, record.group_role, -1, extras.cost)
    count(group, role, 1, extras.cost)
    record.group_role = role
    if role in IN_LINE:
        line_up(unit, record)
    unit.queue.uses |= USES_GROUPS
    touch(unit, group)


def count(group: Group, role: str, by: int, cost: int) -> None:
    """Count ``by`` members in this role (see ``Record.group_role``)."""
    match role:
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


def line_up(unit: Unit, record: Record) -> None:
    """Add the member to the group's line of blocked members."""
    record.line = (0, 0, abs(record.place)) if record.slot_hold else (1, record.priority, record.place)
    unit.sql.execute(_sql["line_up"], (*record.line, unit.queue.key, record.extras.group, record.id))


def _step_out(unit: Unit, record: Record) -> None:
    unit.sql.execute(_sql["step_out"], (*record.line, unit.queue.key, record.extras.group, record.id))


def block(unit: Unit, record: Record, *, slot_hold: int = 0) -> None:
    """Block a member by its group: in line, at the front (``slot_hold`` 1), or holding its slot (2)."""
    record.state, record.blocked_by, record.slot_hold = BLOCKED, GROUP, slot_hold
    move(unit, record, "k" if slot_hold == HOLDING else "b")


def maybe_block(unit: Unit, record: Record, *, keeps_number: bool) -> bool:
    """Block a job that is about to wait, if its group has no room. Return whether it was blocked."""
    extras = record.extras
    if not extras.group:
        return False
    group, role = group_of(unit, extras.group), record.group_role
    if role == "h" or (role == "a" and (keeps_number or group.is_strict)):
        is_full = role == "h" and group.is_full(group.waiting + group.active)
        if is_full or group.is_stopped(unit.now_ms):
            block(unit, record, slot_hold=HOLDING if role == "h" or group.is_strict else _AT_THE_FRONT)
            return True
    else:
        leave(unit, record)
        if group.blocked or group.why_no_room(unit.now_ms, cost=extras.cost)[0]:
            block(unit, record)
            return True
    record.slot_hold = 0
    move(unit, record, "w")
    return False


def start(unit: Unit, key: str, cost: int) -> bool:
    """Count a waiting member as active. Return false, and change nothing, if it may not start."""
    group = group_of(unit, key)
    if not group.can_start(cost, unit.now_ms):
        return False
    count(group, "w", -1, cost)
    count(group, "a", 1, cost)
    group.charge(1, cost=cost, now_ms=unit.now_ms)
    touch(unit, group)
    return True


def end(unit: Unit, key: str) -> None:
    """Count an active member as ended."""
    group = group_of(unit, key)
    group.active -= 1
    unit.queue.uses |= USES_GROUPS
    touch(unit, group)


def send_back(unit: Unit, record: Record) -> None:
    """Move a waiting member that may not start to the front of its group."""
    block(unit, record, slot_hold=_AT_THE_FRONT)
    unit.note(EventType.BLOCKED, record, run=record.runs)


def scheduled(unit: Unit, record: Record) -> None:
    """Handle a member that waits for a time or a signal. In a strict group, the others wait with it."""
    if record.group_role == "a" and group_of(unit, record.extras.group).is_strict:
        record.slot_hold = HOLDING
        move(unit, record, "h")
    elif record.group_role in ("a", "w"):
        move(unit, record, "")


def wait_elsewhere(unit: Unit, record: Record) -> None:
    """Handle a member that waits for its dependencies, like ``scheduled``, outside its group's line."""
    match record.group_role:
        case "k":
            move(unit, record, "h")
        case "b":
            leave(unit, record)
        case _:
            scheduled(unit, record)


def line_up_again(unit: Unit, record: Record) -> None:
    """Move a member in line after its priority or number has changed."""
    if record.group_role in IN_LINE:
        _step_out(unit, record)
        line_up(unit, record)
        touch(unit, group_of(unit, record.extras.group))


def leave(unit: Unit, record: Record) -> None:
    """End the membership."""
    if record.group_role:
        move(unit, record, "")
    record.slot_hold = 0


def park(unit: Unit, key: str, *, until_ms: int) -> None:
    """Start nothing before ``until_ms``: in the group, or in the queue if the key is empty. 0 ends it."""
    group = group_of(unit, key)
    group.parked_until = until_ms
    unit.queue.uses |= USES_GROUPS if key else USES_LIMITS
    touch(unit, group)


def park_of(unit: Unit, record: Record, *, queue: bool, until_ms: int) -> None:
    """Park the group of a job, or its queue. A longer parking stays."""
    key = "" if queue else record.extras.group
    park(unit, key, until_ms=max(group_of(unit, key).parked_until, until_ms))
