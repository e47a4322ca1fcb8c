"""What jobs used, and how much they may: a queue's usage and budgets, in the units they were reported in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.core.display import shown
from penstock.core.duration import Duration, milliseconds
from penstock.core.names import check_id
from penstock.core.usage import MILLION, amounts, check_usage_name
from penstock.errors import InvalidOption
from penstock.storage.values import Budget

if TYPE_CHECKING:
    from penstock.storage.values import Usage

__all__ = ["BudgetInfo", "UsageReport", "budget_info", "budget_of", "check_flow", "in_units", "usage_report"]

Amounts = Mapping[str, float]


class UsageReport(msgspec.Struct, frozen=True):
    """What was used, by name: in all, and by task, group and flow."""

    total: Amounts
    by_task: Mapping[str, Amounts]
    by_group: Mapping[str, Amounts]
    by_flow: Mapping[str, Amounts]


class BudgetInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A budget as it stands. ``renews_at``: when it begins from zero, if it does."""

    name: str
    amount: float
    spent: float
    flow: str
    renews_at: datetime | None

    @property
    def is_spent(self) -> bool:
        """Whether it holds further jobs back."""
        return self.spent >= self.amount


def in_units(micros: Mapping[str, int] | None) -> dict[str, float]:
    """Amounts as they were reported."""
    return {name: value / MILLION for name, value in (micros or {}).items()}


def usage_report(sums: Iterable[Usage]) -> UsageReport:
    """The sums of a queue, arranged."""
    found: dict[str, dict[str, dict[str, float]]] = {"queue": {}, "task": {}, "group": {}, "flow": {}}
    for one in sums:
        found[one.kind].setdefault(one.key, {})[one.name] = one.micros / MILLION
    return UsageReport(found["queue"].get("", {}), found["task"], found["group"], found["flow"])


def budget_of(name: str, amount: float, *, per: Duration | None, flow: str) -> Budget:
    """Raises ``InvalidOption`` for what is no amount or no period."""
    name = check_usage_name(name)
    micros = amounts({name: amount}).get(name, 0)
    per_ms = 0 if per is None else milliseconds(per, what="per")
    if per is not None and per_ms == 0:
        raise InvalidOption(
            f"per={shown(per)} is not a period. Give one such as '1d', or leave it out for all time."
        )
    return Budget(name, micros, per_ms, check_flow(flow))


def check_flow(flow: Any) -> str:
    """Return ``flow`` if it can name a flow; the empty text is none. Raise ``InvalidName`` otherwise."""
    return "" if isinstance(flow, str) and not flow else check_id(flow)


def budget_info(budget: Budget) -> BudgetInfo:
    """A budget for people."""
    return BudgetInfo(
        name=budget.name,
        amount=budget.micros / MILLION,
        spent=budget.spent / MILLION,
        flow=budget.flow,
        renews_at=datetime.fromtimestamp(budget.until_ms / 1000, UTC) if budget.until_ms else None,
    )
