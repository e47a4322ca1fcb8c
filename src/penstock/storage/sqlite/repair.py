"""Repair: quarantine the damaged records that made a call fail, and repeat the call. Also ``check``.

Within a minute, only a few records are quarantined automatically. Many damaged records have a common cause, and a
worker that cannot read any record must not fail a whole queue.
"""

from __future__ import annotations

import sqlite3
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar, get_args

import msgspec

from penstock.core.flow import POLICIES, DependencyState
from penstock.core.lifecycle import State
from penstock.core.limits import Limit
from penstock.core.text import get_logger
from penstock.errors import PenstockError, StorageDamaged
from penstock.storage.sqlite import limits, statements
from penstock.storage.sqlite.clock import can_read_marks
from penstock.storage.sqlite.damage import (
    Damaged,
    find_among,
    find_any,
    has_unknown_states,
    is_sound,
    quarantine,
    recent,
    walk,
)
from penstock.storage.sqlite.eventlog import check_log
from penstock.storage.sqlite.links import deliver
from penstock.storage.sqlite.queuerow import any_text
from penstock.storage.sqlite.records import COMPLETED, FAILED, UNREADABLE, Record, unpack_failure
from penstock.storage.sqlite.transaction import Transaction
from penstock.storage.sqlite.unit import Unit
from penstock.storage.values import Checked

AT_MOST: Final = 10
"""The most records that are quarantined automatically within a minute."""
_ROUNDS: Final = AT_MOST + 2

Answer = TypeVar("Answer")
Place = tuple[str, str]

logger = get_logger("penstock.storage")
# Whole tables, because an orphan does not name its queue.
_ORPHANS: Final = (
    "payloads_without_job", "logs_without_job", "signals_without_job", "steps_without_job", "holds_without_job",
    "waiters_without_job",
)  # fmt: skip
_RECORDS: Final = (
    "active_without_lease", "finished_without_expiry", "dedup_without_job", "schedulers_without_job",
    "parents_without_job", "dependencies_without_job", "dependents_without_job",
)  # fmt: skip
_ENDS: Final = get_args(DependencyState)
_sql = statements("check")
_damage_sql = statements("damage")
_limits: Final = msgspec.json.Decoder(Limit)


def is_damage(error: Exception) -> bool:
    """Return whether an error may mean that stored values cannot be read."""
    if isinstance(error, sqlite3.Error):
        return isinstance(error, sqlite3.OperationalError) and "decode to UTF-8" in str(error)
    return not isinstance(error, PenstockError)


def repeat_mended(
    transaction: Transaction,
    place: Place,
    attempt: Callable[[Transaction, int], Answer],
    *,
    error: Exception,
    ids: Sequence[str],
) -> Answer:
    """Quarantine damaged records and repeat the call that failed with ``error``.

    ``ids`` are the jobs of the call: they are checked first, and quarantined whatever their number. Raise the error
    if nothing is damaged, and ``StorageDamaged`` if too much is.
    """
    mended = 0
    for _ in range(_ROUNDS + len(ids)):
        transaction.roll_back_call()
        count = _mend(transaction, place, ids)
        if count is None:
            raise error
        mended += count
        try:
            return attempt(transaction, mended)
        except Exception as again:
            if not is_damage(again):
                raise
            error = again
    raise error


def mend_all(transaction: Transaction, place: Place) -> dict[str, int]:
    """Quarantine all damaged records of a queue, and rebuild wrong indexes. Return the number of problems by kind."""
    # Indexes first: a record whose index entry differs cannot be changed.
    pages = check_pages(transaction.unit(*place), repair=True)
    total = _mend_values(transaction, place)
    for page in list(walk(transaction.unit(*place))):
        for damaged in page:
            _log_and_quarantine(transaction, place, damaged)
        total += len(page)
    if total:
        _recount(transaction, place)
    counts = {"damaged_jobs": total, "damaged_pages": pages}
    return {kind: count for kind, count in counts.items() if count}


def _mend(transaction: Transaction, place: Place, ids: Sequence[str]) -> int | None:
    """Mend the queue of the call or, if nothing is wrong there, another queue that it used.

    Return the number of quarantined records; ``None`` if nothing was wrong.
    """
    for candidate in (place, *(other for other in transaction.places() if other != place)):
        mended = _mend_queue(transaction, candidate, ids if candidate == place else ())
        if mended is not None:
            return mended
    return None


