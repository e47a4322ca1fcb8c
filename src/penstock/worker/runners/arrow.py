"""Batches as tables: items that are rows go in as one of Arrow's tables, and what comes out is told apart by row."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa

__all__ = ["by_row", "table_of"]


def table_of(kind: str) -> Callable[[Sequence[dict[str, Any]]], Any]:
    """What makes a ``Table`` or a ``RecordBatch`` of rows. A row that lacks a column of another has null there."""
    of = pa.Table.from_arrays if kind == "Table" else pa.RecordBatch.from_arrays

    def make(rows: Sequence[dict[str, Any]]) -> Any:
        names = list(dict.fromkeys(name for row in rows for name in row))
        return of([pa.array([row.get(name) for row in rows]) for name in names], names)

    return make


def by_row(answer: Any) -> Any:
    """Rows of a table as dicts, items of an array as values; anything else as it is. Awaits what is to be awaited."""
    if inspect.isawaitable(answer):
        return _awaited(answer)
    return answer.to_pylist() if hasattr(answer, "to_pylist") else answer


async def _awaited(answer: Any) -> Any:
    return by_row(await answer)
