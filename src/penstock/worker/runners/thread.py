"""The async runner and the thread runner: coroutine functions run on the worker's loop, others in threads.

A thread cannot be stopped: its handler can check ``context.cancelled``.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from penstock.client.middleware import SyncMiddleware, around
from penstock.core.outcome import Undecodable
from penstock.errors import InvalidInput
from penstock.worker.context import context_of
from penstock.worker.run import Call, Run

if TYPE_CHECKING:
    from penstock.client.task import Task


def bind(task: Task[..., Any]) -> Call:
    """Return a call that decodes the payload and calls the task's function."""
    func, unpack, serde = task.func, task.signature.unpack, task.serde
    takes_context = task.signature.context_parameter is not None

    # Not a coroutine function: it returns the handler's own coroutine, which saves one around it.
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


_numbers = itertools.count(1)


class _Started(Protocol):
    """A run, or a batch of them."""

    started_at: float


S = TypeVar("S", bound=_Started)


class ThreadRunner:
    """Runs functions in at most ``size`` threads, which start when needed, inside ``layers`` of middleware.

    Unlike those of ``concurrent.futures`` they are daemons: a handler that hangs must not keep the worker process alive
    after its job was handed back.
    """

    def __init__(self, size: int, layers: Sequence[SyncMiddleware] = ()) -> None:
        self._size = size
        self._layers = layers
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads: list[Thread] = []
        self._busy = 0

    def bind(self, task: Task[..., Any]) -> Call:
        """Return a call that decodes the payload and calls the task's function, both in a thread."""
        call = bind(task)
        return lambda run: self.run(call, run)

    async def run(self, call: Callable[[S], Any], run: S) -> Any:
        """Call ``call(run)`` in a thread, in a copy of this context. Cancelling leaves the thread running."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        context = contextvars.copy_context()
        run.started_at = 0.0
        layers = self._layers

        def work() -> None:
            run.started_at = time.monotonic()
            try:
                answer = context.run(around, layers, lambda: call(run)) if layers else context.run(call, run)
            except BaseException as error:
                _call_soon(loop, _settle_exception, future, error)
            else:
                _call_soon(loop, _settle_result, future, answer)

        self._submit(work)
        try:
            return await future
        finally:
            self._busy -= 1

    def close(self) -> None:
        """End idle threads; busy threads end with their handler."""
        for _ in self._threads:
            self._work.put(None)

    def _submit(self, work: Callable[[], None]) -> None:
        self._busy += 1
        if self._busy > len(self._threads) and len(self._threads) < self._size:
            thread = Thread(target=self._serve, name=f"penstock-handler-{next(_numbers)}", daemon=True)
            self._threads.append(thread)
            thread.start()
        self._work.put(work)

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            work()


def _call_soon(loop: asyncio.AbstractEventLoop, *call: Any) -> None:
    try:
        loop.call_soon_threadsafe(*call)
    except RuntimeError:
        # The loop is closed: the worker has handed the job back and stopped.
        pass


def _settle_result(future: asyncio.Future[Any], answer: Any) -> None:
    if not future.done():
        future.set_result(answer)


def _settle_exception(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        # A future cannot carry StopIteration, and the others would end the loop.
        is_special = isinstance(error, StopIteration | KeyboardInterrupt | GeneratorExit)
        future.set_exception(
            RuntimeError(f"the handler raised {type(error).__name__}") if is_special else error
        )
