"""``penstock spark process``: a task on every row of a table.

Tables are files, by their extension, or ``table:db.name`` for tables of the catalog.
"""

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
from penstock.cli.errors import ExitCode, InvalidUsage, NotFound
from penstock.cli.output import print_json, span, unguarded
from penstock.cli.parameters import all_options, command_of, family, json_option, option
from penstock.cli.settings import Settings
from penstock.cli.sparksession import SparkChoice, open_session, pairs, session_options

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from penstock.client.task import Task
    from penstock.spark import Processed


_TABLE: Final = "table:"
_COMPRESSED: Final = (".gz", ".bz2", ".zst", ".xz", ".lz4", ".snappy", ".deflate")
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
# The format of spreadsheets and databases: quotes are doubled, and a cell may span several lines.
_CSV: Final = {"header": "true", "escape": '"', "multiLine": "true"}
_CORRUPT: Final = "_corrupt_record"
_NOT_FOUND: Final = ("PATH_NOT_FOUND", "TABLE_OR_VIEW_NOT_FOUND", "SCHEMA_NOT_FOUND")


def is_table(name: str) -> bool:
    """Return whether ``name`` is a table of the catalog."""
    return name.startswith(_TABLE)


def format_of(name: str, format: str | None) -> str:
    """Return ``format`` if it is given, else the format of the extension, else Parquet."""
    return format or _FORMATS.get(_extension(name), "parquet")


def export_format(name: str) -> str:
    """Return ``csv`` or ``json``. Raise ``CommandLineError`` if the name has neither extension."""
    format = _FORMATS.get(PurePath(name).suffix.lower())
    if format not in ("csv", "json"):
        raise InvalidUsage(f"--export {name}: the extension must be .csv, .tsv, .json or .jsonl.")
    return format


def _extension(name: str) -> str:
    path = PurePath(name.rstrip("/*"))
    suffix = path.suffix.lower()
    return path.with_suffix("").suffix.lower() if suffix in _COMPRESSED else suffix


def read_table(spark: SparkSession, name: str, format: str, options: Mapping[str, str]) -> DataFrame:
    """Return a table. All columns of a CSV file are texts; Spark infers the types of JSON.

    Raises:
        NotFound: The table does not exist.
        CommandLineError: The table cannot be read in this format.
    """
    from pyspark.errors import AnalysisException

    try:
        if is_table(name):
            return spark.table(name.removeprefix(_TABLE))
        defaults = dict(_CSV) if format == "csv" else {}
        if _extension(name) == ".tsv":
            defaults["sep"] = "\t"
        df = spark.read.format(format).options(**defaults | dict(options)).load(name)
        _ = df.schema
    except AnalysisException as error:
        if str(error.getCondition()).startswith(_NOT_FOUND):
            raise NotFound(f"{name} does not exist.") from error
        first = str(error).strip().partition("\n")[0]
        raise InvalidUsage(f"{name} cannot be read as {format}: {first}") from error
    if format == "json" and _CORRUPT in df.columns:
        raise InvalidUsage(
            f"{name} has lines that are not JSON objects. For one array, or objects that span lines, add "
            "--in-option multiLine=true"
        )
    return df


def export(rows: DataFrame, target: Path) -> int:
    """Write rows to one file atomically, and return their number."""
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
        return json.dumps(value, default=_as_text, ensure_ascii=False)
    return "" if value is None else value if isinstance(value, int | float | str) else _as_text(value)


def _json_writer(file: TextIO) -> Callable[[dict[str, Any]], Any]:
    return lambda row: file.write(json.dumps(row, default=_as_text, ensure_ascii=False) + "\n")


def _utc(value: datetime | None) -> str | None:
    """Return a timestamp of Spark, which has local time, in UTC."""
    return (
        None if value is None else value.astimezone(UTC).isoformat("T", "milliseconds").replace("+00:00", "Z")
    )


def _as_text(value: Any) -> str:
    return str(value.isoformat()) if hasattr(value, "isoformat") else str(value)


# Commands


@family("spark")
def spark() -> None:
    """Run tasks on tables with Spark. Needs penstock[spark].

    \b
      penstock spark process users.csv scores --task jobs:score --key user_id --workers 4
      penstock spark process users.csv scores --task jobs:score --key user_id --dry-run
    """


