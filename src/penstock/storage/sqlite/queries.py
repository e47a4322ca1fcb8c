"""Queries: jobs, counts, workers, log lines, searches and news. Except for ``watch``, nothing here writes."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeVar
from zlib import crc32

import msgspec

from penstock.core.job import DAY_MS, Job
from penstock.core.lifecycle import TERMINAL, State
from penstock.core.limits import Limit
from penstock.errors import InvalidOption, JobNotFound
from penstock.storage.metrics import KeptBudget, Minute
from penstock.storage.sqlite import statements
from penstock.storage.sqlite.eventlog import minutes_of
from penstock.storage.sqlite.queuerow import USES_STAGED, QueueRow, View
from penstock.storage.sqlite.records import (
    FINISHED,
    Record,
    as_job,
    shown_failure,
)
from penstock.storage.sqlite.unit import Unit
from penstock.storage.values import (
    Counts,
    Finished,
    Found,
    Held,
    JobPage,
    LogPage,
    Query,
    QueueClock,
    QueueSettings,
    WorkerRecord,
)

Place = TypeVar("Place")

_sql = statements("read")
_json = msgspec.json.Encoder()
_cursors = msgspec.json.Decoder(tuple[int, int | str])
_limits = msgspec.json.Decoder(Limit)

# The order of the jobs of a state: the name of the statement, and the two fields of a record.
ORDERS: Final[dict[State, tuple[str, str, str]]] = {
    State.WAITING: ("waiting", "priority", "place"),
    State.SCHEDULED: ("scheduled", "run_at", "id"),
    State.BLOCKED: ("blocked", "place", "id"),
    State.ACTIVE: ("active", "lease_until", "id"),
    State.COMPLETED: ("finished", "kept_until", "id"),
    State.FAILED: ("finished", "kept_until", "id"),
    State.CANCELLED: ("finished", "kept_until", "id"),
}
_SCANNED_PER_CALL: Final = 10_000
_records_sql = statements("records")
_scan_sql = statements("scan")
_SEARCH_PAGE: Final = 500
_search_sql = statements("search")
_news_sql = statements("news")
_news = msgspec.msgpack.Decoder(Finished)


def get(view: View, ids: Sequence[str]) -> list[Job | None]:
    """Return the jobs of these ids, in order."""
    rows = view.sql.execute(_sql["by_ids"], (_json.encode(ids).decode(), view.queue.key))
    jobs = {rest[1]: as_job(Record(*rest), payload, queue=view.name) for payload, *rest in rows}
    return [jobs.get(id_) for id_ in ids]


def list_jobs(
    view: View, state: State, *, cursor: str = "", limit: int = 100, reverse: bool = False
) -> JobPage:
    """Return a page of the jobs of a state. The cursor is the place of the last job on it."""
    name, first, second = ORDERS[state]
    text = _sql[f"list_{name}"].replace("{direction}", "DESC" if reverse else "ASC")
    after = after_place(first, second, "<" if reverse else ">") if cursor else ""
    values: dict[str, Any] = {"queue": view.queue.key, "state": state.value, "limit": limit + 1}
    if cursor:
        values["first"], values["second"] = read_cursor(cursor, _cursors)
    rows = view.sql.execute(text.replace("{and_after}", after), values).fetchall()
    records = [(Record(*rest), payload) for payload, *rest in rows]
    jobs = [as_job(record, payload, queue=view.name) for record, payload in records[:limit]]
    if len(records) <= limit:
        return JobPage(jobs)
    last = records[limit - 1][0]
    return JobPage(jobs, _json.encode((getattr(last, first), getattr(last, second))).decode())


def after_place(first: str, second: str, sign: str) -> str:
    """Return the condition that a job comes after a place in an order of two columns."""
    # The first comparison is redundant, but an index without the second column can use it.
    return f"AND j.{first} {sign}= :first AND (j.{first}, j.{second}) {sign} (:first, :second)"


def read_cursor(cursor: str, decoder: msgspec.json.Decoder[Place]) -> Place:
    """Return the place of a cursor. Raise ``InvalidOption`` if it is not valid."""
    try:
        return decoder.decode(cursor)
    except msgspec.DecodeError as error:
        raise InvalidOption(
            f"{cursor!r:.80} is not a valid cursor: {error}. Use one that the same call returned."
        ) from error


def counts(view: View) -> Counts:
    """Return the number of jobs by state, from the counters in the queue's row."""
    sql, row = view.sql, view.queue
    now_ms = row.clock()
    ready = sql.execute(_sql["next_ready_at"], (row.key,)).fetchone()
    due, due_at = sql.execute(_sql["overdue"], (row.key, now_ms)).fetchone() if row.scheduled else (0, None)
    oldest_ms = max(0 if ready is None else now_ms - ready[0], 0 if due_at is None else now_ms - due_at)
    [next_at] = sql.execute(_sql["next_moved"], {"queue": row.key}).fetchone()
    staged = sql.execute(_sql["staged"], (row.key,)).fetchone()[0] if row.uses & USES_STAGED else 0
    next_ms = None if next_at is None else max(0, next_at - now_ms)
    return Counts(
        row.scheduled - staged, row.waiting, row.blocked, row.active, row.completed, row.failed, row.cancelled,
        bool(row.paused), oldest_ms, due, next_ms, staged,
    )  # fmt: skip