def _mend_queue(transaction: Transaction, place: Place, ids: Sequence[str]) -> int | None:
    values = _mend_values(transaction, place)
    records = _find(transaction, place, ids)
    for damaged in records:
        _log_and_quarantine(transaction, place, damaged)
    wrong = _recount(transaction, place)
    return len(records) if records or values or wrong else None


def _find(transaction: Transaction, place: Place, ids: Sequence[str]) -> list[Damaged]:
    unit = transaction.unit(*place)
    damaged = find_among(unit, ids) if ids else []
    if damaged:
        return damaged
    allowed = AT_MOST - recent(unit)
    damaged = find_any(unit, limit=max(allowed, 1))
    if damaged and allowed <= 0:
        raise _too_many(place, damaged[0])
    return damaged


def _log_and_quarantine(transaction: Transaction, place: Place, damaged: Damaged) -> None:
    logger.warning(
        "queue %s: the record of job %r cannot be read and was put aside as failed (Damaged): %s",
        place[1],
        damaged.record.id.encode("utf-8", "backslashreplace").decode(),
        damaged.why,
    )
    try:
        _quarantine(transaction, place, damaged, alone=False)
    except Exception as error:
        if not is_damage(error):
            raise
        # A linked job is damaged as well. Its own quarantine frees it.
        transaction.roll_back_call()
        _quarantine(transaction, place, damaged, alone=True)


def _quarantine(transaction: Transaction, place: Place, damaged: Damaged, *, alone: bool) -> None:
    unit = transaction.unit(*place)
    quarantine(unit, damaged, alone=alone)
    _accept(transaction, unit)


def _accept(transaction: Transaction, unit: Unit) -> None:
    """Take over the repair, so that it stays even if the call fails."""
    if unit.outbox:
        deliver(transaction, unit)
    transaction.accept(unit)
    transaction.keep_call()


def _mend_values(transaction: Transaction, place: Place) -> int:
    unit = transaction.unit(*place)
    problems = {kind: count for kind, count in check_values(unit, repair=True).items() if count}
    for kind, count in problems.items():
        logger.warning("queue %s: mended %s: %d", place[1], kind, count)
    _accept(transaction, unit)
    return sum(problems.values())


def _recount(transaction: Transaction, place: Place) -> int:
    """Correct the counts, and return how many were wrong. Damaged members of groups are counted later.

    While there are records of unknown states, the counts by state stay, because they show that jobs are missing.
    """
    unit = transaction.unit(*place)
    wrong = check_groups(unit, repair=True)
    if not has_unknown_states(unit):
        wrong += check_counts(unit, repair=True)
    _accept(transaction, unit)
    return wrong


def _too_many(place: Place, damaged: Damaged) -> StorageDamaged:
    return StorageDamaged(
        f"queue {place[1]!r}: {AT_MOST} records that cannot be read were put aside within a minute, and there are more "
        f"(job {damaged.record.id!r}: {damaged.why}). The rest stay where they are, because damage to many records "
        "has a common cause: find it, then run `penstock doctor --repair`, which puts all of them aside"
    )


# ``check``: compare every record with its tables and indexes


def check(unit: Unit, *, repair: bool) -> Checked:
    """Check everything, and repair it in the same transaction if ``repair``."""
    problems: Counter[str] = Counter()
    for kind in (*_ORPHANS, *_RECORDS):
        arguments = () if kind in _ORPHANS else (unit.queue.key,)
        problems[kind] = _one(unit, kind, *arguments)
        if repair and problems[kind]:
            unit.sql.execute(_sql[f"repair_{kind}"], arguments)
    problems["damaged_jobs"] = sum(map(len, walk(unit)))
    problems.update(check_values(unit, repair=repair))
    problems.update(check_log(unit, repair=repair))
    problems["wrong_counters"] = _check_counters(unit, repair=repair)
    problems["wrong_counts"] = check_counts(unit, repair=repair)
    problems["wrong_groups"] = check_groups(unit, repair=repair)
    problems["damaged_pages"] = check_pages(unit, repair=repair)
    return Checked(_one(unit, "records", unit.queue.key), dict(+problems), repair)


def _one(unit: Unit, statement: str, *arguments: object) -> int:
    return int(unit.sql.execute(_sql[statement], arguments).fetchone()[0])


