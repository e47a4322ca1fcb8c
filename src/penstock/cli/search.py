"""``penstock search``, and ``penstock dlq`` for jobs that have failed permanently: they share filters."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from penstock.cli.commands import JOB_VERBS
from penstock.cli.completion import STATES, completes_ids
from penstock.cli.connect import queues_of, run_with_app
from penstock.cli.errors import InvalidUsage, WrongState
from penstock.cli.jobs import STATES_HELP, Reasons, first_jobs, print_jobs, read_reasons
from penstock.cli.jobs import show as show_job
from penstock.cli.jobview import find_job, title
from penstock.cli.operate import done_by_id
from penstock.cli.output import print_json
from penstock.cli.parameters import (
    StateName,
    all_options,
    command,
    command_of,
    family,
    json_option,
    limit_option,
    option,
    queue_of_id,
    queue_option,
    yes_option,
)
from penstock.cli.queues import ask, refuse_unknown_queues
from penstock.cli.settings import Settings
from penstock.cli.values import nonempty_text
from penstock.client.situation import counted
from penstock.core.lifecycle import TERMINAL, State
from penstock.core.text import visible_in_line
from penstock.core.units import milliseconds

if TYPE_CHECKING:
    from penstock.client.app import App
    from penstock.client.info import JobInfo
    from penstock.client.queue import Queue

_MOST: Final = 10_000


search_options = all_options(
    option("--task NAME", "Jobs of this task. The task of commands is penstock.command.", nonempty_text),
    option(
        "--error CLASS", "Jobs that failed with this class of error: CommandFailed, Timeout.", nonempty_text
    ),
    option(
        "--where FIELD=VALUE",
        "Jobs with this value in a field of the payload: user.id=7. May be repeated.",
        multiple=True,
    ),
    option("--since DURATION", "Jobs that ended (open jobs: were enqueued) within this time: 1h, 2d."),
    option("--before DURATION", "Jobs that ended (open jobs: were enqueued) longer ago than this."),
)
"""The filters of ``queue.search``."""


def filters_of(state: State, options: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``queue.search`` for the options that were given."""
    kind = "finished" if state in TERMINAL else "enqueued"
    filters: dict[str, Any] = {}
    if options.get("task"):
        filters["task"] = options["task"]
    if options.get("error"):
        filters["error_type"] = options["error"]
    for name, side in (("since", "after"), ("before", "before")):
        if options.get(name):
            distance = timedelta(milliseconds=milliseconds(options[name], what=name))
            filters[f"{kind}_{side}"] = datetime.now(UTC) - distance
    if options.get("where"):
        filters["where"] = dict(map(_field, options["where"]))
    return filters


def _field(text: str) -> tuple[str, Any]:
    name, separator, value = text.partition("=")
    if not separator:
        raise InvalidUsage(f"--where {text}: give a field and its value, such as user.id=7.")
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
def search(
    settings: Settings, *, state: str, queue: str | None, limit: int, as_json: bool, **options: Any
) -> None:
    """Find jobs in STATE by task, time, error, or a field of the payload. Jobs must match all options.

    \b
      penstock search failed --error CommandFailed --since 1h
      penstock search waiting --where 'command=make report'
    """
    classes: Counter[str] = Counter()

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
                classes.update(await (await app.connect()).errors(name) if options.get("error") else {})
        return jobs, await read_reasons(app, jobs), scanned, more

    jobs, reasons, scanned, more = run_with_app(settings, read)
    print_jobs(jobs[:limit], reasons, as_json=as_json)
    if not jobs:
        _note_other_errors(options.get("error"), classes)
    if len(jobs) > limit:
        click.echo(f"{first_jobs(limit)}; add --limit {limit * 10} to see more", err=True)
    elif more:
        click.echo(f"searched {counted(scanned, 'job')}; there may be more", err=True)


def _note_other_errors(wanted: str | None, classes: Counter[str]) -> None:
    """Say on stderr which errors failed jobs have, with the number of jobs, if none has the wanted one."""
    if wanted and classes and wanted not in classes:
        found = ", ".join(f"{name} ({count})" for name, count in classes.most_common())
        click.echo(visible_in_line(f"no jobs failed with {wanted!r}; there are: {found}"), err=True)


