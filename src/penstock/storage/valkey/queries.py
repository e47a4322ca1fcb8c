"""Verbs that read or wait, and those of the event log."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec

from penstock.core.event import EntryPage, EventPage, page_of
from penstock.core.job import DAY_MS, Job
from penstock.core.lifecycle import State
from penstock.errors import JobNotFound
from penstock.storage.metrics import Minute, latest
from penstock.storage.valkey.calls import Calls, Refused
from penstock.storage.valkey.connection import ConnectionLost
from penstock.storage.valkey.jobs import (
    STATE_OF,
    STATES,
    UNREADABLE,
    UnknownOptions,
    damaged_job,
    decode_failure,
    decode_job,
)
from penstock.storage.values import (
    Consumer,
    Counts,
    Finished,
    Found,
    JobPage,
    LogPage,
    Query,
    QueueClock,
    WorkerRecord,
)

_CONSUMER = struct.Struct(">HIHI")
_MINUTE = struct.Struct(">IIIIIIHIHIHIHI")
_NEWS = struct.Struct(">BcHIHII")
_NEWS_LIMIT = 1000


class News(NamedTuple):
    """The end of a job. ``fetch``: the result is too long to send along; the store has it."""

    finished: Finished
    fetch: bool


def _decode_news(row: bytes) -> News | None:
    """Return what a listener receives (lua/waiters.lua), or ``None`` if the bytes are damaged. Waiters also check the
    job itself from time to time."""
    try:
        letter, fetch, i1, i2, id_length, result_length, failure_length = _NEWS.unpack_from(row)
        result_at = _NEWS.size + id_length
        failure_at = result_at + max(0, result_length - 1)
        id = row[_NEWS.size : result_at].decode()
        result = row[result_at:failure_at] if result_length else None
        failure = decode_failure(row[failure_at:]) if failure_length else None
        return News(Finished(id, i1 << 32 | i2, STATE_OF[letter], result, failure), fetch == b"1")
    except (ValueError, LookupError, struct.error):
        return None


def _decode_minute(row: bytes) -> Minute:
    number, *counts = _MINUTE.unpack(row)
    pairs = counts[5:]
    times = [high << 32 | low for high, low in zip(pairs[::2], pairs[1::2], strict=True)]
    return Minute(number * 60_000, *counts[:5], *times)


def _job_or_damaged(queue: str, id: str, row: list[bytes]) -> Job:
    """Return the job, or a stand-in that says it is damaged."""
    try:
        return decode_job(queue, id, row)
    except UNREADABLE as error:
        return damaged_job(queue, id, row, error)


def _place(cursor: str) -> tuple[str, bytes]:
    """Return the place in an index that a cursor stands for: score, and member, in hex."""
    score, _, member = cursor.partition(":")
    return score, bytes.fromhex(member)


def _cursor(score: bytes, member: bytes) -> str:
    return f"{score.decode()}:{member.hex()}" if score else ""


class Queries:
    """The part of the engine that reads jobs and events, and waits for them."""

    _calls: Calls

    def __init__(self) -> None:
        self._seen_events: dict[str, int] = {}

    async def get(self, queue: str, ids: Sequence[str]) -> list[Job | None]:
        rows = await self._calls.call(queue, "get", *ids) if ids else []
        return await self._decoded(queue, ids, rows)

    async def _decoded(self, queue: str, ids: Sequence[str], rows: list[Any]) -> list[Job | None]:
        pairs = list(zip(ids, rows, strict=True))
        try:
            return [decode_job(queue, id, row) if row else None for id, row in pairs]
        except UnknownOptions:
            await self._calls.learn_options(queue)
        except UNREADABLE:
            pass
        return [_job_or_damaged(queue, id, row) if row else None for id, row in pairs]

    async def list_jobs(
        self, queue: str, state: State, *, cursor: str = "", limit: int = 100, reverse: bool = False
    ) -> JobPage:
        args = (state.value, limit, int(reverse), *_place(cursor))
        ids, rows, *last = await self._calls.call(queue, "list", *args)
        jobs = await self._decoded(queue, [id.decode() for id in ids], rows)
        return JobPage([job for job in jobs if job], _cursor(*last))

    async def scan_jobs(
        self, queue: str, *, states: frozenset[State] | None = None, part: int = 0, parts: int = 1,
        cursor: str = "", limit: int = 1000, light: bool = False,
    ) -> JobPage:  # fmt: skip
        """Scan a page of jobs. A cursor is the server's."""
        if states is not None and not states:
            return JobPage([])
        letters = "".join(letter for letter, state in STATES.items() if states and state in states)
        args = (cursor or "0", limit, part, parts, letters, int(light))
        next_cursor, ids, rows = await self._calls.call(queue, "scan", *args)
        jobs = [job for job in await self._decoded(queue, [id.decode() for id in ids], rows) if job]
        if light:
            jobs = [
                msgspec.structs.replace(job, result=None) if job.result is not None else job for job in jobs
            ]
        return JobPage(jobs, "" if next_cursor == b"0" else next_cursor.decode())

    async def held(self, queue: str, consumer: str, *, cursor: str = "", limit: int = 100) -> JobPage:
        ids, *last = await self._calls.call(queue, "held", consumer, limit, *_place(cursor))
        jobs = await self.get(queue, [id.decode() for id in ids])
        return JobPage([job for job in jobs if job], _cursor(*last))

    async def counts(self, queue: str) -> Counts:
        *by_state, paused, oldest_ms, due, next_ms, staged = await self._calls.call(queue, "counts")
        return Counts(*[*by_state, paused == 1, oldest_ms, due, None if next_ms < 0 else next_ms, staged])

    async def search(
        self, queue: str, query: Query, *, cursor: str = "", limit: int = 100, scan: int = 10_000
    ) -> Found:
        index = f"error:{query.error_type}" if query.error_type else query.state.value
        times = (query.enqueued_from_ms, query.enqueued_to_ms, query.finished_from_ms, query.finished_to_ms)
        args = (index, limit, scan, *_place(cursor), query.task, *times)
        ids, scanned, *last, now_ms = await self._calls.call(queue, "search", *args)
        jobs = await self.get(queue, [id.decode() for id in ids])
        return Found([job for job in jobs if job], scanned, _cursor(*last), now_ms)

    async def errors(self, queue: str) -> dict[str, int]:
        rows = await self._calls.call(queue, "errors")
        pairs = zip(rows[::2], rows[1::2], strict=True)
        return dict(sorted((name.decode(), int(count)) for name, count in pairs))

    async def metrics(self, queue: str, *, last_ms: int = DAY_MS) -> list[Minute]:
        now_ms, present, earlier = await self._calls.call(queue, "metrics")
        minutes = [_decode_minute(row) for row in (*earlier, present) if len(row) == _MINUTE.size]
        return latest(minutes, last_ms=last_ms, now_ms=now_ms)

    async def queues(self) -> list[str]:
        return await self._members(self._calls.keys.registry)

    async def attended(self) -> list[str]:
        return await self._members(self._calls.keys.attended)

    async def _members(self, key: bytes) -> list[str]:
        return sorted(name.decode() for name in await self._calls.plain(key, "SMEMBERS", key))

    async def clock(self, queue: str) -> QueueClock:
        return QueueClock(*await self._calls.call(queue, "clock"))

    async def _workers(self, queue: str) -> list[WorkerRecord]:
        """Return the records of workers, by id."""
        now_ms, rows = await self._calls.call(queue, "workers")
        records = []
        for id, row in sorted(zip(rows[::2], rows[1::2], strict=True)):
            seen_at_ms = int.from_bytes(row[:6], "big")
            records.append(WorkerRecord(id.decode(), row[6:], seen_at_ms, now_ms - seen_at_ms))
        return records

    async def logs(self, queue: str, id: str, *, start: int = 0, limit: int = 1000) -> LogPage:
        first, written, lines = await self._calls.call(queue, "logs", id, start, limit)
        return LogPage([line.decode() for line in lines], first, written)

    # Waiting

    async def wait(self, queue: str, *, timeout_ms: int) -> bool:
        """Wait for a job. A lost connection counts as one: there may be a job by now."""
        key = self._calls.keys.part(queue, "wake")
        try:
            return bool(await self._pop(queue, key, 1, timeout_ms=timeout_ms))
        except ConnectionLost:
            return True

    async def listen(self, queue: str, listener: str, *, timeout_ms: int) -> list[Finished]:
        """Wait for news. A lost connection is an error, because news may be lost with it."""
        key = self._calls.keys.part(queue, f"news:{listener}")
        rows = await self._pop(queue, key, _NEWS_LIMIT, timeout_ms=timeout_ms)
        return await self._with_results(queue, rows)

    async def _pop(self, queue: str, key: bytes, count: int, *, timeout_ms: int) -> list[bytes]:
        """Pop up to ``count`` entries of a list; wait for the first. Raises ``ConnectionLost``."""
        if timeout_ms <= 0:
            return await self._calls.plain(key, "LPOP", key, count) or []
        command = ("BLMPOP", timeout_ms / 1000, 1, key, "LEFT", "COUNT", count)
        reply = await self._calls.blocking(queue, *command, timeout_ms=timeout_ms)
        return list(reply[1]) if reply else []

    async def watch(self, queue: str, ids: Sequence[str], *, listener: str) -> list[Finished | None]:
        try:
            rows = await self._calls.call(queue, "watch", listener, *ids) if ids else []
        except Refused as error:
            raise JobNotFound.in_queue(queue, error.text) from None
        news = iter(await self._with_results(queue, [row for row in rows if row]))
        return [next(news) if row else None for row in rows]

    async def _with_results(self, queue: str, rows: list[bytes]) -> list[Finished]:
        """Decode news, and fetch long results. A result that is gone by now stays unknown."""
        news = [item for row in rows if (item := _decode_news(row)) is not None]
        ids = [item.finished.id for item in news if item.fetch]
        jobs = {job.id: job for job in await self.get(queue, ids) if job}
        complete: list[Finished] = []
        for finished, fetch in news:
            job = jobs.get(finished.id) if fetch else None
            is_same = job is not None and job.incarnation == finished.incarnation
            complete.append(
                msgspec.structs.replace(finished, result=job.result) if job and is_same else finished
            )
        return complete

    # The event log

    async def read_entries(self, queue: str, *, after: int, limit: int = 10_000) -> EntryPage:
        seen = self._seen_events.get(queue, 0)
        last, epoch, trimmed, *rows = await self._calls.call(queue, "read_events", after, limit)
        if not epoch or last < seen:
            epoch = await self._calls.call(queue, "renew_epoch", 0, seen)
        self._seen_events[queue] = last
        entries = zip(rows[::2], rows[1::2], strict=True)
        if after >= last:
            return EntryPage([], after, last, epoch.decode())
        return page_of(entries, after=after, limit=limit, last=last, epoch=epoch.decode(), trimmed=trimmed)

    async def read_events(self, queue: str, *, after: int, limit: int = 10_000) -> EventPage:
        page = await self.read_entries(queue, after=after, limit=limit)
        return page.events(queue, after=after)

    async def tail(self, queue: str, *, after: int, timeout_ms: int) -> EventPage:
        page = await self.read_events(queue, after=after)
        if page.events or page.gap or timeout_ms <= 0:
            return page
        key = self._calls.keys.part(queue, "events")
        command = ("XREAD", "COUNT", 1, "BLOCK", timeout_ms, "STREAMS", key, f"{after}-0")
        with suppress(ConnectionLost):
            await self._calls.blocking(queue, *command, timeout_ms=timeout_ms)
        return await self.read_events(queue, after=after)

    async def hold_events(self, queue: str, consumer: str, *, offset: int, ttl_ms: int) -> None:
        await self._calls.call(queue, "hold_events", consumer, offset, ttl_ms)

    async def release_events(self, queue: str, consumer: str) -> None:
        await self._calls.call(queue, "release_events", consumer)

    async def consumers(self, queue: str) -> list[Consumer]:
        """Return the consumers, by name."""
        rows = await self._calls.call(queue, "consumers")
        consumers = []
        for name, row in sorted(zip(rows[::2], rows[1::2], strict=True)):
            if len(row) == _CONSUMER.size:  # ``check`` repairs others.
                a, b, c, d = _CONSUMER.unpack(row)
                consumers.append(Consumer(name.decode(), a << 32 | b, c << 32 | d))
        return consumers
