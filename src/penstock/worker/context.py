"""The job context: what a handler knows about its job and reports while it runs.

A parameter annotated with ``JobContext`` receives it; ``current_job()`` finds it from anywhere below the handler, in
threads and in process runners too. The reporter gathers what handlers report and sends it in batches.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections import Counter
from collections.abc import Generator, Iterable
from concurrent.futures import Future
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import msgspec

from penstock.client.claim import LeasedJob, encode_progress
from penstock.client.info import Child, add_children, read_children
from penstock.client.loopthread import Face, as_sync
from penstock.client.sync import sync_handles
from penstock.core.job import Lease, Policy
from penstock.core.limits import amounts as in_millionths
from penstock.core.names import ref_of
from penstock.core.text import get_logger, shown, text_of
from penstock.errors import LeaseLost, StorageError
from penstock.storage.contract import Storage
from penstock.storage.values import Report
from penstock.worker.run import Run

if TYPE_CHECKING:
    from penstock.client.app import App
    from penstock.client.codec import JobCodec
    from penstock.client.flow import Part
    from penstock.client.handle import JobHandle


logger = get_logger("penstock.worker")


current_run: Final[ContextVar[Run]] = ContextVar("penstock_run")
_current_context: Final[ContextVar[JobContext]] = ContextVar("penstock_context")


class ContextLink(Protocol):
    """The link from a context to its run: in this process, or through a pipe to the worker's process."""

    @property
    def app(self) -> App: ...

    @property
    def cancelled(self) -> bool: ...

    def discard(self) -> None: ...

    def pack(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes: ...

    def report(self, update: JobUpdate) -> Receipt: ...


class RunLink:
    """The link of handlers in the worker's own process. Any thread may use it."""

    __slots__ = ("_run",)

    def __init__(self, run: Run) -> None:
        self._run = run

    @property
    def app(self) -> App:
        app = self._run.served.app
        assert app is not None, "the queues of a running worker have an app"
        return app

    @property
    def cancelled(self) -> bool:
        if self._run.abort is None:
            return False
        self._run.saw_abort = True
        return True

    def discard(self) -> None:
        self._run.discarded = True

    def pack(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
        return self._run.handler.pack(args, kwargs)

    def report(self, update: JobUpdate) -> Receipt:
        reporter = self._run.served.reporter
        assert reporter is not None, "the queues of a running worker have a reporter"
        return reporter.add(self._run, update)


class JobContext(LeasedJob):
    """The running job. Works in the handler's thread, loop or process.

    ``progress``, ``log``, ``use`` and ``update_payload`` return immediately and are sent in batches, the last one
    before the job is settled. Await their result to wait until the store has the update; that raises ``LeaseLost`` if
    another worker has the job.
    """

    __penstock_context__ = True
    __slots__ = ("_lease", "_link", "queue")

    def __init__(self, lease: Lease, queue: str, link: ContextLink) -> None:
        self._lease = lease
        self._link = link
        self.queue = queue

    def __repr__(self) -> str:
        return f"<JobContext {self.task or 'job'} {shown(self.id)} of {shown(self.queue)}, run {self.run}>"

    @property
    def ref(self) -> str:
        """Return queue and id as one string: ``app.job(ref)`` accepts it."""
        return ref_of(self.queue, self.id)

    @property
    def payload(self) -> bytes:
        """Return the payload as it was when the job was claimed."""
        return self._lease.payload

    @property
    def cancelled(self) -> bool:
        """Return whether the run must stop: it is cancelled, timed out, lost or handed back.

        Only handlers in threads need to check this. A thread that reads true and returns counts as stopped.
        """
        return self._link.cancelled

    def progress(self, value: Any) -> Receipt:
        """Store ``value`` (any JSON value) on the job as its progress."""
        return self._link.report(JobUpdate(progress=encode_progress(value)))

    def log(self, line: str) -> Receipt:
        """Append a line to the job's log. The newest 1000 lines are kept."""
        return self._link.report(JobUpdate(log=text_of(line)))

    def update_payload(self, *args: Any, **kwargs: Any) -> Receipt:
        """Replace the stored payload by these arguments of the task, for the next run of this job.

        A job without a task takes one argument, the payload's bytes. Raise ``InvalidInput`` for arguments that the
        task does not take.
        """
        return self._link.report(JobUpdate(payload=self._link.pack(args, kwargs)))

    def use(self, **amounts: float) -> Receipt:
        """Add to the job's usage: ``context.use(tokens=812, usd=0.0042)``. Amounts keep six decimal places.

        They count for the job, its queue, task, group and flow, whatever the outcome of the run. Raise
        ``InvalidOption`` for an amount that is not a number >= 0.
        """
        return self._link.report(JobUpdate(usage=in_millionths(amounts)))

    async def add_children(
        self, children: Iterable[Part], *, on_failure: Policy = "fail"
    ) -> list[JobHandle[Any]]:
        """Enqueue jobs (``task.job(...)``, whole flows), or name existing ones, for this job to wait for.

        Then raise ``WaitForChildren``: the job runs again when they have finished, and ``children()`` returns their
        results. A job that returns instead does not wait. A repeated run adds them again, so give them ids.
        """
        return await add_children(self._source, self.id, children, on_failure=on_failure)

    async def children(self) -> list[Child]:
        """Return the jobs that this one waited for, in the order added, with state, result or failure."""
        return await read_children(self._source, self.id)

    @property
    def sync(self) -> SyncJobContext:
        """Return ``add_children`` and ``children`` for handlers in threads and processes."""
        return SyncJobContext(self)

    @property
    def _source(self) -> JobCodec:
        return self._link.app.job(self.ref).source

    def pass_on(self, update: JobUpdate) -> Receipt:
        """Report an update from a handler in another process, or a command's output. For runners."""
        return self._link.report(update)

    def discard(self) -> None:
        """Make a failure of this run final, whatever attempts are left."""
        self._link.discard()


class SyncJobContext(Face[JobContext]):
    """``context.sync``, for handlers in threads and processes. It uses its own connection to the store."""

    __slots__ = ()

    add_children = as_sync(JobContext.add_children, sync_handles)
    children = as_sync(JobContext.children)


def context_of(run: Run) -> JobContext:
    """Return the context of ``run``. It is created on first use: most handlers need none."""
    if run.context is None:
        run.context = JobContext(run.lease, run.served.name, RunLink(run))
    return run.context


def current_job() -> JobContext:
    """Return the context of the job whose handler calls this. Raise ``LookupError`` outside a handler."""
    run = current_run.get(None)
    if run is not None:
        return context_of(run)
    try:
        return _current_context.get()
    except LookupError:
        raise LookupError("no job is running here: call current_job() in a handler") from None


def use_context(context: JobContext) -> None:
    """Make ``context`` the current one of this process, in a child of a process runner."""
    _current_context.set(context)


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
    """Await this to wait until the store has the update. Not awaiting it is fine, too."""

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
