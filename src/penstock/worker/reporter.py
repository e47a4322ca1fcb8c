"""The reporter gathers what handlers report (progress, log lines, payloads, usage), and sends it in batches."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections import Counter
from collections.abc import Generator
from concurrent.futures import Future
from typing import Any, NamedTuple

import msgspec

from penstock.core.text import get_logger
from penstock.errors import LeaseLost, StorageError
from penstock.storage.contract import Storage
from penstock.storage.values import Report
from penstock.worker.run import Run

logger = get_logger("penstock.worker")


class JobUpdate(msgspec.Struct, frozen=True, tag=True):
    """An update from a handler: progress as JSON, a log line, a new payload, usage in millionths.

    ``log_skipped`` is the number of lines before the log line that are left out.
    """

    progress: bytes | None = None
    log: str | None = None
    payload: bytes | None = None
    usage: dict[str, int] | None = None
    log_skipped: int = 0


class Receipt:
    """Await this to wait until the store has the update. You need not."""

    __slots__ = ("_future",)

    def __init__(self, future: Future[None] | None = None) -> None:
        self._future = future

    def __await__(self) -> Generator[Any, None, None]:
        if self._future is not None:
            answer = asyncio.wrap_future(self._future)
            # The reporter has logged a refusal, so an abandoned await need not report it.
            answer.add_done_callback(lambda done: done.cancelled() or done.exception())
            # Shielded, because cancelling the handler must not withdraw the report.
            yield from asyncio.shield(answer).__await__()


class _Entry(NamedTuple):
    run: Run
    report: Report
    future: Future[None]


class Reporter:
    """Takes reports from any thread; sends them from the worker's loop, one call per queue at a time."""

    def __init__(self, storage: Storage, loop: asyncio.AbstractEventLoop) -> None:
        self._storage = storage
        self._loop = loop
        # A clean context, not that of the first handler that reports.
        self._context = contextvars.copy_context()
        self._lock = threading.Lock()
        self._entries: list[_Entry] = []
        self._added = 0
        self._answered = 0
        self._sending: asyncio.Task[None] | None = None

    def add(self, run: Run, update: JobUpdate) -> Receipt:
        """Queue a report. It is sent when the one before it has been answered."""
        report = Report(
            run.lease.id,
            run.lease.token,
            progress=update.progress,
            log=() if update.log is None else (update.log,),
            payload=update.payload,
            usage=update.usage,
            log_skipped=update.log_skipped,
        )
        future: Future[None] = Future()
        with self._lock:
            self._entries.append(_Entry(run, report, future))
            self._added += 1
            first = len(self._entries) == 1
        if first:
            self._loop.call_soon_threadsafe(self._send_soon, context=self._context)
        return Receipt(future)

    async def flush(self) -> None:
        """Wait until the store has accepted or refused everything reported before this call."""
        before = self._added
        while self._answered < before:
            self._send_soon()
            if self._sending is None:
                return
            await asyncio.wait([self._sending])

    def _send_soon(self) -> None:
        if self._sending is None and self._entries:
            self._sending = self._loop.create_task(self._send(), context=self._context)

    async def _send(self) -> None:
        try:
            while entries := self._taken():
                queues = {entry.run.served.name for entry in entries}
                try:
                    for queue in queues:
                        await self._send_queue(queue, [e for e in entries if e.run.served.name == queue])
                finally:
                    # Count them even if the call raised: a run that waits for its last report must end.
                    self._answered += len(entries)
        finally:
            self._sending = None

    def _taken(self) -> list[_Entry]:
        with self._lock:
            entries, self._entries = self._entries, []
        return entries

    async def _send_queue(self, queue: str, entries: list[_Entry]) -> None:
        reports = _merged(entries)
        try:
            answers = await self._storage.report(queue, reports)
        except BaseException as error:
            if isinstance(error, StorageError) or not isinstance(error, Exception) or len(entries) == 1:
                logger.warning(
                    "reports of %d jobs of queue %s were not stored: %r", len(reports), queue, error
                )
                _refuse(entries, error)
            else:
                # One report is at fault: send each alone, so that the others are stored.
                for entry in entries:
                    await self._send_queue(queue, [entry])
            if not isinstance(error, Exception):
                raise
            return
        held = {report.token for report, answer in zip(reports, answers, strict=True) if answer}
        for entry in entries:
            if entry.report.token not in held:
                _refuse([entry], LeaseLost(f"job {entry.report.id!r} is no longer held by this run"))
            elif not entry.future.done():
                entry.future.set_result(None)


def _refuse(entries: list[_Entry], error: BaseException) -> None:
    for entry in entries:
        if not entry.future.done():
            entry.future.set_exception(error)


def _merged(entries: list[_Entry]) -> list[Report]:
    """Return one report per run: the newest progress and payload, all log lines, the total usage."""
    by_token: dict[int, list[Report]] = {}
    for entry in entries:
        by_token.setdefault(entry.report.token, []).append(entry.report)
    return [_merged_reports(reports) for reports in by_token.values()]


def _merged_reports(reports: list[Report]) -> Report:
    if len(reports) == 1:
        return reports[0]
    lines, skipped = _joined_lines(reports)
    return Report(
        reports[0].id,
        reports[0].token,
        progress=next((r.progress for r in reversed(reports) if r.progress is not None), None),
        log=lines,
        payload=next((r.payload for r in reversed(reports) if r.payload is not None), None),
        usage=_summed(reports),
        log_skipped=skipped,
    )


def _joined_lines(reports: list[Report]) -> tuple[tuple[str, ...], int]:
    """Return the log lines after the last gap, and the number of lines before them."""
    lines: list[str] = []
    skipped = 0
    for report in reports:
        if report.log_skipped:
            skipped += len(lines) + report.log_skipped
            lines.clear()
        lines += report.log
    return tuple(lines), skipped


def _summed(reports: list[Report]) -> dict[str, int] | None:
    used: Counter[str] = Counter()
    for report in reports:
        used.update(report.usage or {})
    return dict(used) or None
