"""Handlers of queues whose jobs have no task: ``@worker.handler("queue")``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeAlias

from penstock.batching import Batching
from penstock.core.names import check_queue
from penstock.errors import InvalidOption, SerializationError, UnknownTask
from penstock.worker.batch import Batch, Batcher
from penstock.worker.context import JobContext, context_of
from penstock.worker.run import Call, Plan
from penstock.worker.runners.thread import ThreadRunner

__all__ = ["BatchHandler", "Bound", "Handler", "Handlers", "no_handler"]

Handler = Callable[[JobContext], Any]
"""Gets the job, whose ``payload`` are the bytes as enqueued; what it returns is encoded by the app's result serde.
A coroutine function runs on the loop, any other in a thread."""

BatchHandler = Callable[[list[JobContext]], Any]
"""The same for several jobs at once; what it returns is told apart as ``worker.batch`` says."""

AnyHandler: TypeAlias = Handler | BatchHandler


class Bound(NamedTuple):
    """A handler, and how its jobs are gathered if it takes several."""

    handler: Callable[[Any], Any]
    batching: Batching | None = None


class MakeBatcher(Protocol):
    """Makes the one that gathers the runs of a handler."""

    def __call__(self, batching: Batching, handle: Callable[[Batch], Any], *, is_async: bool) -> Batcher: ...


class Handlers:
    """Handlers by queue."""

    def __init__(self) -> None:
        self.by_queue: dict[str, Bound] = {}

    def add(self, queue: str, handler: AnyHandler, batching: Batching | None = None) -> None:
        """Raises ``InvalidOption`` if the queue has one already."""
        if check_queue(queue) in self.by_queue:
            raise InvalidOption(f"queue {queue!r} has a handler already. Remove one of the two.")
        self.by_queue[queue] = Bound(handler, batching)

    def plan(
        self,
        queue: str,
        *,
        threads: ThreadRunner,
        batcher: MakeBatcher,
        wrap: Callable[[Call], Call],
        encode: Callable[[Any], bytes],
    ) -> Plan:
        """Return how jobs without a task of this queue are run. The queue must have a handler."""
        handler, batching = self.by_queue[queue]
        is_async = inspect.iscoroutinefunction(handler)
        if batching is not None:
            call = _joining(batcher(batching, lambda batch: handler(batch.items), is_async=is_async))
        else:
            call = _calling(handler, None if is_async else threads)
        return Plan("", "async" if is_async else "thread", wrap(call), encode, _pack)


def _calling(handler: Callable[[Any], Any], threads: ThreadRunner | None) -> Call:
    if threads is None:
        return lambda run: handler(context_of(run))
    return lambda run: threads.run(lambda run: handler(context_of(run)), run)


def _joining(batcher: Batcher) -> Call:
    return lambda run: batcher.join(run, context_of(run))


def no_handler(queue: str) -> UnknownTask:
    """Return the error of a job without a task in a queue that has no handler here."""
    return UnknownTask(
        f"the job has no task, and this worker has no handler for jobs of queue {queue!r} without one. "
        f'Add one by @worker.handler("{queue}"), or let another process work on this queue.'
    )


def _pack(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    if len(args) == 1 and isinstance(args[0], bytes) and not kwargs:
        return args[0]
    raise SerializationError("a job without a task takes its payload as one argument of type bytes.")
