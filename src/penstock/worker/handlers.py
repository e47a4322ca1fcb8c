"""Handlers of queues whose jobs have no task: ``@worker.handler("queue")``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from penstock.core.names import check_queue
from penstock.errors import InvalidOption, SerializationError, UnknownTask
from penstock.worker.context import JobContext, context_of
from penstock.worker.run import Call, Plan, Run
from penstock.worker.runners.thread import ThreadRunner

__all__ = ["Handler", "Handlers"]

Handler = Callable[[JobContext], Any]
"""Gets the job, whose ``payload`` are the bytes as enqueued; what it returns is encoded by the app's result serde.
A coroutine function runs on the loop, any other in a thread."""


class Handlers:
    """Handlers by queue."""

    def __init__(self) -> None:
        self.by_queue: dict[str, Handler] = {}

    def add(self, queue: str, handler: Handler) -> None:
        """Raises ``InvalidOption`` if the queue has one already."""
        if check_queue(queue) in self.by_queue:
            raise InvalidOption(f"queue {queue!r} has a handler already. Remove one of the two.")
        self.by_queue[queue] = handler

    def plan(
        self,
        queue: str,
        *,
        threads: ThreadRunner,
        wrap: Callable[[Call], Call],
        encode: Callable[[Any], bytes],
    ) -> Plan:
        """How jobs without a task of this queue are run."""
        handler = self.by_queue.get(queue)
        if handler is None:
            return Plan("", "async", _refuse, encode, _pack)
        if inspect.iscoroutinefunction(handler):
            return Plan("", "async", wrap(lambda run: handler(context_of(run))), encode, _pack)
        call = wrap(lambda run: threads.run(lambda run: handler(context_of(run)), run))
        return Plan("", "thread", call, encode, _pack)


async def _refuse(run: Run) -> Any:
    queue = run.lane.name
    raise UnknownTask(
        f"the job has no task, and this worker has no handler for jobs of queue {queue!r} without one. "
        f'Add one by @worker.handler("{queue}"), or let another process work on this queue.'
    )


def _pack(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    if len(args) == 1 and isinstance(args[0], bytes) and not kwargs:
        return args[0]
    raise SerializationError("a job without a task takes its payload as one argument of type bytes.")
