"""The options of ``spark.read``, ``df.write`` and their streams: read, checked, with defaults filled in.

Spark hands over texts under names in lower case; what users write is ``numPartitions``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, TypeVar
from urllib.parse import parse_qs, urlsplit

import msgspec

from penstock.client.app import App
from penstock.client.options import refuse_unknown
from penstock.core.names import check_queue, check_task
from penstock.errors import InvalidOption
from penstock.spark.schemas import Kind, PayloadFormat
from penstock.spark.store import shared_url, url_for_executors


class ReadOptions(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What to read. Of ``queue``, ``subscribe`` (several, with commas) and ``subscribe_pattern`` one is given.

    Offsets are ``earliest``, ``latest``, or JSON: ``{"mail": {"epoch": "...", "seq": 17}}``, of which a bare number is
    the short form. Timestamps are epoch milliseconds or ISO 8601. ``num_partitions`` 0 leaves the number to us.
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
    """How rows become jobs. Lists of columns have commas. ``write_id`` names the save: rows of a save that is repeated
    under the same name are duplicates, whatever has become of their jobs."""

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

# What Spark itself puts beside the user's options.
_OF_SPARK = frozenset({"path", "checkpointlocation"})


def read_options(given: Mapping[str, str]) -> ReadOptions:
    """Raises ``InvalidOption`` for a name or a value that is not allowed."""
    options = _parse(given, ReadOptions, where="spark.read.format('penstock')")
    chosen = [name for name in ("queue", "subscribe", "subscribe_pattern") if getattr(options, name)]
    if len(chosen) != 1:
        raise InvalidOption(
            "which queue to read is not clear: give one of the options queue, subscribe ('mail,reports') "
            f"and subscribePattern ('mail-.*'); {len(chosen)} were given."
        )
    if options.queue:
        check_queue(options.queue)
    if options.num_partitions < 0:
        raise InvalidOption(
            f"numPartitions={options.num_partitions} is negative. Give at least 1, or leave it out."
        )
    if options.max_events_per_trigger < 1:
        raise InvalidOption(f"maxEventsPerTrigger={options.max_events_per_trigger}: give at least 1.")
    return options


def write_options(given: Mapping[str, str]) -> WriteOptions:
    """Raises ``InvalidOption`` or ``InvalidName`` for a name or a value that is not allowed."""
    options = _parse(given, WriteOptions, where="df.write.format('penstock')")
    if not options.key_columns:
        raise InvalidOption(
            "keyColumns is missing: the columns whose values name a row, such as 'user_id' or 'day,user_id'."
        )
    if not options.task and not options.queue:
        raise InvalidOption(
            "neither task nor queue was given: say which task the jobs are for, or their queue."
        )
    if options.task and ":" not in options.task:
        check_task(options.task)
    if options.queue:
        check_queue(options.queue)
    if not 1 <= options.batch_size <= 10_000:
        raise InvalidOption(f"batchSize={options.batch_size} is out of range. Give 1 to 10000.")
    return options


def namespace_of(url: str) -> str:
    """The namespace that a URL names: part of what rows' ids are made of."""
    return parse_qs(urlsplit(url).query).get("namespace", [""])[0]


def _parse(given: Mapping[str, str], kind: type[_Options], *, where: str) -> _Options:
    known: list[str] = [field.encode_name for field in msgspec.structs.fields(kind)]
    fields = {name.lower(): name for name in known}
    said = {name: value for name, value in given.items() if name.lower() not in _OF_SPARK}
    for name in said:
        if name.lower() not in fields:
            refuse_unknown([name], known, where=where)
    named: dict[str, Any] = {fields[name.lower()]: value for name, value in said.items()}
    if "url" not in named:
        named["url"] = shared_url(App())
    try:
        options = msgspec.convert(named, kind, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidOption(_plainly(str(error), named)) from None
    return msgspec.structs.replace(options, url=url_for_executors(options.url))


def _plainly(said: str, given: Mapping[str, Any]) -> str:
    found = re.fullmatch(r"(.*) - at `\$\.(\w+)`", said)
    if found is None:
        return f"an option is wrong: {said}."
    return f"{found[2]}={given.get(found[2])!r} is wrong: {found[1][:1].lower()}{found[1][1:]}."
