"""The runner of functions that take batches: each run decodes its payload, then joins a batch for one call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from inspect import Parameter
from typing import TYPE_CHECKING, Any

from penstock.core.verdict import Undecodable
from penstock.errors import InvalidInput
from penstock.worker.batch import Batch, Batcher
from penstock.worker.context import context_of
from penstock.worker.run import Call, Run

if TYPE_CHECKING:
    from penstock.client.task import Task


def table_of(kind: str) -> Callable[[Sequence[dict[str, Any]]], Any]:
    """Return a function that makes a ``Table`` or ``RecordBatch`` of rows. Missing columns of a row become null."""
    import pyarrow as pa

    of = pa.Table.from_arrays if kind == "Table" else pa.RecordBatch.from_arrays

    def make(rows: Sequence[dict[str, Any]]) -> Any:
        names = list(dict.fromkeys(name for row in rows for name in row))
        return of([pa.array([row.get(name) for row in rows]) for name in names], names)

    return make


def by_row(answer: Any) -> Any:
    """Return the rows of a table as dicts or the items of an array; anything else unchanged, awaitables awaited."""
    if inspect.isawaitable(answer):
        return _awaited(answer)
    return answer.to_pylist() if hasattr(answer, "to_pylist") else answer


async def _awaited(answer: Any) -> Any:
    return by_row(await answer)


def bind(task: Task[..., Any], batcher: Batcher) -> Call:
    """Return a call that decodes the payload, so that only a bad job fails, and joins a batch."""
    unpack, serde = task.signature.unpack, task.serde

    def call(run: Run) -> Any:
        try:
            (item,), _ = unpack(run.lease.payload, serde)
        except InvalidInput as error:
            raise Undecodable from error
        return batcher.join(run, item)

    return call


def calling(task: Task[..., Any]) -> Callable[[Batch], Any]:
    """Return a function that calls the task's function with the items of a batch, and contexts if it takes them."""
    func = task.func
    assert task.batching is not None
    contexts = task.batching.contexts
    if task.batching.table:
        return _calling_with_table(task, task.batching.table)
    if not contexts:
        return lambda batch: func(batch.items)
    arguments = _arguments(func, contexts)

    def call(batch: Batch) -> Any:
        args, kwargs = arguments(batch, batch.items)
        return func(*args, **kwargs)

    return call


def _calling_with_table(task: Task[..., Any], kind: str) -> Callable[[Batch], Any]:
    assert task.batching is not None
    func, make = task.func, table_of(kind)
    arguments = _arguments(func, task.batching.contexts)

    def call(batch: Batch) -> Any:
        args, kwargs = arguments(batch, make(batch.items))
        return by_row(func(*args, **kwargs))

    return call


def _arguments(
    func: Callable[..., Any], contexts: str
) -> Callable[[Batch, Any], tuple[list[Any], dict[str, Any]]]:
    """Return a function that arranges the items of a batch as arguments for ``func``."""
    kinds = {p.name: p.kind for p in inspect.signature(func).parameters.values()}
    by_name = [name for name, kind in kinds.items() if kind is Parameter.KEYWORD_ONLY]
    by_order = [name for name in kinds if name not in by_name]

    def arrange(batch: Batch, items: Any) -> tuple[list[Any], dict[str, Any]]:
        values = dict.fromkeys(kinds, items)
        if contexts:
            values[contexts] = [context_of(member.run) for member in batch.members]
        return [values[name] for name in by_order], {name: values[name] for name in by_name}

    return arrange
