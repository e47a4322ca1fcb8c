"""In the process that runs jobs: take a request, find its task, call the function, answer.

A process of the process runner does so again and again (``serve``); one in a sandbox does it once, confined.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from multiprocessing.connection import Connection
from typing import Any, Final

from penstock.client.app import App
from penstock.client.task import Task
from penstock.core.verdict import is_retried
from penstock.errors import InvalidInput, UnknownTask, Unrecoverable
from penstock.worker.context import JobContext, use_context
from penstock.worker.reporter import JobUpdate, Receipt
from penstock.worker.runners.messages import (
    Discarded,
    Done,
    Message,
    Raised,
    Request,
    decode_request,
    encode,
    raised,
)

_NOT_CONFINED: Final = nullcontext()


def serve(pipe: Connection) -> None:
    """Run requests until the pipe closes. Ctrl-C reaches the whole process group, and is the worker's to handle."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The worker's own way of ending (a handler installed before a fork) must not be ours.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # Nobody is left to hear what the job returns.
    end_with_parent(lambda: os._exit(1))
    link = WorkerLink(pipe)
    while True:
        try:
            link.send(perform(decode_request(pipe.recv_bytes()), link))
        except (EOFError, OSError):
            return


def end_with_parent(end: Callable[[], None]) -> None:
    """Call ``end``, in a thread, when the worker's process is gone, however it went."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_follow, args=(parent.join, end), daemon=True).start()


def _follow(gone: Callable[[], None], end: Callable[[], None]) -> None:
    gone()
    end()


class WorkerLink:
    """The context's words go to the process that holds the lease. May be used from any thread.

    ``cancelled`` is for sandboxes, whose function is asked before it is killed; elsewhere it is killed at once.
    """

    def __init__(self, pipe: Connection) -> None:
        self.cancelled = False
        self._pipe = pipe
        # A long message is more than one write: two threads must not mix theirs.
        self._lock = threading.Lock()
        self._task: Task[..., Any] | None = None

    @property
    def app(self) -> App:
        assert self._task is not None, "a context is asked by the task that runs"
        return self._task.app

    def send(self, message: Message) -> None:
        data = encode(message)
        with self._lock:
            self._pipe.send_bytes(data)

    def serve_task(self, task: Task[..., Any]) -> None:
        """From now on payloads are packed as ``task`` has them."""
        self._task = task

    def discard(self) -> None:
        self.send(Discarded())

    def pack(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
        assert self._task is not None, "a context is made for a task"
        return self._task.signature.encode(args, kwargs, serde=self._task.serde)

    def report(self, words: JobUpdate) -> Receipt:
        self.send(words)
        return Receipt()


def perform(
    request: Request, link: WorkerLink, confinement: AbstractContextManager[None] = _NOT_CONFINED
) -> Done | Raised:
    """Run the function the request names, to its end, in ``confinement``; whatever it raises is the answer."""
    undecodable = False
    try:
        with confinement:
            task = _find(request.module, request.name, request.lease.options.task)
            _take_along(task.app, request.moved_to)
            task.app.load(*request.included)
            link.serve_task(task)
            context = JobContext(request.lease, request.queue, link)
            use_context(context)
            undecodable = True
            args, kwargs = task.signature.unpack(request.lease.payload, task.serde, context=context)
            undecodable = False
            answer = _called(task, args, kwargs)
            return Done(task.result_serde.encode(answer))
    except BaseException as error:
        return raised(error, undecodable=undecodable and isinstance(error, InvalidInput))


def _called(task: Task[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what the function returns. Only its name would arrive of an error that is not to be retried."""
    try:
        answer = task.func(*args, **kwargs)
        return asyncio.run(answer) if inspect.iscoroutine(answer) else answer
    except Exception as error:
        if is_retried(error, task.retry_on):
            raise
        raise Unrecoverable(error) from error


def _take_along(app: App, moved_to: tuple[str, str | None] | None) -> None:
    """What the function does with its app, it is to do in the store that the worker is at."""
    if moved_to is not None and moved_to != app.moved_to:
        app.move_to(moved_to[0], namespace=moved_to[1])


def _find(module: str, name: str, task_name: str) -> Task[..., Any]:
    """The task: what stands under the function's name, or one that an app of that module knows by its own."""
    home = importlib.import_module(module)
    found: Any = home
    for part in name.split("."):
        found = getattr(found, part, None)
    if isinstance(found, Task) and found.name == task_name:
        return found
    for value in vars(home).values():
        if isinstance(value, App) and task_name in value.tasks:
            return value.tasks[task_name]
    raise UnknownTask(
        f"process {os.getpid()} finds no task {task_name!r} in module {module!r}. "
        f"Define it with @app.task where it can be imported as {module}.{name}."
    )
