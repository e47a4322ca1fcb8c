"""The process runner: functions run in child processes, one job at a time each, so that each can be killed alone.

A thread waits on the pipe of each busy child, so a slow or dying child never touches the loop. Only the payload's bytes
and the name of the function travel, never a pickled closure.
"""

from __future__ import annotations

import multiprocessing
import os
import select
import struct
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, assert_never

from penstock.core.outcome import Undecodable
from penstock.errors import InvalidOption
from penstock.worker.context import context_of
from penstock.worker.reporter import JobUpdate
from penstock.worker.run import Call, EncodedResult, Run
from penstock.worker.runners.child import (
    Discarded,
    Done,
    Message,
    Raised,
    Ready,
    Request,
    decode_message,
    encode,
    serve,
)
from penstock.worker.runners.thread import ThreadRunner

if TYPE_CHECKING:
    from penstock.client.task import Task


# Not fork: a worker has threads, and a forked child would hold copies of their locks and connections.
SPAWN: Final = multiprocessing.get_context("spawn")
# The interval of checks whether a silent child is dead.
LOOK_EVERY_S: Final = 0.25
# A finished process must exit within this time.
_EXIT_S: Final = 1.0
_REAPING_S: Final = 5.0
# The frame header of a multiprocessing connection: -1 in the first field announces the second.
_SIZE: Final = struct.Struct("!i")
_LARGE_SIZE: Final = struct.Struct("!Q")
_LARGE: Final = 1 << 31
_CHUNK: Final = 1 << 20


class ChildProcess:
    """A fresh interpreter that runs ``serve(its end of the pipe, *args)``, and our end of the pipe.

    One thread uses it at a time; any thread may call ``kill``.
    """

    def __init__(self, serve: Callable[..., None], *args: Any) -> None:
        self.pipe: Connection
        self.pipe, theirs = SPAWN.Pipe()
        self.process = SPAWN.Process(target=serve, args=(theirs, *args), name="penstock-handler", daemon=True)
        self.process.start()
        theirs.close()
        if sys.platform != "win32":
            # A write must not wait for a reader that is dead.
            os.set_blocking(self.pipe.fileno(), False)
        self._lock = threading.Lock()
        self._gone = False

    @property
    def alive(self) -> bool:
        with self._lock:
            return self.process.is_alive()

    @property
    def can_send(self) -> bool:
        """Return whether a message may still come, even if a forked process holds the pipe open."""
        # In this order: the child may answer and exit between a check of the pipe and one of the process.
        return self.alive or self.pipe.poll()

    def send(self, request: Request) -> None:
        """Send all of ``request``. Raise ``EOFError`` or ``OSError`` if the child ends, even halfway."""
        data = encode(request)
        if sys.platform == "win32":  # no other process holds the child's end
            self.pipe.send_bytes(data)
        elif len(data) < _LARGE:
            self._write(_SIZE.pack(len(data)) + data)
        else:
            self._write(_SIZE.pack(-1) + _LARGE_SIZE.pack(len(data)))
            self._write(data)

    def _write(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(self.pipe.fileno(), rest) :]
            except BlockingIOError:
                self._await_room()

    def _await_room(self) -> None:
        """Wait until the pipe takes data. A forked process may hold the child's end open without reading."""
        room = select.poll()
        room.register(self.pipe.fileno(), select.POLLOUT)
        if not room.poll(LOOK_EVERY_S * 1000):
            self._check_child()
            if not self.alive:  # even if it has left messages
                raise EOFError

    def receive(self) -> Message:
        """Return the next message. Raise ``EOFError`` if the child ends without one, even halfway."""
        message: Message = decode_message(self._frame())
        return message

    def _frame(self) -> bytes | bytearray:
        """Return the bytes of a message. ``pipe.recv_bytes`` would hang on half a message of a dead child."""
        if sys.platform == "win32":  # message pipes: a message arrives whole or not at all
            self._await_pipe()
            return self.pipe.recv_bytes()
        [size] = _SIZE.unpack(self._read(_SIZE.size))
        if size < 0:
            [size] = _LARGE_SIZE.unpack(self._read(_LARGE_SIZE.size))
        return self._read(size)

    def _read(self, size: int) -> bytearray:
        data = bytearray()
        while len(data) < size:
            self._await_pipe()
            chunk = os.read(self.pipe.fileno(), min(size - len(data), _CHUNK))
            if not chunk:
                raise EOFError
            data += chunk
        return data

    def _await_pipe(self) -> None:
        while not self.pipe.poll(LOOK_EVERY_S):
            self._check_child()

    def _check_child(self) -> None:
        """Raise ``EOFError`` if the silent child can send no more messages."""
        if not self.can_send:
            raise EOFError

    def kill(self) -> None:
        """Kill the child; do nothing if it has ended."""
        with self._lock:
            if not self._gone:
                self._kill()

    def close(self) -> int | None:
        """End the child and return its exit code. An idle child exits when its pipe closes, any other is killed."""
        self.pipe.close()
        self._wait(_EXIT_S)
        with self._lock:
            # Once the child is reaped, its pid may belong to another process.
            self._kill()
            self._gone = True
        self.process.join()
        code = self._exit_code()
        if code is not None:
            self.process.close()
        return code

    def _exit_code(self) -> int | None:
        """Return the exit code, ``None`` if it is unknown.

        Starting a process, in any thread, reaps ended children and stores their codes a moment later. Until then this
        child has ended, but its code is unknown.
        """
        deadline = time.monotonic() + _REAPING_S
        while (code := self.process.exitcode) is None and time.monotonic() < deadline:
            time.sleep(0.001)
        return code

    def _wait(self, seconds: float) -> None:
        self.process.join(seconds)

    def _kill(self) -> None:
        self.process.kill()


