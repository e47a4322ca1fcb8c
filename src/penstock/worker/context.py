"""The job context: what a handler knows about its job, and what it reports while it runs.

A parameter annotated with ``JobContext`` receives it. ``current_job()`` returns it in all code that a handler calls,
also in threads and other processes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, TypeVarTuple, Unpack, overload

from penstock.client.claim import LeasedJob, encode_progress
from penstock.client.info import Parent
from penstock.client.loopthread import Face, as_sync
from penstock.client.sync import sync_handles
from penstock.core.job import Lease
from penstock.core.limits import amounts as in_millionths
from penstock.core.names import ref_of, step_name
from penstock.core.step import NewStep
from penstock.core.text import get_logger, shown, text_of
from penstock.core.units import Duration, milliseconds
from penstock.errors import StepError, Suspension
from penstock.worker.reporter import JobUpdate, Receipt
from penstock.worker.run import Run
from penstock.worker.stepcall import StepOptions, SyncStepOptions, step_policy, timeout_of, wait_name
from penstock.worker.steprecords import step_key
from penstock.worker.steps import JobSteps

if TYPE_CHECKING:
    from penstock.client.app import App
    from penstock.client.codec import JobCodec
    from penstock.client.task import Task


logger = get_logger("penstock.worker")

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

current_run: Final[ContextVar[Run]] = ContextVar("penstock_run")
_current_context: Final[ContextVar[JobContext]] = ContextVar("penstock_context")


class ContextLink(Protocol):
    """The link from a context to its run: in this process, or through a pipe to the worker's process."""

    @property
    def app(self) -> App: ...

    @property
    def cancelled(self) -> bool: ...

    @property
    def lease_ms(self) -> int: ...

    @property
    def claimed_at(self) -> float: ...

    @property
    def definition(self) -> Task[..., Any] | None: ...

    @property
    def is_batched(self) -> bool: ...

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

    @property
    def lease_ms(self) -> int:
        """Return how long a lease is extended when a step is recorded."""
        return self._run.served.lease_ms

    @property
    def claimed_at(self) -> float:
        """Return the monotonic time at which the lease arrived."""
        return self._run.claimed_at

    @property
    def definition(self) -> Task[..., Any] | None:
        """Return the task or the handler of the app that runs."""
        return self._run.handler.definition

    @property
    def is_batched(self) -> bool:
        """Return whether the job shares its run of the function with others."""
        return self._run.handler.is_batched

    def discard(self) -> None:
        self._run.discarded = True

    def pack(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
        return self._run.handler.pack(args, kwargs)

    def report(self, update: JobUpdate) -> Receipt:
        reporter = self._run.served.reporter
        assert reporter is not None, "the queues of a running worker have a reporter"
        return reporter.add(self._run, update)


class JobContext(LeasedJob, Parent):
    """The running job. Works in the handler's thread, loop or process.

    ``progress``, ``log``, ``use`` and ``update_payload`` return immediately and are sent in batches, the last one
    before the job is settled. Await their result to wait until the store has the update; that raises ``LeaseLost`` if
    another worker has the job.
    """

    __penstock_context__ = True
    __slots__ = ("_lease", "_link", "_steps", "queue")

    def __init__(self, lease: Lease, queue: str, link: ContextLink) -> None:
        self._lease = lease
        self._link = link
        self._steps: JobSteps | None = None
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

        Only handlers in threads need to check this. A handler that reads true and returns counts as stopped: its job
        does not complete.
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

    @overload
    async def step(
        self,
        name: str,
        function: Callable[[*Ts], Awaitable[T]],
        /,
        *args: *Ts,
        **options: Unpack[StepOptions],
    ) -> T: ...
    @overload
    async def step(
        self, name: str, function: Callable[[*Ts], T], /, *args: *Ts, **options: Unpack[StepOptions]
    ) -> T: ...
    async def step(
        self, name: str, function: Callable[[*Ts], Any], /, *args: *Ts, **options: Unpack[StepOptions]
    ) -> Any:
        """Call ``function(*args)`` once for this job: record the result, and return the record in every later run.

        The step is known by its name, in a loop also by its ``key``. A function that is not async runs in a thread.
        It is tried up to ``attempts`` times, with ``backoff`` in between; both default to those of the job, and no
        attempt of the job is used up. Then raise ``StepFailed``, in every run. ``retry_on`` names the errors to retry
        on, as for a task, and defaults to the rules of the task. An attempt is stopped after ``timeout``.
        ``on_divergence``: what to do if the arguments differ from those that were recorded.

        The result is what a later run will read: encoded and decoded, to the type that the function is annotated
        with. Raise ``StepError`` if it cannot be recorded, or if the name is used twice in a run.
        """
        policy = step_policy(name, options)
        return await self.steps.step(step_name(name, options.get("key")), function, args, policy)

    async def sleep(self, delay: Duration, *, name: str = "sleep", key: str | int | None = None) -> None:
        """Wait for ``delay`` without a worker: the run ends, and a later run goes on after this line.

        A second sleep of a job needs a ``name`` or a ``key`` of its own.
        """
        await self.steps.sleep(step_name(name, key), milliseconds(delay))

    @overload
    async def wait_for(
        self, signal: str, *, timeout: Duration | None = None, key: str | int | None = None
    ) -> Any: ...
    @overload
    async def wait_for(
        self, signal: str, *, timeout: Duration | None = None, key: str | int | None = None, type: type[T]
    ) -> T: ...
    async def wait_for(
        self,
        signal: str,
        *,
        timeout: Duration | None = None,
        key: str | int | None = None,
        type: Any = Any,
    ) -> Any:
        """Wait for a signal without a worker and return its data, decoded to ``type``.

        Raise ``TimeoutError`` if it does not come within ``timeout``. Give a ``key`` to wait for a signal again.
        """
        return await self.steps.wait_for(wait_name(signal, key), signal, timeout_of(timeout), type)

    @property
    def step_key(self) -> str:
        """Return an idempotency key for the step that is running: the same in every attempt and run of this job.

        Pass it to the service that the step calls: the step may have run before without being recorded. Raise
        ``LookupError`` outside a step.
        """
        return step_key(self._lease, self.queue)

    @property
    def steps(self) -> JobSteps:
        """Return the steps of this run. For runners."""
        if self._steps is None:
            self._steps = JobSteps(self._lease, self.queue, self._link)
        return self._steps

    @property
    def suspension(self) -> Suspension | None:
        """Return the suspension that has ended this run, even if its handler swallowed it. For runners."""
        return None if self._steps is None else self._steps.suspension

    @property
    def refusal(self) -> StepError | None:
        """Return the error of the wait that was refused because the job is in a batch. For runners."""
        return None if self._steps is None else self._steps.refusal

    def unused_steps(self) -> list[NewStep]:
        """Return the recorded steps that the handler has not asked for. For runners."""
        return [] if self._steps is None else self._steps.unused()

    @property
    def sync(self) -> SyncJobContext:
        """Return ``step``, ``sleep``, ``wait_for``, ``add_children`` and ``children`` for handlers in threads and
        processes."""
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

    def step(
        self, name: str, function: Callable[[*Ts], T], /, *args: *Ts, **options: Unpack[SyncStepOptions]
    ) -> T:
        """Call ``function(*args)`` in this thread, once for this job. The rest is as for ``JobContext.step``."""
        policy = step_policy(name, options, SyncStepOptions)
        whole = step_name(name, options.get("key"))
        result: T = self._target.steps.step_sync(whole, function, args, policy)
        return result

    def sleep(self, delay: Duration, *, name: str = "sleep", key: str | int | None = None) -> None:
        """Wait for ``delay`` without a worker: the run ends, and a later run goes on after this line."""
        self._target.steps.sleep_sync(step_name(name, key), milliseconds(delay))

    @overload
    def wait_for(
        self, signal: str, *, timeout: Duration | None = None, key: str | int | None = None
    ) -> Any: ...
    @overload
    def wait_for(
        self, signal: str, *, timeout: Duration | None = None, key: str | int | None = None, type: type[T]
    ) -> T: ...
    def wait_for(
        self,
        signal: str,
        *,
        timeout: Duration | None = None,
        key: str | int | None = None,
        type: Any = Any,
    ) -> Any:
        """Wait for a signal without a worker and return its data. Raise ``TimeoutError``."""
        return self._target.steps.wait_for_sync(wait_name(signal, key), signal, timeout_of(timeout), type)


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
