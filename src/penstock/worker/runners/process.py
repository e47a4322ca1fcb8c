"""In the worker: the processes it starts to run jobs, and what it makes of their messages."""

from __future__ import annotations

import multiprocessing
import os
import select
import struct
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, assert_never

from penstock.core.verdict import Undecodable
from penstock.errors import InvalidOption
from penstock.worker.context import context_of
from penstock.worker.reporter import JobUpdate
from penstock.worker.run import Call, EncodedResult, Run
from penstock.worker.runners.child import serve
from penstock.worker.runners.messages import (
    Discarded,
    Done,
    Message,
    Raised,
    Ready,
    Request,
    decode_message,
    encode,
)
from penstock.worker.runners.thread import ThreadRunner

if TYPE_CHECKING:
    from penstock.client.task import Task


# Not fork: a worker has threads, and a forked child would hold copies of their locks and connections.
SPAWN: Final = multiprocessing.get_context("spawn")
# How often it is asked after whose silence may be its death.
LOOK_EVERY_S: Final = 0.25
# How long a process that is done may take to leave.
_LEAVING_S: Final = 1.0
_REAPING_S: Final = 5.0
# How a connection of multiprocessing announces a message: -1 in the first stands for the second.
_SIZE: Final = struct.Struct("!i")
_LARGE_SIZE: Final = struct.Struct("!Q")
_LARGE: Final = 1 << 31
_CHUNK: Final = 1 << 20


