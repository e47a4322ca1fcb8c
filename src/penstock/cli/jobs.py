"""``penstock list``, ``show``, ``logs``, ``search``: looking at jobs."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import click

from penstock.cli.connect import find_job, queues_of, run_with_app
from penstock.cli.errors import CommandLineError, ExitCode
from penstock.cli.flags import Flags
from penstock.cli.jobview import BRIEF, brief, described, happened, title
from penstock.cli.output import print_json, print_table, when
from penstock.cli.parameters import command, json_option, limit_option, queue_option
from penstock.cli.settings import Settings
from penstock.cli.waiting import LogFollower
from penstock.core.lifecycle import TERMINAL, State
from penstock.errors import EventsLost

if TYPE_CHECKING:
    from penstock.app import App
    from penstock.info import JobInfo

__all__ = ["filters_of", "list_", "logs", "print_jobs", "search", "search_options", "show"]

_LOOK_EVERY_S: Final = 0.2
_STATES: Final = click.Choice([state.value for state in State])


def print_jobs(jobs: list[JobInfo], *, as_json: bool) -> None:
    """A row for each, or all of each as JSON."""
    if as_json:
        print_json([described(job) for job in jobs])
    else:
        print_table(BRIEF, [brief(job) for job in jobs], empty="no jobs")


@command("list")
@click.argument("state", type=_STATES, required=False)
@click.option(
    "-s", "--state", "also", type=_STATES, multiple=True, help="The same as an option; may be repeated."
)
@click.option("--task", metavar="NAME", help="Of this task only.")
@click.option("-r", "--reverse", is_flag=True, help="From the other end.")
@queue_option
@limit_option(50)
@json_option
@click.pass_obj
def list_(
    flags: Flags,
    /,
    *,
    state: str | None,
    also: tuple[str, ...],
    task: str | None,
    reverse: bool,
    queue: str | None,
    limit: int,
    as_json: bool,
) -> None:
    """Jobs by STATE, in the order they will run, come due, or be forgotten; without one, those of all states.

    \b
      penstock list waiting
      penstock list failed --task send --json
    """
    states = [State(one) for one in ([state] if state else []) + list(also)] or list(State)

    async def read(app: App) -> list[JobInfo]:
        found: list[JobInfo] = []
        for name in await queues_of(app, queue):
            for each in states:
                async for job in app.queue(name).list_jobs(each, reverse=reverse):
                    if len(found) >= limit:
                        return found
                    if task is None or job.task == task:
                        found.append(job)
        return found

    print_jobs(run_with_app(Settings(flags), read), as_json=as_json)


@command("show")
@click.argument("id")
@queue_option
@click.option("--traceback", is_flag=True, help="The traceback of its last failure, too.")
@json_option
@click.pass_obj
def show(flags: Flags, /, *, id: str, queue: str | None, traceback: bool, as_json: bool) -> None:
    """One job: what it is, how it is, and its whole life as a timeline."""

    async def read(app: App) -> tuple[JobInfo, list[Any], str]:
        job = await find_job(app, id, queue)
        try:
            return job, [event async for event in app.job(job.queue, id).events(follow=False)], ""
        except EventsLost as lost:
            return job, [], str(lost)

    job, events, lost = run_with_app(Settings(flags), read)
    if as_json:
        timeline = [{"at_ms": e.at_ms, "type": str(e.type), "state": e.state, "run": e.run} for e in events]
        print_json({**described(job), "timeline": timeline})
        return
    for name, value in _facts(job):
        click.echo(f"{name:12} {value}")
    click.echo(f"\n{lost}" if lost else "")
    for event in events:
        click.echo(happened(event))
    if traceback and job.failure is not None and job.failure.traceback:
        click.echo(f"\n{job.failure.traceback}")


def _facts(job: JobInfo) -> list[tuple[str, Any]]:
    raw, told = job.raw, described(job)
    facts = [
        ("id", job.id),
        ("queue", job.queue),
        ("state", f"{job.state.value}{' (asked to stop)' if job.cancelling else ''}"),
        ("what", title(job)),
        ("failures", f"{job.failures} of {job.attempts}, {job.runs} runs, {job.stalls} stalls"),
        ("failure", f"{raw.failure.type}: {raw.failure.message}" if raw.failure else ""),
        ("result", told["result"] if job.state == "completed" else ""),
        ("progress", job.progress),
        ("priority", job.priority or ""),
        ("group", job.group),
        ("blocked by", job.blocked_by),
        ("worker", job.worker if job.state == "active" else ""),
        ("due", when(raw.run_at_ms) if job.state == "scheduled" else ""),
        ("kept until", when(raw.kept_until_ms) if job.state in TERMINAL else ""),
    ]
    return [(name, value) for name, value in facts if value not in ("", None)]


@command("logs")
@click.argument("id")
@queue_option
@click.option("-f", "--follow", is_flag=True, help="Go on until the job has ended.")
@click.pass_obj
def logs(flags: Flags, /, *, id: str, queue: str | None, follow: bool) -> None:
    """What a job has printed or logged; the newest thousand lines are kept."""

    async def read(app: App) -> None:
        job = await find_job(app, id, queue)
        handle = app.job(job.queue, id)
        follower = LogFollower(handle)
        while True:
            # In this order: what it says last is there when it has ended.
            ended = (info := await handle.get()) is None or info.state in TERMINAL
            for line in await follower.new_lines():
                click.echo(line)
            if ended or not follow:
                return
            await asyncio.sleep(_LOOK_EVERY_S)

    run_with_app(Settings(flags), read)


def search_options(function: Any) -> Any:
    """What jobs are like: the filters of ``queue.search``."""
    for option in (
        click.option("--before", metavar="DURATION", help="Ended (or put in, if open) longer ago than that."),
        click.option("--since", metavar="DURATION", help="Ended (or put in, if open) since then: 1h, 2d."),
        click.option(
            "--where", metavar="FIELD=JSON", multiple=True, help="A field of the payload, such as user.id=7."
        ),
        click.option("--error", metavar="CLASS", help="Failed with this class of error."),
        click.option("--task", metavar="NAME", help="Of this task."),
    ):
        function = option(function)
    return function


def filters_of(state: State, given: dict[str, Any]) -> dict[str, Any]:
    """The filters that the options say."""
    from penstock.core.duration import milliseconds

    kind = "finished" if state in TERMINAL else "enqueued"
    filters: dict[str, Any] = {}
    if given.get("task"):
        filters["task"] = given["task"]
    if given.get("error"):
        filters["error_type"] = given["error"]
    for option, side in (("since", "after"), ("before", "before")):
        if given.get(option):
            distance = timedelta(milliseconds=milliseconds(given[option], what=option))
            filters[f"{kind}_{side}"] = datetime.now(UTC) - distance
    if given.get("where"):
        filters["where"] = dict(map(_field, given["where"]))
    return filters


def _field(text: str) -> tuple[str, Any]:
    import msgspec

    name, separator, value = text.partition("=")
    if not separator:
        raise CommandLineError(
            f"--where {text}: give a field and its value, such as user.id=7.", ExitCode.USAGE
        )
    try:
        return name, msgspec.json.decode(value)
    except msgspec.DecodeError:
        return name, value


@command("search")
@click.argument("state", type=_STATES)
@search_options
@queue_option
@limit_option(100)
@json_option
@click.pass_obj
def search(
    flags: Flags, /, *, state: str, queue: str | None, limit: int, as_json: bool, **given: Any
) -> None:
    """Jobs of STATE that are like that: by task, time, error, or a field of the payload.

    \b
      penstock search failed --error CommandFailed --since 1h
      penstock search waiting --where 'command=make report'
    """

    async def read(app: App) -> tuple[list[JobInfo], int, bool]:
        found: list[JobInfo] = []
        scanned, more = 0, False
        for name in await queues_of(app, queue):
            if len(found) < limit:
                page = await app.queue(name).search(
                    state, limit=limit - len(found), scan=100_000, **filters_of(State(state), given)
                )
                found += page.jobs
                scanned, more = scanned + page.scanned, more or bool(page.cursor)
        return found, scanned, more

    jobs, scanned, more = run_with_app(Settings(flags), read)
    print_jobs(jobs, as_json=as_json)
    if more:
        click.echo(f"{scanned} jobs were looked at; there may be more", err=True)