def check_values(unit: Unit, *, repair: bool) -> dict[str, int]:
    """Count unreadable values beside the records.

    With ``repair``, reset settings to the defaults, remove limits, and fail dependencies.
    """
    return {
        "damaged_settings": _check_settings(unit, repair=repair),
        "damaged_clock": _check_clock(unit, repair=repair),
        "damaged_limits": _check_limits(unit, repair=repair),
        "damaged_dependencies": _check_dependencies(unit, repair=repair),
    }


def _check_settings(unit: Unit, *, repair: bool) -> int:
    if _can(lambda _: unit.queue.settings, None):
        return 0
    if repair:
        unit.queue.settings_json = "{}"
    return 1


def _check_clock(unit: Unit, *, repair: bool) -> int:
    if can_read_marks(unit.moment.packed_marks):
        return 0
    if repair:
        unit.moment = msgspec.structs.replace(unit.moment, packed_marks="")
    return 1


def _check_limits(unit: Unit, *, repair: bool) -> int:
    with any_text(unit.sql):
        rows = unit.sql.execute(_damage_sql["limits"], (unit.queue.key,)).fetchall()
    damaged = [key for key, value in rows if not _can(_limits.decode, value)]
    if repair:
        unit.sql.executemany(_damage_sql["drop_limit"], [(unit.queue.key, key) for key in damaged])
    return len(damaged)


def _check_dependencies(unit: Unit, *, repair: bool) -> int:
    with any_text(unit.sql):
        rows = unit.sql.execute(_damage_sql["edges"], (unit.queue.key,)).fetchall()
    damaged = [
        (policy if policy in POLICIES else "fail", state if state in _ENDS else "pending", key)
        for key, policy, state, failure in rows
        if policy not in POLICIES or state not in _ENDS or not _can(unpack_failure, failure)
    ]
    if repair:
        unit.sql.executemany(_damage_sql["mend_edge"], damaged)
    return len(damaged)


def _can(read: Callable[[Any], object], value: Any) -> bool:
    """Return whether a value can be read."""
    try:
        read(value)
    except UNREADABLE:
        return False
    return True


def _check_counters(unit: Unit, *, repair: bool) -> int:
    """Check that the two counters are not behind the numbers drawn from them."""
    queue = unit.queue
    seq, events = unit.sql.execute(_sql["drawn"], {"queue": queue.key}).fetchone()
    wrong = int(queue.seq < seq) + int(queue.events < events)
    if repair:
        queue.seq, queue.events = max(queue.seq, seq), max(queue.events, events)
    return wrong


def check_counts(unit: Unit, *, repair: bool) -> int:
    """Compare the counts by state with the records."""
    with any_text(unit.sql):
        counted = dict(unit.sql.execute(_sql["counts"], (unit.queue.key,)).fetchall())
        held = dict(unit.sql.execute(_sql["held_counts"], (unit.queue.key,)).fetchall())
    right = {state.value: counted.get(state.value, 0) for state in State}
    right |= {f"held_{state}": held.get(state, 0) for state in (COMPLETED, FAILED)}
    wrong = {name: count for name, count in right.items() if getattr(unit.queue, name) != count}
    if repair:
        for name, count in wrong.items():
            setattr(unit.queue, name, count)
    return len(wrong)


def check_groups(unit: Unit, *, repair: bool) -> int:
    """Compare the counts of groups and their blocked members with the jobs. Damaged jobs do not count."""
    members: defaultdict[str, list[Record]] = defaultdict(list)
    with any_text(unit.sql):
        rows = unit.sql.execute(_sql["members"], (unit.queue.key,)).fetchall()
    for record in unit.adopt(row for row in rows if is_sound(Record(*row))):
        if record.group_role:
            members[record.extras.group].append(record)
    for (key,) in unit.sql.execute(_sql["group_keys"], {"queue": unit.queue.key}).fetchall():
        members[key]  # Check groups without members too.
    return sum(not limits.recount(unit, key, records, repair=repair) for key, records in members.items())


def check_pages(unit: Unit, *, repair: bool) -> int:
    """Run SQLite's own check of the file: every row is in every index, and nothing else."""
    problems = [line for (line,) in unit.sql.execute("PRAGMA integrity_check") if line != "ok"]
    if problems and repair:
        unit.sql.execute("REINDEX")
    return len(problems)