def metrics(view: View, *, last_ms: int = DAY_MS) -> list[Minute]:
    """Return the metrics by minute."""
    row = view.queue
    return minutes_of(view.sql, row.key, row.minute, last_ms=last_ms, now_ms=row.clock())


def clock(view: View) -> QueueClock:
    """Return the queue's time and the wall clock."""
    moment = view.queue.moment()
    return QueueClock(moment.now_ms, moment.wall_ms)


def has_work(view: View) -> bool:
    """Return whether a claim would get a job."""
    sql, row = view.sql, view.queue
    if row.paused or (row.uses & 1 and _is_limited(sql, row)):
        return False
    if row.has_budgets and _is_over_budget(sql, row):
        return False
    if row.waiting or not row.scheduled:
        return bool(row.waiting)
    return sql.execute(_sql["due"], (row.key, row.clock())).fetchone() is not None


def _is_limited(sql: sqlite3.Connection, row: QueueRow) -> bool:
    """Return whether a limit of the queue stops all claims until a job ends or time passes."""
    stored = sql.execute(_sql["queue_limit"], (row.key,)).fetchone()
    limit = Limit() if stored is None else _limits.decode(stored[0])
    if limit.concurrency is not None and row.active >= limit.concurrency:
        return True
    now_ms = row.clock()
    parked = sql.execute(_sql["queue_parked"], (row.key, now_ms)).fetchone() is not None
    if parked or limit.rate is None:
        return parked
    starts = sql.execute(_sql["queue_starts"], (row.key, now_ms - limit.rate.per_ms)).fetchone()[0]
    return int(starts) >= limit.rate.count


def _is_over_budget(sql: sqlite3.Connection, row: QueueRow) -> bool:
    now_ms = row.clock()
    budgets = [KeptBudget(*values) for values in sql.execute(statements("usage")["budgets"], (row.key,))]
    return any(not budget.scope and budget.is_over(now_ms) for budget in budgets)


def queues(view: View) -> list[str]:
    """Return every queue that ever had a job."""
    return [name for (name,) in view.sql.execute(statements("queue")["names"], (view.namespace,))]


def attended(view: View) -> list[str]:
    """Return the queues that have records of workers."""
    return [name for (name,) in view.sql.execute(statements("queue")["attended"], (view.namespace,))]


def settings(view: View) -> QueueSettings:
    """Return the queue's settings, or the defaults."""
    return view.queue.settings


def workers(view: View) -> list[WorkerRecord]:
    """Return the workers seen within about the last hour, by id."""
    now_ms = view.queue.clock()
    rows = view.sql.execute(_sql["workers"], (view.queue.key,))
    return [WorkerRecord(id_, info, seen_at, max(0, now_ms - seen_at)) for id_, info, seen_at in rows]


def worker_ids(view: View) -> list[str]:
    """Return the ids of ``workers``."""
    return [id_ for (id_,) in view.sql.execute(_sql["worker_ids"], (view.queue.key,))]


def leases_of(view: View, worker: str) -> list[Held]:
    """Return the leases that the worker holds."""
    rows = view.sql.execute(statements("claim")["leases_of"], (view.queue.key, worker))
    return [Held(id_, token) for id_, token in rows]


def logs(view: View, id: str, *, start: int = 0, limit: int = 1000) -> LogPage:
    """Return the kept log lines of a job from number ``start`` on."""
    first, last = view.sql.execute(_sql["log_range"], (view.queue.key, id)).fetchone()
    if last is None:
        return LogPage()
    # The table counts lines from 1.
    start = min(max(start, first - 1), last)
    rows = view.sql.execute(_sql["logs"], (view.queue.key, id, start, max(limit, 0)))
    return LogPage([line for (line,) in rows], start, last)


def scan_jobs(
    view: View,
    *,
    states: frozenset[State] | None = None,
    part: int = 0,
    parts: int = 1,
    cursor: str = "",
    limit: int = 1000,
    light: bool = False,
) -> JobPage:
    """Return the next jobs of a part by id, whatever their states. The cursor is the last id scanned."""
    states_json = None if states is None else _json.encode(states).decode()
    jobs: list[Job] = []
    left = _SCANNED_PER_CALL
    while left > 0 and len(jobs) < limit:
        count = min(limit * parts, left)
        ids = view.sql.execute(_scan_sql["ids"], (view.queue.key, cursor, count)).fetchall()
        keys = [key for key, id_ in ids if parts == 1 or crc32(id_.encode()) % parts == part]
        jobs += _read(view, keys, states_json, light=light)
        if len(ids) < count:
            return JobPage(jobs)
        cursor, left = ids[-1][1], left - count
    return JobPage(jobs, cursor)