class ChildProcess:
    """A fresh interpreter that runs ``serve(its end of the pipe, *args)``, and our end of the pipe.

    Used by one thread at a time; ``kill`` may come from any.
    """

    def __init__(self, serve: Callable[..., None], *args: Any) -> None:
        self.pipe: Connection
        self.pipe, theirs = SPAWN.Pipe()
        self.process = SPAWN.Process(target=serve, args=(theirs, *args), name="penstock-handler", daemon=True)
        self.process.start()
        theirs.close()
        if sys.platform != "win32":
            # So that no write waits for a reader that will not come.
            os.set_blocking(self.pipe.fileno(), False)
        self._lock = threading.Lock()
        self._gone = False

    @property
    def alive(self) -> bool:
        with self._lock:
            return self.process.is_alive()

    @property
    def may_speak(self) -> bool:
        """Whether a message may still come. False does not wait for the pipe to close: a process that it forked may
        hold that open.
        """
        # In this order: it may answer and exit between a look at the pipe and one at the process.
        return self.alive or self.pipe.poll()

    def send(self, request: Request) -> None:
        """Say all of it; ``EOFError`` or ``OSError`` when it is gone, be it in the middle."""
        data = encode(request)
        if sys.platform == "win32":  # it is the only one to hold its end
            self.pipe.send_bytes(data)
        elif len(data) < _LARGE:
            self._write(_SIZE.pack(len(data)) + data)
        else:
            self._write(_SIZE.pack(-1) + _LARGE_SIZE.pack(len(data)))
            self._write(data)

    def _write(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            try:
                left = left[os.write(self.pipe.fileno(), left) :]
            except BlockingIOError:
                self._await_room()

    def _await_room(self) -> None:
        """A process that it forked may hold its end of the pipe open, and never read from it."""
        room = select.poll()
        room.register(self.pipe.fileno(), select.POLLOUT)
        if not room.poll(LOOK_EVERY_S * 1000):
            self._look_after()
            if not self.alive:  # whatever it may still have to say
                raise EOFError

    def receive(self) -> Message:
        """Its next message; ``EOFError`` when it is gone and has said no more, be it in the middle of a message."""
        message: Message = decode_message(self._frame())
        return message

    def _frame(self) -> bytes | bytearray:
        """What ``pipe.recv_bytes`` gives, which has no end if who began the message died, and the pipe is held open."""
        if sys.platform == "win32":  # pipes of messages: there is no half of one
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
            self._look_after()

    def _look_after(self) -> None:
        """It has been silent for a while: ``EOFError`` if it always will be."""
        if not self.may_speak:
            raise EOFError

    def kill(self) -> None:
        """End it now; too late is no error."""
        with self._lock:
            if not self._gone:
                self._kill()

    def close(self) -> int | None:
        """End it: an idle child leaves when its pipe closes, any other is killed. Its exit code."""
        self.pipe.close()
        self._wait(_LEAVING_S)
        with self._lock:
            # Once it is reaped its number may be another process's.
            self._kill()
            self._gone = True
        self.process.join()
        code = self._exit_code()
        if code is not None:
            self.process.close()
        return code

    def _exit_code(self) -> int | None:
        """How it ended, ``None`` if nobody knows.

        Whoever starts a process reaps those that have ended, in any thread, and takes note of their codes a moment
        later: until then this one is gone, and its code unknown.
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
    """Processes that have nothing to do, kept for the next run. May be used from any thread."""

    def __init__(self) -> None:
        self._idle: list[C] = []
        self._lock = threading.Lock()
        self._closed = False

    def take(self) -> C | None:
        """One that is alive, now the caller's."""
        with self._lock:
            while self._idle:
                child = self._idle.pop()
                if child.alive:
                    return child
                child.close()
        return None

    def put(self, child: C) -> None:
        """Keep ``child``; end it if nobody will come for it any more."""
        with self._lock:
            if not self._closed:
                self._idle.append(child)
                return
        child.close()

    def close(self) -> None:
        """End them all, and those put here later."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for child in idle:
            child.close()


def address_of(task: Task[..., Any]) -> tuple[str, str]:
    """The module and the name by which another process finds the task's function.

    Raises:
        InvalidOption: it is defined where no other process can import it.
    """
    module, name = task.func.__module__, task.func.__qualname__
    if "<locals>" in name:
        raise InvalidOption(
            f"task {task.name!r} cannot run in a process: {name} is defined inside a function, "
            "where another process cannot import it. Move it to the top of a module."
        )
    return module, name


def hear(message: Message, run: Run) -> Done | Raised | None:
    """Pass on what a handler says of its run; the message itself, if it is the last."""
    match message:
        case Done() | Raised():
            return message
        case JobUpdate():
            # By way of the context: that a run has one tells the executor to wait for its last words.
            context_of(run).pass_on(message)
        case Discarded():
            run.discarded = True
        case Ready():
            pass
        case _ as never:
            assert_never(never)
    return None


def answered(last: Done | Raised) -> EncodedResult:
    """The result; raises what the handler raised."""
    match last:
        case Done(result=result):
            return EncodedResult(result)
        case Raised(undecodable=True):
            raise Undecodable from last.to_exception()
        case Raised():
            raise last.to_exception()
        case _ as never:
            assert_never(never)


# CPU-bound functions run in processes of their own, one job at a time each, so that one can be killed
# alone.
#
# A thread stands by for each busy process and blocks on its pipe; the loop is never touched by a slow or
# dying child. What travels are the payload's bytes and the name of the function, never a pickled closure.


class ProcessDied(Exception):
    """The process that ran the job ended before the job did: killed, out of memory, or exited."""


class ProcessRunner:
    """At most ``size`` processes (one per processor unless given), started when needed and replaced when they die."""

    def __init__(self, size: int | None = None) -> None:
        self._threads = ThreadRunner(size or os.cpu_count() or 1)
        self._idle: IdleChildren[ChildProcess] = IdleChildren()

    def bind(self, task: Task[..., Any]) -> Call:
        """A call that has the task's function run by a process, found there by its module and name."""
        module, name = address_of(task)

        def request(run: Run) -> Request:
            app = task.app
            return Request(module, name, run.served.name, run.lease, app.moved_to, app.included)

        return lambda run: self._threads.run(lambda run: self._call(run, request(run)), run)

    def close(self) -> None:
        """End the idle processes now, the others when they are done."""
        self._idle.close()
        self._threads.close()

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
            # Whoever aborted the run may be about to kill its process, which must not be another run's by then.
            child.close()
        return answered(last)


def _last_message(child: ChildProcess, run: Run) -> Done | Raised:
    while True:
        last = hear(child.receive(), run)
        if last is not None:
            return last
