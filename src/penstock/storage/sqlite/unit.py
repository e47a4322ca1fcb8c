"""A verb's call on one queue, inside a transaction that may hold several of them.

Verbs read records, change them in memory and note what happened; ``Step.save`` writes all of it with a few
statements. So a transition is plain Python, and SQL only stores.
"""

from __future__ import annotations

import sqlite3
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import msgspec

from penstock.core.job import Dependent, Options
from penstock.core.limits import Limit
from penstock.storage.sqlite.clock import Moment, wall_ms
from penstock.storage.sqlite.eventnotes import EventNotes
from penstock.storage.sqlite.messages import End, Message
from penstock.storage.sqlite.queuerow import USES_INSTANTS, Group, QueueRow
from penstock.storage.sqlite.records import (
    BLOCKED,
    REMOVED,
    SCHEDULED,
    STATES,
    WAITING,
    Record,
    pack_options,
    shown_failure,
)
from penstock.storage.sqlite.statements import statements
from penstock.storage.values import Finished

_sql = statements("records")
_news_sql = statements("news")
_instants_sql = statements("instants")
_json = msgspec.json.Encoder()
_pack_news = msgspec.msgpack.Encoder().encode


class Links(Protocol):
    """What a job whose annex binds has to do with others. Given from above: it stands on the transitions."""

    def hold_back(self, step: Step, record: Record, *, keeps_number: bool) -> bool:
        """A job is to enter waiting. True if it is blocked instead; then it has its state."""
        ...

    def ended(self, step: Step, record: Record) -> None:
        """A job has ended, or is removed before its end."""
        ...

    def saving(self, step: Step, record: Record) -> None:
        """A record is about to be written: what finds it by its ties is to agree. ``was`` is its state before."""
        ...

    def scheduled(self, step: Step, record: Record) -> None:
        """A member of a group waits for a time to come, or for a signal."""
        ...

    def reordered(self, step: Step, record: Record) -> None:
        """The priority of a member of a group has changed."""
        ...

    def settle(self, step: Step) -> None:
        """The verb has done all else."""
        ...

    def failed(self, step: Step, record: Record) -> None:
        """A job, of whatever kind, has failed for good."""
        ...

    def removed(self, step: Step, record: Record) -> None:
        """The record of a job that failed or was cancelled goes."""
        ...

    def forget(self, step: Step, ids: Sequence[str]) -> None:
        """The records of these ids go, and with them what hangs on them."""
        ...

    def awaits_children(self, step: Step, record: Record) -> bool:
        """A job is queued. True if it is blocked, whatever its time."""
        ...