_process_options = all_options(
    option(
        "--payload COLUMN",
        "Column of an argument; may be repeated. [columns named like parameters]",
        multiple=True,
    ),
    *(
        option(f"--{name}-column COLUMN", f"The {name} of each job.", name=name, default="")
        for name in ("priority", "delay", "group", "cost")
    ),
    option(
        "--on-change",
        "What to do with rows whose arguments, or whose version of the task, have changed.",
        click.Choice(["rerun", "keep", "error"]),
        default="rerun",
        show_default=True,
    ),
    option("--retry-failed", "Run rows again that failed before."),
    option(
        "--reuse-results/--no-reuse-results",
        "Use results that the store still keeps for rows that are not in OUT.",
        default=True,
        show_default=True,
    ),
    option("--limit NUMBER", "Maximum number of rows to process.", click.IntRange(1)),
    option(
        "--since COLUMN",
        "Process only rows whose value in this column is at least the highest of earlier runs.",
    ),
    option("--max-cost AMOUNT", "Start no more jobs when this much is spent.", float),
    option("--row-cost AMOUNT", "Expected cost of a row, for the estimate of a --dry-run.", float),
    option("--cost-name TEXT", "Unit of costs.", default="usd", show_default=True),
    option("--quarantine PATH", "Write the rows that failed or were rejected to this table."),
    option("--expect MODULE:FUNCTION", "Fail rows whose result this function does not accept."),
    option(
        "--max-failure-rate SHARE",
        "Stop when a larger share of rows than this has failed, such as 0.05; checked from 20 rows on.",
        click.FloatRange(0, 1, max_open=True),
    ),
    option("--max-failures NUMBER", "Stop when more rows than this have failed.", click.IntRange(0)),
    option("--workers NUMBER", "Number of processes to start for the jobs.", click.IntRange(0), default=0),
    option("--fleet", "Run the jobs in Spark's task slots.", click.Choice(["spark"])),
    option("--fleet-size NUMBER", "Number of task slots that run jobs. [all but one]", click.IntRange(1)),
    option("--concurrency NUMBER", "Number of jobs that each worker runs at a time.", click.IntRange(1)),
    option(
        "--progress",
        "Show progress on stderr. [a bar at a terminal, else lines]",
        click.Choice(["auto", "bar", "lines", "none"]),
        default="auto",
    ),
    option("--scratch PATH", "Folder for the run's own files if OUT is a table."),
)


@command_of(spark, "process")
@click.argument("source", metavar="IN")
@click.argument("output", metavar="OUT")
@option("--task MODULE:TASK", "Task to run on each row.", required=True)
@option("--key COLUMN", "Column that identifies a row; may be repeated.", multiple=True, required=True)
@option("--dry-run", "Only print the number of rows to run, and their estimated cost.")
@_process_options
@option("--in-format NAME", "Format of IN. [by its extension, else parquet]")
@option("--in-option KEY=VALUE", "Set an option of Spark's reader of IN; may be repeated.", multiple=True)
@option("--schema DDL", "Types of columns, such as 'zip STRING, age INT'.")
@option("--out-format NAME", "Format of OUT. [by its extension, else parquet]")
@option("--export FILE", "Also write the current results to FILE: .csv, .tsv or .jsonl.", name="copy")
@session_options
@json_option
def process(
    settings: Settings,
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
    or tables of the catalog: table:db.users. OUT is the memory of the runs: a repeated run only processes rows that are
    new, changed or missing. It is a folder of Parquet or JSON lines; for CSV see --export.

    \b
      penstock spark process users.csv scores --task jobs:score --key user_id --workers 4 --export scores.csv
      penstock spark process s3://lake/users table:lake.scores --task jobs:score --key day --key user_id

    Ctrl-C takes back jobs that have not started, waits for those that run, and keeps their results; a second Ctrl-C
    exits immediately. Exits with 1 if more rows than --max-failures have failed, now or before, and with 7 if it was
    stopped before all rows were done.
    """
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
    _print(done, options, as_json=as_json)
    return _exit_code(done, options)


def _check_early(task: Task[..., Any], source: str, *, is_local: bool) -> None:
    """Check the file and the store before Spark is started, which takes a while."""
    from penstock.spark.store import Store, shared_url

    is_plain = not is_table(source) and "://" not in source and not set(source) & set("*?[{")
    if is_local and is_plain and not Path(source.removeprefix("file:")).exists():
        raise NotFound(f"{source} does not exist.")
    with Store(shared_url(task.app)):
        pass


def _out_format(output: str, format: str | None) -> str:
    format = format or ("parquet" if is_table(output) else format_of(output, None))
    if format == "csv":
        raise InvalidUsage(
            f"{output} cannot be CSV: it is the memory of later runs, and CSV has no types and no nested columns. "
            f"Give a folder, which will be Parquet, and --export {Path(output).name} for a copy."
        )
    return format


def _typed(df: DataFrame, task: Task[..., Any], *, schema: str | None, is_text: bool) -> DataFrame:
    """Return the rows with the types of ``--schema``. The columns of a CSV file take the types of the task's hints."""
    from pyspark.errors import PySparkException
    from pyspark.sql.types import DataType, StructType

    from penstock.spark.processing.types import cast, hinted_types

    types: dict[str, DataType] = hinted_types(task, df.columns) if is_text else {}
    if schema is not None:
        try:
            fields = StructType.fromDDL(schema)
            assert isinstance(fields, StructType)
        except (PySparkException, AssertionError) as error:
            raise InvalidUsage(
                f"--schema {schema!r} cannot be read. Give names with types: 'zip STRING, age INT'."
            ) from error
        types |= {field.name: field.dataType for field in fields}
    return cast(df, types)


def _export(
    rows: DataFrame, task: Task[..., Any], key: tuple[str, ...], *, output: str, format: str, target: Path
) -> None:
    from penstock.spark import latest
    from penstock.spark.processing.request import ledger_of

    results = ledger_of(rows, task, key=key, output=output, format=format).read()
    if results is not None:
        export(latest(results), target)


def _print(done: Processed, options: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(done.summary())
        return
    plan = done.plan
    click.echo(
        f"rows: {plan.new:,} new, {plan.changed:,} changed, {plan.done:,} done before, {plan.failed:,} failed before, "
        f"{plan.duplicate:,} duplicate, {plan.rejected:,} rejected; {plan.todo:,} to do"
        f"{plan.cost_text(options['cost_name'])}"
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
        click.echo(f"penstock: stopped by {done.stopped}; run it again to continue", err=True)
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
