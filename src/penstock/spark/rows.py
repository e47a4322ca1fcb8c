"""The id of a row's job: a hash of namespace, task and the values of its key columns."""

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

from penstock.client.options import placed
from penstock.core.job import DEFAULT_OPTIONS, NewJob, Options
from penstock.errors import InvalidInput, InvalidOption, PayloadTooLarge
from penstock.spark.cells import Unreadable, column_values, not_finite, plain_decimal
from penstock.spark.errors import BadKey, BadRow

_DIGEST: Final = 16
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)
_CANONICAL: Final = frozenset({str, int, bool, bytes})
_encode = msgspec.msgpack.Encoder().encode


def row_id_maker(namespace: str, task: str) -> Callable[[tuple[Any, ...]], str]:
    """A function from the values of a key to the id of its job, 32 hexadecimal digits.

    Equal values of equal kind have equal ids, whatever they are stored as: an int and a long, a float and a double, a
    timestamp in any time zone, decimals of any scale. Values of different kinds differ: ``1``, ``"1"``, ``1.0``.

    Raises (the function): ``BadKey``.
    """
    start = blake2b(_encode((namespace, task)), digest_size=_DIGEST)

    def id_of(key: tuple[Any, ...]) -> str:
        digest = start.copy()
        is_canonical = _CANONICAL.issuperset(map(type, key))
        digest.update(_encode(key if is_canonical else [_canonical(value) for value in key]))
        return digest.hexdigest()

    return id_of


def _canonical(value: Any) -> Any:
    """A value that MessagePack encodes in one way only. Kinds it does not know are marked by a list with their name."""
    kind = type(value)
    if kind in _CANONICAL:
        return value
    if kind is float:
        return _canonical_float(value)
    if value is None:
        raise BadKey("the key is null. Drop such rows, or choose key columns that are always there.")
    if isinstance(value, datetime):
        # Without a time zone it is a wall clock's time, which is no instant.
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
        raise BadKey(f"the key is {value}, which identifies nothing. Drop such rows, or choose another key.")
    return value or 0.0  # there is one zero


# From rows of a table to jobs: Arrow batches in, ``NewJob``s out.


_MAX_PAYLOAD: Final = 1 << 20
_row_encode = msgspec.json.Encoder().encode


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """Which columns are what. ``placement`` says from which column an option of a job is taken: ``{"group": "user"}``.

    ``whole``: the payload has the columns as an object under that name. ``fields`` are those that all the jobs share,
    as ``penstock.client.options.placement`` makes them.
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
            payload = _row_encode({layout.whole: row} if layout.whole else row)
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
