"""``penstock archive``: jobs that have ended, moved into a table."""

from __future__ import annotations

import click
import msgspec

from penstock.cli.connect import shared_store
from penstock.cli.flags import Flags
from penstock.cli.output import print_json, span
from penstock.cli.parameters import StateName, command, json_option
from penstock.cli.settings import Settings
from penstock.cli.sparksession import SparkChoice, open_session, session_options
from penstock.cli.tablefiles import format_of, is_table

__all__ = ["archive"]


@command("archive")
@click.argument("queues", metavar="QUEUE...", nargs=-1, required=True)
@click.argument("output", metavar="OUT")
@click.option(
    "--older-than", metavar="DURATION", default="7d", show_default=True, help="Ended longer ago than that."
)
@click.option(
    "--state",
    "states",
    type=StateName(["completed", "failed", "cancelled"]),
    multiple=True,
    help="Only such; may be repeated.",
)
@click.option(
    "--consumer", metavar="NAME", default="", help="Let go of jobs that are held for this consumer."
)
@click.option("--out-format", metavar="NAME", help="Of OUT. [parquet]")
@click.option("--scratch", metavar="PATH", help="For the journal, if OUT is a table: always the same.")
@session_options
@json_option
@click.pass_obj
def archive(
    flags: Flags,
    /,
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
    """Move the jobs of QUEUE that have ended, with payload and result, out of the store and into the table OUT:
    a folder (Parquet), or table:db.archive. Needs penstock[spark].

    \b
      penstock archive mail archive/ --older-than 30d
      penstock archive mail reports table:lake.jobs --scratch s3://lake/journal

    A job is in the store or in the table, never in both. Can be killed anywhere and started again.
    """
    url = shared_store(Settings(flags))
    format = out_format or ("parquet" if is_table(output) else format_of(output, None))
    given = {"states": states} if states else {}
    with open_session(choice, catalog=is_table(output)) as session:
        from penstock.spark import archive as move

        for queue in queues:
            done = move(
                session,
                url,
                queue,
                output,
                older_than=older_than,
                consumer=consumer,
                format=format,
                scratch=scratch,
                **given,
            )
            if as_json:
                print_json(msgspec.to_builtins(done))
            else:
                recovered = f" ({done.recovered:,} of an earlier call)" if done.recovered else ""
                click.echo(
                    f"{queue}: {done.archived:,} jobs archived{recovered}, {done.kept:,} kept, "
                    f"in {span(done.seconds * 1000)}"
                )
