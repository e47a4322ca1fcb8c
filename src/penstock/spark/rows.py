"""From rows of a table to jobs: Arrow batches in, ``NewJob``s out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, cast

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from penstock.core.job import DEFAULT_OPTIONS, NewJob, Options
from penstock.errors import InvalidInput, InvalidOption, PayloadTooLarge
from penstock.options import placed
from penstock.spark.errors import BadRow
from penstock.spark.keys import row_id_maker

__all__ = ["Layout", "Refused", "column_values", "new_jobs", "placements"]

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


def new_jobs(batch: pa.RecordBatch, layout: Layout) -> Iterator[NewJob | Refused]:
    """A job for every row, in order, or what is wrong with the row."""
    id_of = row_id_maker(layout.namespace, layout.task)
    not_json = _not_json(batch, layout.payload)
    rows = zip(
        _rows(batch, layout.key),
        _rows(batch, layout.payload),
        placements(batch, layout),
        strict=True,
    )
    names = layout.payload
    for number, (key, values, given) in enumerate(rows):
        id = ""
        try:
            id = id_of(key)
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
            yield Refused(_shown(layout.key, key), str(error), id)


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


def _rows(batch: pa.RecordBatch, names: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    if not names:
        return iter([()] * batch.num_rows)
    return zip(*(column_values(batch.column(name)) for name in names), strict=True)


def column_values(column: pa.Array) -> list[Any]:
    """What ``to_pylist`` gives, several times as fast for the kinds that most columns are of. Instants are in UTC,
    whatever the time zone of the session that they come from: they are to be equal in all of them."""
    kind = column.type
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind)
    if pa.types.is_string(kind) or (is_number and column.null_count == 0):
        return cast("list[Any]", column.to_numpy(zero_copy_only=False).tolist())
    in_utc = _in_utc(kind)
    return cast("list[Any]", (column if in_utc == kind else column.cast(in_utc)).to_pylist())


def _in_utc(kind: pa.DataType) -> pa.DataType:
    """The type with UTC for the time zone of every instant in it."""
    if pa.types.is_timestamp(kind):
        return kind if kind.tz is None else pa.timestamp(kind.unit, "UTC")
    if pa.types.is_struct(kind):
        return pa.struct([_field_in_utc(field) for field in kind])
    if pa.types.is_list(kind):
        return pa.list_(_field_in_utc(kind.value_field))
    if pa.types.is_map(kind):
        return pa.map_(_field_in_utc(kind.key_field), _field_in_utc(kind.item_field), kind.keys_sorted)
    return kind


def _field_in_utc(field: pa.Field) -> pa.Field:
    return field.with_type(_in_utc(field.type))


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


def _not_json(batch: pa.RecordBatch, names: Sequence[str]) -> Mapping[int, str]:
    """Rows with a number that JSON has no word for; it would arrive as null."""
    found: dict[int, str] = {}
    for name in names:
        column = batch.column(name)
        if not pa.types.is_floating(column.type):
            continue
        finite = pc.fill_null(pc.is_finite(column), True)
        for number in pc.indices_nonzero(pc.invert(finite)).to_pylist():
            found[number] = (
                f"column {name!r} is {column[number].as_py()}, which JSON cannot say. Replace it, by null for example."
            )
    return found


def _shown(names: Sequence[str], key: Sequence[Any]) -> str:
    return ", ".join(f"{name}={value!r:.60}" for name, value in zip(names, key, strict=True))
