"""What usage is summed by: the queue, the task, the group, the flow. And how a budget is counted."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Literal, NamedTuple

from penstock.core.annex import Annex
from penstock.storage.values import Budget, Usage

__all__ = ["KEPT_DAYS", "KeptBudget", "flow_scope", "read_usage", "scopes_of"]

KEPT_DAYS: Final = 30

_KINDS: Final[dict[str, Literal["queue", "task", "group", "flow"]]] = {
    "": "queue",
    "t": "task",
    "g": "group",
    "f": "flow",
}


class KeptBudget(NamedTuple):
    """A budget as it is stored: ``base`` is what the sum was when its period began, ``since`` when that was."""

    scope: str
    name: str
    micros: int
    per_ms: int
    base: int
    since: int
    total: int

    def is_past(self, now_ms: int) -> bool:
        """Whether its period has ended: the next one begins with nothing spent."""
        return self.per_ms > 0 and self.since + self.per_ms <= now_ms

    def is_over(self, now_ms: int) -> bool:
        return not self.is_past(now_ms) and self.total - self.base >= self.micros

    def began(self, now_ms: int) -> int:
        """When the period of ``now_ms`` began."""
        return now_ms - (now_ms - self.since) % self.per_ms if self.per_ms else self.since

    def shown(self, now_ms: int) -> Budget:
        """As users see it."""
        spent = 0 if self.is_past(now_ms) else self.total - self.base
        until_ms = self.began(now_ms) + self.per_ms if self.per_ms else 0
        return Budget(self.name, self.micros, self.per_ms, self.scope[2:], spent, until_ms)


def flow_scope(flow: str) -> str:
    """The scope of a flow; that of the queue if there is none."""
    return f"f:{flow}" if flow else ""


def scopes_of(task: str, annex: Annex) -> list[str]:
    """The sums that what this job uses is added to."""
    scopes = [""]
    if task:
        scopes.append(f"t:{task}")
    if annex.group:
        scopes.append(f"g:{annex.group}")
    if annex.flow:
        scopes.append(f"f:{annex.flow}")
    return scopes


def read_usage(rows: Iterable[tuple[str, str, int]]) -> list[Usage]:
    """Sums from scope, name and millionths, in the order the contract says."""
    order = list(_KINDS)
    found = [(*scope.partition(":")[::2], name, micros) for scope, name, micros in rows]
    found.sort(key=lambda row: (order.index(row[0]), *row[1:]))
    return [Usage(_KINDS[kind], key, name, micros) for kind, key, name, micros in found]