class Step:
    """One call of one verb on one queue. All of it is written by ``save``, or nothing."""

    def __init__(
        self,
        sql: sqlite3.Connection,
        namespace: str,
        queue: QueueRow,
        *,
        option_keys: dict[bytes, int],
        links: Links,
    ) -> None:
        self.sql = sql
        self.namespace = namespace
        self.queue = queue
        self.moment = queue.moment()
        self.now_ms = self.moment.now_ms
        self.mended = 0
        """Damaged records that were put aside for this call."""
        self.notes = EventNotes()
        self.wakes: set[str] = set()
        self.links = links
        self.groups: dict[str, Group] = {}
        self.limits: dict[str, Limit] = {}
        self.touched_groups: list[Group] = []
        self.outbox: list[tuple[str, Message]] = []
        """What is to be said to other queues, before the call is over."""
        self.ends: deque[tuple[Dependent, End]] = deque()
        self.works_off = False
        self.giving = ""
        self._option_keys = option_keys
        self._known: dict[str, Record] = {}
        self._touched: dict[str, Record] = {}
        self._interned: tuple[Options | None, tuple[int, bytes]] = (None, (0, b""))
        self._ended: dict[int, Finished] = {}
        self._told: list[tuple[str, Finished]] = []
        self._listeners: list[tuple[Record, str]] = []
        self._without_log: list[int] = []
        self._without_signals: list[int] = []

    def set_moment(self, moment: Moment) -> None:
        """Go by another time from here on."""
        self.moment, self.now_ms = moment, moment.now_ms

    def is_over(self, record: Record) -> bool:
        """Return whether only the next sweep keeps a finished record from being gone."""
        return 0 < record.kept_until <= self.now_ms and self.moment.is_past(record.kept_until)

    def draw(self) -> int:
        """The next number of the queue's counter: an incarnation, a place in line, or a token."""
        self.queue.seq += 1
        return self.queue.seq

    def draw_many(self, count: int) -> range:
        """The next so many of these numbers."""
        first = self.queue.seq + 1
        self.queue.seq += count
        return range(first, first + count)

    def note(self, kind: str, record: Record, **extra: Any) -> None:
        """Log what happened to a job, with its state as it is now, and its group if it has one."""
        if record.binds and (group := record.extras.group):
            extra["grp"] = group
        self.notes.add(kind, self.now_ms, record, **extra)

    def tell(self, record: Record, *, state: str, also: Sequence[str] = ()) -> None:
        """The job has ended: whoever waits for it is to be told, and ``also`` these listeners."""
        news = Finished(
            record.id, record.incarnation, STATES[state], record.result, shown_failure(record, state)
        )
        if self._listeners:  # They came in this very call.
            also = [*also, *(listener for one, listener in self._listeners if one is record)]
            self._listeners = [pair for pair in self._listeners if pair[0] is not record]
        self.tell_of(record.key, news, also=also)

    def tell_of(self, key: int, news: Finished, *, also: Sequence[str] = ()) -> None:
        """The same for a job known by its key alone (0: only ``also`` are told)."""
        self._ended[key] = news
        self._told.extend((listener, news) for listener in also)

    def awaited(self, keys: list[int]) -> set[int]:
        """Which of the jobs with these keys somebody waits for."""
        return {job for job, _ in self.sql.execute(_news_sql["waiters_of"], (_json.encode(keys).decode(),))}

    def listen(self, record: Record, listener: str) -> None:
        """Register a listener for the end of this job."""
        self._listeners.append((record, listener))

    def clear_log(self, record: Record) -> None:
        """Drop the log lines of an earlier incarnation."""
        if record.key:
            self._without_log.append(record.key)

    def clear_signals(self, record: Record) -> None:
        """Drop what signals have left. To be called while the annex still tells of it."""
        if record.packed_extras is not None and record.key:
            extras = record.extras
            if extras.received or extras.kept:
                self._without_signals.append(record.key)

    def find(self, ids: Iterable[str]) -> dict[str, Record]:
        """The records of these ids. Until they are saved an id is one record, whoever asks for it."""
        wanted = list(ids)
        unknown = [id_ for id_ in wanted if id_ not in self._known] if self._known else wanted
        rows = self.sql.execute(_sql["by_ids"], (_json.encode(unknown).decode(), self.queue.key))
        self.adopt(rows)
        known = self._known
        return {id_: known[id_] for id_ in wanted if id_ in known}

    def knows_any(self, ids: list[str]) -> bool:
        """Whether one of these ids has a record."""
        if self._known and not self._known.keys().isdisjoint(ids):
            return True
        listed = _json.encode(ids).decode()
        return bool(self.sql.execute(_sql["knows_any"], (listed, self.queue.key)).fetchone()[0])

    def adopt(self, rows: Iterable[Sequence[Any]]) -> list[Record]:
        """The records of rows that were read. One that is known already stays what it has become meanwhile."""
        return [self._known.get(row[1]) or self._adopt(Record(*row)) for row in rows]

    def _adopt(self, record: Record) -> Record:
        self._known[record.id] = record
        if record.binds:
            record.note_part()
        return record

    def meet(self, record: Record) -> None:
        """A new record, not to be read again before it is saved."""
        self._known[record.id] = record

    def touch(self, record: Record) -> None:
        """The next ``save`` writes this record too: the verb is not about it, but it was changed."""
        self._touched[record.id] = record

    def payload_size(self, record: Record) -> int:
        """How large the stored payload is."""
        if record.payload is not None:
            return len(record.payload)
        return int(self.sql.execute(_sql["payload_size"], (record.key,)).fetchone()[0])

    def intern(self, options: Options) -> tuple[int, bytes]:
        """The key under which these options are stored, and their packed form."""
        if options is self._interned[0]:  # Hashing them takes longer than all the rest of an enqueue.
            return self._interned[1]
        packed = pack_options(options)
        keys = self._option_keys
        key = keys.get(packed)
        if key is None:
            key = keys[packed] = int(self.sql.execute(_sql["options_key"], (packed,)).fetchone()[0])
        self._interned = (options, (key, packed))
        return key, packed

    def save(self, records: Iterable[Record]) -> None:
        """Write new, changed and removed records, then news and listeners."""
        new: list[Record] = []
        changed: list[Record] = []
        removed: list[Record] = []
        moves: defaultdict[tuple[str, str], int] = defaultdict(int)
        for record in {id(record): record for record in (*records, *self._touched.values())}.values():
            moves[record.was, record.state] += 1
            if record.state == REMOVED:
                self.clear_signals(record)
            (removed if record.state == REMOVED else changed if record.key else new).append(record)
        for (was, state), count in moves.items():
            self.queue.move(was, state, count)
            if state == WAITING:
                self.wakes.add("w")
        self._tell_waiters()
        self._delete([record.key for record in removed if record.key])
        if tied := [record.id for record in removed if record.binds]:
            self.links.forget(self, tied)
        self._insert(new)
        if self.queue.uses & USES_INSTANTS:
            self._save_instants((*removed, *changed, *new))
        for record in (*removed, *changed, *new):
            if record.binds or record.held_until:
                self.links.saving(self, record)
            record.was = record.state
        # One that has ended in the call it came in is written in full.
        self._update([*changed, *(record for record in new if record.finished_at)])
        if self._without_signals:
            self.sql.execute(_sql["delete_signals"], (_json.encode(self._without_signals).decode(),))
        if any(state == SCHEDULED for _, state in moves):
            self._wake_if_sooner([record.run_at for record in (*new, *changed) if record.state == SCHEDULED])
        self._add_listeners()
        self._ended, self._told, self._listeners = {}, [], []
        self._without_log, self._without_signals = [], []
        self._known, self._touched = {}, {}

    def _save_instants(self, records: Sequence[Record]) -> None:
        queue = self.queue.key
        self.forget_instants([r.id for r in records if r.was in (SCHEDULED, BLOCKED) and not r.is_timed])
        timed = [(queue, r.id, r.wall_at, r.run_at) for r in records if r.wall_at and r.is_timed]
        self.sql.executemany(_instants_sql["note"], timed)

    def forget_instants(self, ids: Sequence[str]) -> None:
        """Let these jobs go by the queue's time alone."""
        if ids:
            self.sql.execute(_instants_sql["forget"], (self.queue.key, _json.encode(ids).decode()))

    def _wake_if_sooner(self, due: list[int]) -> None:
        """Who waits knows of the first due time there was when it asked."""
        first = self.next_due()
        if first is not None and min(due) <= first:
            self.wakes.add("w")

    def next_due(self) -> int | None:
        """When the first of the scheduled jobs is due; staged ones never are."""
        at: int | None = self.sql.execute(_sql["next_due"], (self.queue.key,)).fetchone()[0]
        return at

    def _insert(self, records: Sequence[Record]) -> None:
        if not records:
            return
        queue = self.queue.key
        for key, record in enumerate(records, self.next_key()):
            record.key = key
        self.sql.executemany(_sql["insert"], [_new_values(r, queue) for r in records])
        self.sql.executemany(_sql["insert_payload"], [(r.key, r.payload) for r in records])

    def next_key(self) -> int:
        """The key of the next row of a job."""
        return int(self.sql.execute(_sql["last_key"]).fetchone()[0] or 0) + 1

    def _update(self, records: Sequence[Record]) -> None:
        if not records:
            return
        self.sql.executemany(_sql["update"], [(*_values(r), r.key) for r in records])
        payloads = [(r.key, r.payload) for r in records if r.payload is not None]
        if payloads:
            self.sql.executemany(_sql["replace_payload"], payloads)
        if self._without_log:
            self.sql.execute(_sql["delete_logs"], (_json.encode(self._without_log).decode(),))

    def _delete(self, keys: list[int]) -> None:
        if keys:
            listed = (_json.encode(keys).decode(),)
            for table in ("jobs", "payloads", "logs", "waiters"):
                self.sql.execute(_sql[f"delete_{table}"], listed)

    def _tell_waiters(self) -> None:
        if not self._ended:
            return
        listed = (_json.encode(list(self._ended)).decode(),)
        waiters = self.sql.execute(_news_sql["waiters_of"], listed).fetchall()
        if waiters:
            self._told.extend((listener, self._ended[job]) for job, listener in waiters)
            self.sql.execute(_sql["delete_waiters"], listed)
        if self._told:
            # By the clock on the wall: a listener's minute is not the queue's, which tests move.
            at_ms = wall_ms()
            told = dict.fromkeys(self._told)  # Who waited for the run and for its rerun is told once.
            rows = [(self.queue.key, who, at_ms, _pack_news(news)) for who, news in told]
            self.sql.executemany(_news_sql["publish"], rows)
            self.wakes.add("n")

    def _add_listeners(self) -> None:
        if self._listeners:
            waiters = [(record.key, listener) for record, listener in self._listeners]
            self.sql.executemany(_news_sql["add_waiter"], waiters)


def _new_values(r: Record, queue: int) -> tuple[Any, ...]:
    return (
        r.key, queue, r.id, r.incarnation, r.state, r.priority, r.place, r.options_key, r.ttl_ms, r.run_id, r.write_id,
        r.ready_at, r.run_at, r.enqueued_at, r.expires_at, r.blocked_by, r.packed_extras, r.binds, r.grip,
    )  # fmt: skip


def _values(r: Record) -> tuple[Any, ...]:
    return (
        r.incarnation, r.state, r.priority, r.place, r.options_key, r.ttl_ms, r.run_id, r.write_id, r.blocked_by,
        r.runs, r.failures, r.stalls, r.ready_at, r.run_at, r.enqueued_at, r.expires_at, r.claimed_at, r.finished_at,
        r.kept_until, r.token, r.settled_as, r.worker, r.lease_until, r.cancelling, r.failure, r.result, r.progress,
        r.rerun, r.packed_extras, r.binds, r.wake_at,
        r.held_until, r.error_type, r.grip,
    )  # fmt: skip
