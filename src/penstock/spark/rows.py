"""Jobs from rows of a table. A job's id is a hash of namespace, task and the values of the row's key columns."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from hashlib import blake2b
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from penstock.client.codec import resolve_serde
from penstock.client.options import placed
from penstock.client.rules import Rules
from penstock.core.job import DEFAULT_OPTIONS, NewJob, Options
from penstock.errors import BadKey, BadRow, InvalidInput, InvalidOption, PayloadTooLarge
from penstock.spark.cells import Unreadable, column_values, not_finite, plain_decimal

_DIGEST: Final = 16
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)
_CANONICAL: Final = frozenset({str, int, bool, bytes})
_MAX_PAYLOAD: Final = 1 << 20
_encode_key = msgspec.msgpack.Encoder().encode
_encode_payload = msgspec.json.Encoder().encode
_JSON: Final = resolve_serde("json")


def row_id_maker(namespace: str, task: str) -> Callable[[tuple[Any, ...]], str]:
    """Return a function from the values of a key to the id of its job, 32 hexadecimal digits.

    Equal values of the same kind have equal ids, whatever their storage type: int or long, float or double, a
    timestamp in any time zone, decimals of any scale. Values of different kinds differ: ``1``, ``"1"``, ``1.0``.

    The function raises ``BadKey`` for a key that cannot identify a row.
    """
    start = blake2b(_encode_key((namespace, task)), digest_size=_DIGEST)

    def id_of(key: tuple[Any, ...]) -> str:
        digest = start.copy()
        is_canonical = _CANONICAL.issuperset(map(type, key))
        digest.update(_encode_key(key if is_canonical else [_canonical(value) for value in key]))
        return digest.hexdigest()

    return id_of


def _canonical(value: Any) -> Any:
    """Return an equivalent with exactly one MessagePack encoding. Kinds without one become a list with their name."""
    kind = type(value)
    if kind in _CANONICAL:
        return value
    if kind is float:
        return _canonical_float(value)
    if value is None:
        raise BadKey("the key is null. Drop the row, or choose key columns without nulls.")
    if isinstance(value, datetime):
        # Without a time zone, a datetime is local time, not an instant.
        if value.tzinfo is None:
            return ["local", (value.replace(tzinfo=UTC) - _EPOCH) // _MICROSECOND]
        return ["instant", (value - _EPOCH) // _MICROSECOND]
    if isinstance(value, date):
        return ["date", value.toordinal()]
    if isinstance(value, Decimal):
        return ["decimal", plain_decimal(value)]
    if isinstance(value, list):
        return ["array", *map(_canonical, value)]
    if isinstance(value, dict):
        return ["struct", *([name, _canonical(member)] for name, member in value.items())]
    raise BadKey(
        f"a key of type {kind.__name__} has no canonical form. Use text, numbers, dates, timestamps or bytes."
    )


def _canonical_float(value: float) -> float:
    if not math.isfinite(value):
        raise BadKey(f"the key is {value}, which identifies nothing. Drop the row, or choose another key.")
    return value or 0.0  # -0.0 becomes 0.0


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """The roles of a table's columns. ``placement`` maps an option of a job to its column: ``{"group": "user"}``.

    If ``whole`` is set, the payload holds the columns as one object under that name. ``fields`` are shared by all
    jobs, as made by ``penstock.client.options.placement``. ``rules`` are those of the task; columns override them.
    """

    namespace: str
    task: str
    key: tuple[str, ...]
    payload: tuple[str, ...]
    whole: str = ""
    placement: dict[str, str] = {}
    options: Options = DEFAULT_OPTIONS
    fields: dict[str, Any] = {}
    rules: Rules | None = None
    max_payload: int = _MAX_PAYLOAD

    def check(self, columns: Sequence[str]) -> None:
        """Raise ``InvalidOption`` for a column that the table does not have."""
        for name in (*self.key, *self.payload, *self.placement.values()):
            if name not in columns:
                raise InvalidOption(
                    f"the table has no column {name!r}. Its columns are: {', '.join(columns)}."
                )


class Refused(msgspec.Struct, frozen=True):
    """A row that cannot become a job: its key as text, and why. ``id`` is empty if the key itself is invalid."""

    key: str
    why: str
    id: str = ""


def payload_columns(batch: pa.RecordBatch, layout: Layout) -> dict[str, list[Any]]:
    """Return the values of the columns that make the payloads, by name."""
    return {name: column_values(batch.column(name)) for name in layout.payload}


def new_jobs(
    batch: pa.RecordBatch, layout: Layout, columns: dict[str, list[Any]] | None = None
) -> Iterator[NewJob | Refused]:
    """Yield a job for each row in order, or the reason why the row cannot become one. ``columns`` are the payload
    columns, if the caller already has them."""
    make_id = row_id_maker(layout.namespace, layout.task)
    if columns is None:
        columns = payload_columns(batch, layout)
    not_json = _not_json(batch, columns)
    rows = zip(
        _rows(batch, layout.key), rows_of(columns, batch.num_rows), placements(batch, layout), strict=True
    )
    names = layout.payload
    for number, (key, values, options) in enumerate(rows):
        id = ""
        try:
            id = make_id(key)
            if number in not_json:
                raise BadRow(not_json[number])
            row = dict(zip(names, values, strict=True))
            payload = _encode_payload({layout.whole: row} if layout.whole else row)
            if len(payload) > layout.max_payload:
                raise PayloadTooLarge(
                    f"its payload has {len(payload)} bytes; at most {layout.max_payload} are allowed."
                )
            ruled = {} if layout.rules is None else layout.rules.options(payload, _JSON)
            fields = placed(layout.fields, ruled | options) if ruled or options else layout.fields
            yield NewJob(id=id, payload=payload, options=layout.options, **fields)
        except (InvalidInput, TypeError, ValueError, OverflowError) as error:
            why = _why(error, (*layout.key, *names), (*key, *values))
            yield Refused(_shown(layout.key, key), why, id)


def placements(batch: pa.RecordBatch, layout: Layout) -> Iterator[dict[str, Any]]:
    """Yield the options that each row sets for its job. Null keeps the default."""
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
    """Return the column as option values: decimals as numbers, intervals as seconds, group names as text."""
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
        # The number may exceed Arrow's integers. Then only this row is refused.
        return [None if value is None else int(value) for value in values]
    return values


def _not_json(batch: pa.RecordBatch, columns: Mapping[str, list[Any]]) -> Mapping[int, str]:
    """Return an error message for each row that has a number that JSON cannot represent, by row number."""
    errors: dict[int, str] = {}
    for name, values in columns.items():
        errors |= not_finite(name, batch.column(name), values)
    return errors


def _why(error: Exception, names: Sequence[str], values: Sequence[Any]) -> str:
    for name, value in zip(names, values, strict=True):
        if isinstance(value, Unreadable):
            return f"column {name!r} {value.why}. Replace it, or leave the column out."
    return str(error)


def _shown(names: Sequence[str], key: Sequence[Any]) -> str:
    return ", ".join(f"{name}={value!r:.60}" for name, value in zip(names, key, strict=True))
