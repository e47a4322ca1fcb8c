"""The process runner's other half: a loop that runs one job after the other, and the messages between the two."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import threading
import traceback
from datetime import UTC, datetime
from functools import cache
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from penstock import errors
from penstock.app import App
from penstock.core.duration import milliseconds
from penstock.core.job import Lease
from penstock.errors import InvalidInput, UnknownTask
from penstock.task import Task
from penstock.worker.context import JobContext, use_context
from penstock.worker.reporter import Receipt

__all__ = [
    "Discarded",
    "Done",
    "Message",
    "Raised",
    "RemoteError",
    "Reported",
    "Request",
    "decode_message",
    "serve",
]


class Request(msgspec.Struct, frozen=True):
    """Run the task found as ``module``, ``name`` on this lease."""

    module: str
    name: str
    queue: str
    lease: Lease


class Done(msgspec.Struct, frozen=True, tag=True):
    """The function returned; ``result`` is encoded as it will be stored."""

    result: bytes


class Raised(msgspec.Struct, frozen=True, tag=True):
    """The function raised. ``verdict`` names one of Penstock's own errors, with its ``delay_s`` or ``at``."""

    error_type: str
    message: str
    traceback: str
    undecodable: bool = False
    verdict: str = ""
    delay_s: float | None = None
    at: datetime | None = None

    def to_exception(self) -> Exception:
        """The verdict that was raised, or an exception of a class with the same name and words."""
        match self.verdict:
            case "Unrecoverable":
                return errors.Unrecoverable(self.message)
            case "Retry":
                return errors.Retry(self.message, delay=self.delay_s, at=self.at)
            case "Snooze":
                return errors.Snooze(self.delay_s, at=self.at)
            case _:
                return _remote_class(self.error_type)(self.message, self.traceback)


class Reported(msgspec.Struct, frozen=True, tag=True):
    """Progress, a log line or a payload."""

    progress: bytes | None = None
    log: str | None = None
    payload: bytes | None = None


class Discarded(msgspec.Struct, frozen=True, tag=True):
    """From now on a failure is final."""


Message = Done | Raised | Reported | Discarded

_encode = msgspec.msgpack.Encoder().encode
_decode_request = msgspec.msgpack.Decoder(Request).decode
decode_message = msgspec.msgpack.Decoder(Message).decode


class RemoteError(Exception):
    """What a handler raised in another process; its traceback there is part of ours."""

    def __init__(self, message: str, remote: str) -> None:
        super().__init__(message)
        self.add_note(f"\nIn the process that ran the job:\n{remote}")


@cache
def _remote_class(name: str) -> type[RemoteError]:
    return type(name, (RemoteError,), {})


def serve(pipe: Connection) -> None:
    """Run requests until the pipe closes. Ctrl-C reaches the whole process group, and is the worker's to handle."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The worker's own way of ending (a handler installed before a fork) must not be ours.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    while True:
        try:
            request = _decode_request(pipe.recv_bytes())
        except (EOFError, OSError):
            return
        try:
            pipe.send_bytes(_encode(_run(request, pipe)))
        except OSError:
            return


def _end_with_parent() -> None:
    """Nobody is left to hear what the job returns."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _run(request: Request, pipe: Connection) -> Done | Raised:
    undecodable = False
    try:
        task = _find(request.module, request.name, request.lease.options.task)
        context = JobContext(request.lease, request.queue, _PipeLink(pipe, task))
        use_context(context)
        undecodable = True
        args, kwargs = task.signature.unpack(request.lease.payload, task.serde, context=context)
        undecodable = False
        return Done(task.result_serde.encode(task.func(*args, **kwargs)))
    except BaseException as error:
        return _raised(error, undecodable=undecodable and isinstance(error, InvalidInput))


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


class _PipeLink:
    """The context's words go to the process that holds the lease. A run that is to stop is killed, not told."""

    cancelled = False

    def __init__(self, pipe: Connection, task: Task[..., Any]) -> None:
        self._pipe = pipe
        self._task = task

    def discard(self) -> None:
        self._pipe.send_bytes(_encode(Discarded()))

    def pack(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
        return self._task.signature.encode(args, kwargs, serde=self._task.serde)

    def report(
        self, *, progress: bytes | None = None, log: str | None = None, payload: bytes | None = None
    ) -> Receipt:
        self._pipe.send_bytes(_encode(Reported(progress, log, payload)))
        return Receipt()


def _raised(error: BaseException, *, undecodable: bool) -> Raised:
    verdict = type(error).__name__ if isinstance(error, errors.Verdict) else ""
    if isinstance(error, errors.Unrecoverable):
        verdict = "Unrecoverable"
    delay = getattr(error, "delay", None) if verdict else None
    at = getattr(error, "at", None) if verdict else None
    return Raised(
        type(error).__name__,
        str(error).encode("utf-8", "backslashreplace").decode(),
        "".join(traceback.format_exception(error, limit=-30)).encode("utf-8", "backslashreplace").decode(),
        undecodable=undecodable,
        verdict=verdict,
        delay_s=None if delay is None else milliseconds(delay) / 1000,
        at=None if at is None else at.astimezone(UTC),
    )
