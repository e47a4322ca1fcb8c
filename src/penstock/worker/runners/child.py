"""The child process that runs jobs: receive a request, find its task, call the function, answer.

A child of the process runner repeats this (``serve``); a sandbox does it once, confined. The messages between worker
and child are tagged bytes, never pickled objects.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from functools import cache
from multiprocessing.connection import Connection
from typing import Any, Final, Literal

import msgspec

from penstock import errors
from penstock.client.app import App
from penstock.client.middleware import around
from penstock.client.task import Task
from penstock.core.command import SandboxLimits
from penstock.core.job import Lease
from penstock.core.outcome import RemoteError, kind_and_message, own_delay_ms, retry_rule, traceback_of
from penstock.core.text import storable
from penstock.core.units import milliseconds
from penstock.errors import InvalidInput, UnknownTask, Unrecoverable
from penstock.worker.context import JobContext, use_context
from penstock.worker.reporter import JobUpdate, Receipt

_OWN_ERRORS: Final = frozenset(
    {
        errors.Unrecoverable,
        errors.Retry,
        errors.WaitForChildren,
        errors.Snooze,
        errors.Suspend,
        errors.RateLimited,
        errors.MemoryLimitExceeded,
    }
)
"""The errors that keep their class; see ``Raised.to_exception``."""


class Request(msgspec.Struct, frozen=True):
    """Run the task at ``module``, ``name`` on this lease. ``moved_to`` is the store that its app has moved to.
    ``included`` are the modules with the other tasks of that app, ``preloaded`` those to import before all others.
    Only a sandbox uses ``limits``."""

    module: str
    name: str
    queue: str
    lease: Lease
    moved_to: tuple[str, str | None] | None = None
    included: tuple[str, ...] = ()
    preloaded: tuple[str, ...] = ()
    limits: SandboxLimits = SandboxLimits()


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The process has started and can take a request."""


class Done(msgspec.Struct, frozen=True, tag=True):
    """The function returned; ``result`` is encoded for the store."""

    result: bytes


class Raised(msgspec.Struct, frozen=True, tag=True):
    """The function raised. ``own`` names one of Penstock's own errors, with its ``delay_s`` or ``at``, its ``signal``
    (whose timeout is ``delay_s``), ``stage`` and ``scope``."""

    error_type: str
    message: str
    traceback: str
    undecodable: bool = False
    own: str = ""
    delay_s: float | None = None
    at: datetime | None = None
    signal: str = ""
    stage: str | None = None
    scope: Literal["group", "queue"] = "group"

    def to_exception(self) -> Exception:
        """Return the error of Penstock that was raised, or an exception with the same class name and message."""
        match self.own:
            case "Unrecoverable":
                return _with_trace(errors.Unrecoverable(self._reason()), self.traceback)
            case "Retry":
                retry = errors.Retry(self._reason(), delay=self.delay_s, at=self.at)
                return _with_trace(retry, self.traceback)
            case "WaitForChildren":
                return errors.WaitForChildren()
            case "Snooze":
                return errors.Snooze(self.delay_s, at=self.at, stage=self.stage)
            case "Suspend":
                return errors.Suspend(self.signal, timeout=self.delay_s, stage=self.stage)
            case "RateLimited":
                return errors.RateLimited(self.delay_s or 0, scope=self.scope)
            case "MemoryLimitExceeded":
                return _with_trace(errors.MemoryLimitExceeded(self.message), self.traceback)
            case _:
                return _with_trace(_remote_class(self.error_type)(self.message), self.traceback)

    def _reason(self) -> str | Exception:
        """Return the message of the directive, or the error that it wraps."""
        return self.message if self.error_type == self.own else _remote_class(self.error_type)(self.message)


class Discarded(msgspec.Struct, frozen=True, tag=True):
    """A failure of this run is final."""


Message = Ready | Done | Raised | JobUpdate | Discarded

encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(Request).decode
decode_message = msgspec.msgpack.Decoder(Message).decode


def raised(error: BaseException, *, undecodable: bool = False) -> Raised:
    """Return ``error`` as a message."""
    if isinstance(error, errors.Suspension):
        error = error.directive
    # A subclass counts as the error of Penstock that it is derived from.
    own = next((kind.__name__ for kind in type(error).__mro__ if kind in _OWN_ERRORS), "")
    delays = (getattr(error, name, None) for name in ("delay", "timeout", "retry_in"))
    delay = next((delay for delay in delays if delay is not None), None) if own else None
    at = getattr(error, "at", None) if own else None
    kind, message = kind_and_message(error)
    return Raised(
        storable(kind),
        storable(message),
        storable(traceback_of(error)),
        undecodable=undecodable,
        own=own,
        delay_s=None if delay is None else milliseconds(delay) / 1000,
        at=None if at is None else at.astimezone(UTC),
        signal=getattr(error, "signal", "") if own else "",
        stage=getattr(error, "stage", None) if own else None,
        scope=getattr(error, "scope", "group") if own else "group",
    )


