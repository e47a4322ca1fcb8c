"""A unit of work: one verb's call on one queue, inside a transaction that may hold several of them.

Verbs read records, change them in memory and note events; ``Unit.save`` writes all of it with a few statements. So
a transition is plain Python, and SQL only stores.
"""

from __future__ import annotations

import sqlite3
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from penstock.core.flow import DependencyState
from penstock.core.job import Dependent, NewJob, Options
from penstock.core.limits import Limit
from penstock.core.outcome import Failure
from penstock.storage.sqlite import statements
from penstock.storage.sqlite.clock import Moment, wall_ms
from penstock.storage.sqlite.eventlog import EventNotes
from penstock.storage.sqlite.queuerow import USES_INSTANTS, Group, QueueRow
from penstock.storage.sqlite.records import (
    BLOCKED,
    REMOVED,
    SCHEDULED,
    STATES,
    WAITING,
    Record,
    new_values,
    pack_options,
    saved_values,
    shown_failure,
)
from penstock.storage.values import Finished

if TYPE_CHECKING:
    from penstock.storage.sqlite.links import Links

# Messages between queues: one lock covers all queues of a database, so the transaction that sends a message also
# applies it.


class End(NamedTuple):
    """The outcome of a job that others depend on."""

    queue: str
    id: str
    state: DependencyState
    result: bytes | None
    failure: Failure | None


class Put(NamedTuple):
    """Enqueue this job. The jobs in ``to_come`` are dependencies that notify it of their ends themselves."""

    job: NewJob
    to_come: frozenset[tuple[str, str]] = frozenset()


class Link(NamedTuple):
    """Notify ``dependent`` of the end of the job of this id."""

    id: str
    dependent: Dependent


class Done(NamedTuple):
    """Report the end of a dependency to ``dependent``."""

    dependent: Dependent
    end: End


Message = Put | Link | Done


_sql = statements("records")
_news_sql = statements("news")
_instants_sql = statements("instants")
_json = msgspec.json.Encoder()
_pack_news = msgspec.msgpack.Encoder().encode


