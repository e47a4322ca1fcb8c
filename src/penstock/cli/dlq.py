"""``penstock dlq``: jobs that have failed permanently."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import click

from penstock.cli.connect import queues_of, run_with_app
from penstock.cli.errors import CommandLineError, ExitCode, WrongState
from penstock.cli.jobs import first_jobs, print_jobs
from penstock.cli.jobs import show as show_job
from penstock.cli.jobview import find_job, title
from penstock.cli.operate import done_by_id
from penstock.cli.output import print_json
from penstock.cli.parameters import (
    QUEUE_OF_ID,
    Flags,
    command_of,
    completes_ids,
    family,
    json_option,
    limit_option,
    queue_option,
    queue_option_for,
    yes_option,
)
from penstock.cli.queues import ask, refuse_unknown_queues
from penstock.cli.search import filters_of, search_options
from penstock.cli.settings import Settings
from penstock.cli.values import some_text
from penstock.client.situation import counted
from penstock.core.lifecycle import State

if TYPE_CHECKING:
    from penstock.client.app import App
    from penstock.client.info import JobInfo


_matching_option = click.option(
    "--matching",
    metavar="TEXT",
    type=some_text,
    help="Jobs with TEXT in the command, the arguments or the error.",
)


@family("dlq")
def dlq() -> None:
    """Jobs that have failed permanently: list, show, retry or remove them.

    \b
      penstock dlq list --error Timeout
      penstock dlq show 01a1e25c...
      penstock dlq retry 01a1e25c...
      penstock dlq retry --all --matching 'connection refused' --since 1h
      penstock dlq clear
    """


@command_of(dlq, "list")
@_matching_option
@search_options
@queue_option
@limit_option(100)
@json_option
@click.pass_obj
def list_(
    flags: Flags,
    /,
    *,
    matching: str | None,
    queue: str | None,
    limit: int,
    as_json: bool,
    **filters: Any,
) -> None:
    """List failed jobs: all, or those that match the options."""

    async def read(app: App) -> tuple[list[JobInfo], bool]:
        jobs: list[JobInfo] = []
        for name in await queues_of(app, queue):
            async for job in _matching(app, name, filters, matching or ""):
                if len(jobs) == limit:
                    return jobs, True
                jobs.append(job)
        return jobs, False

    jobs, is_cut = run_with_app(Settings(flags), read)
    print_jobs(jobs, {}, as_json=as_json)
    if is_cut:
        click.echo(f"{first_jobs(limit)}; add --limit {limit * 10} to see more", err=True)


@command_of(dlq, "show")
@click.argument("id", shell_complete=completes_ids("failed"))
@queue_option_for(QUEUE_OF_ID)
@json_option
@click.pass_context
def show(ctx: click.Context, /, *, id: str, queue: str | None, as_json: bool) -> None:
    """Show a failed job, its timeline, and the traceback of its last failure."""

    async def check(app: App) -> None:
        job = await find_job(app, id, queue)
        if job.state is not State.FAILED:
            raise WrongState(f"{id} has not failed: it is {job.state.value}. See: penstock show {id}")

    run_with_app(Settings(ctx.find_object(Flags) or Flags()), check)
    ctx.invoke(show_job, id=id, queue=queue, traceback=True, as_json=as_json)


async def _matching(app: App, queue: str, filters: dict[str, Any], text: str) -> AsyncIterator[JobInfo]:
    """Yield the failed jobs with ``text`` in their command, arguments or error."""
    named, cursor = app.queue(queue), ""
    while True:
        page = await named.search(
            "failed", limit=1000, scan=100_000, cursor=cursor, **filters_of(State.FAILED, filters)
        )
        for job in page.jobs:
            error = f"{job.failure.type}: {job.failure.message}" if job.failure is not None else ""
            if text in title(job) or text in error:
                yield job
        if not page.cursor:
            return
        cursor = page.cursor


@command_of(dlq, "retry")
@click.argument("ids", metavar="[ID]...", nargs=-1, shell_complete=completes_ids("failed"))
@click.option("--all", "everything", is_flag=True, help="Retry all failed jobs that match the options.")
@_matching_option
@search_options
@queue_option
@json_option
@click.pass_obj
def retry(
    flags: Flags,
    /,
    *,
    ids: tuple[str, ...],
    everything: bool,
    matching: str | None,
    queue: str | None,
    as_json: bool,
    **filters: Any,
) -> int:
    """Run failed jobs again: those with these ids, or --all that match the options."""
    if bool(ids) == everything:
        raise CommandLineError("give either ids or --all.", ExitCode.USAGE)
    if ids and (matching is not None or any(filters.values())):
        raise CommandLineError("filters such as --matching need --all instead of ids.", ExitCode.USAGE)
    if ids:
        return done_by_id(flags, ids, queue, lambda named, id: named.retry(id), as_json=as_json)

    async def act(app: App) -> int:
        names = await queues_of(app, queue)
        if matching is None:
            in_store = filters_of(State.FAILED, filters)
            return sum([await app.queue(name).retry_all(**in_store) for name in names])
        return sum([await _retry_matching(app, name, filters, matching) for name in names])

    count = run_with_app(Settings(flags), act)
    print_json({"retried": count}) if as_json else click.echo(
        f"{counted(count, 'job')} {'waits' if count == 1 else 'wait'} again"
    )
    return 0


async def _retry_matching(app: App, queue: str, filters: dict[str, Any], text: str) -> int:
    ids = [job.id async for job in _matching(app, queue, filters, text)]
    answers = await app.queue(queue).retry(*ids) if ids else {}
    return sum(answer == "retried" for answer in answers.values())


@command_of(dlq, "clear")
@_matching_option
@search_options
@queue_option
@yes_option
@json_option
@click.pass_obj
def clear(
    flags: Flags,
    /,
    *,
    matching: str | None,
    queue: str | None,
    yes: bool,
    as_json: bool,
    **filters: Any,
) -> None:
    """Remove failed jobs: all, or those that match the options. Asks for confirmation."""
    chosen = " that match" if matching is not None or any(filters.values()) else ""
    refuse_unknown_queues(flags, queue)
    ask(f"Remove the failed jobs of {queue or 'all queues'}{chosen}?", yes=yes)

    async def act(app: App) -> int:
        names = await queues_of(app, queue)
        if matching is None:
            in_store = filters_of(State.FAILED, filters)
            return sum([await app.queue(name).remove_all("failed", **in_store) for name in names])
        return sum([await _remove_matching(app, name, filters, matching) for name in names])

    count = run_with_app(Settings(flags), act)
    print_json({"removed": count}) if as_json else click.echo(f"{counted(count, 'job')} removed")


async def _remove_matching(app: App, queue: str, filters: dict[str, Any], text: str) -> int:
    ids = [job.id async for job in _matching(app, queue, filters, text)]
    answers = await app.queue(queue).remove(*ids) if ids else {}
    return sum(answer == "removed" for answer in answers.values())
