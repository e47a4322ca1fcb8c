"""Budgets: how much may be used, of a queue or a flow, before further jobs are held back."""

from __future__ import annotations

from typing import NamedTuple

from penstock.storage.metrics import KeptBudget, flow_scope
from penstock.storage.sqlite.statements import statements
from penstock.storage.sqlite.unit import Step
from penstock.storage.values import Budget

_sql = statements("usage")


class Spent(NamedTuple):
    """``over``: nothing more is to be claimed; ``wait_ms`` until that may change by itself, if it may."""

    over: bool
    wait_ms: int | None = None


def _rows(step: Step) -> list[KeptBudget]:
    return [KeptBudget(*row) for row in step.sql.execute(_sql["budgets"], (step.queue.key,))]


def look(step: Step, scope: str = "") -> Spent:
    """Whether the budgets of a scope let a job begin now."""
    over, waits = False, list[int]()
    for row in _rows(step):
        if row.scope == scope and row.is_over(step.now_ms):
            over = True
            waits += [row.since + row.per_ms - step.now_ms] if row.per_ms else []
    return Spent(over, max(waits) if waits else None)


def renew(step: Step) -> None:
    """Begin the periods anew that have ended. To be called before something is added to the sums."""
    for row in _rows(step):
        if row.is_past(step.now_ms):
            began = (row.total, row.began(step.now_ms), step.queue.key, row.scope, row.name)
            step.sql.execute(_sql["renew_budget"], began)


def set_budget(step: Step, budget: Budget) -> None:
    """Set or replace one."""
    scope = flow_scope(budget.flow)
    found = step.sql.execute(_sql["sum"], (step.queue.key, scope, budget.name)).fetchone()
    base = found[0] if found and budget.per_ms else 0
    row = (step.queue.key, scope, budget.name, budget.micros, budget.per_ms, base, step.now_ms)
    step.sql.execute(_sql["set_budget"], row)
    step.queue.has_budgets = 1
    step.wakes.add("w")


def remove_budget(step: Step, name: str, flow: str) -> bool:
    """Whether there was one."""
    scope = flow_scope(flow)
    removed = step.sql.execute(_sql["remove_budget"], (step.queue.key, scope, name)).rowcount > 0
    left = step.sql.execute(_sql["budgets_left"], (step.queue.key,)).fetchone()[0]
    step.queue.has_budgets = int(left > 0)
    step.wakes.add("w")
    return removed


def zero(step: Step) -> None:
    """The sums begin from zero."""
    step.sql.execute(_sql["zero_budgets"], (step.queue.key,))
    step.wakes.add("w")


def budgets(step: Step) -> list[Budget]:
    """All of them."""
    return [row.shown(step.now_ms) for row in _rows(step)]
