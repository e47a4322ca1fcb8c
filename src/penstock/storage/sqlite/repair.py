"""Going on after a call could not read what it found: what is damaged is put aside, and the call is repeated.

Few records are put aside by themselves within a minute. Many damaged records have a cause in common, and a worker
that cannot read any record must not bury a whole queue.
"""

from __future__ import annotations

import sqlite3
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar, get_args

import msgspec

from penstock.core.flow import DependencyState
from penstock.core.lifecycle import State
from penstock.core.limits import Limit
from penstock.core.text import get_logger
from penstock.errors import PenstockError, StorageDamaged
from penstock.storage.sqlite import admission
from penstock.storage.sqlite.damage import (
    Found,
    find_among,
    find_any,
    has_unknown_states,
    is_sound,
    quarantine,
    recent,
    walk,
)
from penstock.storage.sqlite.deliver import deliver
from penstock.storage.sqlite.eventlog import check_log
from penstock.storage.sqlite.queuerow import any_text
from penstock.storage.sqlite.records import COMPLETED, FAILED, Record, unpack_failure
from penstock.storage.sqlite.statements import statements
from penstock.storage.sqlite.transaction import Transaction
from penstock.storage.sqlite.unit import Unit
from penstock.storage.values import Checked

AT_MOST: Final = 10
"""Records that are put aside within a minute without anybody asking for it."""
_ROUNDS: Final = AT_MOST + 2

Answer = TypeVar("Answer")
Place = tuple[str, str]

logger = get_logger("penstock.storage")


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
    """Repeat a call that failed with ``error``, after the damaged records were put aside.

    ``ids`` are those the call is about: they are looked at first, and put aside however many they are. Raises the
    error if nothing is damaged, and ``StorageDamaged`` if too much is.
    """
    mended = 0
    for _ in range(_ROUNDS + len(ids)):
        transaction.roll_back_call()
        found = _mend(transaction, place, ids)
        if found is None:
            raise error
        mended += found
        try:
            return attempt(transaction, mended)
        except Exception as again:
            if not is_damage(again):
                raise
            error = again
    raise error


def mend_all(transaction: Transaction, place: Place) -> dict[str, int]:
    """Put all damaged records of a queue aside, and rebuild its indexes if they differ; how much there was of each."""
    # The indexes first: a record cannot be changed if its index says something else of it.
    pages = check_pages(transaction.unit(*place), repair=True)
    total = _mend_values(transaction, place)
    for found in list(walk(transaction.unit(*place))):
        for one in found:
            _put_aside(transaction, place, one)
        total += len(found)
    if total:
        _recount(transaction, place)
    counts = {"damaged_jobs": total, "damaged_pages": pages}
    return {kind: count for kind, count in counts.items() if count}


def _mend(transaction: Transaction, place: Place, ids: Sequence[str]) -> int | None:
    """Mend the queue of the call or, if nothing is wrong there, one that the call had something to say to; how many
    records were put aside, ``None`` if nothing was wrong."""
    for one in (place, *(other for other in transaction.places() if other != place)):
        mended = _mend_queue(transaction, one, ids if one == place else ())
        if mended is not None:
            return mended
    return None


def _mend_queue(transaction: Transaction, place: Place, ids: Sequence[str]) -> int | None:
    values = _mend_values(transaction, place)
    found = _find(transaction, place, ids)
    for one in found:
        _put_aside(transaction, place, one)
    wrong = _recount(transaction, place)
    return len(found) if found or values or wrong else None


def _find(transaction: Transaction, place: Place, ids: Sequence[str]) -> list[Found]:
    unit = transaction.unit(*place)
    found = find_among(unit, ids) if ids else []
    if found:
        return found
    allowed = AT_MOST - recent(unit)
    found = find_any(unit, limit=max(allowed, 1))
    if found and allowed <= 0:
        raise _too_many(place, found[0])
    return found


def _put_aside(transaction: Transaction, place: Place, found: Found) -> None:
    logger.warning(
        "queue %s: the record of job %r cannot be read and was put aside as failed (Damaged): %s",
        place[1],
        found.record.id.encode("utf-8", "backslashreplace").decode(),
        found.why,
    )
    try:
        _quarantine(transaction, place, found, alone=False)
    except Exception as error:
        if not is_damage(error):
            raise
        # A job that it is tied to is damaged as well. That one frees itself when its turn comes.
        transaction.roll_back_call()
        _quarantine(transaction, place, found, alone=True)


def _quarantine(transaction: Transaction, place: Place, found: Found, *, alone: bool) -> None:
    unit = transaction.unit(*place)
    quarantine(unit, found, alone=alone)
    _accept(transaction, unit)


