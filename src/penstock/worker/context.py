"""The job context: what a handler knows about its job and reports while it runs.

A parameter annotated with ``JobContext`` receives it; ``current_job()`` finds it from anywhere below the handler, in
threads and in process runners too.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, Protocol

from penstock.client.claim import LeasedJob, encode_progress
from penstock.client.info import Child, add_children, read_children
from penstock.client.loopthread import run
from penstock.client.sync import SyncJobHandle
from penstock.core.job import Lease, Policy
from penstock.core.limits import amounts as in_millionths
from penstock.core.names import ref_of
from penstock.core.text import shown, text_of
from penstock.worker.reporter import JobUpdate, Receipt
from penstock.worker.run import Run

if TYPE_CHECKING:
    from penstock.client.app import App
    from penstock.client.codec import JobCodec
    from penstock.client.flow.parts import Part
    from penstock.client.handle import JobHandle


class SyncJobContext:
    """``context.sync``, for handlers in threads and processes. It uses its own connection to the store."""

    __slots__ = ("_context",)

    def __init__(self, context: JobContext) -> None:
        self._context = context

    def add_children(
        self, children: Iterable[Part], *, on_failure: Policy = "fail"
    ) -> list[SyncJobHandle[Any]]:
        """See ``JobContext.add_children``."""
        added = run(self._context.add_children(children, on_failure=on_failure))
        return [SyncJobHandle(handle) for handle in added]

    def children(self) -> list[Child]:
        """See ``JobContext.children``."""
        return run(self._context.children())


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
    __slots__ = ("_link", "queue")

    def __init__(self, lease: Lease, queue: str, link: ContextLink) -> None:
        super().__init__(lease)
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
