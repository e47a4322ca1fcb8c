"""``scan_jobs``: every job by its identity, in the order of ids, whatever their states."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from typing import Final
from zlib import crc32

import msgspec

from penstock.core.job import Job
from penstock.core.lifecycle import State
from penstock.storage.sqlite.queuerow import find_queue
from penstock.storage.sqlite.records import Record, as_job
from penstock.storage.sqlite.statements import statements
from penstock.storage.values import JobPage

__all__ = ["scan_jobs"]

_LOOKED_AT: Final = 10_000

_sql = statements("scan")
_json = msgspec.json.Encoder()


def scan_jobs(
    sql: sqlite3.Connection,
    namespace: str,
    queue: str,
    *,
    states: frozenset[State] | None,
    part: int,
    parts: int,
    cursor: str,
    limit: int,
    light: bool,
) -> JobPage:
    """The next jobs of a part; the cursor is the last id that was looked at."""
    row = find_queue(sql, namespace, queue)
    if row is None:
        return JobPage([])
    wanted = None if states is None else _json.encode(states).decode()
    jobs: list[Job] = []
    left = _LOOKED_AT
    while left > 0 and len(jobs) < limit:
        count = min(limit * parts, left)
        ids = sql.execute(_sql["ids"], (row.key, cursor, count)).fetchall()
        keys = [key for key, id_ in ids if parts == 1 or crc32(id_.encode()) % parts == part]
        jobs += _read(sql, queue, keys, wanted, light=light)
        if len(ids) < count:
            return JobPage(jobs)
        cursor, left = ids[-1][1], left - count
    return JobPage(jobs, cursor)


def _read(
    sql: sqlite3.Connection, queue: str, keys: list[int], states: str | None, *, light: bool
) -> Iterator[Job]:
    # Columns that are not named are not read: a long result stays where it is.
    statement = _sql["light"].replace("j.result", "NULL") if light else _sql["jobs"]
    for payload, *rest in sql.execute(statement, {"keys": _json.encode(keys).decode(), "states": states}):
        yield as_job(Record(*rest), payload, queue=queue)
