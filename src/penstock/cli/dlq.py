"""``penstock dlq``: jobs that have failed for good."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import click

from penstock.cli.connect import queues_of, run_with_app
from penstock.cli.errors import CommandLineError, ExitCode, WrongState
from penstock.cli.jobs import print_jobs
from penstock.cli.jobs import show as show_job
from penstock.cli.jobview import find_job, title
from penstock.cli.operate import done_by_id
from penstock.cli.output import print_json
from penstock.cli.parameters import (
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
    help="With TEXT in the command, the arguments or the error.",
)


@family("dlq")
def dlq() -> None:
    """Jobs that have failed for good: look at them, have them run again, or forget them.

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
    **given: Any,
) -> None:
    """Failed jobs: all, or those that fit."""

    async def read(app: App) -> tuple[list[JobInfo], bool]:
        found: list[JobInfo] = []
        for name in await queues_of(app, queue):
            async for job in _matching(app, name, given, matching or ""):
                if len(found) == limit:
                    return found, True
                found.append(job)
        return found, False

    jobs, is_cut = run_with_app(Settings(flags), read)
    print_jobs(jobs, {}, as_json=as_json)
    if is_cut:
        click.echo(f"the first {limit} jobs; add --limit {limit * 10} to see more", err=True)


@command_of(dlq, "show")
@click.argument("id", shell_complete=completes_ids("failed"))
@queue_option_for("Which queue it is in, if several have that id.")
@json_option
@click.pass_context
def show(ctx: click.Context, /, *, id: str, queue: str | None, as_json: bool) -> None:
    """One failed job: its life, and the traceback of its last failure."""

    async def check(app: App) -> None:
        job = await find_job(app, id, queue)
        if job.state is not State.FAILED:
            raise WrongState(f"{id} has not failed: it is {job.state.value}. See: penstock show {id}")

    run_with_app(Settings(ctx.find_object(Flags) or Flags()), check)
    ctx.invoke(show_job, id=id, queue=queue, traceback=True, as_json=as_json)


async def _matching(app: App, queue: str, given: dict[str, Any], text: str) -> AsyncIterator[JobInfo]:
    """The failed jobs in whose command, arguments or error the text stands."""
    named, cursor = app.queue(queue), ""
    while True:
        page = await named.search(
            "failed", limit=1000, scan=100_000, cursor=cursor, **filters_of(State.FAILED, given)
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
@click.option("--all", "everything", is_flag=True, help="All failed jobs, or those of them that fit.")
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
    **given: Any,
) -> int:
    """Have failed jobs run again: these, or --all that fit."""
    if bool(ids) == everything:
        raise CommandLineError("give ids, or --all.", ExitCode.USAGE)
    if ids and (matching is not None or any(given.values())):
        raise CommandLineError("--matching and its like choose among --all; ids need none.", ExitCode.USAGE)
    if ids:
        return done_by_id(flags, ids, queue, lambda named, id: named.retry(id), as_json=as_json)

    async def act(app: App) -> int:
        names = await queues_of(app, queue)
        if matching is None:
            filters = filters_of(State.FAILED, given)
            return sum([await app.queue(name).retry_all(**filters) for name in names])
        return sum([await _retry_matching(app, name, given, matching) for name in names])

    count = run_with_app(Settings(flags), act)
    print_json({"retried": count}) if as_json else click.echo(
        f"{counted(count, 'job')} {'waits' if count == 1 else 'wait'} again"
    )
    return 0


async def _retry_matching(app: App, queue: str, given: dict[str, Any], text: str) -> int:
    ids = [job.id async for job in _matching(app, queue, given, text)]
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
    **given: Any,
) -> None:
    """Forget failed jobs: all, or those that fit. Asks first."""
    chosen = " that fit" if matching is not None or any(given.values()) else ""
    refuse_unknown_queues(flags, queue)
    ask(f"Remove the failed jobs of {queue or 'all queues'}{chosen}?", yes=yes)

    async def act(app: App) -> int:
        names = await queues_of(app, queue)
        if matching is None:
            filters = filters_of(State.FAILED, given)
            return sum([await app.queue(name).remove_all("failed", **filters) for name in names])
        return sum([await _remove_matching(app, name, given, matching) for name in names])

    count = run_with_app(Settings(flags), act)
    print_json({"removed": count}) if as_json else click.echo(f"{counted(count, 'job')} removed")


async def _remove_matching(app: App, queue: str, given: dict[str, Any], text: str) -> int:
    ids = [job.id async for job in _matching(app, queue, given, text)]
    answers = await app.queue(queue).remove(*ids) if ids else {}
    return sum(answer == "removed" for answer in answers.values())
