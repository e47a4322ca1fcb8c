"""Usage: sums by queue, task, group and flow, and each job's own amounts in its extras."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from penstock.core.job import DAY_MS
from penstock.core.lifecycle import EventType
from penstock.storage.metrics import KEPT_DAYS, read_usage, scopes_of
from penstock.storage.sqlite.budgets import renew, zero
from penstock.storage.sqlite.queuerow import View
from penstock.storage.sqlite.records import Record
from penstock.storage.sqlite.statements import statements
from penstock.storage.sqlite.unit import Unit
from penstock.storage.values import Usage

_USED: Final = EventType.USED.value

_sql = statements("usage")
_json = msgspec.json.Encoder()


def add_usage(unit: Unit, record: Record, used: Mapping[str, int]) -> None:
    """Add the usage of a running job to its own amounts and to all sums that include it."""
    if unit.queue.has_budgets:
        renew(unit)
    extras = record.extras
    own = dict(extras.usage or {})
    for name, micros in used.items():
        own[name] = own.get(name, 0) + micros
    record.extras = msgspec.structs.replace(extras, usage=own)
    rows = [
        (unit.queue.key, scope, name, micros, unit.now_ms)
        for scope in scopes_of(record.options.task, extras)
        for name, micros in used.items()
    ]
    unit.sql.executemany(_sql["add"], rows)
    unit.note(_USED, record, run=record.runs, data=_json.encode(dict(sorted(used.items()))).decode())


def usage(view: View) -> list[Usage]:
    """Return all sums of a queue."""
    return read_usage(view.sql.execute(_sql["read"], (view.queue.key,)))


def reset_usage(unit: Unit) -> None:
    """Forget all sums."""
    unit.sql.execute(_sql["reset"], (unit.queue.key,))
    zero(unit)


def forget_usage(unit: Unit) -> None:
    """Forget sums that have not grown for a long time."""
    unit.sql.execute(_sql["forget"], (unit.queue.key, unit.now_ms - unit.moment.hole[0] - KEPT_DAYS * DAY_MS))
