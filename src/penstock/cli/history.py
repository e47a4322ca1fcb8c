"""``penstock archive`` and ``penstock history``: finished jobs and events as tables, and a report."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from penstock.cli.connect import shared_store
from penstock.cli.output import print_json, span
from penstock.cli.parameters import StateName, command, command_of, family, json_option, option
from penstock.cli.settings import Settings
from penstock.cli.spark import format_of, is_table
from penstock.cli.sparksession import SparkChoice, open_session, session_options
from penstock.core.units import milliseconds
from penstock.errors import InvalidOption

if TYPE_CHECKING:
    from penstock.spark.history import SyncReport


@command("archive")
@click.argument("queues", metavar="QUEUE...", nargs=-1, required=True)
@click.argument("output", metavar="OUT")
@option(
    "--older-than DURATION", "Minimum age of the jobs, since they finished.", default="7d", show_default=True
)
@option(
    "--state",
    "Archive only jobs in this state; may be repeated.",
    StateName(["completed", "failed", "cancelled"]),
    name="states",
    multiple=True,
)
@option("--consumer NAME", "Release the hold of this consumer on the jobs.", default="")
@option("--out-format NAME", "Format of OUT. [parquet]")
@option("--scratch PATH", "Folder of the journal if OUT is a table: the same in every run.")
@session_options
@json_option
def archive(
    settings: Settings,
    *,
    queues: tuple[str, ...],
    output: str,
    older_than: str,
    states: tuple[str, ...],
    consumer: str,
    out_format: str | None,
    scratch: str | None,
    choice: SparkChoice,
    as_json: bool,
) -> None:
    """Move the finished jobs of QUEUE, with payload and result, from the store to the table OUT: a folder (Parquet),
    or table:db.archive. Needs penstock[spark].

    \b
      penstock archive mail archive/ --older-than 30d
      penstock archive mail reports table:lake.jobs --scratch s3://lake/journal

    A job is in the store or in the table, never in both. You can kill the command at any time and run it again.
    """
    url = shared_store(settings, *queues)
    format = out_format or ("parquet" if is_table(output) else format_of(output, None))
    filters = {"states": states} if states else {}
    with open_session(choice, catalog=is_table(output)) as session:
        from penstock.spark import archive as archive_jobs

        for queue in queues:
            report = archive_jobs(
                session,
                url,
                queue,
                output,
                older_than=older_than,
                consumer=consumer,
                format=format,
                scratch=scratch,
                **filters,
            )
            if as_json:
                print_json(msgspec.to_builtins(report))
            else:
                recovered = f" ({report.recovered:,} of an earlier call)" if report.recovered else ""
                click.echo(
                    f"{queue}: {report.archived:,} jobs archived{recovered}, {report.kept:,} kept, "
                    f"in {span(report.seconds * 1000)}"
                )


# History


_FOLDER = click.argument("folder", metavar="[DIR]", default="history")


@family("history")
def history() -> None:
    """Keep the history of the queues in tables (sync), and write it as a page (report). Needs penstock[spark].

    \b
      penstock history sync                       add new events to ./history
      penstock history sync --follow              and keep adding them
      penstock history report -o page.html        write a page
    """


@command_of(history, "sync")
@_FOLDER
@option("-f, --follow", "Keep adding new events, until Ctrl-C.")
@option("--every DURATION", "With --follow: time between two syncs.", default="30s", show_default=True)
@option("-q, --queue NAME", "Only this queue; may be repeated.", name="queues", multiple=True)
@option("--pattern REGEX", "Only queues whose whole name matches.")
@option("--max-events NUMBER", "Maximum number of events in a sync.", click.IntRange(1))
@option(
    "--upto",
    "Stop after these tables. [gold: all]",
    click.Choice(["bronze", "silver", "gold"]),
    default="gold",
)
@session_options
@json_option
def sync(
    settings: Settings,
    *,
    folder: str,
    follow: bool,
    every: str,
    queues: tuple[str, ...],
    choice: SparkChoice,
    as_json: bool,
    **options: Any,
) -> None:
    """Add the events since the last sync to the history in DIR (./history), each exactly once.

    DIR is a folder, or the URL of an object store such as s3://bucket/history. You can kill the sync at any time and
    run it again. --json prints a line for each sync.
    """
    url = shared_store(settings)
    with open_session(choice) as session:
        from penstock.spark import history as tables
        from penstock.spark.driver_lease import noted_interrupts

        options |= {"spark": session, "queues": list(queues) or None}
        if not follow:
            _print(tables.sync(url, folder, **options), as_json=as_json, is_quiet=False)
            return
        with noted_interrupts() as stop:
            tables.follow(
                url,
                folder,
                every=every,
                stop=stop,
                on_sync=lambda report: _print(report, as_json=as_json, is_quiet=True),
                **options,
            )
    raise KeyboardInterrupt


def _print(report: SyncReport, *, as_json: bool, is_quiet: bool) -> None:
    """Print the result of a sync. If ``is_quiet``, print nothing without new events."""
    if as_json:
        print_json(msgspec.to_builtins(report))
        return
    for loss in report.losses:
        click.echo(
            f"lost: events {loss.first} to {loss.last} of {loss.queue}, trimmed before they could be read",
            err=True,
        )
    for change in report.changes:
        click.echo(
            f"changed: the store of {change.queue} went back to event {change.common}; {change.read} were read",
            err=True,
        )
    if report.events or not is_quiet:
        click.echo(f"{report.events:,} new events, in {span(report.seconds * 1000)}")


@command_of(history, "report")
@_FOLDER
@option(
    "-o, --output FILE",
    "File of the page.",
    click.Path(dir_okay=False, path_type=Path),
    default="history.html",
    show_default=True,
)
@option("--since TIME", "ISO 8601, or how long ago: 2d.")
@option("--until TIME", "ISO 8601, or how long ago: 2d.")
@option("--title TEXT", "", default="Queues", show_default=True)
def report(
    _: Settings, *, folder: str, output: Path, since: str | None, until: str | None, title: str
) -> None:
    """Write the history in DIR (./history) as a page, one file that loads nothing else, and print its path."""
    from penstock.spark.history import report as write_page

    click.echo(write_page(folder, output, since=_instant(since), until=_instant(until), title=title))


def _instant(text: str | None) -> str | datetime | None:
    """Read a duration as an instant that long ago; leave other texts to ``report``."""
    try:
        return text and datetime.now(UTC) - timedelta(milliseconds=milliseconds(text))
    except InvalidOption:
        return text
