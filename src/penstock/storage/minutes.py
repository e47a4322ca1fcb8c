"""Per-minute metrics: which minutes are told, and how the events of a call are counted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from penstock.core.lifecycle import EventType
from penstock.storage.values import Minute

__all__ = ["DAY_MINUTES", "MINUTE_MS", "counted", "latest"]

MINUTE_MS: Final = 60_000
DAY_MINUTES: Final = 1440

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
    """Those of the last ``last_ms``, at most 24 hours, in order."""
    present_ms = now_ms // MINUTE_MS * MINUTE_MS
    first_ms = max(now_ms - last_ms - MINUTE_MS + 1, present_ms - (DAY_MINUTES - 1) * MINUTE_MS)
    return sorted((minute for minute in minutes if minute.at_ms >= first_ms), key=lambda minute: minute.at_ms)


def counted(
    minute: Minute, groups: Iterable[tuple[tuple[str, ...], Sequence[tuple[Any, ...]]]]
) -> Minute | None:
    """``minute`` with these events, each group a type and names of columns, and rows; ``None`` if none counts."""
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
