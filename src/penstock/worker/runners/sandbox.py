"""The sandbox runner: functions that may crash, hang or leak run in a process made for one run.

The next process is always ready: it has started, imported the tasks' modules, and waits. So a run does not pay for the
start of an interpreter unless runs are shorter than that. A job is settled when its process, and all processes that
this has started, are gone.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, Final

from penstock.core.text import get_logger
from penstock.core.units import describe, describe_size
from penstock.errors import CpuLimitExceeded, InvalidOption, SandboxCrashed, SandboxError
from penstock.worker.context import context_of
from penstock.worker.run import Call, EncodedResult, Run
from penstock.worker.runners.child import Done, Raised, Ready, Request
from penstock.worker.runners.process import (
    LOOK_EVERY_S,
    SPAWN,
    ChildProcess,
    ChildRunner,
    handle_message,
    result_of,
)

if TYPE_CHECKING:
    from penstock.client.task import Task


logger = get_logger("penstock.worker")

# Both parts, and what the function itself logs, must fit into the 1000 lines that are kept per job.
_MOST_BYTES: Final = 64 * 1024
_MOST_LINES: Final = 400
_LONGEST_LINE: Final = 2_000

_GRACE_S: Final = 2.0
_STARTING_S: Final = 60.0
_CHUNK: Final = 64 * 1024
# The number of chunks to read after a run: a process that has left the group may keep writing.
_LAST_CHUNKS: Final = 16


class Output:
    """Turns the output of one run into lines: at most 400 (64 KiB) of its beginning and of its end each."""

    def __init__(self) -> None:
        self._lines = 0
        self._bytes = 0
        # An incomplete line; once the beginning is full, everything that is kept of the rest.
        self._buffer = bytearray()
        self._full = False
        self._dropped_lines = 0
        self._dropped_bytes = 0

    def feed(self, chunk: bytes) -> list[str]:
        """Take the next bytes; return the lines in them that belong to the beginning."""
        self._buffer += chunk
        lines: list[str] = []
        while not self._full and (end := self._buffer.find(b"\n")) >= 0:
            self._lines += 1
            self._bytes += end + 1
            self._full = self._lines > _MOST_LINES or self._bytes > _MOST_BYTES
            if not self._full:
                lines.append(_text(self._buffer[:end]))
                del self._buffer[: end + 1]
        if len(self._buffer) > 2 * _MOST_BYTES:
            self._full = True
            self._drop(len(self._buffer) - _MOST_BYTES)
        return lines

    def rest(self) -> list[str]:
        """Return the last lines, after a line that says how much is left out. Call this once, at the end."""
        self._drop(max(len(self._buffer) - _MOST_BYTES, 0))
        lines = bytes(self._buffer).split(b"\n")
        if not lines[-1]:
            lines.pop()
        surplus = max(len(lines) - _MOST_LINES, 0)
        self._dropped_lines += surplus
        self._dropped_bytes += sum(len(line) + 1 for line in lines[:surplus])
        texts = [_text(line) for line in lines[surplus:]]
        if self._dropped_bytes:
            size = describe_size(self._dropped_bytes)
            texts.insert(0, f"… {self._dropped_lines} lines ({size}) left out …")
        return texts

    def _drop(self, count: int) -> None:
        """Drop the oldest ``count`` bytes. Bytes, not lines: a run may print faster than lines can be split."""
        self._dropped_bytes += count
        self._dropped_lines += self._buffer.count(b"\n", 0, count)
        del self._buffer[:count]


def _text(line: bytes | bytearray) -> str:
    text = line.removesuffix(b"\r").decode("utf-8", "replace")
    return text if len(text) <= _LONGEST_LINE else f"{text[:_LONGEST_LINE]} …"


class SandboxRunner(ChildRunner["_Sandbox"]):
    """Runs functions in processes that are made for one run each. One of them is idle: it waits for the next run."""

    def __init__(self, size: int | None = None) -> None:
        super().__init__(size)
        self._modules: dict[str, None] = {}

    def bind(self, task: Task[..., Any]) -> Call:
        """Return a call that runs the task's function in a sandbox."""
        if not hasattr(os, "killpg"):
            raise InvalidOption(
                f"task {task.name!r} cannot run in a sandbox: {sys.platform} has no process groups."
            )
        if task.limits.memory_bytes and sys.platform != "linux":
            logger.warning("task %s: memory is not limited on %s, only on Linux", task.name, sys.platform)
        call = super().bind(task)
        self._modules.update(dict.fromkeys([*task.app.preloaded, task.func.__module__, *task.app.included]))
        return call

    def _call(self, run: Run, request: Request) -> EncodedResult:
        spare = self._idle.take()
        if spare is not None:
            try:
                return self._run_in(spare, run, request)
            except SandboxCrashed:
                # A process that died while it waited was not killed by this run.
                if spare.has_begun or run.abort is not None:
                    raise
        return self._run_in(self._new(), run, request)

    def _run_in(self, sandbox: _Sandbox, run: Run, request: Request) -> EncodedResult:
        # The timeout starts when the process is ready.
        run.started_at = 0.0
        run.kill = sandbox.stop
        try:
            last = sandbox.run(run, request, on_begin=self._prepare_next) if run.abort is None else None
        finally:
            run.kill = None
            code = sandbox.close()
            sandbox.log_rest(run)
        if last is None:
            raise _crash(code, request, has_begun=sandbox.has_begun)
        return result_of(last)

    def _prepare_next(self) -> None:
        try:
            self._idle.put(self._new())
        except OSError as error:
            # This must not fail the current run.
            logger.warning("cannot start a process for the next run in a sandbox: %s", error)

    def _new(self) -> _Sandbox:
        return _Sandbox(tuple(self._modules))