C = TypeVar("C", bound=ChildProcess)


class IdleChildren(Generic[C]):
    """Idle processes, kept for the next run. Any thread may use this."""

    def __init__(self) -> None:
        self._idle: list[C] = []
        self._lock = threading.Lock()
        self._closed = False

    def take(self) -> C | None:
        """Return a living child, which then belongs to the caller, or ``None``."""
        with self._lock:
            while self._idle:
                child = self._idle.pop()
                if child.alive:
                    return child
                child.close()
        return None

    def put(self, child: C) -> None:
        """Keep ``child``, or end it after ``close``."""
        with self._lock:
            if not self._closed:
                self._idle.append(child)
                return
        child.close()

    def close(self) -> None:
        """End all children, and those added later."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for child in idle:
            child.close()


def address_of(task: Task[..., Any]) -> tuple[str, str]:
    """Return the module and name by which another process finds the task's function.

    Raises:
        InvalidOption: another process cannot import it.
    """
    module, name = task.func.__module__, task.func.__qualname__
    if "<locals>" in name:
        raise InvalidOption(
            f"task {task.name!r} cannot run in a process: {name} is defined inside a function, "
            "where another process cannot import it. Move it to the top of a module."
        )
    return module, name


def handle_message(message: Message, run: Run) -> Done | Raised | None:
    """Act on a message from a handler; return it if it is the last one."""
    match message:
        case Done() | Raised():
            return message
        case JobUpdate():
            # Through the context: if a run has one, the executor waits for its last reports.
            context_of(run).pass_on(message)
        case Discarded():
            run.discarded = True
        case Ready():
            pass
        case _ as never:
            assert_never(never)
    return None


def result_of(last: Done | Raised) -> EncodedResult:
    """Return the result, or raise the handler's exception."""
    match last:
        case Done(result=result):
            return EncodedResult(result)
        case Raised(undecodable=True):
            raise Undecodable from last.to_exception()
        case Raised():
            raise last.to_exception()
        case _ as never:
            assert_never(never)


class ProcessDied(Exception):
    """The process that ran the job ended before the job finished: killed, out of memory, or exited."""


class ChildRunner(ABC, Generic[C]):
    """Runs at most ``size`` functions at a time (default: one per CPU), each in a process."""

    def __init__(self, size: int | None = None) -> None:
        self._threads = ThreadRunner(size or os.cpu_count() or 1)
        self._idle: IdleChildren[C] = IdleChildren()

    def bind(self, task: Task[..., Any]) -> Call:
        """Return a call that runs the task's function in a process, which finds it by module and name."""
        module, name = address_of(task)

        def call(run: Run) -> EncodedResult:
            app, names = task.app, (module, name, run.served.name)
            request = Request(*names, run.lease, app.moved_to, app.included, app.preloaded, task.limits)
            return self._call(run, request)

        return lambda run: self._threads.run(call, run)

    def close(self) -> None:
        """End idle processes now, the others when their runs end."""
        self._idle.close()
        self._threads.close()

    @abstractmethod
    def _call(self, run: Run, request: Request) -> EncodedResult:
        """Run a request in a process; called in a thread."""


class ProcessRunner(ChildRunner[ChildProcess]):
    """Runs functions in processes that start when needed, one after the other in each."""

    def _call(self, run: Run, request: Request) -> EncodedResult:
        child = self._idle.take() or ChildProcess(serve)
        run.kill = child.kill
        try:
            if run.abort is not None:
                raise EOFError
            child.send(request)
            last = _last_message(child, run)
        except (EOFError, OSError) as error:
            run.kill = None
            raise ProcessDied(f"the process that ran the job ended with exit code {child.close()}") from error
        run.kill = None
        if run.abort is None:
            self._idle.put(child)
        else:
            # The abort may be about to kill the process, so no other run may use it.
            child.close()
        return result_of(last)


def _last_message(child: ChildProcess, run: Run) -> Done | Raised:
    while True:
        last = handle_message(child.receive(), run)
        if last is not None:
            return last
