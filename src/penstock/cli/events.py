"""``penstock events``: read and follow the event log."""

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
    help="Only events of this queue. May be repeated. [all]",
)
@click.option("-f", "--follow", is_flag=True, help="Keep printing new events until Ctrl-C.")
@click.option(
    "--since",
    metavar="SEQ",
    default="earliest",
    help="Events after this number, or of the last 5m; 'now' for new events only. [all kept events]",
)
@click.option(
    "--type",
    "types",
    metavar="TYPE",
    type=click.Choice(_TYPES),
    multiple=True,
    help="Only events of this type. May be repeated. [all]",
)
@click.option("--id", metavar="ID", shell_complete=completes_ids(), help="Only events of this job.")
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

    run_with_app(Settings(flags), read)


def _start(since: str) -> tuple[int | str | None, int]:
    """Return the event to start after, and the time before which events are skipped."""
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
    """Return the queues to read and the whole id. The log may have events of a job that is no longer kept."""
    try:
        job = await find_job(app, id, queues[0] if len(queues) == 1 else None)
    except NotFound:
        return queues, id
    return (job.queue,), job.id


def _line(event: Event) -> str:
    return visible_in_line(f"{event.queue} {event.seq}  {event.id or '-'}  {happened(event)}")


def _json(event: Event) -> str:
    """Return the event as JSON, without empty fields."""
    fields = {**jsonable(event), "ref": event.ref}
    return json_text({name: value for name, value in fields.items() if value not in ("", 0)})
