"""``penstock spark``: tasks on tables."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from penstock.cli.connect import import_task
from penstock.cli.errors import CommandLineError, ExitCode, NotFound
from penstock.cli.flags import Flags
from penstock.cli.output import print_json, span
from penstock.cli.parameters import command_of, family, json_option
from penstock.cli.settings import Settings
from penstock.cli.sparksession import SparkChoice, open_session, pairs, session_options
from penstock.cli.streams import unguarded
from penstock.cli.tablefiles import export, export_format, format_of, is_table, read_table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from penstock.spark import Processed
    from penstock.task import Task

__all__ = ["spark"]


@family("spark")
def spark() -> None:
    """Tasks on tables, by Spark. Needs penstock[spark].

    \b
      penstock spark process users.csv scores --task jobs:score --key user_id --workers 4
      penstock spark process users.csv scores --task jobs:score --key user_id --dry-run
    """


def _process_options(function: Any) -> Any:
    for option in (
        click.option("--scratch", metavar="PATH", help="For the run's own files, if OUT is a table."),
        click.option(
            "--progress",
            type=click.Choice(["auto", "bar", "lines", "none"]),
            default="auto",
            help="How far it is, on stderr. [a bar at a terminal, else lines]",
        ),
        click.option("--concurrency", type=click.IntRange(1), help="Jobs at a time, of each worker."),
        click.option("--fleet-size", type=click.IntRange(1), help="So many of them. [all but one]"),
        click.option("--fleet", type=click.Choice(["spark"]), help="Let Spark's task slots do the jobs."),
        click.option(
            "--workers", type=click.IntRange(0), default=0, help="Number of processes to start for the jobs."
        ),
        click.option(
            "--max-failures",
            type=click.IntRange(0),
            help="End once more rows have failed; up to that is fine.",
        ),
        click.option(
            "--max-failure-rate",
            type=click.FloatRange(0, 1, max_open=True),
            help="End once a larger share of rows has failed, such as 0.05; judged from 20 rows on.",
        ),
        click.option(
            "--expect",
            metavar="MODULE:FUNCTION",
            help="Fail rows whose result this function does not accept.",
        ),
        click.option(
            "--quarantine", metavar="PATH", help="Write the rows that failed or were rejected to this table."
        ),
        click.option("--cost-name", default="usd", show_default=True, help="What a cost is counted in."),
        click.option("--max-cost", type=float, help="Begin no further jobs once so much is spent."),
        click.option(
            "--since",
            metavar="COLUMN",
            help="Look only at rows from the highest value of this column on that earlier runs have seen.",
        ),
        click.option("--limit", type=click.IntRange(1), help="Maximum number of rows to process."),
        click.option(
            "--reuse-results/--no-reuse-results",
            default=True,
            show_default=True,
            help="Take results that the store still keeps for rows that OUT does not have.",
        ),
        click.option("--retry-failed", is_flag=True, help="Do rows again that have failed before."),
        click.option(
            "--on-change",
            type=click.Choice(["rerun", "keep", "error"]),
            default="rerun",
            show_default=True,
            help="Rows that were done with other arguments, or another version of the task.",
        ),
        *(
            click.option(f"--{name}-column", name, metavar="COLUMN", default="", help=f"{what} of each job.")
            for name, what in (
                ("cost", "The cost"),
                ("group", "The group"),
                ("delay", "The delay"),
                ("priority", "The priority"),
            )
        ),
        click.option(
            "--payload",
            metavar="COLUMN",
            multiple=True,
            help="An argument; may be repeated. [columns named like parameters]",
        ),
    ):
        function = option(function)
    return function


@command_of(spark, "process")
@click.argument("source", metavar="IN")
@click.argument("output", metavar="OUT")
@click.option("--task", metavar="MODULE:TASK", required=True, help="What to run on each row.")
@click.option(
    "--key", metavar="COLUMN", multiple=True, required=True, help="What names a row; may be repeated."
)
@click.option("--dry-run", is_flag=True, help="Only say what there is to do, and what it may cost.")
@_process_options
@click.option("--in-format", metavar="NAME", help="Of IN. [by its extension, else parquet]")
@click.option(
    "--in-option", metavar="KEY=VALUE", multiple=True, help="For Spark's reader of IN; may be repeated."
)
@click.option("--schema", metavar="DDL", help="Types of columns, such as 'zip STRING, age INT'.")
@click.option("--out-format", metavar="NAME", help="Of OUT. [by its extension, else parquet]")
@click.option("--export", "copy", metavar="FILE", help="Then write what holds to FILE: .csv, .tsv or .jsonl.")
@session_options
@json_option
@click.pass_obj
def process(
    flags: Flags,
    /,
    *,
    source: str,
    output: str,
    task: str,
    key: tuple[str, ...],
    in_format: str | None,
    in_option: tuple[str, ...],
    schema: str | None,
    out_format: str | None,
    copy: str | None,
    choice: SparkChoice,
    as_json: bool,
    **options: Any,
) -> int:
    """Run a task on every row of the table IN; the results are rows of OUT.

    IN and OUT are files or folders (Parquet, CSV, JSON lines ... by their extension, or --in-format and --out-format),
    or tables of the catalog: table:db.users. OUT is what is remembered: started again, only what is new, changed or
    missing is run. It is a folder of Parquet, or of JSON lines; for CSV see --export.

    \b
      penstock spark process users.csv scores --task jobs:score --key user_id --workers 4 --export scores.csv
      penstock spark process s3://lake/users table:lake.scores --task jobs:score --key day --key user_id

    Ctrl-C takes back what has not begun, lets finish what has, and keeps its results; again Ctrl-C leaves at once.
    Exits with 1 if rows have failed (now or before, more than --max-failures), with 7 if it was stopped before all rows
    were done.
    """
    settings = Settings(flags)
    chosen = import_task(settings, task)
    out_format = _out_format(output, out_format)
    reading = dict(pairs(in_option, option="--in-option"))
    if copy is not None:
        export_format(copy)
    is_local = choice.remote is None and not any(text.startswith("spark.") for text in choice.conf)
    _check_early(chosen, source, is_local=is_local)
    options["concurrency"] = options["concurrency"] or settings["concurrency"] or 100
    by_name = is_table(source) or is_table(output)
    with open_session(choice, catalog=by_name) as session:
        from penstock.spark import process as process_table

        rows = _typed(
            read_table(session, source, format_of(source, in_format), reading),
            chosen,
            schema=schema,
            is_text=format_of(source, in_format) == "csv" and not is_table(source),
        )
        given = {name: value for name, value in options.items() if value != ()}
        with unguarded():
            done = process_table(rows, chosen, key=key, output=output, format=out_format, **given)
        if copy is not None and not options["dry_run"]:
            _export(rows, chosen, key, output=output, format=out_format, target=Path(copy))
    _tell(done, options, as_json=as_json)
    return _exit_code(done, options)


def _check_early(task: Task[..., Any], source: str, *, is_local: bool) -> None:
    """What can be known before Spark is started, which takes a while: a file and a store that are there."""
    from penstock.spark.store import Store, shared_url

    is_plain = not is_table(source) and "://" not in source and not set(source) & set("*?[{")
    if is_local and is_plain and not Path(source.removeprefix("file:")).exists():
        raise NotFound(f"there is no {source}.")
    with Store(shared_url(task.app)):
        pass


def _out_format(output: str, given: str | None) -> str:
    chosen = given or ("parquet" if is_table(output) else format_of(output, None))
    if chosen == "csv":
        raise CommandLineError(
            f"{output} cannot be CSV: it is what the next run remembers by, and CSV has no types and no nested "
            f"columns. Give a folder (it will be Parquet), and --export {Path(output).name} for a copy.",
            ExitCode.USAGE,
        )
    return chosen


def _typed(df: DataFrame, task: Task[..., Any], *, schema: str | None, is_text: bool) -> DataFrame:
    """CSV has no types: columns have those of the task's hints. What ``--schema`` says goes before."""
    from pyspark.errors import PySparkException
    from pyspark.sql.types import DataType, StructType

    from penstock.spark.tables.casting import cast, hinted_types

    types: dict[str, DataType] = hinted_types(task, df.columns) if is_text else {}
    if schema is not None:
        try:
            said = StructType.fromDDL(schema)
            assert isinstance(said, StructType)
        except (PySparkException, AssertionError) as error:
            raise CommandLineError(
                f"--schema {schema!r} cannot be read. Give names with types: 'zip STRING, age INT'.",
                ExitCode.USAGE,
            ) from error
        types |= {field.name: field.dataType for field in said}
    return cast(df, types)


