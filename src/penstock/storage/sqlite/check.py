"""``check``: hold every record against the tables and indexes that belong to it, and mend what does not fit."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Final

from penstock.core.job import DEFAULT_OPTIONS
from penstock.core.lifecycle import State
from penstock.storage.sqlite import admission
from penstock.storage.sqlite.records import COMPLETED, FAILED, Record
from penstock.storage.sqlite.statements import statements
from penstock.storage.sqlite.step import Step
from penstock.storage.values import Checked

__all__ = ["check"]

# Whole tables: an orphan does not say which queue it was of.
_ORPHANS: Final = (
    "payloads_without_job",
    "logs_without_job",
    "signals_without_job",
    "holds_without_job",
    "waiters_without_job",
)
_RECORDS: Final = (
    "jobs_without_payload",
    "active_without_lease",
    "finished_without_expiry",
    "dedup_without_job",
    "schedulers_without_job",
    "parents_without_job",
    "dependencies_without_job",
    "dependents_without_job",
)

_sql = statements("check")


def check(step: Step, *, repair: bool) -> Checked:
    """Look at everything; repair in the same transaction if asked."""
    problems: Counter[str] = Counter()
    for kind in (*_ORPHANS, *_RECORDS):
        arguments = () if kind in _ORPHANS else (step.queue.key,)
        problems[kind] = _one(step, kind, *arguments)
        if repair and problems[kind]:
            step.sql.execute(_sql[f"repair_{kind}"], arguments)
    problems["jobs_without_options"] = _check_options(step, repair=repair)
    problems["wrong_counts"] = _check_counts(step, repair=repair)
    problems["wrong_groups"] = _check_groups(step, repair=repair)
    problems["damaged_pages"] = _check_pages(step, repair=repair)
    return Checked(_one(step, "records", step.queue.key), dict(+problems), repair)


def _one(step: Step, statement: str, *arguments: object) -> int:
    return int(step.sql.execute(_sql[statement], arguments).fetchone()[0])


def _check_options(step: Step, *, repair: bool) -> int:
    """Jobs whose options are gone get the defaults."""
    found = _one(step, "jobs_without_options", step.queue.key)
    if found and repair:
        key, _ = step.intern(DEFAULT_OPTIONS)
        step.sql.execute(_sql["repair_jobs_without_options"], (key, step.queue.key))
    return found


def _check_counts(step: Step, *, repair: bool) -> int:
    counted = dict(step.sql.execute(_sql["counts"], (step.queue.key,)).fetchall())
    held = dict(step.sql.execute(_sql["held_counts"], (step.queue.key,)).fetchall())
    right = {state.value: counted.get(state.value, 0) for state in State}
    right |= {f"held_{state}": held.get(state, 0) for state in (COMPLETED, FAILED)}
    wrong = {name: count for name, count in right.items() if getattr(step.queue, name) != count}
    if repair:
        for name, count in wrong.items():
            setattr(step.queue, name, count)
    return len(wrong)


def _check_groups(step: Step, *, repair: bool) -> int:
    """Counts of groups, and their blocked members, held against the jobs."""
    members: defaultdict[str, list[Record]] = defaultdict(list)
    for record in step.adopt(step.sql.execute(_sql["members"], (step.queue.key,)).fetchall()):
        if record.part:
            members[record.annex.group].append(record)
    for (key,) in step.sql.execute(_sql["group_keys"], {"queue": step.queue.key}).fetchall():
        members[key]  # Groups without members are looked at, too.
    return sum(not admission.recount(step, key, found, repair=repair) for key, found in members.items())


def _check_pages(step: Step, *, repair: bool) -> int:
    """What SQLite itself says of the file: every row in every index, and nothing else in them."""
    found = [line for (line,) in step.sql.execute("PRAGMA integrity_check") if line != "ok"]
    if found and repair:
        step.sql.execute("REINDEX")
    return len(found)
