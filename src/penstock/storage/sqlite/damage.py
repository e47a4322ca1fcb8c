"""Damaged records: find stored values that cannot be read, and quarantine their jobs as failed.

This runs only after a call could not read its records, or when ``check`` reads everything.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple, get_args

import msgspec

from penstock.core.job import DEFAULT_OPTIONS, Dependent, Extras, pack_extras
from penstock.core.lifecycle import BlockedBy
from penstock.core.outcome import DAMAGED, damaged_failure
from penstock.core.step import unpack_body
from penstock.storage.bounds import DAMAGED_KEPT_MS, MINUTE_MS
from penstock.storage.sqlite import flows, schedules, statements
from penstock.storage.sqlite.queuerow import any_text
from penstock.storage.sqlite.records import (
    FAILED,
    SCHEDULED,
    STATES,
    UNREADABLE,
    Record,
    as_extras,
    unpack_failure,
    unpack_options,
)
from penstock.storage.sqlite.transitions import fail
from penstock.storage.sqlite.unit import End, Unit

_PER_PAGE: Final = 1000
_BLOCKED_BY: Final = ("", *get_args(BlockedBy))
_TEXTS: Final = ("id", "state", "run_id", "write_id", "blocked_by", "settled_as", "worker")
_COUNTS: Final = (
    "incarnation", "ttl_ms", "runs", "failures", "stalls", "ready_at", "run_at", "enqueued_at", "expires_at",
    "claimed_at", "finished_at", "kept_until", "token", "lease_until", "held_until",
)  # fmt: skip
_COLUMNS: Final = Record.__struct_fields__[1 : Record.__struct_fields__.index("was")]
_KEPT_AS: Final = {"slot_hold": "grip", "has_links": "binds"}
"""Names that the values of a quarantined job have had since earlier versions."""
_MOST: Final = 2**53

_sql = statements("damage")
_json = msgspec.json.Encoder()
_pack: Final = msgspec.msgpack.Encoder().encode


class Damaged(NamedTuple):
    """A record that cannot be read, with its readable parts, and why."""

    record: Record
    has_payload: bool
    why: str


def find_among(unit: Unit, ids: Sequence[str]) -> list[Damaged]:
    """Return the damaged records of these ids."""
    return _damaged(unit, "by_ids", (_json.encode(ids).decode(), unit.queue.key))


def find_any(unit: Unit, *, limit: int) -> list[Damaged]:
    """Return up to ``limit`` damaged records: those that a claim or sweep meets first, otherwise the first in the
    queue."""
    damaged = _damaged(unit, "heads", {"queue": unit.queue.key, "limit": _PER_PAGE})
    pages = walk(unit)
    while not damaged and (page := next(pages, None)) is not None:
        damaged = page
    return damaged[:limit]


def walk(unit: Unit) -> Iterator[list[Damaged]]:
    """Read all records of the queue in pages, and yield the damaged ones of each page."""
    after = -1
    while True:
        with any_text(unit.sql):
            rows = unit.sql.execute(_sql["walk"], (unit.queue.key, after, _PER_PAGE)).fetchall()
        if not rows:
            return
        after = rows[-1][1]
        yield _examined(unit, rows)


def recent(unit: Unit) -> int:
    """Return how many records of the queue were quarantined within the last minute."""
    since_ms = unit.now_ms - MINUTE_MS
    return int(unit.sql.execute(_sql["recent"], (unit.queue.key, DAMAGED, since_ms)).fetchone()[0])


def has_unknown_states(unit: Unit) -> bool:
    """Return whether a record of the queue has an unknown state, so that it is in no index."""
    known = _json.encode(list(STATES)).decode()
    return bool(unit.sql.execute(_sql["has_unknown_states"], (unit.queue.key, known)).fetchone()[0])


def _damaged(unit: Unit, statement: str, values: Any) -> list[Damaged]:
    with any_text(unit.sql):
        rows = unit.sql.execute(_sql[statement], values).fetchall()
    return _examined(unit, rows)


def _examined(unit: Unit, rows: Iterable[Sequence[Any]]) -> list[Damaged]:
    candidates = [Damaged(Record(*row), not lacks_payload, "") for lacks_payload, *row in rows]
    steps = _damaged_steps(
        unit, [one.record.key for one in candidates if one.record.packed_extras is not None]
    )
    whys = (_problem(one) or next(iter(steps.get(one.record.key, {}).values()), "") for one in candidates)
    return [one._replace(why=why) for one, why in zip(candidates, whys, strict=True) if why]


def _problem(damaged: Damaged) -> str:
    """Return why a record cannot be read; the empty string if it can."""
    record = damaged.record
    if not damaged.has_payload:
        return "the payload is missing"
    if record.packed_options is None:
        return "the options are missing"
    for name in _TEXTS:
        if not _is_text(getattr(record, name)):
            return f"{name} is not UTF-8"
    if record.state not in STATES or (record.settled_as and record.settled_as not in STATES):
        return "unknown state"
    if record.blocked_by not in _BLOCKED_BY or record.slot_hold not in (0, 1, 2):
        return "unknown reason for being blocked"
    for name in _COUNTS:
        if not 0 <= getattr(record, name) < _MOST:
            return f"{name} is out of range"
    return _undecodable(record)


def is_sound(record: Record) -> bool:
    """Return whether a record can be read."""
    return not _problem(Damaged(record, True, ""))


def _undecodable(record: Record) -> str:
    for name, decode in (
        ("options", lambda: unpack_options(record.packed_options)),
        ("failure", lambda: unpack_failure(record.failure)),
        ("rerun", lambda: record.slot),
        ("extras", lambda: as_extras(record.packed_extras)),
    ):
        try:
            decode()
        except UNREADABLE as error:
            return f"{name} cannot be decoded ({type(error).__name__})"
    return ""


def _damaged_steps(unit: Unit, keys: Sequence[int]) -> dict[int, dict[bytes, str]]:
    """Return why steps of these jobs cannot be read, by the keys of the jobs and the names of the steps."""
    found: defaultdict[int, dict[bytes, str]] = defaultdict(dict)
    if keys:
        with any_text(unit.sql):
            for job, *values in unit.sql.execute(_sql["steps_of"], (_json.encode(keys).decode(),)):
                stored = _StoredStep(*values)
                if why := _step_problem(stored):
                    found[job][stored.name] = why
    return found


class _StoredStep(NamedTuple):
    """A step as it is stored, with the size of its large result."""

    name: bytes
    number: int
    status: Any
    at_ms: int
    until_ms: int
    body: bytes
    large: int | None


def _step_problem(stored: _StoredStep) -> str:
    try:
        name = stored.name.decode()
    except UnicodeDecodeError:
        return "the name of a step is not UTF-8"
    try:
        step = unpack_body(stored.body).step(
            name, status=stored.status, number=stored.number, at_ms=stored.at_ms, until_ms=stored.until_ms
        )
    except UNREADABLE:
        return f"step {name} cannot be decoded"
    is_whole = step.result is not None or step.size == stored.large
    return "" if is_whole else f"the result of step {name} is missing"


def _take_damaged_steps(unit: Unit, key: int) -> dict[str, bytes]:
    """Remove the steps of a job that cannot be read. Return their bytes, to be kept with the job."""
    names = _damaged_steps(unit, [key]).get(key, {})
    taken = {name: unit.sql.execute(_sql["take_step"], (key, name)).fetchone() for name in names}
    return {"steps": _pack(taken)} if taken else {}


def _is_text(value: Any) -> bool:
    return (type(value) is str and value.isascii()) or not any(
        "\ud800" <= character <= "\udfff" for character in value
    )


def quarantine(unit: Unit, damaged: Damaged, *, alone: bool = False) -> None:
    """Fail the job, keep its stored values, and free what it holds. With ``alone``, notify no other job."""
    kept = {_KEPT_AS.get(name, name): _raw(getattr(damaged.record, name)) for name in _COLUMNS}
    original = _pack(kept | _take_damaged_steps(unit, damaged.record.key))
    record, is_whole = _salvaged(unit, damaged)
    failure = damaged_failure(damaged.why)
    if alone:
        record.extras, record.group_role = _extras_of_steps(unit, record.key), ""
    unit.meet(record)
    fail(unit, record, failure)
    _tell_of_rerun(unit, damaged.record, record)
    record.result = original
    unit.save([record])
    if not is_whole or alone:
        _free(unit, record, alone=alone)


def _tell_of_rerun(unit: Unit, damaged: Record, record: Record) -> None:
    """Notify those who wait for the rerun of a job, if its slot can be read, because there will be none."""
    try:
        slot = damaged.slot
    except UNREADABLE:
        return
    if slot is not None:
        unit.tell(record, state=FAILED, also=slot.listeners)


def _raw(value: Any) -> Any:
    return value.encode("utf-8", "surrogateescape") if type(value) is str else value


def _salvaged(unit: Unit, damaged: Damaged) -> tuple[Record, bool]:
    """Return a sound record with the readable parts of a damaged one, and whether its links could be read."""
    record = damaged.record
    values = {name: getattr(record, name) for name in Record.__struct_fields__}
    for name in _TEXTS:
        values[name] = _raw(values[name]).decode("utf-8", "replace")
    values |= {name: 0 for name in _COUNTS if not 0 <= values[name] < _MOST}
    extras, is_whole = _extras(record)
    if not is_whole:
        extras = _extras_of_steps(unit, record.key)
    values |= {
        "packed_extras": None if extras is None else pack_extras(extras),
        "has_links": int(extras is not None and extras.has_links),
    }
    values |= {"rerun": None, "failure": None, "payload": None if damaged.has_payload else b""}
    if record.slot_hold not in (0, 1, 2) or record.blocked_by not in _BLOCKED_BY:
        values |= {"slot_hold": 0, "blocked_by": ""}
    if record.state not in STATES:
        values |= {"state": SCHEDULED, "was": ""}
        is_whole = False
    if record.settled_as not in STATES:
        values["settled_as"] = ""
    values["options_key"], values["packed_options"] = _options(unit, record)
    values["id"] = _named(unit, record.key, record.id, values["id"])
    clean = Record(**values)
    if clean.has_links:
        clean.note_group_role()
    return clean, is_whole


def _extras(record: Record) -> tuple[Extras | None, bool]:
    try:
        return as_extras(record.packed_extras), True
    except UNREADABLE:
        return None, False


def _extras_of_steps(unit: Unit, key: int) -> Extras | None:
    """Return the extras of a job of which only the steps are known: a retry must not run them again."""
    return Extras(has_steps=True) if unit.sql.execute(_sql["has_steps"], (key,)).fetchone() else None


def _options(unit: Unit, record: Record) -> tuple[int, bytes]:
    """Return the options or the defaults, with a ttl that leaves people time to look at the job."""
    try:
        options = unpack_options(record.packed_options)
    except UNREADABLE:
        options = DEFAULT_OPTIONS
    return unit.intern(
        msgspec.structs.replace(options, failure_ttl_ms=max(options.failure_ttl_ms, DAMAGED_KEPT_MS))
    )


def _named(unit: Unit, key: int, id_: str, shown: str) -> str:
    """Give a record whose id is not UTF-8 an id by which it can be found."""
    if shown != id_:
        if unit.sql.execute(_sql["is_taken"], (unit.queue.key, shown)).fetchone():
            shown = f"{shown}~{key}"
        unit.sql.execute(_sql["rename"], (shown, key))
    return shown


def _free(unit: Unit, record: Record, *, alone: bool) -> None:
    """Free what the job holds. Its id identifies it, because its extras cannot be read."""
    queue, id_ = unit.queue.key, record.id
    unit.sql.execute(_sql["leave_lines"], (queue, id_))
    unit.sql.execute(_sql["forget_dedup"], (queue, id_, record.incarnation))
    unit.sql.execute(_sql["forget_signals"], (record.key,))
    schedules.last_ended(unit, id_)
    rows = unit.sql.execute(_sql["dependents_of"], (unit.namespace, unit.queue.name, id_)).fetchall()
    end = End(unit.queue.name, id_, "failed", None, unpack_failure(record.failure))
    if not alone:
        flows.tell(unit, [Dependent(*row) for row in rows], end)
    flows.forget(unit, [id_])
    unit.flush()
