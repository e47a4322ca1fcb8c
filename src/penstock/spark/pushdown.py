"""Filters of a query that a read applies by itself, so that it reads less.

Spark hands them over where its session allows (``spark.sql.python.filterPushdown.enabled``, from pyspark 4.1).
Elsewhere it refuses any reader with a ``pushFilters`` of its own; as ours only saves work, it passes for the base's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeAlias

import msgspec
from pyspark.sql.datasource import DataSourceReader

__all__ = ["Pushed", "Pushing", "Times", "narrowed", "within"]

Filters: TypeAlias = Sequence[Any]

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND: Final = timedelta(milliseconds=1)


class Pushing:
    """What a reader has as ``pushFilters``: takes filters, and gives back those that Spark is to apply."""

    def __init__(self, push: Callable[[Filters], Iterable[Any]]) -> None:
        self._push = push
        self.__func__ = getattr(DataSourceReader, "pushFilters", None)

    def __call__(self, filters: Filters) -> Iterable[Any]:
        return self._push(filters)


class Pushed(msgspec.Struct, frozen=True, kw_only=True):
    """What columns may be; ``None`` for one that may be anything."""

    queue: frozenset[str] | None = None
    id: frozenset[str] | None = None
    state: frozenset[str] | None = None


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """Events from ``since_ms`` on, and before ``until_ms``; ``None`` for no bound."""

    since_ms: int | None = None
    until_ms: int | None = None


def narrowed(filters: Filters, columns: Iterable[str]) -> tuple[Pushed, list[Any]]:
    """What the equalities (``=``, ``IN``) on these text columns leave, and the filters that are something else."""
    values: dict[str, frozenset[str]] = {}
    others: list[Any] = []
    for filter in filters:
        column, allowed = _equality(filter)
        if allowed is None or column not in columns:
            others.append(filter)
        else:
            values[column] = allowed & values.get(column, allowed)
    return Pushed(**values), others


def within(filters: Filters, column: str) -> Times:
    """The milliseconds in which all instants are that the comparisons of ``column`` with times let pass; Spark is to
    apply them all the same, for it knows the microseconds."""
    from pyspark.sql.datasource import GreaterThan, GreaterThanOrEqual, LessThan, LessThanOrEqual

    since: list[int] = []
    until: list[int] = []
    for filter in filters:
        if getattr(filter, "attribute", None) != (column,) or not _is_instant(getattr(filter, "value", None)):
            continue
        at_ms = max((filter.value - _EPOCH) // _MILLISECOND, 0)
        if isinstance(filter, (GreaterThan, GreaterThanOrEqual)):
            since.append(at_ms)
        elif isinstance(filter, (LessThan, LessThanOrEqual)):
            until.append(at_ms + 1)
    return Times(since_ms=max(since, default=None), until_ms=min(until, default=None))


def _equality(filter: Any) -> tuple[str, frozenset[str] | None]:
    """The column that is to be one of some texts, and these; ``None`` for any other filter."""
    from pyspark.sql.datasource import EqualTo, In

    match filter:
        case EqualTo(attribute=(column,), value=str() as value):
            return column, frozenset({value})
        case In(attribute=(column,), value=[*values]):
            # Nothing equals null, so it adds nothing.
            texts = [value for value in values if value is not None]
            return column, frozenset(texts) if all(isinstance(value, str) for value in texts) else None
        case _:
            return "", None


def _is_instant(value: Any) -> bool:
    return isinstance(value, datetime) and value.tzinfo is not None
