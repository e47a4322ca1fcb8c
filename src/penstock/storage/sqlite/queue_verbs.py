"""The verbs that operate on a queue: pauses, settings, its clock, and bulk verbs on its jobs."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from msgspec.structs import replace

from penstock.core.lifecycle import EventType, State
from penstock.core.staging import staged_at_ms
from penstock.storage.sqlite import flows, groups, statements
from penstock.storage.sqlite.job_verbs import retry_in_order
from penstock.storage.sqlite.queries import read_cursor
from penstock.storage.sqlite.queuerow import USES_STAGED
from penstock.storage.sqlite.records import BLOCKED, CANCELLED, FAILED, GROUP, Record, Slot
from penstock.storage.sqlite.schedules import forget_jobs
from penstock.storage.sqlite.transitions import remove, return_to_waiting, schedule
from penstock.storage.sqlite.unit import Unit
from penstock.storage.values import Bulk, Finished, QueueSettings, jobs_active

_LOWEST = -(2**63)
_sql = statements("bulk")
_groups_sql = statements("groups")
_slots = msgspec.msgpack.Decoder(Slot)


def pause(unit: Unit, *, group: str = "", duration_ms: int = 0) -> None:
    """Stop claims, or claims of this group; with a duration, for that long."""
    if duration_ms:
        _pause_for(unit, group, duration_ms)
    elif _set_paused(unit, group, paused=1):
        unit.notes.add_queue(EventType.PAUSED, unit.now_ms, grp=group)


def resume(unit: Unit, *, group: str = "") -> None:
    """End a pause, and wake the waiters."""
    was_paused = _set_paused(unit, group, paused=0)
    was_parked = bool(unit.queue.uses) and groups.group_of(unit, group).parked_until > unit.now_ms
    if was_parked:
        groups.park(unit, group, until_ms=0)
    if was_paused or was_parked:
        unit.notes.add_queue(EventType.RESUMED, unit.now_ms, grp=group)
    if not group:
        unit.wakes.add("w")


def _pause_for(unit: Unit, group: str, duration_ms: int) -> None:
    until_ms = unit.now_ms + duration_ms
    if groups.group_of(unit, group).parked_until < until_ms:
        groups.park(unit, group, until_ms=until_ms)
        unit.notes.add_queue(EventType.PAUSED, unit.now_ms, grp=group, data=f'{{"for_ms":{duration_ms}}}')


def _set_paused(unit: Unit, key: str, *, paused: int) -> bool:
    """Set the flag. Return whether it changed."""
    if not key:
        was, unit.queue.paused = unit.queue.paused, paused
        return was != paused
    group = groups.group_of(unit, key)
    if group.paused == paused:
        return False
    group.paused = paused
    unit.queue.uses |= groups.USES_GROUPS
    groups.touch(unit, group)
    return True


def configure(unit: Unit, settings: QueueSettings) -> None:
    """Replace the settings."""
    unit.queue.settings_json = msgspec.json.encode(settings).decode()
    unit.notes.add_queue(EventType.CONFIGURED, unit.now_ms, data=unit.queue.settings_json)


def depart(unit: Unit, worker: str) -> None:
    """Forget a worker's record."""
    unit.sql.execute(statements("read")["depart"], (unit.queue.key, worker))


def shift_clock(unit: Unit, ms: int, *, jump: bool = False) -> None:
    """Move the queue's clock forward. With ``jump``, change only the wall clock that the queue sees."""
    unit.queue.shift_ms += ms
    if not jump:
        moment = unit.moment
        unit.set_moment(replace(moment, now_ms=moment.now_ms + ms, wall_ms=moment.wall_ms + ms))


# Bulk verbs, bounded per call. A cursor says when the verb started (``seq`` and time), and the last place that it
# has seen. Incarnations and numbers in line are drawn from ``seq``, so they show which jobs were added or retried
# after the verb started.


class _Cursor(msgspec.Struct, array_like=True):
    seq: int
    now_ms: int
    walk: str
    place: tuple[int, int | str]


_cursors = msgspec.json.Decoder(_Cursor)


def _resume(unit: Unit, cursor: str, walk: str) -> _Cursor:
    return read_cursor(cursor, _cursors) if cursor else _start(unit.queue.seq, unit.now_ms, walk)


def _start(seq: int, now_ms: int, walk: str) -> _Cursor:
    return _Cursor(seq, now_ms, walk, (_LOWEST, _LOWEST if walk == "drain_waiting" else ""))


def _walk(
    unit: Unit,
    at: _Cursor,
    state: str = "",
    *,
    limit: int,
    is_included: Callable[[Record], bool],
    act: Callable[[Unit, Record], None],
) -> tuple[int, int]:
    """Act on the included jobs among the next ``limit`` of the walk. Return how many jobs were seen, and how many of
    them included."""
    first, second = at.place
    values = {"queue": unit.queue.key, "state": state, "first": first, "second": second, "limit": limit}
    rows = unit.sql.execute(_sql[at.walk], values)
    seen = unit.adopt(rows)
    matching = [record for record in seen if is_included(record)]
    if seen:
        at.place = _place(seen[-1], at.walk)
    for record in matching:
        act(unit, record)
    unit.save(matching)
    return len(seen), len(matching)


def _place(record: Record, walk: str) -> tuple[int, int | str]:
    match walk:
        case "drain_blocked":
            return record.place, record.id
        case "drain_waiting":
            return record.priority, record.place
        case "drain_scheduled" | "staged":
            return record.run_at, record.id
        case _:
            return record.kept_until, record.id


def _progress(at: _Cursor, *, done: int, more: bool) -> Bulk:
    return Bulk(done, msgspec.json.encode(at).decode() if more else "")


