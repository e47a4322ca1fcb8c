"""What jobs used: sums by queue, task, group and flow, and each job's own in its annex."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from typing import Final

import msgspec

from penstock.core.job import DAY_MS
from penstock.core.lifecycle import EventType
from penstock.storage.metrics import KEPT_DAYS, read_usage, scopes_of
from penstock.storage.sqlite.budgets import renew, zero
from penstock.storage.sqlite.records import Record
from penstock.storage.sqlite.statements import statements
from penstock.storage.sqlite.unit import Step
from penstock.storage.values import Usage

_USED: Final = EventType.USED.value

_sql = statements("usage")
_json = msgspec.json.Encoder()


def add_usage(step: Step, record: Record, used: Mapping[str, int]) -> None:
    """Add what a running job used to its own and to all sums it belongs to."""
    if step.queue.has_budgets:
        renew(step)
    extras = record.extras
    own = dict(extras.usage or {})
    for name, micros in used.items():
        own[name] = own.get(name, 0) + micros
    record.extras = msgspec.structs.replace(extras, usage=own)
    rows = [
        (step.queue.key, scope, name, micros, step.now_ms)
        for scope in scopes_of(record.options.task, extras)
        for name, micros in used.items()
    ]
    step.sql.executemany(_sql["add"], rows)
    step.note(_USED, record, run=record.runs, data=_json.encode(dict(sorted(used.items()))).decode())


def usage(sql: sqlite3.Connection, namespace: str, queue: str) -> list[Usage]:
    """All sums of a queue."""
    return read_usage(sql.execute(_sql["read"], (namespace, queue)))


def reset_usage(step: Step) -> None:
    """Forget all sums."""
    step.sql.execute(_sql["reset"], (step.queue.key,))
    zero(step)


def forget_usage(step: Step) -> None:
    """Forget sums that nothing was added to for long."""
    step.sql.execute(_sql["forget"], (step.queue.key, step.now_ms - step.moment.hole[0] - KEPT_DAYS * DAY_MS))
