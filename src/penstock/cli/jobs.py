"""``penstock list``, ``show``, ``why``, ``logs``: read jobs."""

from __future__ import annotations

import asyncio
import shutil
import sys
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import click

from penstock.cli.completion import STATES, completes_ids
from penstock.cli.connect import queues_of, run_with_app
from penstock.cli.errors import InvalidUsage
from penstock.cli.jobview import (
    JOB_COLUMNS,
    SPARE_JOB_COLUMNS,
    facts,
    find_job,
    identity,
    job_fields,
    job_row,
    reason_fields,
    short_ids,
    step_facts,
    step_row,
    timeline,
    timeline_row,
)
from penstock.cli.output import at_terminal, print_json, print_sentences, print_table, raw, wrapped
from penstock.cli.parameters import (
    StateName,
    command,
    json_option,
    limit_option,
    option,
    queue_of_id,
    queue_option,
)
from penstock.cli.settings import Settings
from penstock.cli.values import whole
from penstock.cli.waiting import LOG_POLL_S, LogFollower, hint_at_cause
from penstock.client.session import shown_store
from penstock.client.situation import command_line
from penstock.client.why import explain_all
from penstock.core.command import COMMAND_TASK
from penstock.core.lifecycle import TERMINAL, State
from penstock.core.text import visible_in_line
from penstock.errors import EventsLost

if TYPE_CHECKING:
    from penstock.client.app import App
    from penstock.client.causes import Reason
    from penstock.client.info import JobInfo
    from penstock.client.steps import StepInfo


_STATES: Final = StateName(STATES)
# Running jobs, then those that need a person, then those that come next, then the rest.
_URGENT_FIRST: Final = (
    State.ACTIVE,
    State.FAILED,
    State.WAITING,
    State.BLOCKED,
    State.SCHEDULED,
    State.COMPLETED,
    State.CANCELLED,
)
STATES_HELP: Final = f"STATE is one of {', '.join(STATES)}."


Reasons: TypeAlias = "dict[tuple[str, str], Reason]"
"""Why jobs do not run, by queue and id."""


async def read_reasons(app: App, jobs: list[JobInfo]) -> Reasons:
    """Return why the open jobs among ``jobs`` do not run."""
    return await explain_all(await app.connect(), [job.raw for job in jobs])


def print_jobs(jobs: list[JobInfo], reasons: Reasons, *, as_json: bool, empty: str = "no jobs") -> None:
    """Print a row for each job, or everything about each job as JSON. Print ``empty`` instead of an empty table."""
    with_reasons = [(job, reasons.get((job.queue, job.id))) for job in jobs]
    if as_json:
        print_json([job_fields(job, reason) for job, reason in with_reasons])
    else:
        # Scripts get whole ids and whole texts.
        shorten = at_terminal()
        shorts = short_ids(job.id for job in jobs) if shorten else {}
        rows = [
            job_row(job, reason, shown_id=shorts.get(job.id), whole=not shorten)
            for job, reason in with_reasons
        ]
        print_table(JOB_COLUMNS, rows, empty=empty, spare=SPARE_JOB_COLUMNS)


def first_jobs(count: int) -> str:
    """Return how a note names the jobs that are shown."""
    return "the first job" if count == 1 else f"the first {count} jobs"


@command("list", epilog=STATES_HELP)
@click.argument("state", metavar="[STATE]", type=_STATES, required=False)
@option(
    "-s, --state STATE", "Also list jobs in this state. May be repeated.", _STATES, name="also", multiple=True
)
@option("--task NAME", "Only list jobs of this task.")
@option("-r, --reverse", "Reverse the order.")
@queue_option
@limit_option(50)
@option("-a, --all", "List all jobs, without a limit.", name="everything")
@json_option
def list_(
    settings: Settings,
    *,
    state: str | None,
    also: tuple[str, ...],
    task: str | None,
    reverse: bool,
    queue: str | None,
    limit: int,
    everything: bool,
    as_json: bool,
) -> None:
    """List jobs in STATE, or in all states.

    Waiting jobs: next to run first. Scheduled jobs: next due first. Ended jobs: newest first.

    \b
      penstock list waiting
      penstock list failed --task send --json
    """
    states = [State(name) for name in ([state] if state else []) + list(also)] or list(_URGENT_FIRST)

    async def read(app: App) -> tuple[list[JobInfo], bool]:
        jobs: list[JobInfo] = []
        names = await queues_of(app, queue)
        for current in states:
            newest_first = reverse != (current in TERMINAL)
            for name in names:
                async for job in app.queue(name).list_jobs(current, reverse=newest_first):
                    if task is not None and job.task != task:
                        continue
                    if len(jobs) >= limit and not everything:
                        return jobs, True
                    jobs.append(job)
        return jobs, False

    async def read_all(app: App) -> tuple[list[JobInfo], Reasons, str, str]:
        jobs, is_cut = await read(app)
        total = await _count(app, queue, states) if is_cut and task is None else None
        note = _cut_note(len(jobs), total) if is_cut else ""
        where = "" if await app.queues() else f" yet in the store {shown_store(app.url, app.namespace)}"
        return jobs, await read_reasons(app, jobs), note, f"no jobs{where}"

    jobs, reasons, note, empty = run_with_app(settings, read_all)
    print_jobs(jobs, reasons, as_json=as_json, empty=empty)
    if note:
        click.echo(note, err=True)


async def _count(app: App, queue: str | None, states: list[State]) -> int:
    counts = [await app.queue(name).counts() for name in await queues_of(app, queue)]
    return sum(getattr(count, state.value) for count in counts for state in states)


