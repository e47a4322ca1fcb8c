"""Enqueue jobs when the transaction of the database is committed, so that workers find its rows."""

from __future__ import annotations

import asyncio
from typing import Any, ParamSpec, TypeVar

from asgiref.sync import sync_to_async
from django.core.exceptions import SynchronousOnlyOperation
from django.db import transaction

from penstock.client.handle import JobHandle
from penstock.client.task import Dispatch

P = ParamSpec("P")
R = TypeVar("R")


def enqueue_on_commit(task: Dispatch[P, R], /, *args: P.args, **kwargs: P.kwargs) -> JobHandle[R]:
    """Enqueue one call of ``task`` when the current transaction commits; immediately outside a transaction.

    Nothing is enqueued if the transaction, or the savepoint around this call, is rolled back. The arguments are checked
    and encoded now. ``task`` may have options: ``enqueue_on_commit(send.options(delay="5m"), user.id)``.

    The handle has the id that the job will have, so it can be stored in the same transaction. ``state`` and ``status``
    are ``None``.

    Raises:
        InvalidInput: the arguments do not fit the function.
        SynchronousOnlyOperation: the caller runs on an event loop. Use ``await aenqueue_on_commit(...)``.
    """
    if asyncio._get_running_loop() is not None:
        raise SynchronousOnlyOperation(
            "enqueue_on_commit cannot be used in a thread that runs an event loop. "
            "Use `await aenqueue_on_commit(...)`."
        )
    spec = task.job(*args, **kwargs)
    to_queue = task.task.options(queue=spec.queue)
    transaction.on_commit(lambda: to_queue.sync.enqueue_many([spec]))
    return JobHandle(spec.source, spec.id)


async def aenqueue_on_commit(task: Dispatch[P, R], /, *args: P.args, **kwargs: P.kwargs) -> JobHandle[R]:
    """See ``enqueue_on_commit``, for asynchronous callers. It acts in the thread that Django runs their queries in."""
    enqueue: Any = sync_to_async(enqueue_on_commit)
    handle: JobHandle[R] = await enqueue(task, *args, **kwargs)
    return handle
