"""Options of ``spark.read``, ``df.write`` and their streams: parsing, validation and defaults.

Spark passes option values as text, under lower-case names. Users write camel case, such as ``numPartitions``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, TypeVar
from urllib.parse import parse_qs

import msgspec

from penstock.client.app import App
from penstock.client.options import refuse_unknown
from penstock.core.names import check_queue, check_task
from penstock.core.text import split_url
from penstock.errors import InvalidOption
from penstock.spark.schemas import Kind, PayloadFormat
from penstock.spark.store import shared_url, url_for_executors


class ReadOptions(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Options of a read. Exactly one of ``queue``, ``subscribe`` (comma-separated) and ``subscribe_pattern`` is set.

    Offsets are ``earliest``, ``latest``, or JSON: ``{"mail": {"epoch": "...", "seq": 17}}``, or just the number in
    place of the inner object. Timestamps are epoch milliseconds or ISO 8601. ``num_partitions=0`` means automatic.
    """

    url: str = ""
    queue: str = ""
    subscribe: str = ""
    subscribe_pattern: str = ""
    kind: Kind = "jobs"
    state: str = ""
    starting_offsets: str = "earliest"
    ending_offsets: str = "latest"
    starting_timestamp: str = ""
    ending_timestamp: str = ""
    num_partitions: int = 0
    payload_format: PayloadFormat = "json"
    max_events_per_trigger: int = 250_000
    fail_on_data_loss: bool = True
    consumer_name: str = ""
    consumer_ttl: str = "7d"


class WriteOptions(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Options of a write. Lists of columns are comma-separated. ``write_id`` identifies the save: repeating a save
    under the same id makes its rows duplicates, in whatever state their jobs are."""

    url: str = ""
    queue: str = ""
    task: str = ""
    key_columns: str = ""
    payload_columns: str = ""
    priority_column: str = ""
    delay_column: str = ""
    group_column: str = ""
    cost_column: str = ""
    batch_size: int = 1000
    release: Literal["immediately", "onCommit"] = "immediately"
    bad_rows: Literal["fail", "skip"] = "fail"
    write_id: str = ""
    run_id: str = ""


_Options = TypeVar("_Options", ReadOptions, WriteOptions)

# Spark adds these to the user's options.
_SPARK_OPTIONS = frozenset({"path", "checkpointlocation"})


def read_options(values: Mapping[str, str]) -> ReadOptions:
    """Parse the options of a read. Raise ``InvalidOption`` for an unknown name or an invalid value."""
    options = _parse(values, ReadOptions, where="spark.read.format('penstock')")
    chosen = [name for name in ("queue", "subscribe", "subscribe_pattern") if getattr(options, name)]
    if len(chosen) != 1:
        raise InvalidOption(
            "set exactly one of the options queue, subscribe ('mail,reports') and subscribePattern ('mail-.*'), "
            f"got {len(chosen)}."
        )
    if options.queue:
        check_queue(options.queue)
    if options.num_partitions < 0:
        raise InvalidOption(
            f"numPartitions must be >= 1, got {options.num_partitions}. Leave it out for an automatic number."
        )
    if options.max_events_per_trigger < 1:
        raise InvalidOption(f"maxEventsPerTrigger must be >= 1, got {options.max_events_per_trigger}.")
    return options


def write_options(values: Mapping[str, str]) -> WriteOptions:
    """Parse the options of a write. Raise ``InvalidOption`` or ``InvalidName`` for an unknown name or an invalid
    value."""
    options = _parse(values, WriteOptions, where="df.write.format('penstock')")
    if not options.key_columns:
        raise InvalidOption(
            "keyColumns is missing. Name the columns that identify a row, such as 'user_id' or 'day,user_id'."
        )
    if not options.task and not options.queue:
        raise InvalidOption("task and queue are both missing. Name the task of the jobs, or their queue.")
    if options.task and ":" not in options.task:
        check_task(options.task)
    if options.queue:
        check_queue(options.queue)
    if not 1 <= options.batch_size <= 10_000:
        raise InvalidOption(f"batchSize must be from 1 to 10000, got {options.batch_size}.")
    return options


def namespace_of(url: str) -> str:
    """Return the namespace in a URL. It is part of what row ids are computed from."""
    return parse_qs(split_url(url).query).get("namespace", [""])[0]


def _parse(values: Mapping[str, str], kind: type[_Options], *, where: str) -> _Options:
    names: list[str] = [field.encode_name for field in msgspec.structs.fields(kind)]
    by_lower = {name.lower(): name for name in names}
    user_values = {name: value for name, value in values.items() if name.lower() not in _SPARK_OPTIONS}
    for name in user_values:
        if name.lower() not in by_lower:
            refuse_unknown([name], names, where=where)
    named: dict[str, Any] = {by_lower[name.lower()]: value for name, value in user_values.items()}
    if "url" not in named:
        named["url"] = shared_url(App())
    try:
        options = msgspec.convert(named, kind, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidOption(_explain(str(error), named)) from None
    return msgspec.structs.replace(options, url=url_for_executors(options.url))


def _explain(message: str, values: Mapping[str, Any]) -> str:
    match = re.fullmatch(r"(.*) - at `\$\.(\w+)`", message)
    if match is None:
        return f"an option is invalid: {message}."
    return f"{match[2]}={values.get(match[2])!r} is invalid: {match[1][:1].lower()}{match[1][1:]}."
