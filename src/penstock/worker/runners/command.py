"""The command runner: shell commands, each in its own process group, with live output in the job's log.

A small supervisor (``supervise``) stands between command and worker. It holds one end of a pipe, the worker the other.
So a command ends when its run is aborted and when the worker dies in any way: no command keeps running that another
worker is about to repeat.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from asyncio.subprocess import PIPE, STDOUT, Process, SubprocessStreamProtocol
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from penstock.core.command import CommandLine, decode_command
from penstock.core.outcome import Undecodable
from penstock.core.text import text_of
from penstock.errors import CommandFailed, InvalidInput, InvalidOption
from penstock.worker.context import JobContext, context_of
from penstock.worker.reporter import JobUpdate
from penstock.worker.run import Run
from penstock.worker.runners import supervise

if TYPE_CHECKING:
    from penstock.worker.reporter import Receipt


# The number of lines that the store keeps per job, so more need not be kept between two reports.
_MOST_LINES: Final = 1000
_LONGEST_LINE: Final = 2_000
_CHUNK: Final = 64 * 1024
# Lines are gathered for this long, which bounds the number of reports.
_REPORT_EVERY_S: Final = 0.1

_SUPERVISOR: Final = str(Path(supervise.__file__).resolve())
# Between SIGTERM and SIGKILL; shorter than the executor's patience with an aborted run.
_GRACE_S: Final = 3.0
# The output may outlast the command by this; like the grace, part of that patience.
_LAST_OUTPUT_S: Final = 1.0
_BUFFER: Final = 64 * 1024
_SHELL: Final = "/bin/sh"


class LogTail:
    """Reads a stream to its end and logs its lines. It never delays the command: lines that the store cannot take in
    time are left out, the oldest first, and counted."""

    def __init__(self, context: JobContext) -> None:
        self._context = context
        self._lines: deque[bytes] = deque(maxlen=_MOST_LINES)
        self._rest = b""
        self._left_out = 0
        self._has_lines = asyncio.Event()
        self._last = b""

    @property
    def last(self) -> str:
        """Return the last line that is not blank: usually the reason why a command failed."""
        return _text(self._last).strip()

    async def follow(self, stream: asyncio.StreamReader) -> None:
        """Log the stream until it ends and the store has its lines. If cancelled, report the lines read so far."""
        sending = asyncio.create_task(self._send())
        try:
            while chunk := await stream.read(_CHUNK):
                self._take(chunk)
        finally:
            sending.cancel()
            if self._rest:
                self._add([self._rest])
            receipts = self._hand_over()
        await asyncio.gather(sending, return_exceptions=True)
        await _await_receipts(receipts)

    def _take(self, chunk: bytes) -> None:
        data = self._rest + chunk
        # A command may print faster than lines can be split, so do not split those that are left out.
        *lines, self._rest = data.rsplit(b"\n", _MOST_LINES + 1)
        if len(lines) > _MOST_LINES:
            self._left_out += lines.pop(0).count(b"\n") + 1
        self._add(lines)
        if len(self._rest) > _CHUNK:
            self._add([self._rest])
            self._rest = b""
        self._has_lines.set()

    def _add(self, lines: Sequence[bytes]) -> None:
        self._left_out += max(len(self._lines) + len(lines) - _MOST_LINES, 0)
        self._lines.extend(lines)
        self._last = next((line for line in reversed(lines) if line.strip()), self._last)

    async def _send(self) -> None:
        while True:
            await self._has_lines.wait()
            self._has_lines.clear()
            await _await_receipts(self._hand_over())
            await asyncio.sleep(_REPORT_EVERY_S)

    def _hand_over(self) -> list[Receipt]:
        lines, left_out = [_text(line) for line in self._lines], self._left_out
        self._lines.clear()
        self._left_out = 0
        return [
            self._context.pass_on(JobUpdate(log=text_of(line), log_skipped=0 if i else left_out))
            for i, line in enumerate(lines)
        ]


async def _await_receipts(receipts: Sequence[Receipt]) -> None:
    try:
        for receipt in receipts:
            await receipt
    except Exception:
        # The run learns of a lost lease or store in another way. A line that cannot be stored must not fail it.
        pass


def _text(line: bytes) -> str:
    # Cut before decoding, because a line may be very long. A character has at most four bytes.
    text = line[: 4 * _LONGEST_LINE + 4].removesuffix(b"\r").decode("utf-8", "replace")
    return text if len(text) <= _LONGEST_LINE else f"{text[:_LONGEST_LINE]} …"


class CommandRunner:
    """Runs command jobs with ``shell``. The executor cancels a run to abort it."""

    def __init__(self, shell: str = _SHELL) -> None:
        if not hasattr(os, "posix_spawn") or not hasattr(os, "killpg"):
            raise InvalidOption(f"commands cannot run on {sys.platform}: it has no process groups.")
        self._shell = shell

    async def call(self, run: Run) -> dict[str, Any]:
        """Run the command; return its exit code, 0, and its run time in seconds.

        Raise ``CommandFailed`` for any other exit code, which is also stored as the job's progress.
        """
        try:
            line = decode_command(run.lease.payload)
        except InvalidInput as error:
            raise Undecodable from error
        context, began = context_of(run), time.monotonic()
        code, last = await self._run(line, context)
        seconds = round(time.monotonic() - began, 3)
        if code == 0:
            return {"exit_code": 0, "seconds": seconds}
        context.progress({"exit_code": code, "seconds": seconds})
        raise CommandFailed(f"{_ending(code)}: {last}" if last else _ending(code), exit_code=code)

    async def _run(self, line: CommandLine, context: JobContext) -> tuple[int, str]:
        status, theirs = os.pipe()
        starting = asyncio.create_task(self._start(line, context, theirs))
        try:
            # asyncio cannot cancel a start: it would kill only the supervisor and wait for the command.
            aborted = await _until_done(starting)
            process, supervisor = starting.result()
        except BaseException:
            os.close(status)
            raise
        finally:
            os.close(theirs)
        tail = LogTail(context)
        assert process.stdout is not None
        output = asyncio.create_task(tail.follow(process.stdout))
        try:
            if aborted is not None:
                raise aborted
            await supervisor.until_over(output)
            return await process.wait(), tail.last
        except BaseException:
            await _stop(process, supervisor, output)
            raise
        finally:
            supervisor.close_output()
            _end_group(process, status)
            os.close(status)

    async def _start(
        self, line: CommandLine, context: JobContext, status: int
    ) -> tuple[Process, _Supervisor]:
        if line.cwd and not os.path.isdir(line.cwd):  # noqa: ASYNC240
            raise CommandFailed(f"the folder {line.cwd} does not exist on this machine", exit_code=127)
        loop = asyncio.get_running_loop()
        transport, supervisor = await loop.subprocess_exec(
            lambda: _Supervisor(loop),
            *(sys.executable, "-I", "-S", _SUPERVISOR, self._shell, line.command, str(_GRACE_S), str(status)),
            stdin=PIPE,
            stdout=PIPE,
            stderr=STDOUT,
            pass_fds=[status],
            cwd=line.cwd or None,
            env=os.environ | line.env | _job_variables(context),
            # Keeps Ctrl-C of the terminal away: the worker decides about its jobs.
            start_new_session=True,
        )
        return Process(transport, supervisor, loop), supervisor


class _Supervisor(SubprocessStreamProtocol):
    """Notices the end of a supervisor. ``Process.wait`` may also wait for the end of the output, which a process that
    has left the command's group can hold open."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(limit=_BUFFER, loop=loop)
        self._ended: asyncio.Future[None] = loop.create_future()
        self._pipe: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        # A cast, because transports of other loops, such as uvloop's, are not instances of asyncio's classes.
        self._pipe = cast(asyncio.SubprocessTransport, transport).get_pipe_transport(1)

    def process_exited(self) -> None:
        super().process_exited()
        self._ended.set_result(None)

    async def until_over(self, output: asyncio.Task[None]) -> None:
        """Wait until the output has ended, at most a little longer than the command runs.

        This never cancels ``output``, so that lines printed during a stop are kept.
        """
        await asyncio.wait({output, self._ended}, return_when=asyncio.FIRST_COMPLETED)
        if not output.done():
            await asyncio.wait({output}, timeout=_LAST_OUTPUT_S)
            self.close_output()
        await asyncio.shield(output)

    def close_output(self) -> None:
        """Close the output pipe for reader and writers."""
        if self._pipe is not None:
            self._pipe.close()


