"""Operating on a queue as a whole: ``pause``, ``resume``, ``configure``, its workers' records, its clock."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from msgspec.structs import replace

from penstock.core.job import staged_at_ms
from penstock.core.lifecycle import EventType, State
from penstock.errors import InvalidOption
from penstock.storage.contract import jobs_active
from penstock.storage.sqlite import flows, groups
from penstock.storage.sqlite.job_verbs import retry_in_order
from penstock.storage.sqlite.queuerow import USES_STAGED
from penstock.storage.sqlite.records import BLOCKED, CANCELLED, FAILED, Record, Slot
from penstock.storage.sqlite.schedules import forget_jobs
from penstock.storage.sqlite.statements import statements
from penstock.storage.sqlite.transitions import remove, return_to_waiting, schedule
from penstock.storage.sqlite.unit import Step
from penstock.storage.values import Bulk, Finished, QueueSettings

_PAUSED = EventType.PAUSED.value
_RESUMED = EventType.RESUMED.value
_CONFIGURED = EventType.CONFIGURED.value


def pause(step: Step, group: str, duration_ms: int) -> None:
    """Claims get nothing from now on, or nothing of this group; with a duration, for that long."""
    if duration_ms:
        _pause_for(step, group, duration_ms)
    elif _set_paused(step, group, paused=1):
        step.notes.add_queue(_PAUSED, step.now_ms, grp=group)


def resume(step: Step, group: str) -> None:
    """Claims get jobs again; those who wait are woken."""
    was_paused = _set_paused(step, group, paused=0)
    was_parked = bool(step.queue.uses) and groups.group_of(step, group).parked_until > step.now_ms
    if was_parked:
        groups.park(step, group, until_ms=0)
    if was_paused or was_parked:
        step.notes.add_queue(_RESUMED, step.now_ms, grp=group)
    if not group:
        step.wakes.add("w")


def _pause_for(step: Step, group: str, duration_ms: int) -> None:
    until_ms = step.now_ms + duration_ms
    if groups.group_of(step, group).parked_until < until_ms:
        groups.park(step, group, until_ms=until_ms)
        step.notes.add_queue(_PAUSED, step.now_ms, grp=group, data=f'{{"for_ms":{duration_ms}}}')


def _set_paused(step: Step, key: str, *, paused: int) -> bool:
    """Whether that changed the flag."""
    if not key:
        was, step.queue.paused = step.queue.paused, paused
        return was != paused
    group = groups.group_of(step, key)
    if group.paused == paused:
        return False
    group.paused = paused
    step.queue.uses |= groups.USES_GROUPS
    groups.touch(step, group)
    return True


def configure(step: Step, settings: QueueSettings) -> None:
    """Replace the settings."""
    step.queue.settings_json = msgspec.json.encode(settings).decode()
    step.notes.add_queue(_CONFIGURED, step.now_ms, data=step.queue.settings_json)


def depart(step: Step, worker: str) -> None:
    """Forget a worker's record."""
    step.sql.execute(statements("read")["depart"], (step.queue.key, worker))


def shift_clock(step: Step, ms: int, *, jump: bool) -> None:
    """Move the queue's clock forward. ``jump``: the queue is not told."""
    step.queue.shift_ms += ms
    if not jump:
        moment = step.moment
        step.set_moment(replace(moment, now_ms=moment.now_ms + ms, wall_ms=moment.wall_ms + ms))


# Operating on many jobs, bounded per call: ``retry_all``, ``drain``, ``clean``, ``unstage``; and
# ``obliterate``.
#
# A cursor carries where the verb started (``seq`` and time) and the last place it looked at. Numbers and
# incarnations are drawn from ``seq``, so what came later, or came back, is told by them.


_LOWEST = -(2**63)
_CHANGED = EventType.CHANGED.value
_PROMOTED = EventType.PROMOTED.value
_OBLITERATED = EventType.OBLITERATED.value

_sql = statements("bulk")
_groups_sql = statements("groups")
_slots = msgspec.msgpack.Decoder(Slot)


class _Cursor(msgspec.Struct, array_like=True):
    seq: int
    now_ms: int
    walk: str
    place: tuple[int, int | str]


_cursors = msgspec.json.Decoder(_Cursor)


def _resume(step: Step, cursor: str, walk: str) -> _Cursor:
    if not cursor:
        return _start(step.queue.seq, step.now_ms, walk)
    try:
        return _cursors.decode(cursor)
    except msgspec.DecodeError as error:
        raise InvalidOption(
            f"{cursor!r} is not a cursor of this verb: {error}. Use one it returned."
        ) from error


def _start(seq: int, now_ms: int, walk: str) -> _Cursor:
    return _Cursor(seq, now_ms, walk, (_LOWEST, _LOWEST if walk == "drain_waiting" else ""))


def _walk(
    step: Step,
    at: _Cursor,
    state: str = "",
    *,
    limit: int,
    wanted: Callable[[Record], bool],
    act: Callable[[Step, Record], None],
) -> tuple[int, int]:
    """Act on the wanted ones of the next ``limit`` jobs of the walk: how many were seen, how many were wanted."""
    first, second = at.place
    values = {"queue": step.queue.key, "state": state, "first": first, "second": second, "limit": limit}
    rows = step.sql.execute(_sql[at.walk], values)
    seen = step.adopt(rows)
    found = [record for record in seen if wanted(record)]
    if seen:
        at.place = _place(seen[-1], at.walk)
    for record in found:
        act(step, record)
    step.save(found)
    return len(seen), len(found)


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


