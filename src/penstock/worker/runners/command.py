"""What a command prints, on its way into the job's log: live, and never faster than the store takes it."""

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
from penstock.core.text import text_of
from penstock.core.verdict import Undecodable
from penstock.errors import CommandFailed, InvalidInput, InvalidOption
from penstock.worker.context import JobContext, context_of
from penstock.worker.reporter import JobUpdate
from penstock.worker.run import Run
from penstock.worker.runners import supervise

if TYPE_CHECKING:
    from penstock.worker.reporter import Receipt


# The store keeps so many lines of a job: of more, between two reports, only the last would be left
# anyway.
_MOST_LINES: Final = 1000
_LONGEST_LINE: Final = 2_000
_CHUNK: Final = 64 * 1024
# How long lines are gathered; a command that prints a lot costs so many reports, no more.
_REPORT_EVERY_S: Final = 0.1


class LogTail:
    """Reads a stream to its end and logs its lines. A command is never held up by it: lines that the store cannot take
    in time are left out, the oldest first, and counted."""

    def __init__(self, context: JobContext) -> None:
        self._context = context
        self._lines: deque[bytes] = deque(maxlen=_MOST_LINES)
        self._rest = b""
        self._left_out = 0
        self._news = asyncio.Event()
        self._last = b""

    @property
    def last(self) -> str:
        """The last line that says something: most often why a command failed."""
        return _text(self._last).strip()

    async def follow(self, stream: asyncio.StreamReader) -> None:
        """Returns when the stream has ended and the store has what is kept of it. When it is cancelled, what was read
        until then has been reported."""
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
        await _answered(receipts)

    def _take(self, chunk: bytes) -> None:
        data = self._rest + chunk
        # A command may print faster than lines can be made of it: of those that would be left out, none is made.
        *lines, self._rest = data.rsplit(b"\n", _MOST_LINES + 1)
        if len(lines) > _MOST_LINES:
            self._left_out += lines.pop(0).count(b"\n") + 1
        self._add(lines)
        if len(self._rest) > _CHUNK:
            self._add([self._rest])
            self._rest = b""
        self._news.set()

    def _add(self, lines: Sequence[bytes]) -> None:
        self._left_out += max(len(self._lines) + len(lines) - _MOST_LINES, 0)
        self._lines.extend(lines)
        self._last = next((line for line in reversed(lines) if line.strip()), self._last)

    async def _send(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            await _answered(self._hand_over())
            await asyncio.sleep(_REPORT_EVERY_S)

    def _hand_over(self) -> list[Receipt]:
        lines, left_out = [_text(line) for line in self._lines], self._left_out
        self._lines.clear()
        self._left_out = 0
        return [
            self._context.pass_on(JobUpdate(log=text_of(line), log_skipped=0 if i else left_out))
            for i, line in enumerate(lines)
        ]


async def _answered(receipts: Sequence[Receipt]) -> None:
    try:
        for receipt in receipts:
            await receipt
    except Exception:
        # A lost lease or store reaches the run in another way. A line that cannot be stored must not fail it.
        pass


def _text(line: bytes) -> str:
    # Cut first: a line may be long, and a character has four bytes at most.
    text = line[: 4 * _LONGEST_LINE + 4].removesuffix(b"\r").decode("utf-8", "replace")
    return text if len(text) <= _LONGEST_LINE else f"{text[:_LONGEST_LINE]} …"


# Shell commands: each in a process group of its own, with a small supervisor between it and the worker.
#
# The supervisor (``supervise``) holds one end of a pipe, the worker the other. So a command ends when its
# run is aborted, and when the worker dies, however it dies: nothing is left running that another worker
# is about to run again.


_SUPERVISOR: Final = str(Path(supervise.__file__).resolve())
# Between SIGTERM and SIGKILL; shorter than the patience the executor has with an aborted run.
_GRACE_S: Final = 3.0
# How long the output may outlast the command: as the grace, part of that patience.
_LAST_OUTPUT_S: Final = 1.0
_BUFFER: Final = 64 * 1024
_SHELL: Final = "/bin/sh"


class CommandRunner:
    """Runs command jobs by ``shell``. The executor cancels a run to abort it."""

    def __init__(self, shell: str = _SHELL) -> None:
        if not hasattr(os, "posix_spawn") or not hasattr(os, "killpg"):
            raise InvalidOption(f"commands cannot be run on {sys.platform}: it has no process groups.")
        self._shell = shell

    async def call(self, run: Run) -> dict[str, Any]:
        """The exit code and the seconds it took, of a command that ended with 0.

        Raises ``CommandFailed`` for any other code, which stands in the job's progress as well.
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
            # asyncio cannot cut a start short: it would kill the supervisor alone and wait for the command.
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
            raise CommandFailed(f"the folder {line.cwd} is not there on this machine", exit_code=127)
        loop = asyncio.get_running_loop()
        transport, supervisor = await loop.subprocess_exec(
            lambda: _Supervisor(loop),
            *(sys.executable, "-I", "-S", _SUPERVISOR, self._shell, line.command, str(_GRACE_S), str(status)),
            stdin=PIPE,
            stdout=PIPE,
            stderr=STDOUT,
            pass_fds=[status],
            cwd=line.cwd or None,
            env=os.environ | line.env | _told(context),
            # No terminal's Ctrl-C comes here: the worker decides what becomes of its jobs.
            start_new_session=True,
        )
        return Process(transport, supervisor, loop), supervisor


class _Supervisor(SubprocessStreamProtocol):
    """Knows of a supervisor's end when it comes. ``Process.wait`` may wait for the end of the output as well, which a
    process that has left the command's group holds open for as long as it likes."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(limit=_BUFFER, loop=loop)
        self._ended: asyncio.Future[None] = loop.create_future()
        self._pipe: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        # By name: the transports of other loops, such as uvloop's, are of no class that asyncio knows.
        self._pipe = cast(asyncio.SubprocessTransport, transport).get_pipe_transport(1)

    def process_exited(self) -> None:
        super().process_exited()
        self._ended.set_result(None)

    async def until_over(self, output: asyncio.Task[None]) -> None:
        """Returns when the output has ended; at the latest when it was read a little longer than the command ran.

        ``output`` is never cancelled by it: what a command says while it is being stopped is kept, too.
        """
        await asyncio.wait({output, self._ended}, return_when=asyncio.FIRST_COMPLETED)
        if not output.done():
            await asyncio.wait({output}, timeout=_LAST_OUTPUT_S)
            self.close_output()
        await asyncio.shield(output)

    def close_output(self) -> None:
        """Whoever reads it meets its end; whoever writes to it, a closed pipe."""
        if self._pipe is not None:
            self._pipe.close()


def _told(context: JobContext) -> dict[str, str]:
    """What a command may want to know of its job."""
    return {
        "PENSTOCK_JOB_ID": context.id,
        "PENSTOCK_JOB_QUEUE": context.queue,
        "PENSTOCK_JOB_RUN": str(context.run),
    }


async def _until_done(task: asyncio.Task[Any]) -> asyncio.CancelledError | None:
    """Wait for ``task``, even if this run is cancelled meanwhile. Return the error that the cancel has raised."""
    cancelled = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    return cancelled


async def _stop(process: Process, supervisor: _Supervisor, output: asyncio.Task[None]) -> None:
    """Ask it to end; cut the lifeline when we are told to hurry."""
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
    """If the supervisor was killed, do what it would have done."""
    if process.stdin is not None:
        process.stdin.close()
    if process.returncode is not None and process.returncode < 0:
        os.set_blocking(status, False)
        try:
            os.killpg(int(os.read(status, 32)), signal.SIGKILL)
        except (ValueError, OSError):
            # It had not told yet, or all is gone.
            _end_session(process.pid)


def _end_session(leader: int) -> None:
    """Kill what is left of the session that a supervisor had begun: its number is its own for as long as any is left.
    Only where the system tells of sessions, which is Linux."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name of a program may have anything in it, and is in brackets.
            _, _, _, session, *_ = stat.read_text(errors="replace").rpartition(")")[2].split()
            if int(session) == leader:
                os.kill(int(stat.parent.name), signal.SIGKILL)
        except OSError:
            pass  # it has ended meanwhile


def _ending(code: int) -> str:
    known = {128 + number.value: number.name for number in signal.Signals}
    return f"killed by {known[code]}" if code in known else f"exit code {code}"