def retry_all(unit: Unit, *, limit: int = 1000, cursor: str = "") -> Bulk:
    """Retry failed jobs. Skip a job that has failed again since the verb started: its number is higher."""
    at = _resume(unit, cursor, "finished")
    done = 0

    def is_included(record: Record) -> bool:
        number = abs(record.place)
        return (
            record.state == FAILED and max(number, record.token) <= at.seq and record.finished_at <= at.now_ms
        )

    def act(unit: Unit, record: Record) -> None:
        nonlocal done
        if is_included(record):
            done += len(retry_in_order(unit, record, is_included))

    seen, _ = _walk(unit, at, FAILED, limit=limit, is_included=is_included, act=act)
    return _progress(at, done=done, more=seen == limit)


def drain(unit: Unit, *, scheduled: bool = False, limit: int = 1000, cursor: str = "") -> Bulk:
    """Remove jobs that their group blocks, then waiting ones in order, then scheduled ones if ``scheduled``.

    Blocked ones go first: removing a waiting one would admit the next member of its group.
    """
    walks = ["drain_blocked", "drain_waiting", *(["drain_scheduled"] if scheduled else [])]
    at = _resume(unit, cursor, walks[0])
    left, done = limit, 0

    def is_included(record: Record) -> bool:
        is_ready = record.state != BLOCKED or record.blocked_by == GROUP
        return is_ready and record.incarnation <= at.seq

    while True:
        seen, removed = _walk(unit, at, limit=left, is_included=is_included, act=remove)
        left, done = left - seen, done + removed
        if left == 0 or at.walk == walks[-1]:
            return _progress(at, done=done, more=left == 0)
        at = _start(at.seq, at.now_ms, walks[walks.index(at.walk) + 1])


def clean(unit: Unit, state: State, *, older_than_ms: int = 0, limit: int = 1000, cursor: str = "") -> Bulk:
    """Remove jobs that ended as ``state`` at least ``older_than_ms`` ago, in the order of their expiry."""
    at = _resume(unit, cursor, "finished")

    def is_included(record: Record) -> bool:
        return record.finished_at <= at.now_ms - older_than_ms and record.held_until <= unit.now_ms

    seen, done = _walk(unit, at, state.value, limit=limit, is_included=is_included, act=remove)
    return _progress(at, done=done, more=seen == limit)


def unstage(unit: Unit, write_id: str, *, discard: bool = False, limit: int = 1000, cursor: str = "") -> Bulk:
    """Release or discard the staged jobs of a write, in the order of their ids."""
    at = _resume(unit, cursor, "staged")
    if not cursor:
        at.place = (staged_at_ms(write_id), "")

    def is_included(record: Record) -> bool:
        return record.write_id == write_id and record.incarnation <= at.seq

    seen, done = _walk(unit, at, limit=limit, is_included=is_included, act=remove if discard else _release)
    if seen < limit and unit.sql.execute(_sql["has_staged"], (unit.queue.key,)).fetchone() is None:
        unit.queue.uses &= ~USES_STAGED
    return _progress(at, done=done, more=seen == limit)


def _release(unit: Unit, record: Record) -> None:
    """Release a staged job. Its ttl and delay start now."""
    delay_ms = record.extras.staged_delay_ms
    record.expires_at = unit.now_ms + record.ttl_ms if record.ttl_ms else 0
    if delay_ms:
        schedule(unit, record, unit.now_ms + delay_ms)
        unit.note(EventType.CHANGED, record, run=record.runs)
    else:
        record.run_at = unit.now_ms
        return_to_waiting(unit, record)
        unit.note(EventType.PROMOTED, record, run=record.runs)


def obliterate(unit: Unit, *, force: bool = False) -> int:
    """Delete all jobs of the queue."""
    queue = unit.queue
    if queue.active and not force:
        raise jobs_active(queue.name, active=queue.active)
    _tell_open(unit)
    flows.obliterated(unit)
    for table in ("waiters", "logs", "signals", "steps", "holds", "payloads"):
        unit.sql.execute(_sql[f"obliterate_{table}"], (queue.key,))
    for subject in ("dedup", "instants"):
        unit.sql.execute(statements(subject)["obliterate"], (queue.key,))
    removed = unit.sql.execute(_sql["obliterate_jobs"], (queue.key,)).rowcount
    for state in State:
        setattr(queue, state.value, 0)
    forget_jobs(unit)
    queue.held_completed = queue.held_failed = 0
    _empty_groups(unit)
    unit.notes.add_queue(EventType.OBLITERATED, unit.now_ms, size=removed)
    return removed


def _empty_groups(unit: Unit) -> None:
    """Empty the groups. Paused and parked ones stay paused or parked."""
    for table in ("lines", "starts"):
        unit.sql.execute(_groups_sql[f"obliterate_{table}"], (unit.queue.key,))
    unit.sql.execute(_groups_sql["obliterate_groups"], (unit.queue.key, unit.now_ms))
    unit.sql.execute(_groups_sql["empty_groups"], (unit.queue.key,))


def _tell_open(unit: Unit) -> None:
    for key, id_, incarnation in unit.sql.execute(_sql["obliterate_news"], (unit.queue.key,)).fetchall():
        unit.tell_of(key, Finished(id_, incarnation, State(CANCELLED)))
    for packed, id_, incarnation in unit.sql.execute(_sql["reruns"], (unit.queue.key,)).fetchall():
        news = Finished(id_, incarnation, State(CANCELLED))
        unit.tell_of(0, news, also=_listeners(packed))
    unit.flush()


def _listeners(packed: bytes) -> list[str]:
    """Return the listeners of a rerun; none if its record is damaged."""
    try:
        return _slots.decode(packed).listeners
    except msgspec.DecodeError:
        return []