class Unit:
    """One call of one verb on one queue. ``save`` writes all of it, or nothing.

    ``links`` applies the effects of linked jobs on others. It stands above the transitions, which call it here.
    """

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
        """The number of damaged records that were quarantined for this call."""
        self.notes = EventNotes()
        self.wakes: set[str] = set()
        self.links = links
        self.groups: dict[str, Group] = {}
        self.limits: dict[str, Limit] = {}
        self.touched_groups: list[Group] = []
        self.outbox: list[tuple[str, Message]] = []
        """Messages to other queues, delivered before the call is over."""
        self.ends: deque[tuple[Dependent, End]] = deque()
        self.is_delivering = False
        self.linking_id = ""
        self._option_keys = option_keys
        self._known: dict[str, Record] = {}
        self._touched: dict[str, Record] = {}
        self._interned: tuple[Options | None, tuple[int, bytes]] = (None, (0, b""))
        self._ended: dict[int, Finished] = {}
        self._news: list[tuple[str, Finished]] = []
        self._listeners: list[tuple[Record, str]] = []
        self._to_clear: defaultdict[str, list[int]] = defaultdict(list)
        """The keys of jobs by the side table from which to delete their rows."""

    def set_moment(self, moment: Moment) -> None:
        """Use another time from here on."""
        self.moment, self.now_ms = moment, moment.now_ms

    def is_over(self, record: Record) -> bool:
        """Return whether a finished record has expired and waits only for the next sweep."""
        return self.moment.is_over(record.kept_until)

    def draw(self) -> int:
        """Draw the queue's next number: an incarnation, a place in line, or a token."""
        self.queue.seq += 1
        return self.queue.seq

    def draw_many(self, count: int) -> range:
        """Draw the next ``count`` numbers."""
        first = self.queue.seq + 1
        self.queue.seq += count
        return range(first, first + count)

    def note(self, kind: str, record: Record, **extra: Any) -> None:
        """Log an event of a job, with its current state, and its group if it has one."""
        if record.has_links and (group := record.extras.group):
            extra["grp"] = group
        self.notes.add(kind, self.now_ms, record, **extra)

    def tell(self, record: Record, *, state: str, also: Sequence[str] = ()) -> None:
        """Notify the waiters of a job that has ended, and the listeners ``also``."""
        news = Finished(
            record.id, record.incarnation, STATES[state], record.result, shown_failure(record, state)
        )
        if self._listeners:  # Registered by this call.
            also = [*also, *(listener for awaited, listener in self._listeners if awaited is record)]
            self._listeners = [pair for pair in self._listeners if pair[0] is not record]
        self.tell_of(record.key, news, also=also)

    def tell_of(self, key: int, news: Finished, *, also: Sequence[str] = ()) -> None:
        """Notify the waiters of the job with this key (0: none), and the listeners ``also``."""
        self._ended[key] = news
        self._news.extend((listener, news) for listener in also)

    def awaited(self, keys: list[int]) -> set[int]:
        """Return the keys of those jobs that have waiters."""
        return {job for job, _ in self.sql.execute(_news_sql["waiters_of"], (_json.encode(keys).decode(),))}

    def listen(self, record: Record, listener: str) -> None:
        """Register a listener for the end of this job."""
        self._listeners.append((record, listener))

    def clear_log(self, record: Record) -> None:
        """Delete the log lines of an earlier incarnation."""
        if record.key:
            self._to_clear["logs"].append(record.key)

    def clear_side_values(self, record: Record) -> None:
        """Delete kept signals and steps. Call it while the extras still show that there are any."""
        if record.packed_extras is not None and record.key:
            extras = record.extras
            if extras.received or extras.kept:
                self._to_clear["signals"].append(record.key)
            if extras.has_steps:
                self._to_clear["steps"].append(record.key)

    def find(self, ids: Iterable[str]) -> dict[str, Record]:
        """Return the records of these ids. Until they are saved, all callers get the same record for an id."""
        ids = list(ids)
        unknown = [id_ for id_ in ids if id_ not in self._known] if self._known else ids
        rows = self.sql.execute(_sql["by_ids"], (_json.encode(unknown).decode(), self.queue.key))
        self.adopt(rows)
        known = self._known
        return {id_: known[id_] for id_ in ids if id_ in known}

    def knows_any(self, ids: list[str]) -> bool:
        """Return whether one of these ids has a record."""
        if self._known and not self._known.keys().isdisjoint(ids):
            return True
        listed = _json.encode(ids).decode()
        return bool(self.sql.execute(_sql["knows_any"], (listed, self.queue.key)).fetchone()[0])

    def adopt(self, rows: Iterable[Sequence[Any]]) -> list[Record]:
        """Return the records of these rows. A record that is known already keeps its changes."""
        return [self._known.get(row[1]) or self._adopt(Record(*row)) for row in rows]

    def _adopt(self, record: Record) -> Record:
        self._known[record.id] = record
        if record.has_links:
            record.note_group_role()
        return record

    def meet(self, record: Record) -> None:
        """Register a new record, so that ``find`` returns it before it is saved."""
        self._known[record.id] = record

    def touch(self, record: Record) -> None:
        """Have the next ``save`` write this record too."""
        self._touched[record.id] = record

    def payload_size(self, record: Record) -> int:
        """Return the size of the stored payload."""
        if record.payload is not None:
            return len(record.payload)
        return int(self.sql.execute(_sql["payload_size"], (record.key,)).fetchone()[0])

    def intern(self, options: Options) -> tuple[int, bytes]:
        """Return the key of the stored options, and their packed form."""
        if options is self._interned[0]:  # Hashing them would take longer than the rest of an enqueue.
            return self._interned[1]
        packed = pack_options(options)
        keys = self._option_keys
        key = keys.get(packed)
        if key is None:
            key = keys[packed] = int(self.sql.execute(_sql["options_key"], (packed,)).fetchone()[0])
        self._interned = (options, (key, packed))
        return key, packed

    def flush(self) -> None:
        """Write the records that ``touch`` marked, then news and listeners."""
        self.save(())

    def save(self, records: Iterable[Record]) -> None:
        """Write new, changed and removed records, then news and listeners."""
        new: list[Record] = []
        changed: list[Record] = []
        removed: list[Record] = []
        moves: defaultdict[tuple[str, str], int] = defaultdict(int)
        for record in {id(record): record for record in (*records, *self._touched.values())}.values():
            moves[record.was, record.state] += 1
            if record.state == REMOVED:
                self.clear_side_values(record)
            (removed if record.state == REMOVED else changed if record.key else new).append(record)
        for (was, state), count in moves.items():
            self.queue.move(was, state, count)
            if state == WAITING:
                self.wakes.add("w")
        self._tell_waiters()
        self._delete([record.key for record in removed if record.key])
        if linked := [record.id for record in removed if record.has_links]:
            self.links.forget(self, linked)
        self._insert(new)
        if self.queue.uses & USES_INSTANTS:
            self._save_instants((*removed, *changed, *new))
        for record in (*removed, *changed, *new):
            if record.has_links or record.held_until:
                self.links.saving(self, record)
            record.was = record.state
        # A job that was enqueued and has ended in one call is written in full.
        self._update([*changed, *(record for record in new if record.finished_at)])
        for table, keys in self._to_clear.items():
            self.sql.execute(_sql[f"delete_{table}"], (_json.encode(keys).decode(),))
        if any(state == SCHEDULED for _, state in moves):
            self._wake_if_sooner([record.run_at for record in (*new, *changed) if record.state == SCHEDULED])
        self._add_listeners()
        self._ended, self._news, self._listeners = {}, [], []
        self._to_clear.clear()
        self._known, self._touched = {}, {}

    def _save_instants(self, records: Sequence[Record]) -> None:
        queue = self.queue.key
        self.forget_instants([r.id for r in records if r.was in (SCHEDULED, BLOCKED) and not r.is_timed])
        timed = [(queue, r.id, r.wall_at, r.run_at) for r in records if r.wall_at and r.is_timed]
        self.sql.executemany(_instants_sql["note"], timed)

    def forget_instants(self, ids: Sequence[str]) -> None:
        """Detach these jobs from the wall clock."""
        if ids:
            self.sql.execute(_instants_sql["forget"], (self.queue.key, _json.encode(ids).decode()))

    def _wake_if_sooner(self, due: list[int]) -> None:
        """Wake the waiters if a job is due before the earliest time that they know."""
        first = self.next_due()
        if first is not None and min(due) <= first:
            self.wakes.add("w")

    def next_due(self) -> int | None:
        """Return when the first scheduled job is due. Staged jobs never are."""
        at: int | None = self.sql.execute(_sql["next_due"], (self.queue.key,)).fetchone()[0]
        return at

    def _insert(self, records: Sequence[Record]) -> None:
        if not records:
            return
        queue = self.queue.key
        for key, record in enumerate(records, self.next_key()):
            record.key = key
        self.sql.executemany(_sql["insert"], [(*new_values(r), r.key, queue, r.id) for r in records])
        self.sql.executemany(_sql["insert_payload"], [(r.key, r.payload) for r in records])

    def next_key(self) -> int:
        """Return the key of the next row of a job."""
        return int(self.sql.execute(_sql["last_key"]).fetchone()[0] or 0) + 1

    def _update(self, records: Sequence[Record]) -> None:
        if not records:
            return
        self.sql.executemany(_sql["update"], [(*saved_values(r), r.key) for r in records])
        payloads = [(r.key, r.payload) for r in records if r.payload is not None]
        if payloads:
            self.sql.executemany(_sql["replace_payload"], payloads)

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
            self._news.extend((listener, self._ended[job]) for job, listener in waiters)
            self.sql.execute(_sql["delete_waiters"], listed)
        if self._news:
            # Wall time: a listener's minute is not the queue's, which tests move.
            at_ms = wall_ms()
            unique = dict.fromkeys(self._news)  # A listener may wait for both the run and its rerun.
            rows = [(self.queue.key, listener, at_ms, _pack_news(news)) for listener, news in unique]
            self.sql.executemany(_news_sql["publish"], rows)
            self.wakes.add("n")

    def _add_listeners(self) -> None:
        if self._listeners:
            waiters = [(record.key, listener) for record, listener in self._listeners]
            self.sql.executemany(_news_sql["add_waiter"], waiters)
