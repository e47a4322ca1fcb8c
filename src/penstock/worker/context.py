"""What of a job's context has to be awaited, for handlers that cannot."""

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
from penstock.worker.reporter import Receipt, Words
from penstock.worker.run import Run

if TYPE_CHECKING:
    from penstock.client.app import App
    from penstock.client.codec import JobCodec
    from penstock.client.flow.parts import Part
    from penstock.client.handle import JobHandle


class SyncJobContext:
    """``context.sync``: for handlers in threads and processes, with a connection of their own to the store."""

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


# What a handler can know of its job, and say about it.
#
# A parameter annotated with ``JobContext`` gets it; ``current_job()`` finds it from anywhere below the
# handler, in threads and in process runners too.


current_run: Final[ContextVar[Run]] = ContextVar("penstock_run")
_current_context: Final[ContextVar[JobContext]] = ContextVar("penstock_context")


class ContextLink(Protocol):
    """Where a context's words go: the run in this process, or a pipe to the process that has it."""

    @property
    def app(self) -> App: ...

    @property
    def cancelled(self) -> bool: ...

    def discard(self) -> None: ...

    def pack(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes: ...

    def report(self, words: Words) -> Receipt: ...


class RunLink:
    """The link of handlers that run in the worker's own process; may be used from any thread."""

    __slots__ = ("_run",)

    def __init__(self, run: Run) -> None:
        self._run = run

    @property
    def app(self) -> App:
        app = self._run.served.app
        assert app is not None, "lanes of a running worker have one"
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
        return self._run.plan.pack(args, kwargs)

    def report(self, words: Words) -> Receipt:
        reporter = self._run.served.reporter
        assert reporter is not None, "lanes of a running worker have one"
        return reporter.add(self._run, words)


class JobContext(LeasedJob):
    """The job that is being run. May be used from the handler's thread, loop or process alike.

    ``progress``, ``log``, ``use`` and ``update_payload`` return at once and are sent in batches, the last of them
    before the job is settled. Awaiting what they return waits until the store has it, and raises ``LeaseLost`` if
    the job is no longer ours.
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
        """The payload as it was when the job was claimed."""
        return self._lease.payload

    @property
    def cancelled(self) -> bool:
        """Whether the run is to stop: cancelled, timed out, lost or handed back.

        Only handlers in threads need to look; a thread that has seen it, and returns, has stopped as asked.
        """
        return self._link.cancelled

    def progress(self, value: Any) -> Receipt:
        """Keep ``value`` (anything JSON can say) on the job as its progress."""
        return self._link.report(Words(progress=encode_progress(value)))

    def log(self, line: str) -> Receipt:
        """Append a line to the job's log. The newest 1000 lines are kept."""
        return self._link.report(Words(log=text_of(line)))

    def update_payload(self, *args: Any, **kwargs: Any) -> Receipt:
        """Replace the stored payload by these arguments of the task: the next run of this job gets them.

        A job without a task takes one argument, the payload's bytes. Raises ``InvalidInput`` for arguments the
        task does not take.
        """
        return self._link.report(Words(payload=self._link.pack(args, kwargs)))

    def use(self, **amounts: float) -> Receipt:
        """Add to what this job has used: ``context.use(tokens=812, usd=0.0042)``. Kept to six decimal places.

        It stands on the job, and in the sums of its queue, task, group and flow, whatever becomes of the run. Raises
        ``InvalidOption`` for what is not a number of at least 0.
        """
        return self._link.report(Words(usage=in_millionths(amounts)))

    async def add_children(
        self, children: Iterable[Part], *, on_failure: Policy = "fail"
    ) -> list[JobHandle[Any]]:
        """Put further jobs in (``task.job(...)``, whole flows), or name some that are there, for this job to wait for.

        Then raise ``WaitForChildren``: the job runs again when they have ended, and ``children()`` has their
        results. A job that returns instead does not wait. A repeated run adds them again, so give them ids.
        """
        return await add_children(self._source, self.id, children, on_failure=on_failure)

    async def children(self) -> list[Child]:
        """The jobs this one waited for, in the order they were given: state, result or failure of each."""
        return await read_children(self._source, self.id)

    @property
    def sync(self) -> SyncJobContext:
        """``add_children`` and ``children`` for handlers in threads and processes."""
        pass

        return SyncJobContext(self)

    @property
    def _source(self) -> JobCodec:
        return self._link.app.job(self.ref).source

    def pass_on(self, words: Words) -> Receipt:
        """Report what a handler said in another process, or what a command printed. For runners."""
        return self._link.report(words)

    def discard(self) -> None:
        """From now on a failure of this run is final, whatever attempts are left."""
        self._link.discard()


def context_of(run: Run) -> JobContext:
    """The context of ``run``, made when first asked for: most handlers never do."""
    if run.context is None:
        run.context = JobContext(run.lease, run.served.name, RunLink(run))
    return run.context


def current_job() -> JobContext:
    """The context of the job whose handler this is called from. ``LookupError`` outside any handler."""
    run = current_run.get(None)
    if run is not None:
        return context_of(run)
    try:
        return _current_context.get()
    except LookupError:
        raise LookupError("no job is running here: current_job() is for handlers of a worker") from None


def use_context(context: JobContext) -> None:
    """Make ``context`` the current one of this process: what a process runner's child does."""
    _current_context.set(context)
