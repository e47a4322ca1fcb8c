"""Coroutine functions run on the worker's loop, each in an asyncio task of its own."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any

from penstock.errors import InvalidInput
from penstock.worker.context import context_of
from penstock.worker.run import Call, Run, Undecodable

if TYPE_CHECKING:
    from penstock.task import Task

__all__ = ["bind"]


def bind(task: Task[..., Any]) -> Call:
    """A call that decodes the payload and awaits the task's function. The executor cancels it to abort it."""
    func, unpack, serde = task.func, task.signature.unpack, task.serde
    takes_context = task.signature.context_parameter is not None

    # Not a coroutine function: it gives the handler's own coroutine, and saves one around it.
    def call(run: Run) -> Awaitable[Any]:
        try:
            args, kwargs = unpack(
                run.lease.payload, serde, context=context_of(run) if takes_context else None
            )
        except InvalidInput as error:
            raise Undecodable from error
        awaitable: Awaitable[Any] = func(*args, **kwargs)
        return awaitable

    return call