def retry_all(step: Step, *, limit: int, cursor: str) -> Bulk:
    """Retry failed jobs; one that fails again meanwhile has a later number, and is passed over."""
    at = _resume(step, cursor, "finished")
    done = 0

    def wanted(record: Record) -> bool:
        number = abs(record.place)
        return (
            record.state == FAILED and max(number, record.token) <= at.seq and record.finished_at <= at.now_ms
        )

    def act(step: Step, record: Record) -> None:
        nonlocal done
        if wanted(record):
            done += len(retry_in_order(step, record, wanted))

    seen, _ = _walk(step, at, FAILED, limit=limit, wanted=wanted, act=act)
    return _progress(at, done=done, more=seen == limit)


def drain(step: Step, *, scheduled: bool, limit: int, cursor: str) -> Bulk:
    """Remove jobs that their group blocks, then waiting ones in order, then scheduled ones if asked.

    Blocked ones go first: removing a waiting one would let the next member of its group in.
    """
    walks = ["drain_blocked", "drain_waiting", *(["drain_scheduled"] if scheduled else [])]
    at = _resume(step, cursor, walks[0])
    left, done = limit, 0

    def is_meant(record: Record) -> bool:
        is_ready = record.state != BLOCKED or record.blocked_by == "group"
        return is_ready and record.incarnation <= at.seq

    while True:
        seen, removed = _walk(step, at, limit=left, wanted=is_meant, act=remove)
        left, done = left - seen, done + removed
        if left == 0 or at.walk == walks[-1]:
            return _progress(at, done=done, more=left == 0)
        at = _start(at.seq, at.now_ms, walks[walks.index(at.walk) + 1])


def clean(step: Step, state: State, *, older_than_ms: int, limit: int, cursor: str) -> Bulk:
    """Remove jobs that ended as ``state`` long enough ago, in the order in which they would be forgotten."""
    at = _resume(step, cursor, "finished")
    seen, done = _walk(
        step,
        at,
        state.value,
        limit=limit,
        wanted=lambda record: (
            record.finished_at <= at.now_ms - older_than_ms and record.held_until <= step.now_ms
        ),
        act=remove,
    )
    return _progress(at, done=done, more=seen == limit)


def unstage(step: Step, write_id: str, *, keep: bool, limit: int, cursor: str) -> Bulk:
    """Release or remove the staged jobs of a write, in the order of their ids."""
    at = _resume(step, cursor, "staged")
    if not cursor:
        at.place = (staged_at_ms(write_id), "")

    def is_meant(record: Record) -> bool:
        return record.write_id == write_id and record.incarnation <= at.seq

    seen, done = _walk(step, at, limit=limit, wanted=is_meant, act=_release if keep else remove)
    if seen < limit and step.sql.execute(_sql["has_staged"], (step.queue.key,)).fetchone() is None:
        step.queue.uses &= ~USES_STAGED
    return _progress(at, done=done, more=seen == limit)


def _release(step: Step, record: Record) -> None:
    """Its time begins now."""
    delay_ms = record.extras.staged_delay_ms
    record.expires_at = step.now_ms + record.ttl_ms if record.ttl_ms else 0
    if delay_ms:
        schedule(step, record, step.now_ms + delay_ms)
        step.note(_CHANGED, record, run=record.runs)
    else:
        record.run_at = step.now_ms
        return_to_waiting(step, record)
        step.note(_PROMOTED, record, run=record.runs)


def obliterate(step: Step, *, force: bool) -> int:
    """Delete all jobs of the queue."""
    queue = step.queue
    if queue.active and not force:
        raise jobs_active(queue.name, active=queue.active)
    _tell_open(step)
    flows.obliterated(step)
    for table in ("waiters", "logs", "signals", "holds", "payloads"):
        step.sql.execute(_sql[f"obliterate_{table}"], (queue.key,))
    for subject in ("dedup", "instants"):
        step.sql.execute(statements(subject)["obliterate"], (queue.key,))
    removed = step.sql.execute(_sql["obliterate_jobs"], (queue.key,)).rowcount
    for state in State:
        setattr(queue, state.value, 0)
    forget_jobs(step)
    queue.held_completed = queue.held_failed = 0
    _empty_groups(step)
    step.notes.add_queue(_OBLITERATED, step.now_ms, size=removed)
    return removed


def _empty_groups(step: Step) -> None:
    """What was paused stays paused, what was parked stays parked."""
    for table in ("lines", "starts"):
        step.sql.execute(_groups_sql[f"obliterate_{table}"], (step.queue.key,))
    step.sql.execute(_groups_sql["obliterate_groups"], (step.queue.key, step.now_ms))
    step.sql.execute(_groups_sql["empty_groups"], (step.queue.key,))


def _tell_open(step: Step) -> None:
    for key, id_, incarnation in step.sql.execute(_sql["obliterate_news"], (step.queue.key,)).fetchall():
        step.tell_of(key, Finished(id_, incarnation, State(CANCELLED)))
    for packed, id_, incarnation in step.sql.execute(_sql["reruns"], (step.queue.key,)).fetchall():
        news = Finished(id_, incarnation, State(CANCELLED))
        step.tell_of(0, news, also=_listeners(packed))
    step.save(())


def _listeners(packed: bytes) -> list[str]:
    """Return the listeners of a rerun; none if its record is damaged."""
    try:
        return _slots.decode(packed).listeners
    except msgspec.DecodeError:
        return []
