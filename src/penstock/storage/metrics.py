"""Metrics per minute, usage and budgets: the arithmetic that the engines share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal, NamedTuple

import msgspec

from penstock.core.job import Extras
from penstock.core.lifecycle import EventType
from penstock.storage.bounds import DAY_MINUTES, MINUTE_MS
from penstock.storage.values import Budget, Usage


class Minute(msgspec.Struct, frozen=True, array_like=True):
    """The activity of one minute of a queue, which began at ``at_ms``.

    ``wait_ms`` and ``run_ms`` are sums over the claimed jobs and over the runs that ended; ``longest_*`` are the
    longest of each. ``failed`` counts jobs, including those past their ttl; ``retried`` counts failed runs with
    attempts left.
    """

    at_ms: int
    enqueued: int = 0
    claimed: int = 0
    completed: int = 0
    failed: int = 0
    retried: int = 0
    wait_ms: int = 0
    longest_wait_ms: int = 0
    run_ms: int = 0
    longest_run_ms: int = 0

    @property
    def mean_wait_ms(self) -> float:
        return self.wait_ms / self.claimed if self.claimed else 0.0

    @property
    def mean_run_ms(self) -> float:
        ended = self.completed + self.failed + self.retried
        return self.run_ms / ended if ended else 0.0


_COUNTED: Final = {
    EventType.ENQUEUED.value: "enqueued",
    EventType.CLAIMED.value: "claimed",
    EventType.COMPLETED.value: "completed",
    EventType.FAILED.value: "failed",
    EventType.EXPIRED.value: "failed",
    EventType.RETRYING.value: "retried",
}
_TIMES: Final = {"wait": ("wait_ms", "longest_wait_ms"), "ms": ("run_ms", "longest_run_ms")}


def latest(minutes: Iterable[Minute], *, last_ms: int, now_ms: int) -> list[Minute]:
    """Return the minutes of the last ``last_ms``, at most 24 hours, in order."""
    present_ms = now_ms // MINUTE_MS * MINUTE_MS
    first_ms = max(now_ms - last_ms - MINUTE_MS + 1, present_ms - (DAY_MINUTES - 1) * MINUTE_MS)
    return sorted((minute for minute in minutes if minute.at_ms >= first_ms), key=lambda minute: minute.at_ms)


def counted(
    minute: Minute, groups: Iterable[tuple[tuple[str, ...], Sequence[tuple[Any, ...]]]]
) -> Minute | None:
    """Return ``minute`` with these events added; ``None`` if none of them counts.

    A group of events is a type and the names of its columns, with a list of rows.
    """
    sums: dict[str, int] = {}
    for (kind, *columns), rows in groups:
        name = _COUNTED.get(kind)
        if name is None:
            continue
        sums[name] = sums.get(name, getattr(minute, name)) + len(rows)
        for column, (total, longest) in _TIMES.items():
            if column in columns:
                at = columns.index(column)
                times = [row[at] for row in rows]
                sums[total] = sums.get(total, getattr(minute, total)) + sum(times)
                sums[longest] = max(sums.get(longest, getattr(minute, longest)), *times)
    if not sums:
        return None
    return Minute(minute.at_ms, *(sums.get(name, getattr(minute, name)) for name in _FIELDS))


_FIELDS: Final = Minute.__struct_fields__[1:]


# Usage and budgets

_KINDS: Final[dict[str, Literal["queue", "task", "group", "flow"]]] = {
    "": "queue",
    "t": "task",
    "g": "group",
    "f": "flow",
}


class KeptBudget(NamedTuple):
    """A budget as it is stored. ``base`` is the sum at the start of its period, ``since`` the time of that."""

    scope: str
    name: str
    micros: int
    per_ms: int
    base: int
    since: int
    total: int

    def is_past(self, now_ms: int) -> bool:
        """Return whether the period has ended, so that nothing is spent of the next one."""
        return self.per_ms > 0 and self.since + self.per_ms <= now_ms

    def is_over(self, now_ms: int) -> bool:
        return not self.is_past(now_ms) and self.total - self.base >= self.micros

    def began(self, now_ms: int) -> int:
        """Return when the period of ``now_ms`` began."""
        return now_ms - (now_ms - self.since) % self.per_ms if self.per_ms else self.since

    def shown(self, now_ms: int) -> Budget:
        """Return the budget as users see it."""
        spent = 0 if self.is_past(now_ms) else self.total - self.base
        until_ms = self.began(now_ms) + self.per_ms if self.per_ms else 0
        return Budget(self.name, self.micros, self.per_ms, self.scope[2:], spent, until_ms)


def flow_scope(flow: str) -> str:
    """Return the scope of a flow, or that of the queue if ``flow`` is empty."""
    return f"f:{flow}" if flow else ""


def scopes_of(task: str, extras: Extras) -> list[str]:
    """Return the scopes whose sums include the job's usage."""
    scopes = [""]
    if task:
        scopes.append(f"t:{task}")
    if extras.group:
        scopes.append(f"g:{extras.group}")
    if extras.flow:
        scopes.append(f"f:{extras.flow}")
    return scopes


def read_usage(rows: Iterable[tuple[str, str, int]]) -> list[Usage]:
    """Return the sums of (scope, name, millionths) in the order of the contract."""
    order = list(_KINDS)
    sums = [(*scope.partition(":")[::2], name, micros) for scope, name, micros in rows]
    sums.sort(key=lambda row: (order.index(row[0]), *row[1:]))
    return [Usage(_KINDS[kind], key, name, micros) for kind, key, name, micros in sums]
