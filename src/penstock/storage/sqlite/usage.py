"""Usage: sums by queue, task, group and flow, and each job's own amounts in its extras. Budgets: how much a queue or
a flow may use before its jobs are held back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from penstock.core.lifecycle import EventType
from penstock.storage.bounds import USAGE_KEPT_MS
from penstock.storage.metrics import KeptBudget, flow_scope, read_usage, scopes_of
from penstock.storage.sqlite import statements
from penstock.storage.sqlite.queuerow import View
from penstock.storage.sqlite.records import Record
from penstock.storage.sqlite.unit import Unit
from penstock.storage.values import Budget, Usage

_sql = statements("usage")
_json = msgspec.json.Encoder()


class Spent(NamedTuple):
    """``over``: no job may start; ``wait_ms``: the time until that may change by itself, if it may."""

    over: bool
    wait_ms: int | None = None


def _rows(unit: Unit) -> list[KeptBudget]:
    return [KeptBudget(*row) for row in unit.sql.execute(_sql["budgets"], (unit.queue.key,))]


def check_budgets(unit: Unit, scope: str = "") -> Spent:
    """Return whether the budgets of a scope are spent."""
    over, waits = False, list[int]()
    for row in _rows(unit):
        if row.scope == scope and row.is_over(unit.now_ms):
            over = True
            waits += [row.since + row.per_ms - unit.now_ms] if row.per_ms else []
    return Spent(over, max(waits) if waits else None)


def renew_budgets(unit: Unit) -> None:
    """Begin new periods where they have ended. Call it before adding to the sums."""
    for row in _rows(unit):
        if row.is_past(unit.now_ms):
            began = (row.total, row.began(unit.now_ms), unit.queue.key, row.scope, row.name)
            unit.sql.execute(_sql["renew_budget"], began)


def set_budget(unit: Unit, budget: Budget) -> None:
    """Set or replace a budget. One with the same period goes on with it."""
    renew_budgets(unit)
    scope = flow_scope(budget.flow)
    known = [row for row in _rows(unit) if (row.scope, row.name) == (scope, budget.name)]
    if budget.per_ms and known and known[0].per_ms == budget.per_ms:
        base, since = known[0].base, known[0].since
    else:
        total = unit.sql.execute(_sql["sum"], (unit.queue.key, scope, budget.name)).fetchone()
        base, since = total[0] if total and budget.per_ms else 0, unit.now_ms
    row = (unit.queue.key, scope, budget.name, budget.micros, budget.per_ms, base, since)
    unit.sql.execute(_sql["set_budget"], row)
    unit.queue.has_budgets = 1
    unit.wakes.add("w")


def remove_budget(unit: Unit, name: str, *, flow: str = "") -> bool:
    """Remove a budget. Return whether it existed."""
    scope = flow_scope(flow)
    removed = unit.sql.execute(_sql["remove_budget"], (unit.queue.key, scope, name)).rowcount > 0
    left = unit.sql.execute(_sql["budgets_left"], (unit.queue.key,)).fetchone()[0]
    unit.queue.has_budgets = int(left > 0)
    unit.wakes.add("w")
    return removed


def zero_budgets(unit: Unit) -> None:
    """Reset the amounts spent, together with the sums."""
    unit.sql.execute(_sql["zero_budgets"], (unit.queue.key,))
    unit.wakes.add("w")


def budgets(unit: Unit) -> list[Budget]:
    """Return all budgets."""
    return [row.shown(unit.now_ms) for row in _rows(unit)]


def add_usage(unit: Unit, record: Record, used: Mapping[str, int]) -> None:
    """Add the usage of a running job to its own amounts and to all sums that include it."""
    if unit.queue.has_budgets:
        renew_budgets(unit)
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
    unit.note(EventType.USED, record, run=record.runs, data=_json.encode(dict(sorted(used.items()))).decode())


def usage(view: View) -> list[Usage]:
    """Return all sums of a queue."""
    return read_usage(view.sql.execute(_sql["read"], (view.queue.key,)))


def reset_usage(unit: Unit) -> None:
    """Forget all sums."""
    unit.sql.execute(_sql["reset"], (unit.queue.key,))
    zero_budgets(unit)


def forget_usage(unit: Unit) -> None:
    """Forget sums that have not grown for a long time."""
    unit.sql.execute(_sql["forget"], (unit.queue.key, unit.now_ms - unit.moment.lag[0] - USAGE_KEPT_MS))
