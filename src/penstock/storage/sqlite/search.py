"""``search``: jobs of a state, or of an error class, that match. ``errors``: how many there are of each class."""

from __future__ import annotations

import sqlite3
from typing import Any, Final

import msgspec

from penstock.core.lifecycle import TERMINAL
from penstock.storage.search import Found, Query
from penstock.storage.sqlite.queuerow import find_queue
from penstock.storage.sqlite.read import ORDERS, after_place, get, place_of
from penstock.storage.sqlite.records import Record
from penstock.storage.sqlite.statements import statements

__all__ = ["errors", "search"]

_AT_ONCE: Final = 500

_sql = statements("search")
_json = msgspec.json.Encoder()


def search(
    sql: sqlite3.Connection, namespace: str, queue: str, query: Query, *, cursor: str, limit: int, scan: int
) -> Found:
    """Up to ``limit`` jobs that match, among the next ``scan``."""
    row = find_queue(sql, namespace, queue)
    if row is None:
        return Found([], 0)
    first, second = _order(query)
    ids: list[str] = []
    scanned, is_end = 0, False
    while scanned < scan and len(ids) < limit and not is_end:
        asked = min(scan - scanned, _AT_ONCE)
        records = _walk(sql, row.key, query, cursor=cursor, limit=asked)
        is_end = len(records) < asked
        for record in records:
            if len(ids) == limit:
                is_end = False
                break
            scanned += 1
            cursor = _json.encode((getattr(record, first), getattr(record, second))).decode()
            if query.fits(_task(record), record.enqueued_at, record.finished_at):
                ids.append(record.id)
    jobs = [job for job in get(sql, namespace, queue, ids) if job is not None]
    return Found(jobs, scanned, "" if is_end else cursor, row.clock())


def _task(record: Record) -> str:
    """The task of a job; that of a damaged one is not known."""
    try:
        return record.options.task
    except msgspec.DecodeError:
        return ""


def _order(query: Query) -> tuple[str, str]:
    return ("finished_at", "id") if query.error_type else ORDERS[query.state][1:]


def _walk(sql: sqlite3.Connection, queue: int, query: Query, *, cursor: str, limit: int) -> list[Record]:
    which = "j.state = :state"
    if query.error_type:
        which = "j.state = 'failed' AND j.error_type <> '' AND j.error_type = :error_type"
    elif query.state in TERMINAL:
        which += " AND j.kept_until > 0"
    first, second = _order(query)
    text = _sql["walk"].replace("{which}", which).replace("{first}", first).replace("{second}", second)
    text = text.replace("{and_after}", after_place(first, second, ">") if cursor else "")
    values: dict[str, Any] = {"queue": queue, "state": query.state.value, "error_type": query.error_type}
    if cursor:
        values["first"], values["second"] = place_of(cursor)
    return [Record(*row) for row in sql.execute(text, {**values, "limit": limit})]


def errors(sql: sqlite3.Connection, namespace: str, queue: str) -> dict[str, int]:
    """Failed jobs by error class."""
    row = find_queue(sql, namespace, queue)
    return {} if row is None else dict(sql.execute(_sql["errors"], (row.key,)).fetchall())
