"""Functions that take batches: each run decodes its own payload, then joins the others for one call."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from inspect import Parameter
from typing import TYPE_CHECKING, Any

from penstock.errors import InvalidInput
from penstock.worker.batch import Batch, Batcher
from penstock.worker.context import context_of
from penstock.worker.run import Call, Run, Undecodable

if TYPE_CHECKING:
    from penstock.task import Task

__all__ = ["bind", "calling"]


def bind(task: Task[..., Any], batcher: Batcher) -> Call:
    """A call that decodes the payload, so that one which cannot be fails alone, and joins a batch."""
    unpack, serde = task.signature.unpack, task.serde

    def call(run: Run) -> Any:
        try:
            (item,), _ = unpack(run.lease.payload, serde)
        except InvalidInput as error:
            raise Undecodable from error
        return batcher.join(run, item)

    return call


def calling(task: Task[..., Any]) -> Callable[[Batch], Any]:
    """What calls the task's function with the items of a batch, and with their contexts if it takes them."""
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
    from penstock.worker.runners.arrow import by_row, table_of

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
    """The arguments for the items of a batch, in the places that the function has for them."""
    kinds = {p.name: p.kind for p in inspect.signature(func).parameters.values()}
    by_name = [name for name, kind in kinds.items() if kind is Parameter.KEYWORD_ONLY]
    by_order = [name for name in kinds if name not in by_name]

    def arrange(batch: Batch, items: Any) -> tuple[list[Any], dict[str, Any]]:
        values = dict.fromkeys(kinds, items)
        if contexts:
            values[contexts] = [context_of(member.run) for member in batch.members]
        return [values[name] for name in by_order], {name: values[name] for name in by_name}

    return arrange