def _read(view: View, keys: list[int], states: str | None, *, light: bool) -> Iterator[Job]:
    # SQLite does not read columns that the statement leaves out, such as a long result.
    statement = _scan_sql["light"].replace("j.result", "NULL") if light else _scan_sql["jobs"]
    for payload, *rest in view.sql.execute(
        statement, {"keys": _json.encode(keys).decode(), "states": states}
    ):
        yield as_job(Record(*rest), payload, queue=view.name)


def search(view: View, query: Query, *, cursor: str = "", limit: int = 100, scan: int = 10_000) -> Found:
    """Return up to ``limit`` matches among the next ``scan`` jobs."""
    first, second = _order(query)
    ids: list[str] = []
    scanned, is_end = 0, False
    while scanned < scan and len(ids) < limit and not is_end:
        count = min(scan - scanned, _SEARCH_PAGE)
        records = _walk(view, query, cursor=cursor, limit=count)
        is_end = len(records) < count
        for record in records:
            if len(ids) == limit:
                is_end = False
                break
            scanned += 1
            cursor = _json.encode((getattr(record, first), getattr(record, second))).decode()
            if query.fits(_task(record), record.enqueued_at, record.finished_at):
                ids.append(record.id)
    jobs = [job for job in get(view, ids) if job is not None]
    return Found(jobs, scanned, "" if is_end else cursor, view.queue.clock())


def _task(record: Record) -> str:
    """Return the task of a job; empty for a damaged one."""
    try:
        return record.options.task
    except msgspec.DecodeError:
        return ""


def _order(query: Query) -> tuple[str, str]:
    return ("finished_at", "id") if query.error_type else ORDERS[query.state][1:]


def _walk(view: View, query: Query, *, cursor: str, limit: int) -> list[Record]:
    which = "j.state = :state"
    if query.error_type:
        which = "j.state = 'failed' AND j.error_type <> '' AND j.error_type = :error_type"
    elif query.state in TERMINAL:
        which += " AND j.kept_until > 0"
    first, second = _order(query)
    text = _search_sql["walk"].replace("{which}", which).replace("{first}", first).replace("{second}", second)
    text = text.replace("{and_after}", after_place(first, second, ">") if cursor else "")
    values: dict[str, Any] = {
        "queue": view.queue.key,
        "state": query.state.value,
        "error_type": query.error_type,
    }
    if cursor:
        values["first"], values["second"] = read_cursor(cursor, _cursors)
    return [Record(*row) for row in view.sql.execute(text, {**values, "limit": limit})]


def errors(view: View) -> dict[str, int]:
    """Return the number of failed jobs by error class."""
    return dict(view.sql.execute(_search_sql["errors"], (view.queue.key,)).fetchall())


# News: ``watch`` registers for the ends of jobs, and ``listen`` reads the news of them. A listener continues after
# the last news that it has seen. Sweeps delete news after a minute.


def watch(unit: Unit, ids: Sequence[str], *, listener: str) -> list[Finished | None]:
    """Register for the ends of these jobs. Return those that have ended."""
    known = unit.find(ids)
    for id_ in ids:
        record = known.get(id_)
        if record is None or unit.is_over(record):
            raise JobNotFound.in_queue(unit.queue.name, id_)
    answers = [_ended(known[id_]) for id_ in ids]
    for id_, answer in zip(ids, answers, strict=True):
        if answer is None:
            unit.listen(known[id_], listener)
    unit.flush()
    return answers


def ends(view: View, ids: Sequence[str]) -> list[Finished | None]:
    """Return how these jobs have ended; nothing if one is open or cannot be read, which ``watch`` handles."""
    rows = view.sql.execute(_records_sql["by_ids"], (_json.encode(ids).decode(), view.queue.key))
    records = {record.id: record for record in (Record(*row) for row in rows)}
    moment = view.queue.moment()
    try:
        found = {
            id_: _ended(record) for id_, record in records.items() if not moment.is_over(record.kept_until)
        }
    except (msgspec.MsgspecError, ValueError, TypeError):
        return []
    answers = [found.get(id_) for id_ in ids]
    return [] if None in answers else answers


def _ended(record: Record) -> Finished | None:
    if record.state not in FINISHED:
        return None
    failure = shown_failure(record, record.state)
    return Finished(record.id, record.incarnation, State(record.state), record.result, failure)


def news_after(view: View, listener: str, *, key: int) -> tuple[int, list[Finished]]:
    """Return the listener's news after ``key``, and the key of the last."""
    # The statement looks up the queue by name, which costs less than reading its whole row.
    rows = view.sql.execute(_news_sql["after"], (view.namespace, view.name, listener, key)).fetchall()
    readable = (_read_news(body) for _, body in rows)
    return (rows[-1][0] if rows else key), [news for news in readable if news is not None]


def _read_news(body: bytes) -> Finished | None:
    """Return the news of these bytes; ``None`` if they are damaged. Waiters also check the job itself from time to
    time."""
    try:
        return _news.decode(body)
    except msgspec.DecodeError:
        return None