def _export(
    rows: DataFrame, task: Task[..., Any], key: tuple[str, ...], *, output: str, format: str, target: Path
) -> None:
    from penstock.spark import latest
    from penstock.spark.tables.request import ledger_of

    found = ledger_of(rows, task, key=key, output=output, format=format).read()
    if found is not None:
        export(latest(found), target)


def _tell(done: Processed, options: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(done.summary())
        return
    plan = done.plan
    cost = "" if not plan.estimated_cost else f", for about {plan.estimated_cost:g} {options['cost_name']}"
    click.echo(
        f"rows: {plan.new:,} new, {plan.changed:,} changed, {plan.done:,} done before, {plan.failed:,} failed before, "
        f"{plan.duplicate:,} duplicate, {plan.rejected:,} rejected; {plan.todo:,} to do{cost}"
    )
    if options["dry_run"]:
        return
    reused = f", {done.reused:,} reused" if done.reused else ""
    spent = f", {done.cost:g} {options['cost_name']}" if done.cost else ""
    click.echo(
        f"done: {done.completed:,} completed{reused}, {done.failed:,} failed{spent}, "
        f"in {span(done.seconds * 1000)}; in {done.output}"
    )


def _exit_code(done: Processed, options: dict[str, Any]) -> int:
    if options["dry_run"]:
        return ExitCode.DONE
    if done.stopped:
        click.echo(f"penstock: stopped by {done.stopped}; start it again to go on", err=True)
        return ExitCode.STOPPED
    earlier = 0 if options["retry_failed"] else done.plan.failed
    bad = done.failed + done.plan.rejected + earlier
    if bad <= (options["max_failures"] or 0):
        return ExitCode.DONE
    click.echo(
        f"penstock: {bad:,} rows have no result: see penstock_state and penstock_error in {done.output}, and "
        "--retry-failed",
        err=True,
    )
    return ExitCode.FAILED