def _cut_note(shown: int, total: int | None) -> str:
    """Return the line below a list that was cut."""
    jobs = f"{shown} of {total} jobs" if total is not None else first_jobs(shown)
    return f"{jobs}; add --all to see the rest"


@command("show")
@click.argument("id", shell_complete=completes_ids())
@queue_of_id
@option("--traceback", "Also show the traceback of the last failure.")
@json_option
def show(settings: Settings, *, id: str, queue: str | None, traceback: bool, as_json: bool) -> None:
    """Show a job and its timeline. For its output, run `penstock logs ID`."""

    async def read(app: App) -> tuple[JobInfo, Reason, list[StepInfo], list[Any], str]:
        job = await find_job(app, id, queue)
        reason = await job.why()
        handle = app.job(job.ref)
        steps = await handle.steps() if job.raw.extras and job.raw.extras.has_steps else []
        try:
            return job, reason, steps, [event async for event in handle.events(follow=False)], ""
        except EventsLost as lost:
            return job, reason, steps, [], str(lost)

    job, reason, steps, events, lost = run_with_app(settings, read)
    if as_json:
        fields = job_fields(job, reason, traceback=job.task != COMMAND_TASK)
        of_steps = [step_row(step) for step in steps]
        print_json({**fields, "steps": of_steps, "timeline": [timeline_row(event) for event in events]})
        return
    for name, value in [*facts(job, reason), *step_facts(steps)]:
        # Indented, the lines of a script cannot pass for facts.
        text = str(value).replace("\n", f"\n{'':13}")
        if name == "why" and at_terminal():
            text = wrapped(text, shutil.get_terminal_size().columns, indent=13)
        click.echo(f"{name:12} {text}")
    click.echo(f"\n{lost}" if lost else "")
    for line in timeline(events, job.raw):
        click.echo(line)
    if job.failure is not None and job.failure.traceback:
        if traceback:
            click.echo(f"\n{job.failure.traceback}")
        elif job.task != COMMAND_TASK:
            click.echo(f"\n{command_line('show', job.ref, '--traceback')} shows the traceback")


@command("why")
@click.argument("id", shell_complete=completes_ids())
@queue_of_id
@json_option
def why(settings: Settings, *, id: str, queue: str | None, as_json: bool) -> None:
    """Say why a job is not running, and what to do about it. For other jobs, say where they run or how they ended."""

    async def read(app: App) -> tuple[JobInfo, Reason]:
        job = await find_job(app, id, queue)
        return job, await app.job(job.ref).why()

    job, reason = run_with_app(settings, read)
    if as_json:
        print_json({**identity(job), "state": job.state.value, **reason_fields(reason)})
        return
    for sentences in filter(None, (reason.text, reason.remedy)):
        print_sentences(visible_in_line(sentences))


@command("logs")
@click.argument("id", shell_complete=completes_ids())
@queue_of_id
@option("-f, --follow", "Keep printing until the job ends, or Ctrl-C.")
@option("-n, --tail NUMBER", "Number of lines to show, from the end. [all]", whole(0))
@option("--raw", "Print control characters as they are, colours included.", name="as_is")
@json_option
def logs(
    settings: Settings,
    *,
    id: str,
    queue: str | None,
    follow: bool,
    tail: int | None,
    as_is: bool,
    as_json: bool,
) -> None:
    r"""Print what a job wrote to stdout and stderr, or logged, in all its runs.

    Only the newest 1000 lines are kept, and only the first 2000 characters of a line. To keep all output, redirect it
    to a file in the command. Prints of a Python task are kept only if it runs in a sandbox; context.log(line) keeps a
    line of any task. Control characters appear as escapes such as \x1b; --raw prints them as they are, so use it only
    for jobs you trust. With --json, each line is a JSON string.
    """
    if as_is and as_json:
        raise InvalidUsage("give either --raw or --json, not both.")
    write = print_json if as_json else _print_raw if as_is else click.echo

    async def read(app: App) -> None:
        job = await find_job(app, id, queue)
        handle = app.job(job.ref)
        hint = asyncio.create_task(hint_at_cause(handle)) if follow else None
        follower, at_most = LogFollower(handle), tail
        try:
            while True:
                # The state first: once the job has ended, its last line is there.
                ended = (info := await handle.get_or_none()) is None or info.state in TERMINAL
                await follower.print_new(write, at_most=at_most)
                at_most = None
                if ended or not follow:
                    if not follower.has_lines and info is not None:
                        click.echo(await _why_no_log(app, info), err=True)
                    return
                await asyncio.sleep(LOG_POLL_S)
        finally:
            if hint is not None:
                hint.cancel()
                await asyncio.gather(hint, return_exceptions=True)

    run_with_app(settings, read)


async def _why_no_log(app: App, job: JobInfo) -> str:
    """Return why the log of a job is empty."""
    if job.runs and job.task != COMMAND_TASK:
        return (
            f"{job.id} has logged nothing. Prints of a Python task go to the output of its worker, unless it runs in a "
            "sandbox; context.log(line) keeps a line with the job"
        )
    if job.runs:
        return f"{job.id} has printed nothing"
    reason = await app.job(job.ref).why()
    return visible_in_line(f"{job.id} has not run. {reason}")


def _print_raw(line: str) -> None:
    out = raw(sys.stdout)
    out.flush()
    out.buffer.write(f"{line}\n".encode())
    out.flush()
