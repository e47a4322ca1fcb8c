"""``penstock wait`` and ``enqueue --wait``: print a job's output, exit by how it ended. ``penstock events``: follow the
log of all jobs."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Final

import click

from penstock.cli.completion import completes_ids, completes_queues
from penstock.cli.connect import queues_of, run_with_app
from penstock.cli.errors import CommandLineError, ExitCode, InvalidUsage, NotFound
from penstock.cli.jobview import event_line, find_job, identity
from penstock.cli.output import json_text, jsonable, print_json
from penstock.cli.parameters import OPEN, command, json_option, option, queue_of_ids
from penstock.cli.settings import Settings
from penstock.client.situation import command_line
from penstock.core.command import COMMAND_TASK
from penstock.core.lifecycle import EventType
from penstock.core.text import visible_in_line
from penstock.core.units import milliseconds
from penstock.errors import InvalidOption, JobCancelled, JobError, JobNotFound, SerializationError

if TYPE_CHECKING:
    from penstock.client.app import App
    from penstock.client.handle import JobHandle
    from penstock.core.event import Event
    from penstock.storage.values import LogPage

LOG_POLL_S: Final = 0.2
_CUT_AT: Final = 2_000
_CUT_MARK: Final = " …"
"""Workers end a line with this mark where they cut it."""
_HINT_AFTER_S: Final = 2.0
_NEEDS_NOTHING: Final = ("ready", "busy", "active", "retry", "not due", "completed", "failed", "cancelled")
"""Kinds of reasons that need no action."""


class LogFollower:
    """Reads each line of a job's log once, and counts the lines that the store dropped."""

    def __init__(self, handle: JobHandle[Any]) -> None:
        self._handle = handle
        self._seen = 0

    @property
    def has_lines(self) -> bool:
        """Return whether the log had a line when it was last read."""
        return self._seen > 0

    async def new_lines(self) -> tuple[int, list[str]]:
        """Return the number of lines that were dropped since the last call, and the new lines."""
        page = await self._page()
        if page.written < self._seen:
            # The job was enqueued again under its id, with a new log.
            self._seen = 0
            page = await self._page()
        dropped = page.start - self._seen
        self._seen = page.written
        return dropped, page.lines

    async def _page(self) -> LogPage:
        storage = await self._handle.source.app.connect()
        return await storage.logs(self._handle.queue, self._handle.id, start=self._seen)

    async def print_new(
        self, write: Callable[[str], object] = click.echo, *, at_most: int | None = None
    ) -> None:
        """Print the new lines, or the last ``at_most`` of them. Report dropped and cut lines on stderr."""
        dropped, lines = await self.new_lines()
        if dropped and (at_most is None or at_most > len(lines)):
            click.echo(dropped_lines_note(dropped), err=True)
        if at_most is not None:
            lines = lines[len(lines) - min(at_most, len(lines)) :]
        for line in lines:
            write(line)
        if cut := sum(map(_is_cut, lines)):
            click.echo(f"… {_lines_were(cut)} cut after {_CUT_AT} characters", err=True)


def dropped_lines_note(count: int) -> str:
    """Return the note about log lines that the store dropped."""
    return f"… {_lines_were(count)} not kept"


def _lines_were(count: int) -> str:
    return f"{count} {'line was' if count == 1 else 'lines were'}"


def _is_cut(line: str) -> bool:
    return len(line) == _CUT_AT + len(_CUT_MARK) and line.endswith(_CUT_MARK)


