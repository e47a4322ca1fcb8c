"""Tables as a shell names them: files by their extension, ``table:db.name`` for those of the catalog."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Final, TextIO

import click

from penstock.cli.connect import import_task
from penstock.cli.errors import CommandLineError, ExitCode, NotFound
from penstock.cli.output import print_json, span, unguarded
from penstock.cli.parameters import Flags, command_of, family, json_option
from penstock.cli.settings import Settings
from penstock.cli.sparksession import SparkChoice, open_session, pairs, session_options

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from penstock.client.task import Task
    from penstock.spark import Processed


_TABLE: Final = "table:"
_PACKED: Final = (".gz", ".bz2", ".zst", ".xz", ".lz4", ".snappy", ".deflate")
_FORMATS: Final = {
    ".parquet": "parquet",
    ".csv": "csv",
    ".tsv": "csv",
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".orc": "orc",
    ".avro": "avro",
}
# As spreadsheets and databases write them: quotes are doubled, and a cell may have several lines.
_CSV: Final = {"header": "true", "escape": '"', "multiLine": "true"}
_TORN: Final = "_corrupt_record"
_NOT_THERE: Final = ("PATH_NOT_FOUND", "TABLE_OR_VIEW_NOT_FOUND", "SCHEMA_NOT_FOUND")


def is_table(name: str) -> bool:
    """Whether it is one of the catalog."""
    return name.startswith(_TABLE)


def format_of(name: str, given: str | None) -> str:
    """The format asked for, or that of the extension, or Parquet."""
    return given or _FORMATS.get(_extension(name), "parquet")


def export_format(name: str) -> str:
    """``csv`` or ``json``. Raises if the name has neither extension."""
    found = _FORMATS.get(PurePath(name).suffix.lower())
    if found not in ("csv", "json"):
        raise CommandLineError(
            f"--export {name}: a copy can be .csv, .tsv, .json or .jsonl. In other formats the output itself is.",
            ExitCode.USAGE,
        )
    return found


def _extension(name: str) -> str:
    path = PurePath(name.rstrip("/*"))
    suffix = path.suffix.lower()
    return path.with_suffix("").suffix.lower() if suffix in _PACKED else suffix


def read_table(spark: SparkSession, name: str, format: str, options: Mapping[str, str]) -> DataFrame:
    """The table. Of a CSV file, all columns are texts; the types of JSON are those that Spark finds in it.

    Raises:
        NotFound: there is none.
        CommandLineError: it cannot be read as that.
    """
    from pyspark.errors import AnalysisException

    try:
        if is_table(name):
            return spark.table(name.removeprefix(_TABLE))
        defaults = dict(_CSV) if format == "csv" else {}
        if _extension(name) == ".tsv":
            defaults["sep"] = "\t"
        found = spark.read.format(format).options(**defaults | dict(options)).load(name)
        _ = found.schema
    except AnalysisException as error:
        if str(error.getCondition()).startswith(_NOT_THERE):
            raise NotFound(f"there is no {name}.") from error
        first = str(error).strip().partition("\n")[0]
        raise CommandLineError(f"{name} cannot be read as {format}: {first}", ExitCode.USAGE) from error
    if format == "json" and _TORN in found.columns:
        raise CommandLineError(
            f"{name} has lines that are not JSON objects. A file with one array, or objects over several lines, is "
            "read with: --in-option multiLine=true",
            ExitCode.USAGE,
        )
    return found


def export(rows: DataFrame, target: Path) -> int:
    """Write rows to one file, which is there as a whole or not at all; how many there were."""
    from penstock.core.names import uuid7

    draft = target.with_name(f".{target.name}.{uuid7()}")
    kind = export_format(target.name)
    instants = [field.name for field in rows.schema if field.dataType.typeName() == "timestamp"]
    try:
        with draft.open("w", encoding="utf-8", newline="") as file:
            write = _csv_writer(file, rows.columns, target) if kind == "csv" else _json_writer(file)
            count = 0
            for row in rows.toLocalIterator():
                write({**row.asDict(recursive=True), **{name: _utc(row[name]) for name in instants}})
                count += 1
        os.replace(draft, target)
    finally:
        draft.unlink(missing_ok=True)
    return count


def _csv_writer(file: TextIO, columns: list[str], target: Path) -> Callable[[dict[str, Any]], Any]:
    out = csv.writer(file, delimiter="\t" if target.suffix.lower() == ".tsv" else ",")
    out.writerow(columns)
    return lambda row: out.writerow([_cell(value) for value in row.values()])


def _cell(value: Any) -> Any:
    if isinstance(value, dict | list):
        return json.dumps(value, default=_text, ensure_ascii=False)
    return "" if value is None else value if isinstance(value, int | float | str) else _text(value)


def _json_writer(file: TextIO) -> Callable[[dict[str, Any]], Any]:
    return lambda row: file.write(json.dumps(row, default=_text, ensure_ascii=False) + "\n")


def _utc(value: datetime | None) -> str | None:
    """Spark gives instants by the clock on this machine's wall."""
    return (
        None if value is None else value.astimezone(UTC).isoformat("T", "milliseconds").replace("+00:00", "Z")
    )


def _text(value: Any) -> str:
    return str(value.isoformat()) if hasattr(value, "isoformat") else str(value)


# ``penstock spark``: tasks on tables.


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

    from penstock.spark.processing.types import cast, hinted_types

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
    from penstock.spark.processing.request import ledger_of

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