_matching_option = option(
    "--matching TEXT", "Jobs with TEXT in the command, the arguments or the error.", nonempty_text
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
def list_(
    settings: Settings, *, matching: str | None, queue: str | None, limit: int, as_json: bool, **filters: Any
) -> None:
    """List failed jobs: all, or those that match the options."""

    classes: Counter[str] = Counter()

    async def read(app: App) -> tuple[list[JobInfo], bool]:
        jobs: list[JobInfo] = []
        for name in await queues_of(app, queue):
            async for job in _matching(app.queue(name), filters, matching or ""):
                if len(jobs) == limit:
                    return jobs, True
                jobs.append(job)
            classes.update(await (await app.connect()).errors(name) if filters.get("error") else {})
        return jobs, False

    jobs, is_cut = run_with_app(settings, read)
    print_jobs(jobs, {}, as_json=as_json)
    if not jobs:
        _note_other_errors(filters.get("error"), classes)
    if is_cut:
        click.echo(f"{first_jobs(limit)}; add --limit {limit * 10} to see more", err=True)


@command_of(dlq, "show")
@click.argument("id", shell_complete=completes_ids("failed"))
@queue_of_id
@json_option
def show(settings: Settings, *, id: str, queue: str | None, as_json: bool) -> None:
    """Show a failed job, its timeline, and the traceback of its last failure."""

    async def check(app: App) -> None:
        job = await find_job(app, id, queue)
        if job.state is not State.FAILED:
            raise WrongState(f"{id} has not failed: it is {job.state.value}. See: penstock show {id}")

    run_with_app(settings, check)
    click.get_current_context().invoke(show_job, id=id, queue=queue, traceback=True, as_json=as_json)


async def _matching(queue: Queue, filters: dict[str, Any], text: str) -> AsyncIterator[JobInfo]:
    """Yield the failed jobs with ``text`` in their command, arguments or error."""
    cursor = ""
    while True:
        page = await queue.search(
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
@option("--all", "Retry all failed jobs that match the options.", name="everything")
@_matching_option
@search_options
@queue_option
@json_option
def retry(
    settings: Settings,
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
        raise InvalidUsage("give either ids or --all.")
    if ids and (matching is not None or any(filters.values())):
        raise InvalidUsage("filters such as --matching need --all instead of ids.")
    if ids:
        return done_by_id(settings, ids, queue, lambda named, id: named.retry(id), as_json=as_json)
    count = _count_done(settings, "retry", queue, matching, filters)
    print_json({"retried": count}) if as_json else click.echo(
        f"{counted(count, 'job')} {'waits' if count == 1 else 'wait'} again"
    )
    return 0


@command_of(dlq, "clear")
@_matching_option
@search_options
@queue_option
@yes_option
@json_option
def clear(
    settings: Settings, *, matching: str | None, queue: str | None, yes: bool, as_json: bool, **filters: Any
) -> None:
    """Remove failed jobs: all, or those that match the options. Asks for confirmation."""
    chosen = " that match" if matching is not None or any(filters.values()) else ""
    refuse_unknown_queues(settings, queue)
    ask(f"Remove the failed jobs of {queue or 'all queues'}{chosen}?", yes=yes)
    count = _count_done(settings, "remove", queue, matching, filters)
    print_json({"removed": count}) if as_json else click.echo(f"{counted(count, 'job')} removed")


def _count_done(
    settings: Settings, verb: str, queue: str | None, text: str | None, filters: dict[str, Any]
) -> int:
    """Retry or remove the failed jobs that match, and return their number."""

    async def act(app: App) -> int:
        names = await queues_of(app, queue)
        return sum([await _act_on_failed(app.queue(name), verb, text, filters) for name in names])

    return run_with_app(settings, act)


async def _act_on_failed(queue: Queue, verb: str, text: str | None, filters: dict[str, Any]) -> int:
    if text is None:
        in_store = filters_of(State.FAILED, filters)
        return await (
            queue.retry_all(**in_store) if verb == "retry" else queue.remove_all("failed", **in_store)
        )
    ids = [job.id async for job in _matching(queue, filters, text)]
    answers = await getattr(queue, verb)(*ids) if ids else {}
    return sum(answer in JOB_VERBS[verb].done for answer in answers.values())