def _with_trace(error: Exception, remote: str) -> Exception:
    error.add_note(f"\nIn the process that ran the job:\n{remote}")
    return error


@cache
def _remote_class(name: str) -> type[RemoteError]:
    return type(name, (RemoteError,), {})


_NOT_CONFINED: Final = nullcontext()


def serve(pipe: Connection) -> None:
    """Run requests until the pipe closes. Ctrl-C reaches the whole process group; only the worker handles it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Drop a handler of the worker that was installed before a fork.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # Without the worker, no process can receive the result.
    end_with_parent(lambda: os._exit(1))
    link = WorkerLink(pipe)
    while True:
        try:
            link.send(perform(decode_request(pipe.recv_bytes()), link))
        except (EOFError, OSError):
            return


def end_with_parent(end: Callable[[], None]) -> None:
    """Call ``end``, in a thread, when the worker's process has ended in any way."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def follow() -> None:
        parent.join()
        end()

    threading.Thread(target=follow, daemon=True).start()


class WorkerLink:
    """Sends the reports of a context to the process that holds the lease. Any thread may use it.

    ``cancelled`` is for sandboxes, which are asked to stop before they are killed; other children are killed
    immediately.
    """

    def __init__(self, pipe: Connection) -> None:
        self.cancelled = False
        self.lease_ms = 0
        """The worker extends the lease."""
        self.claimed_at = 0.0
        self._pipe = pipe
        # A long message takes several writes, which threads must not mix.
        self._lock = threading.Lock()
        self.is_batched = False
        self.definition: Task[..., Any] | None = None
        """The running task."""

    @property
    def app(self) -> App:
        assert self.definition is not None, "a context belongs to a running task"
        return self.definition.app

    def send(self, message: Message) -> None:
        data = encode(message)
        with self._lock:
            self._pipe.send_bytes(data)

    def serve_task(self, task: Task[..., Any]) -> None:
        """Set the running task, which packs payloads."""
        self.definition = task
        self.claimed_at = time.monotonic()

    def discard(self) -> None:
        self.send(Discarded())

    def pack(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
        task = self.definition
        assert task is not None, "a context belongs to a running task"
        return task.signature.encode(args, kwargs, serde=task.serde)

    def report(self, update: JobUpdate) -> Receipt:
        self.send(update)
        return Receipt()


def perform(
    request: Request, link: WorkerLink, confinement: AbstractContextManager[None] = _NOT_CONFINED
) -> Done | Raised:
    """Run the function of the request in ``confinement``; return its result or its exception."""
    undecodable = False
    try:
        with confinement:
            for module in request.preloaded:
                importlib.import_module(module)
            task = _find(request.module, request.name, request.lease.options.task)
            prepare_app(task.app, request.moved_to, request.included)
            link.serve_task(task)
            context = JobContext(request.lease, request.queue, link)
            use_context(context)
            undecodable = True
            args, kwargs = task.signature.unpack(request.lease.payload, task.serde, context=context)
            undecodable = False
            answer = _called(task, args, kwargs, failures=request.lease.failures)
            if context.suspension is not None:
                raise context.suspension  # The handler swallowed it.
            return Done(task.result_serde.encode(answer))
    except BaseException as error:
        return raised(error, undecodable=undecodable and isinstance(error, InvalidInput))


def _called(task: Task[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, failures: int) -> Any:
    """Call the function. Wrap an error that rules of the task decide about: only its name would reach the worker."""
    try:
        layers = () if inspect.iscoroutinefunction(task.func) else task.app.sync_middlewares
        answer = around(layers, lambda: task.func(*args, **kwargs))
        return asyncio.run(answer) if inspect.iscoroutine(answer) else answer
    except Exception as error:
        if task.retries is None:
            raise
        rule = retry_rule(error, task.retries)
        if rule is None:
            raise Unrecoverable(error) from error
        if rule.backoff is None:
            raise
        raise errors.Retry(error, delay=own_delay_ms(rule.backoff, failures + 1, error) / 1000) from error


def prepare_app(app: App, moved_to: tuple[str, str | None] | None, included: tuple[str, ...]) -> None:
    """Move an app that this process has imported to the store of the worker, and import its modules."""
    if moved_to is not None and moved_to != app.moved_to:
        app.move_to(moved_to[0], namespace=moved_to[1])
    app.load(*included)


def _find(module: str, name: str, task_name: str) -> Task[..., Any]:
    """Return the task at the function's name, or the task of that name of an app in the module."""
    home = importlib.import_module(module)
    value: Any = home
    for part in name.split("."):
        value = getattr(value, part, None)
    if isinstance(value, Task) and value.defaults.task == task_name:  # empty for a handler
        return value
    for value in vars(home).values():
        if isinstance(value, App) and task_name in value.tasks:
            return value.tasks[task_name]
    raise UnknownTask(
        f"process {os.getpid()} cannot find task {task_name!r} in module {module!r}. "
        f"Define it with @app.task so that it can be imported as {module}.{name}."
    )