def _accept(transaction: Transaction, unit: Unit) -> None:
    """Take over what was mended, so that it stays even if the call fails after all."""
    if unit.outbox:
        deliver(transaction, unit)
    transaction.accept(unit)
    transaction.keep_call()


def _mend_values(transaction: Transaction, place: Place) -> int:
    unit = transaction.unit(*place)
    found = {kind: count for kind, count in check_values(unit, repair=True).items() if count}
    for kind, count in found.items():
        logger.warning("queue %s: mended %s: %d", place[1], kind, count)
    _accept(transaction, unit)
    return sum(found.values())


def _recount(transaction: Transaction, place: Place) -> int:
    """Make the counts agree with the records; how many did not. Damaged members of groups have their turn later.

    While there are records of unknown states, the counts by state are left alone: they tell that jobs are missing.
    """
    unit = transaction.unit(*place)
    wrong = check_groups(unit, repair=True)
    if not has_unknown_states(unit):
        wrong += check_counts(unit, repair=True)
    _accept(transaction, unit)
    return wrong


def _too_many(place: Place, found: Found) -> StorageDamaged:
    return StorageDamaged(
        f"queue {place[1]!r}: {AT_MOST} records that cannot be read were put aside within a minute, and there are more "
        f"(job {found.record.id!r}: {found.why}). The rest stay where they are, because damage to many records "
        "has a common cause: find it, then run `penstock doctor --repair`, which puts all of them aside"
    )


# ``check``: hold every record against the tables and indexes that belong to it, and mend what does not
# fit.


# Whole tables: an orphan does not say which queue it was of.
_ORPHANS: Final = (
    "payloads_without_job",
    "logs_without_job",
    "signals_without_job",
    "holds_without_job",
    "waiters_without_job",
)
_RECORDS: Final = (
    "active_without_lease",
    "finished_without_expiry",
    "dedup_without_job",
    "schedulers_without_job",
    "parents_without_job",
    "dependencies_without_job",
    "dependents_without_job",
)

_POLICIES: Final = ("fail", "ignore", "wait")
_ENDS: Final = get_args(DependencyState)

_sql = statements("check")
_damage_sql = statements("damage")
_limits: Final = msgspec.json.Decoder(Limit)


def check(unit: Unit, *, repair: bool) -> Checked:
    """Look at everything; repair in the same transaction if asked."""
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
    """Count values beside the records that cannot be read. Repaired, settings are the defaults, a limit is gone, and a
    dependency has failed."""
    return {
        "damaged_settings": _check_settings(unit, repair=repair),
        "damaged_limits": _check_limits(unit, repair=repair),
        "damaged_dependencies": _check_dependencies(unit, repair=repair),
    }


def _check_settings(unit: Unit, *, repair: bool) -> int:
    if _can(lambda _: unit.queue.settings, None):
        return 0
    if repair:
        unit.queue.settings_json = "{}"
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
        (policy if policy in _POLICIES else "fail", state if state in _ENDS else "pending", key)
        for key, policy, state, failure in rows
        if policy not in _POLICIES or state not in _ENDS or not _can(unpack_failure, failure)
    ]
    if repair:
        unit.sql.executemany(_damage_sql["mend_edge"], damaged)
    return len(damaged)


def _can(read: Callable[[Any], object], value: Any) -> bool:
    """Return whether a value can be read."""
    try:
        read(value)
    except (ValueError, TypeError, RecursionError):
        return False
    return True


def _check_counters(unit: Unit, *, repair: bool) -> int:
    """The two counters are never behind what was drawn from them."""
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
    """Counts of groups, and their blocked members, held against the jobs; those that are damaged do not count."""
    members: defaultdict[str, list[Record]] = defaultdict(list)
    with any_text(unit.sql):
        rows = unit.sql.execute(_sql["members"], (unit.queue.key,)).fetchall()
    for record in unit.adopt(row for row in rows if is_sound(Record(*row))):
        if record.group_role:
            members[record.extras.group].append(record)
    for (key,) in unit.sql.execute(_sql["group_keys"], {"queue": unit.queue.key}).fetchall():
        members[key]  # Groups without members are looked at, too.
    return sum(not admission.recount(unit, key, found, repair=repair) for key, found in members.items())


def check_pages(unit: Unit, *, repair: bool) -> int:
    """What SQLite itself says of the file: every row in every index, and nothing else in them."""
    found = [line for (line,) in unit.sql.execute("PRAGMA integrity_check") if line != "ok"]
    if found and repair:
        unit.sql.execute("REINDEX")
    return len(found)
