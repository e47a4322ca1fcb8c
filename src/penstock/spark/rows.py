"""From rows of a table to jobs: Arrow batches in, ``NewJob``s out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from penstock.core.job import DEFAULT_OPTIONS, NewJob, Options
from penstock.errors import InvalidInput, InvalidOption, PayloadTooLarge
from penstock.options import placed
from penstock.spark.cells import Unreadable, column_values, not_finite
from penstock.spark.errors import BadRow
from penstock.spark.keys import row_id_maker

__all__ = ["Layout", "Refused", "new_jobs", "payload_columns", "placements", "rows_of"]

_MAX_PAYLOAD: Final = 1 << 20
_encode = msgspec.json.Encoder().encode


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """Which columns are what. ``placement`` says from which column an option of a job is taken: ``{"group": "user"}``.

    ``whole``: the payload has the columns as an object under that name. ``fields`` are those that all the jobs share,
    as ``penstock.options.placement`` makes them.
    """

    namespace: str
    task: str
    key: tuple[str, ...]
    payload: tuple[str, ...]
    whole: str = ""
    placement: dict[str, str] = {}
    options: Options = DEFAULT_OPTIONS
    fields: dict[str, Any] = {}
    max_payload: int = _MAX_PAYLOAD

    def check(self, columns: Sequence[str]) -> None:
        """Raises ``InvalidOption`` for a column that the table does not have."""
        for name in (*self.key, *self.payload, *self.placement.values()):
            if name not in columns:
                raise InvalidOption(f"the table has no column {name!r}. It has: {', '.join(columns)}.")


class Refused(msgspec.Struct, frozen=True):
    """A row that cannot be a job: its key, as far as it can be shown, and why. Without an ``id``
    it is the key that is no good."""

    key: str
    why: str
    id: str = ""


def payload_columns(batch: pa.RecordBatch, layout: Layout) -> dict[str, list[Any]]:
    """Return the values of the columns that make the payloads, by name."""
    return {name: column_values(batch.column(name)) for name in layout.payload}


def new_jobs(
    batch: pa.RecordBatch, layout: Layout, columns: dict[str, list[Any]] | None = None
) -> Iterator[NewJob | Refused]:
    """Yield a job for every row, in order, or what is wrong with the row. ``columns`` are the payload columns, if the
    caller has them."""
    make_id = row_id_maker(layout.namespace, layout.task)
    if columns is None:
        columns = payload_columns(batch, layout)
    not_json = _not_json(batch, columns)
    rows = zip(
        _rows(batch, layout.key),
        rows_of(columns, batch.num_rows),
        placements(batch, layout),
        strict=True,
    )
    names = layout.payload
    for number, (key, values, given) in enumerate(rows):
        id = ""
        try:
            id = make_id(key)
            if number in not_json:
                raise BadRow(not_json[number])
            row = dict(zip(names, values, strict=True))
            payload = _encode({layout.whole: row} if layout.whole else row)
            if len(payload) > layout.max_payload:
                raise PayloadTooLarge(
                    f"its payload has {len(payload)} bytes; at most {layout.max_payload} are allowed."
                )
            fields = placed(layout.fields, given) if given else layout.fields
            yield NewJob(id=id, payload=payload, options=layout.options, **fields)
        except (InvalidInput, TypeError, ValueError, OverflowError) as error:
            why = _why(error, (*layout.key, *names), (*key, *values))
            yield Refused(_shown(layout.key, key), why, id)


def placements(batch: pa.RecordBatch, layout: Layout) -> Iterator[dict[str, Any]]:
    """The options that each row gives its job. Null leaves one at its default."""
    if not layout.placement:
        return iter([{}] * batch.num_rows)
    names = tuple(layout.placement)
    columns = [_option_values(name, batch.column(column)) for name, column in layout.placement.items()]
    return (
        {name: value for name, value in zip(names, values, strict=True) if value is not None}
        for values in zip(*columns, strict=True)
    )


def rows_of(columns: Mapping[str, list[Any]], count: int) -> Iterator[tuple[Any, ...]]:
    """Yield the values of each of ``count`` rows."""
    return zip(*columns.values(), strict=True) if columns else iter([()] * count)


def _rows(batch: pa.RecordBatch, names: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    if not names:
        return iter([()] * batch.num_rows)
    return zip(*(column_values(batch.column(name)) for name in names), strict=True)


def _option_values(option: str, column: pa.Array) -> list[Any]:
    """Decimals as numbers, intervals as seconds, and what groups are named by as text: as options are given."""
    kind = column.type
    is_whole = pa.types.is_decimal(kind) and kind.scale == 0
    if pa.types.is_decimal(kind) and not is_whole:
        column = column.cast(pa.float64())
    elif pa.types.is_duration(kind):
        column = pc.divide(column.cast(pa.duration("us")).cast(pa.int64()), 1e6)
    values = column_values(column)
    if option == "group" and (is_whole or pa.types.is_integer(kind)):
        return [None if value is None else str(value) for value in values]
    if is_whole:
        # It may be too large for any integer of Arrow's: then it is this row that is refused, and no other.
        return [None if value is None else int(value) for value in values]
    return values


def _not_json(batch: pa.RecordBatch, columns: Mapping[str, list[Any]]) -> Mapping[int, str]:
    """Return what is wrong with the rows that hold a number which JSON cannot represent."""
    found: dict[int, str] = {}
    for name, values in columns.items():
        found |= not_finite(name, batch.column(name), values)
    return found


def _why(error: Exception, names: Sequence[str], values: Sequence[Any]) -> str:
    for name, value in zip(names, values, strict=True):
        if isinstance(value, Unreadable):
            return f"column {name!r} {value.why}. Replace it, or leave the column out."
    return str(error)


def _shown(names: Sequence[str], key: Sequence[Any]) -> str:
    return ", ".join(f"{name}={value!r:.60}" for name, value in zip(names, key, strict=True))