@command("wait")
@click.argument("ids", metavar="ID...", nargs=-1, required=True, shell_complete=completes_ids(*OPEN))
@option("--timeout DURATION", "Wait at most this long, then exit with 6. [no limit]")
@queue_of_ids
@json_option
def wait(
    settings: Settings, *, ids: tuple[str, ...], timeout: str | None, queue: str | None, as_json: bool
) -> int:
    """Wait for jobs to end, and print how each one ended.

    \b
      penstock wait 01a1e25c... && deploy
      penstock wait build test --timeout 10min

    Exit codes: 0 all jobs completed; 1 a job failed or was cancelled; 3 no such job; 6 --timeout passed. Ctrl-C ends
    the wait; the jobs keep going.
    """

    async def read(app: App) -> int:
        handles = {}
        for id in ids:
            job = await find_job(app, id, queue)
            handles[job.ref] = app.job(job.ref)
        return await _wait_for_all(list(handles.values()), timeout=timeout, as_json=as_json)

    return run_with_app(settings, read)


async def _wait_for_all(handles: list[JobHandle[Any]], *, timeout: str | None, as_json: bool) -> int:
    hints = [asyncio.create_task(hint_at_cause(handle)) for handle in _one_per_queue(handles)]
    waits = [asyncio.create_task(_end_of(handle)) for handle in handles]
    ends: list[dict[str, Any]] = []
    try:
        timeout_s = None if timeout is None else milliseconds(timeout, what="--timeout") / 1000
        for next_end in asyncio.as_completed(waits, timeout=timeout_s):
            ends.append(end := await next_end)
            if not as_json:
                click.echo(visible_in_line(end["error"] or f"job {end['id']!r} completed"))
    except TimeoutError:
        ended = {end["ref"] for end in ends}
        late = [handle for handle in handles if handle.ref not in ended]
        names = ", ".join(handle.id for handle in late)
        raise CommandLineError(
            f"timed out after {timeout}. Not ended: {names}. {await late[0].why()}", ExitCode.TIMEOUT
        ) from None
    finally:
        for task in (*waits, *hints):
            task.cancel()
        await asyncio.gather(*waits, *hints, return_exceptions=True)
        if as_json:
            print_json(ends)
    return ExitCode.DONE if all(end["state"] == "completed" for end in ends) else ExitCode.FAILED


def _one_per_queue(handles: list[JobHandle[Any]]) -> Iterable[JobHandle[Any]]:
    return {handle.queue: handle for handle in handles}.values()


async def _end_of(handle: JobHandle[Any]) -> dict[str, Any]:
    """Wait for a job to end, and return how it ended."""
    state, error = "completed", ""
    try:
        await handle.result()
    except SerializationError:
        # The job completed; only its result is unreadable here.
        pass
    except JobNotFound:
        raise
    except JobError as caught:
        state, error = "cancelled" if isinstance(caught, JobCancelled) else "failed", str(caught)
    return {**identity(handle), "state": state, "error": error}


async def wait_for(handle: JobHandle[Any], *, timeout: str | None, as_json: bool) -> int:
    """Wait for a job to end, print its output or result, and return the exit code for how it ended."""
    if sys.stderr.isatty() and not as_json:
        click.echo(f"job {handle.id}", err=True)
    follower = LogFollower(handle)
    following = asyncio.create_task(_print_lines(follower, silent=as_json))
    hinting = asyncio.create_task(hint_at_cause(handle))
    error: JobError | None = None
    result: Any = None
    try:
        result = await handle.result(timeout)
    except JobNotFound:
        raise
    except JobError as caught:
        error = caught
    except asyncio.CancelledError:
        click.echo(
            f"the job keeps going. Wait for it with {command_line('wait', handle.ref)}, or stop it with "
            f"{command_line('cancel', handle.ref)}",
            err=True,
        )
        raise
    finally:
        for task in (following, hinting):
            task.cancel()
        await asyncio.gather(following, hinting, return_exceptions=True)
    return await _print_end(handle, follower, error, result, as_json=as_json)


async def _print_end(
    handle: JobHandle[Any], follower: LogFollower, error: JobError | None, result: Any, *, as_json: bool
) -> int:
    info = await handle.get_or_none()
    is_command = info is not None and info.task == COMMAND_TASK
    code = _exit_code(error, info.progress if info is not None else None)
    if as_json:
        state = info.state if info is not None else None
        failure = None if error is None else str(error)
        ended = {"state": state, "exit_code": code, "result": result, "error": failure}
        print_json({**identity(handle), **ended})
        return code
    await follower.print_new()
    if error is not None:
        click.echo(f"penstock: {error}", err=True)
    elif not is_command and result is not None:
        print_json(result)
    return code


