"""``penstock search``, and the filters that other commands share with it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import click

from penstock.cli.connect import queues_of, run_with_app
from penstock.cli.errors import CommandLineError, ExitCode
from penstock.cli.jobs import STATES_HELP, Reasons, first_jobs, print_jobs, read_reasons
from penstock.cli.parameters import STATES, Flags, StateName, command, json_option, limit_option, queue_option
from penstock.cli.settings import Settings
from penstock.cli.values import duration, some_text
from penstock.client.situation import counted
from penstock.core.lifecycle import TERMINAL, State

if TYPE_CHECKING:
    from penstock.client.app import App
    from penstock.client.info import JobInfo


_MOST: Final = 10_000


def search_options(function: Any) -> Any:
    """Add the filters of ``queue.search``."""
    for option in (
        click.option(
            "--before",
            metavar="DURATION",
            type=duration,
            help="Jobs that ended (open jobs: were enqueued) longer ago than this.",
        ),
        click.option(
            "--since",
            metavar="DURATION",
            type=duration,
            help="Jobs that ended (open jobs: were enqueued) within this time: 1h, 2d.",
        ),
        click.option(
            "--where",
            metavar="FIELD=VALUE",
            multiple=True,
            help="Jobs with this value in a field of the payload: user.id=7. May be repeated.",
        ),
        click.option(
            "--error",
            metavar="CLASS",
            type=some_text,
            help="Jobs that failed with this class of error: CommandFailed, Timeout.",
        ),
        click.option(
            "--task",
            metavar="NAME",
            type=some_text,
            help="Jobs of this task. The task of commands is penstock.command.",
        ),
    ):
        function = option(function)
    return function


def filters_of(state: State, options: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``queue.search`` for the options that were given."""
    from penstock.core.units import milliseconds

    kind = "finished" if state in TERMINAL else "enqueued"
    filters: dict[str, Any] = {}
    if options.get("task"):
        filters["task"] = options["task"]
    if options.get("error"):
        filters["error_type"] = options["error"]
    for option, side in (("since", "after"), ("before", "before")):
        if options.get(option):
            distance = timedelta(milliseconds=milliseconds(options[option], what=option))
            filters[f"{kind}_{side}"] = datetime.now(UTC) - distance
    if options.get("where"):
        filters["where"] = dict(map(_field, options["where"]))
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
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return name, value


@command("search", epilog=STATES_HELP)
@click.argument("state", metavar="STATE", type=StateName(STATES))
@search_options
@queue_option
@limit_option(100)
@json_option
@click.pass_obj
def search(
    flags: Flags, /, *, state: str, queue: str | None, limit: int, as_json: bool, **options: Any
) -> None:
    """Find jobs in STATE by task, time, error, or a field of the payload. Jobs must match all options.

    \b
      penstock search failed --error CommandFailed --since 1h
      penstock search waiting --where 'command=make report'
    """

    classes: set[str] = set()

    async def read(app: App) -> tuple[list[JobInfo], Reasons, int, bool]:
        jobs: list[JobInfo] = []
        scanned, more = 0, False
        for name in await queues_of(app, queue):
            # One job more than the limit shows that there are more.
            if len(jobs) <= limit:
                page = await app.queue(name).search(
                    state,
                    limit=min(limit + 1 - len(jobs), _MOST),
                    scan=100_000,
                    **filters_of(State(state), options),
                )
                jobs += page.jobs
                scanned, more = scanned + page.scanned, more or bool(page.cursor)
                classes.update(await (await app.connect()).errors(name) if options.get("error") else ())
        return jobs, await read_reasons(app, jobs), scanned, more

    jobs, reasons, scanned, more = run_with_app(Settings(flags), read)
    print_jobs(jobs[:limit], reasons, as_json=as_json)
    if not jobs and options.get("error") and classes:
        click.echo(f"there are jobs that failed with {', '.join(sorted(classes))}", err=True)
    if len(jobs) > limit:
        click.echo(f"{first_jobs(limit)}; add --limit {limit * 10} to see more", err=True)
    elif more:
        click.echo(f"searched {counted(scanned, 'job')}; there may be more", err=True)
