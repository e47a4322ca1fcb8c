"""``penstock events``: what happened, and what happens."""

from __future__ import annotations

import time
from contextlib import aclosing
from typing import TYPE_CHECKING, Final

import click

from penstock.cli.connect import queues_of, run_with_app
from penstock.cli.errors import CommandLineError, ExitCode, NotFound
from penstock.cli.jobview import find_job, happened
from penstock.cli.output import json_text, jsonable
from penstock.cli.parameters import Flags, command, completes_ids, completes_queues, json_option
from penstock.cli.settings import Settings
from penstock.core.lifecycle import EventType
from penstock.core.text import visible_in_line
from penstock.core.units import milliseconds
from penstock.errors import InvalidOption

if TYPE_CHECKING:
    from penstock.client.app import App
    from penstock.core.event import Event


_TYPES: Final = tuple(kind.value for kind in EventType)


@command("events", epilog=f"TYPE is one of {', '.join(_TYPES)}.")
@click.option(
    "-q",
    "--queue",
    metavar="NAME",
    multiple=True,
    shell_complete=completes_queues,
    help="Of this queue. May be repeated. [all]",
)
@click.option("-f", "--follow", is_flag=True, help="Go on with what happens, until Ctrl-C.")
@click.option(
    "--since",
    metavar="SEQ",
    default="earliest",
    help="After the event of this number, or of the last 5m; 'now' for those to come. [all that are kept]",
)
@click.option(
    "--type",
    "types",
    metavar="TYPE",
    type=click.Choice(_TYPES),
    multiple=True,
    help="Of this type. May be repeated. [all]",
)
@click.option("--id", metavar="ID", shell_complete=completes_ids(), help="Of this job.")
@json_option
@click.pass_obj
def events(
    flags: Flags,
    /,
    *,
    queue: tuple[str, ...],
    follow: bool,
    since: str,
    types: tuple[str, ...],
    id: str | None,
    as_json: bool,
) -> None:
    """The event log: every change of every job, in order. With --json a line for each.

    \b
      penstock events --follow --since now
      penstock events --type failed --json | jq .error
    """
    after, least_ms = _start(since)

    async def read(app: App) -> None:
        await queues_of(app, *queue)
        queues, whole_id = await _job_of(app, queue, id) if id else (queue, None)
        log = app.events(*queues, after=after, follow=follow, types=types or None, id=whole_id)  # type: ignore[arg-type]
        async with aclosing(log):
            async for event in log:
                if event.at_ms >= least_ms:
                    click.echo(_json(event) if as_json else _line(event))

    run_with_app(Settings(flags), read)


def _start(since: str) -> tuple[int | str | None, int]:
    """Return the number or name of the event to start after, and the instant before which events are left out."""
    if since.isdigit():
        return int(since), 0
    if since in ("now", "earliest"):
        return (None if since == "now" else since), 0
    try:
        return "earliest", time.time_ns() // 1_000_000 - milliseconds(since)
    except InvalidOption:
        raise CommandLineError(
            f"--since {since}: give the number of an event, a duration such as 5m, 'now' or 'earliest'.",
            ExitCode.USAGE,
        ) from None


async def _job_of(app: App, queues: tuple[str, ...], id: str) -> tuple[tuple[str, ...], str]:
    """Return the queues to read and the whole id. The log may know a job that the store no longer keeps."""
    try:
        job = await find_job(app, id, queues[0] if len(queues) == 1 else None)
    except NotFound:
        return queues, id
    return (job.queue,), job.id


def _line(event: Event) -> str:
    return visible_in_line(f"{event.queue} {event.seq}  {event.id or '-'}  {happened(event)}")


def _json(event: Event) -> str:
    """Without the fields that say nothing."""
    fields = {**jsonable(event), "ref": event.ref}
    return json_text({name: value for name, value in fields.items() if value not in ("", 0)})