def _exit_code(error: JobError | None, progress: Any) -> int:
    if error is None:
        return 0
    code = progress.get("exit_code") if isinstance(progress, dict) else None
    if isinstance(code, int) and code and not isinstance(error, JobCancelled):
        return code
    return int(ExitCode.FAILED)


async def _print_lines(follower: LogFollower, *, silent: bool) -> None:
    while not silent:
        await follower.print_new()
        await asyncio.sleep(LOG_POLL_S)


async def hint_at_cause(handle: JobHandle[Any]) -> None:
    """Wait a moment, then print on stderr what keeps the job from running, if anything does."""
    await asyncio.sleep(_HINT_AFTER_S)
    if await handle.get_or_none() is not None and (reason := await handle.why()).kind not in _NEEDS_NOTHING:
        click.echo(visible_in_line(f"{handle.id} waits. {reason}"), err=True)


_TYPES: Final = tuple(kind.value for kind in EventType)


@command("events", epilog=f"TYPE is one of {', '.join(_TYPES)}.")
@option(
    "-q, --queue NAME",
    "Only events of this queue. May be repeated. [all]",
    multiple=True,
    shell_complete=completes_queues,
)
@option("-f, --follow", "Keep printing new events until Ctrl-C.")
@option(
    "--since SEQ",
    "Events after this number, or of the last 5m; 'now' for new events only. [all kept events]",
    default="earliest",
)
@option(
    "--type TYPE",
    "Only events of this type. May be repeated. [all]",
    click.Choice(_TYPES),
    name="types",
    multiple=True,
)
@option("--id ID", "Only events of this job.", shell_complete=completes_ids())
@json_option
def events(
    settings: Settings,
    *,
    queue: tuple[str, ...],
    follow: bool,
    since: str,
    types: tuple[str, ...],
    id: str | None,
    as_json: bool,
) -> None:
    """Print the event log: every change of every job, in order. With --json, one object per line.

    \b
      penstock events --follow --since now
      penstock events --type failed --json | jq .error
    """
    after, since_ms = _start(since)

    async def read(app: App) -> None:
        await queues_of(app, *queue)
        queues, whole_id = await _job_of(app, queue, id) if id else (queue, None)
        log = app.events(*queues, after=after, follow=follow, types=types or None, id=whole_id)  # type: ignore[arg-type]
        async with aclosing(log):
            async for event in log:
                if event.at_ms >= since_ms:
                    click.echo(_json(event) if as_json else _line(event))

    run_with_app(settings, read)


def _start(since: str) -> tuple[int | str | None, int]:
    """Return the event to start after, and the time before which events are skipped."""
    if since.isdigit():
        return int(since), 0
    if since in ("now", "earliest"):
        return (None if since == "now" else since), 0
    try:
        return "earliest", time.time_ns() // 1_000_000 - milliseconds(since)
    except InvalidOption:
        raise InvalidUsage(
            f"--since {since}: give the number of an event, a duration such as 5m, 'now' or 'earliest'."
        ) from None


async def _job_of(app: App, queues: tuple[str, ...], id: str) -> tuple[tuple[str, ...], str]:
    """Return the queues to read and the whole id. The log may have events of a job that is no longer kept."""
    try:
        job = await find_job(app, id, queues[0] if len(queues) == 1 else None)
    except NotFound:
        return queues, id
    return (job.queue,), job.id


def _line(event: Event) -> str:
    return visible_in_line(f"{event.queue} {event.seq}  {event.id or '-'}  {event_line(event)}")


def _json(event: Event) -> str:
    """Return the event as JSON, without empty fields."""
    fields = {**jsonable(event), "ref": event.ref}
    return json_text({name: value for name, value in fields.items() if value not in ("", 0)})
