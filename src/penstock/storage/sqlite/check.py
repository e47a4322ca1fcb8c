"""``check``: hold every record against the tables and indexes that belong to it, and mend what does not fit."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any, Final, get_args

import msgspec

from penstock.core.flow import DependencyState
from penstock.core.lifecycle import State
from penstock.core.limits import Limit
from penstock.storage.sqlite import admission
from penstock.storage.sqlite.damage import is_sound, walk
from penstock.storage.sqlite.eventlog import check_log
from penstock.storage.sqlite.queuerow import any_text
from penstock.storage.sqlite.records import COMPLETED, FAILED, Record, unpack_failure
from penstock.storage.sqlite.statements import statements
from penstock.storage.sqlite.step import Step
from penstock.storage.values import Checked

__all__ = ["check", "check_counts", "check_groups", "check_pages", "check_values"]

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


def check(step: Step, *, repair: bool) -> Checked:
    """Look at everything; repair in the same transaction if asked."""
    problems: Counter[str] = Counter()
    for kind in (*_ORPHANS, *_RECORDS):
        arguments = () if kind in _ORPHANS else (step.queue.key,)
        problems[kind] = _one(step, kind, *arguments)
        if repair and problems[kind]:
            step.sql.execute(_sql[f"repair_{kind}"], arguments)
    problems["damaged_jobs"] = sum(map(len, walk(step)))
    problems.update(check_values(step, repair=repair))
    problems.update(check_log(step, repair=repair))
    problems["wrong_counters"] = _check_counters(step, repair=repair)
    problems["wrong_counts"] = check_counts(step, repair=repair)
    problems["wrong_groups"] = check_groups(step, repair=repair)
    problems["damaged_pages"] = check_pages(step, repair=repair)
    return Checked(_one(step, "records", step.queue.key), dict(+problems), repair)


def _one(step: Step, statement: str, *arguments: object) -> int:
    return int(step.sql.execute(_sql[statement], arguments).fetchone()[0])


def check_values(step: Step, *, repair: bool) -> dict[str, int]:
    """Count values beside the records that cannot be read. Repaired, settings are the defaults, a limit is gone, and a
    dependency has failed."""
    return {
        "damaged_settings": _check_settings(step, repair=repair),
        "damaged_limits": _check_limits(step, repair=repair),
        "damaged_dependencies": _check_dependencies(step, repair=repair),
    }


def _check_settings(step: Step, *, repair: bool) -> int:
    if _can(lambda _: step.queue.settings, None):
        return 0
    if repair:
        step.queue.settings_json = "{}"
    return 1


def _check_limits(step: Step, *, repair: bool) -> int:
    with any_text(step.sql):
        rows = step.sql.execute(_damage_sql["limits"], (step.queue.key,)).fetchall()
    damaged = [key for key, value in rows if not _can(_limits.decode, value)]
    if repair:
        step.sql.executemany(_damage_sql["drop_limit"], [(step.queue.key, key) for key in damaged])
    return len(damaged)


def _check_dependencies(step: Step, *, repair: bool) -> int:
    with any_text(step.sql):
        rows = step.sql.execute(_damage_sql["edges"], (step.queue.key,)).fetchall()
    damaged = [
        (policy if policy in _POLICIES else "fail", state if state in _ENDS else "pending", key)
        for key, policy, state, failure in rows
        if policy not in _POLICIES or state not in _ENDS or not _can(unpack_failure, failure)
    ]
    if repair:
        step.sql.executemany(_damage_sql["mend_edge"], damaged)
    return len(damaged)


def _can(read: Callable[[Any], object], value: Any) -> bool:
    """Return whether a value can be read."""
    try:
        read(value)
    except (ValueError, TypeError, RecursionError):
        return False
    return True


def _check_counters(step: Step, *, repair: bool) -> int:
    """The two counters are never behind what was drawn from them."""
    queue = step.queue
    seq, events = step.sql.execute(_sql["drawn"], {"queue": queue.key}).fetchone()
    wrong = int(queue.seq < seq) + int(queue.events < events)
    if repair:
        queue.seq, queue.events = max(queue.seq, seq), max(queue.events, events)
    return wrong


def check_counts(step: Step, *, repair: bool) -> int:
    """Compare the counts by state with the records."""
    with any_text(step.sql):
        counted = dict(step.sql.execute(_sql["counts"], (step.queue.key,)).fetchall())
        held = dict(step.sql.execute(_sql["held_counts"], (step.queue.key,)).fetchall())
    right = {state.value: counted.get(state.value, 0) for state in State}
    right |= {f"held_{state}": held.get(state, 0) for state in (COMPLETED, FAILED)}
    wrong = {name: count for name, count in right.items() if getattr(step.queue, name) != count}
    if repair:
        for name, count in wrong.items():
            setattr(step.queue, name, count)
    return len(wrong)


def check_groups(step: Step, *, repair: bool) -> int:
    """Counts of groups, and their blocked members, held against the jobs; those that are damaged do not count."""
    members: defaultdict[str, list[Record]] = defaultdict(list)
    with any_text(step.sql):
        rows = step.sql.execute(_sql["members"], (step.queue.key,)).fetchall()
    for record in step.adopt(row for row in rows if is_sound(Record(*row))):
        if record.part:
            members[record.annex.group].append(record)
    for (key,) in step.sql.execute(_sql["group_keys"], {"queue": step.queue.key}).fetchall():
        members[key]  # Groups without members are looked at, too.
    return sum(not admission.recount(step, key, found, repair=repair) for key, found in members.items())


def check_pages(step: Step, *, repair: bool) -> int:
    """What SQLite itself says of the file: every row in every index, and nothing else in them."""
    found = [line for (line,) in step.sql.execute("PRAGMA integrity_check") if line != "ok"]
    if found and repair:
        step.sql.execute("REINDEX")
    return len(found)