def _job_variables(context: JobContext) -> dict[str, str]:
    """Return the environment variables that describe the job."""
    return {
        "PENSTOCK_JOB_ID": context.id,
        "PENSTOCK_JOB_QUEUE": context.queue,
        "PENSTOCK_JOB_RUN": str(context.run),
    }


async def _until_done(task: asyncio.Task[Any]) -> asyncio.CancelledError | None:
    """Wait for ``task``, even if this run is cancelled meanwhile; return the error of that cancel."""
    cancelled = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    return cancelled


async def _stop(process: Process, supervisor: _Supervisor, output: asyncio.Task[None]) -> None:
    """Ask the supervisor to stop the command; cut the lifeline if this is cancelled."""
    assert process.stdin is not None
    try:
        if not process.stdin.is_closing():
            process.stdin.write(b"t")
        await supervisor.until_over(output)
        await process.wait()
    except (ConnectionError, asyncio.CancelledError):
        process.stdin.close()
        output.cancel()
        await asyncio.wait({output})
    finally:
        process.stdin.close()


def _end_group(process: Process, status: int) -> None:
    """Kill the command's group if the supervisor was killed."""
    if process.stdin is not None:
        process.stdin.close()
    if process.returncode is not None and process.returncode < 0:
        os.set_blocking(status, False)
        try:
            os.killpg(int(os.read(status, 32)), signal.SIGKILL)
        except (ValueError, OSError):
            # The supervisor had not written the group id, or the group is gone.
            _end_session(process.pid)


def _end_session(leader: int) -> None:
    """Kill the rest of a supervisor's session, whose id cannot be reused while a process is left. Works on Linux, where
    ``/proc`` has the session of each process."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The program name is in brackets and may contain anything.
            _, _, _, session, *_ = stat.read_text(errors="replace").rpartition(")")[2].split()
            if int(session) == leader:
                os.kill(int(stat.parent.name), signal.SIGKILL)
        except OSError:
            pass  # it has ended meanwhile


def _ending(code: int) -> str:
    names = {128 + number.value: number.name for number in signal.Signals}
    return f"killed by {names[code]}" if code in names else f"exit code {code}"
