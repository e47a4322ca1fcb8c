"""Damage to stored values, on every engine: what a fault of a disk, or of another program, leaves behind."""

from __future__ import annotations

import random
import sqlite3
from typing import Any, Final

from penstock.storage.contract import Storage
from penstock.storage.sqlite.engine import SqliteStorage
from penstock.storage.valkey.engine import ValkeyStorage

__all__ = ["GARBAGE", "PARTS", "database", "harm", "harm_events", "harm_limit", "harm_queue", "spoil_step"]

GARBAGE: Final = b"\xc1\xff\x00 not what was written"
PARTS: Final = ("record", "options", "extras", "failure", "rerun", "steps", "large step")
"""What of a job may be damaged."""

_COLUMNS: Final = {"extras": "annex", "failure": "failure", "rerun": "rerun"}
_HASHES: Final = {"extras": "annex", "failure": "failures", "rerun": "rerun"}
_HAS: Final = {"failure": 8, "rerun": 4, "extras": 128 + 64}
"""The flag of the state record that says that a job has it."""


def database(storage: SqliteStorage) -> sqlite3.Connection:
    """Return the connection that writes."""
    session = storage._session
    assert session is not None
    return session._database.writer.sql


async def harm(storage: Storage, queue: str, id: str, part: str) -> None:
    """Replace a part of a job by bytes that mean nothing."""
    if isinstance(storage, SqliteStorage):
        _harm_row(database(storage), id, part)
    else:
        assert isinstance(storage, ValkeyStorage)
        await _harm_hash(storage, queue, id, part)


def _harm_row(sql: sqlite3.Connection, id: str, part: str) -> None:
    if part == "record":
        sql.execute("UPDATE jobs SET state = ?, run_id = CAST(x'ff' AS TEXT) WHERE id = ?", ("?", id))
    elif part == "options":
        sql.execute("INSERT OR IGNORE INTO options (value) VALUES (?)", (GARBAGE,))
        sql.execute(
            "UPDATE jobs SET options = (SELECT key FROM options WHERE value = ?) WHERE id = ?", (GARBAGE, id)
        )
    elif part == "steps":
        sql.execute(
            "UPDATE steps SET body = ? WHERE job = (SELECT key FROM jobs WHERE id = ?)", (GARBAGE, id)
        )
    elif part == "large step":
        sql.execute("UPDATE steps SET result = NULL WHERE job = (SELECT key FROM jobs WHERE id = ?)", (id,))
    else:
        sql.execute(f"UPDATE jobs SET {_COLUMNS[part]} = ? WHERE id = ?", (GARBAGE, id))


async def _harm_hash(storage: ValkeyStorage, queue: str, id: str, part: str) -> None:
    if part == "options":
        await _harm_header(storage, queue, id)
        return
    if part == "steps":
        key = storage._calls.keys.part(queue, f"steps:{id}")
        for name in await storage._calls.plain(key, "HKEYS", key):
            await storage._calls.plain(key, "HSET", key, name, b"c" + bytes(18) + GARBAGE)
        return
    if part == "large step":
        key = storage._calls.keys.part(queue, f"step_results:{id}")
        await storage._calls.plain(key, "DEL", key)
        return
    state = await _value(storage, queue, "state", id)
    if part == "record":
        await _put(storage, queue, "jobs", id, GARBAGE)
        if state:
            await _put(storage, queue, "state", id, GARBAGE)
    elif state is None:
        assert part == "extras"
        static = await _value(storage, queue, "jobs", id)
        assert static is not None
        await _put(storage, queue, "jobs", id, static[:23] + b"\xc1" * (len(static) - 23))
    else:
        flags = bytes((state[68] | _HAS[part],))
        await _put(storage, queue, "state", id, state[:68] + flags + state[69:])
        await _put(storage, queue, _HASHES[part], id, GARBAGE)


async def _harm_header(storage: ValkeyStorage, queue: str, id: str) -> None:
    """Have the job refer to options that the queue does not have."""
    for name in ("jobs", "state"):
        record = await _value(storage, queue, name, id)
        if record is not None:
            at = 13 if name == "jobs" else 80 + record[75]
            await _put(storage, queue, name, id, record[:at] + b"\0gone!" + record[at + 6 :])


async def spoil_step(storage: Storage, queue: str, id: str, luck: random.Random) -> None:
    """Cut the record of a step, flip bits of it, or append to it."""

    def spoiled(value: bytes) -> bytes:
        cut = value[: luck.randrange(len(value))]
        flipped = bytearray(value)
        flipped[luck.randrange(len(value))] ^= 1 << luck.randrange(8)
        return luck.choice([cut, bytes(flipped), bytes(flipped), value + b"\0"])

    name = luck.choice(["charge", "load"])
    if isinstance(storage, SqliteStorage):
        sql = database(storage)
        [body] = sql.execute("SELECT body FROM steps WHERE name = ?", (name,)).fetchone()
        sql.execute("UPDATE steps SET body = ? WHERE name = ?", (spoiled(body), name))
    else:
        assert isinstance(storage, ValkeyStorage)
        stored = await _value(storage, queue, f"steps:{id}", name)
        assert stored is not None
        await _put(storage, queue, f"steps:{id}", name, spoiled(stored))


async def harm_limit(storage: Storage, queue: str, group: str) -> None:
    """Replace the limit of a group by bytes that mean nothing."""
    if isinstance(storage, SqliteStorage):
        database(storage).execute("UPDATE limits SET value = '{' WHERE key = ?", (group,))
    else:
        assert isinstance(storage, ValkeyStorage)
        await _put(storage, queue, "limits", group, GARBAGE)


async def harm_queue(storage: Storage, queue: str, field: str) -> bool:
    """Replace a field of the queue itself by bytes that mean nothing. Return whether the engine has it."""
    if isinstance(storage, SqliteStorage):
        if field == "clock":
            database(storage).execute("UPDATE queues SET clock_marks = '{'")
        return field == "clock"
    assert isinstance(storage, ValkeyStorage)
    await _put(storage, queue, "meta", field, GARBAGE)
    return True


async def harm_events(storage: Storage, queue: str, *, last: int, missing: bool = False) -> None:
    """Damage, or remove, the entry of the log whose last event has this number."""
    if isinstance(storage, SqliteStorage):
        if missing:
            database(storage).execute("DELETE FROM events WHERE last_seq = ?", (last,))
        else:
            database(storage).execute("UPDATE events SET entry = ? WHERE last_seq = ?", (GARBAGE, last))
        return
    assert isinstance(storage, ValkeyStorage)
    calls = storage._calls
    key = calls.keys.part(queue, "events")
    entries = await calls.plain(key, "XRANGE", key, "-", "+")
    await calls.plain(key, "DEL", key)
    for number, fields in entries:
        is_it = number == b"%d-0" % last
        if not (is_it and missing):
            await calls.plain(key, "XADD", key, number, "e", GARBAGE if is_it else fields[1])


async def _value(storage: ValkeyStorage, queue: str, part: str, field: str) -> bytes | None:
    key = storage._calls.keys.part(queue, part)
    found: bytes | None = await storage._calls.plain(key, "HGET", key, field)
    return found


async def _put(storage: ValkeyStorage, queue: str, part: str, field: str, value: Any) -> None:
    key = storage._calls.keys.part(queue, part)
    await storage._calls.plain(key, "HSET", key, field, value)
