"""The events of a transaction, gathered in columns until they are packed into one entry per queue."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.core.event import pack
from penstock.storage.sqlite.records import Record

__all__ = ["EventNotes"]

_JOB_COLUMNS = ("at", "id", "inc", "enq", "rid", "task", "ver", "st")


class EventNotes:
    """Events in the order they happened. Neighbours of one type and one set of columns share a group."""

    __slots__ = ("_groups", "count")

    def __init__(self) -> None:
        self.count = 0
        self._groups: list[tuple[tuple[str, ...], list[tuple[Any, ...]]]] = []

    def add(self, kind: str, at_ms: int, record: Record, **extra: Any) -> None:
        """Note what happened to a job, with its record as it is now."""
        options = record.options
        self._rows((kind, *_JOB_COLUMNS, *extra)).append(
            (
                at_ms,
                record.id,
                record.incarnation,
                record.enqueued_at,
                record.run_id,
                options.task,
                options.version,
                record.state,
                *extra.values(),
            )
        )
        self.count += 1

    def add_rows(self, kind: str, columns: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> None:
        """Note the same kind of event many times; the columns begin with those of a job."""
        self._rows((kind, *_JOB_COLUMNS, *columns)).extend(rows)
        self.count += len(rows)

    def add_queue(self, kind: str, at_ms: int, **extra: Any) -> None:
        """Note what happened to the queue itself."""
        self._rows((kind, "at", *extra)).append((at_ms, *extra.values()))
        self.count += 1

    def extend(self, later: EventNotes) -> None:
        """Take over the events of a later call."""
        for shape, rows in later._groups:
            self._rows(shape).extend(rows)
        self.count += later.count

    @property
    def groups(self) -> Sequence[tuple[tuple[str, ...], Sequence[tuple[Any, ...]]]]:
        """Events of one type and one set of columns (named after the type), with a row for each."""
        return self._groups

    def pack(self) -> bytes:
        """The entry of the event log that holds them all."""
        return pack([_columns(shape, rows) for shape, rows in self._groups])

    def _rows(self, shape: tuple[str, ...]) -> list[tuple[Any, ...]]:
        """Where events of this shape go: the last group if it has it, else a new one."""
        if not self._groups or self._groups[-1][0] != shape:
            self._groups.append((shape, []))
        return self._groups[-1][1]


def _columns(shape: tuple[str, ...], rows: list[tuple[Any, ...]]) -> dict[str, Any]:
    kind, *names = shape
    columns = (list(column) for column in zip(*rows, strict=True))
    return {"t": kind, "n": len(rows), **dict(zip(names, columns, strict=True))}