class _Sandbox(ChildProcess):
    """A process for one run, and our end of its output. Any thread may call ``stop`` and ``kill``."""

    def __init__(self, modules: tuple[str, ...]) -> None:
        from penstock.worker.runners.confine import serve_once  # which Windows cannot import

        self._output, theirs = SPAWN.Pipe(duplex=False)
        super().__init__(serve_once, theirs, modules)
        theirs.close()
        os.set_blocking(self._output.fileno(), False)
        self._printed = Output()
        self._printing = True
        self._pid = self.process.pid or 0
        self._pidfd = _pidfd(self._pid)
        self._starts_by = time.monotonic() + _STARTING_S
        self._stops_by = float("inf")
        self.has_begun = False

    @property
    def alive(self) -> bool:
        # Checking the pidfd does not reap the process, so its pid stays valid for later signals.
        return super().alive if self._pidfd is None else not wait([self._pidfd], 0)

    def run(self, run: Run, request: Request, *, on_begin: Callable[[], None]) -> Done | Raised | None:
        """Run ``request`` when the process is ready; call ``on_begin`` when it has the request.

        Return its last message, ``None`` if it died without one.
        """
        try:
            while True:
                ready = wait(self._sources(), LOOK_EVERY_S)
                if self._output in ready:
                    self._log_some(run)
                if self.pipe in ready:
                    last = self._receive_from(run, request, on_begin)
                    if last is not None:
                        return last
                elif not self.can_send:
                    return None
                self._kill_if_late()
        except (EOFError, OSError):
            return None

    def stop(self) -> None:
        """Ask the run to stop, without waiting. Whatever is left of it after the grace is killed."""
        self._stops_by = time.monotonic() + _GRACE_S
        with self._lock:
            if not self._gone:
                self._signal(signal.SIGTERM)

    def close(self) -> int | None:
        code = super().close()
        if self._pidfd is not None:
            os.close(self._pidfd)
        return code

    def log_rest(self, run: Run) -> None:
        """Log the last output after the end of the run."""
        for _ in range(_LAST_CHUNKS):
            self._log_some(run)
        for line in self._printed.rest():
            context_of(run).log(line)
        self._output.close()

    def _sources(self) -> list[Any]:
        sources: list[Any] = [self.pipe]
        if self._printing:
            sources.append(self._output)
        if self._pidfd is not None:
            sources.append(self._pidfd)
        return sources

    def _receive_from(self, run: Run, request: Request, on_begin: Callable[[], None]) -> Done | Raised | None:
        message = self.receive()
        if isinstance(message, Ready):
            # Send first: a process that died when it was ready has begun nothing.
            self.send(request)
            self.has_begun = True
            self._starts_by = float("inf")
            run.started_at = time.monotonic()
            on_begin()
        return handle_message(message, run)

    def _check_child(self) -> None:
        # The child may hang in the middle of a message, which is noticed only here.
        self._kill_if_late()
        super()._check_child()

    def _kill_if_late(self) -> None:
        if time.monotonic() > min(self._starts_by, self._stops_by):
            self.kill()

    def _log_some(self, run: Run) -> None:
        try:
            chunk = os.read(self._output.fileno(), _CHUNK)
        except BlockingIOError:
            return
        self._printing = bool(chunk)
        for line in self._printed.feed(chunk):
            context_of(run).log(line)

    def _wait(self, seconds: float) -> None:
        # A process without a run may still be importing modules; do not wait for it.
        if self.has_begun:
            wait([self.process.sentinel if self._pidfd is None else self._pidfd], seconds)

    def _kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self._pid, number)
        except (ProcessLookupError, PermissionError):
            # The process has not made its group yet, or the whole group is gone.
            if number == signal.SIGKILL:
                self.process.kill()
            else:
                self.process.terminate()


def _pidfd(pid: int) -> int | None:
    """Return a descriptor that is readable when the process has died; ``None`` if the platform has none."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def _crash(code: int | None, request: Request, *, has_begun: bool) -> SandboxError:
    if code in (-signal.SIGPROF, -signal.SIGXCPU) and request.limits.cpu_ms:
        return CpuLimitExceeded(
            f"the run used up its {describe(request.limits.cpu_ms)} of processor time. "
            "Raise the task's cpu_time, or do less; the job's log shows where it was."
        )
    if not has_begun:
        return SandboxCrashed(
            f"the process for the run ended ({_ending(code)}) or was not ready within {_STARTING_S:.0f} s. "
            f"Check what importing {request.module} does."
        )
    hint = " The machine may be out of memory." if code == -signal.SIGKILL else ""
    return SandboxCrashed(
        f"the process of the run ended before its function returned: {_ending(code)}.{hint}"
    )


def _ending(code: int | None) -> str:
    if code is None or code >= 0:
        return f"exit code {code}"
    names = {number.value: number.name for number in signal.Signals}
    return f"killed by {names.get(-code, f'signal {-code}')}"
