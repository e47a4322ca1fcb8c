"""Tables as a shell names them: files by their extension, ``table:db.name`` for those of the catalog."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Final, TextIO

from penstock.cli.errors import CommandLineError, ExitCode, NotFound

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["export", "export_format", "format_of", "is_table", "read_table"]

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
    from penstock.core.ids import uuid7

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
