"""``penstock dlq``: jobs that have failed for good."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from penstock.cli.connect import find_job, queues_of, run_with_app
from penstock.cli.errors import CommandLineError, ExitCode, WrongState
from penstock.cli.flags import Flags
from penstock.cli.jobs import filters_of, print_jobs, search_options
from penstock.cli.jobs import show as show_job
from penstock.cli.jobview import title
from penstock.cli.operate import done_by_id
from penstock.cli.output import print_json
from penstock.cli.parameters import command_of, json_option, limit_option, queue_option, yes_option
from penstock.cli.queues import ask
from penstock.cli.settings import Settings
from penstock.core.lifecycle import State

if TYPE_CHECKING:
    from penstock.app import App
    from penstock.info import JobInfo

__all__ = ["dlq"]


@click.group("dlq", context_settings={"help_option_names": ["-h", "--help"]})
def dlq() -> None:
    """Jobs that have failed for good: look at them, have them run again, or forget them.

    \b
      penstock dlq list --error Timeout
      penstock dlq retry 01a1e25c...
      penstock dlq retry --all --since 1h
    """


@command_of(dlq, "list")
@search_options
@queue_option
@limit_option(100)
@json_option
@click.pass_obj
def list_(flags: Flags, /, *, queue: str | None, limit: int, as_json: bool, **given: Any) -> None:
    """Failed jobs, all or those that are like that."""

    async def read(app: App) -> list[JobInfo]:
        found: list[JobInfo] = []
        for name in await queues_of(app, queue):
            if len(found) < limit:
                filters = filters_of(State.FAILED, given)
                page = await app.queue(name).search(
                    "failed", limit=limit - len(found), scan=100_000, **filters
                )
                found += page.jobs
        return found

    print_jobs(run_with_app(Settings(flags), read), as_json=as_json)


@command_of(dlq, "show")
@click.argument("id")
@queue_option
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


async def _matching(app: App, queue: str, given: dict[str, Any], text: str) -> list[str]:
    """The failed jobs in whose command, arguments or error the text stands."""
    named, cursor, found = app.queue(queue), "", list[str]()
    while True:
        page = await named.search(
            "failed", limit=1000, scan=100_000, cursor=cursor, **filters_of(State.FAILED, given)
        )
        for job in page.jobs:
            error = f"{job.failure.type}: {job.failure.message}" if job.failure is not None else ""
            if text in title(job) or text in error:
                found.append(job.id)
        if not page.cursor:
            return found
        cursor = page.cursor


@command_of(dlq, "retry")
@click.argument("ids", metavar="[ID]...", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="All failed jobs, or those that are like that.")
@click.option(
    "--matching", metavar="TEXT", help="With --all: where the command, the arguments or the error has TEXT."
)
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
    """Have failed jobs run again: these, or --all that match."""
    if bool(ids) == everything:
        raise CommandLineError("give ids, or --all.", ExitCode.USAGE)
    if ids:
        return done_by_id(flags, ids, queue, lambda named, id: named.retry(id), as_json=as_json)

    async def act(app: App) -> int:
        names = await queues_of(app, queue)
        if matching is None:
            filters = filters_of(State.FAILED, given)
            return sum([await app.queue(name).retry_all(**filters) for name in names])
        answers = [await app.queue(n).retry(*await _matching(app, n, given, matching)) for n in names]
        return sum(answer == "retried" for some in answers for answer in some.values())

    count = run_with_app(Settings(flags), act)
    print_json({"retried": count}) if as_json else click.echo(f"{count} jobs wait again")
    return 0


@command_of(dlq, "clear")
@search_options
@queue_option
@yes_option
@json_option
@click.pass_obj
def clear(flags: Flags, /, *, queue: str | None, yes: bool, as_json: bool, **given: Any) -> None:
    """Forget failed jobs, all or those that are like that. Asks first."""
    ask(f"Remove the failed jobs of {queue or 'all queues'}?", yes=yes)

    async def act(app: App) -> int:
        filters = filters_of(State.FAILED, given)
        return sum(
            [await app.queue(name).remove_all("failed", **filters) for name in await queues_of(app, queue)]
        )

    count = run_with_app(Settings(flags), act)
    print_json({"removed": count}) if as_json else click.echo(f"{count} jobs removed")
