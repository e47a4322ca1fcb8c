"""The errors that Penstock raises, one class per decision that a caller can make.

::

    PenstockError
    ├── InvalidInput (ValueError)         refused; nothing was written
    │   ├── InvalidName                   an id, queue, task or namespace that is not allowed
    │   ├── InvalidOption                 an unknown option, or an invalid value
    │   ├── CostTooHigh                   a job that costs more than the bucket of its group can hold
    │   ├── PayloadTooLarge               a payload or result over the limit
    │   ├── BadKey                        a key of a row on Spark that cannot identify a job
    │   ├── BadRow                        a row on Spark that cannot become a job
    │   └── SerializationError            a value that cannot be encoded, or bytes that cannot be decoded
    ├── UnknownTask (LookupError)         no task of that name is registered here
    ├── StorageError                      the store did not carry out a call
    │   ├── StorageUnavailable            unreachable, or the connection was lost; try again later
    │   │   ├── StorageReplaced           the file was deleted or replaced while it was open; nothing was written
    │   │   └── NotReplicated             written, but on too few replicas; you can repeat the call
    │   ├── StorageRefused                wrong user or password, or a missing permission
    │   ├── StorageFull                   out of memory or disk; nothing was written
    │   ├── StorageReadOnly               a replica, or a file without write permission
    │   ├── StorageVersion                a server too old, or data written by a newer Penstock
    │   └── StorageDamaged                stored data that cannot be read
    ├── EventsLost                        the requested events are no longer kept
    ├── LeaseLost                         the caller no longer holds the job; nothing was changed
    ├── ResultTimeout (TimeoutError)      the wait for a result is over; the job continues
    ├── JobError                          the reason why a job has no result
    │   ├── JobExists                     the task is unique, and a job with the same arguments exists
    │   ├── JobFailed
    │   ├── JobExpired                    its ttl passed before it was finished
    │   ├── JobCancelled
    │   └── JobNotFound (LookupError)     unknown id, or no longer kept
    ├── CommandFailed                     a shell command returned a nonzero exit code; fails the run
    ├── SandboxError                      a run with runner="sandbox" was killed; fails the run
    │   ├── SandboxCrashed                its process crashed, exited or was killed
    │   ├── MemoryLimitExceeded           it exceeded the task's ``memory``
    │   └── CpuLimitExceeded              it exceeded the task's ``cpu_time``
    ├── OutputBusy                        another run of ``process`` is writing to the output
    ├── OutputLost                        the run was away for too long, and another took over its output
    ├── TooManyFailures                   more rows failed than the run allows
    ├── ArchiveTorn                       the archive differs from what the store had
    ├── FleetFailed                       the workers on Spark's executors could not start, or gave up
    └── Directive                           raised *by handlers* to decide how the job goes on
        ├── Unrecoverable                 fail now, even if attempts are left
        │   ├── StepFailed                a durable step failed for good
        │   └── StepError                 a step or a wait that is not possible, recorded or replayed
        ├── Retry                         count a failure, and run again at a given time
        ├── Snooze                        run again later; not counted
        ├── Suspend                       run again when a signal arrives; not counted
        ├── RateLimited                   hand the job back, and pause its group or queue for a while
        └── WaitForChildren               run again when its children have finished; not counted
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Final, Literal, Never


class PenstockError(Exception):
    """The base class of all errors of Penstock."""


class InvalidInput(PenstockError, ValueError):
    """Refused before anything was written. The message names the problem, the cause and the remedy."""


class InvalidName(InvalidInput):
    """An id, queue, task or namespace that is empty, too long, or contains a forbidden character."""


class InvalidOption(InvalidInput):
    """An unknown option, or a value outside its range."""


class CostTooHigh(InvalidInput):
    """A job costs more than the bucket of its group can hold, so it could never start."""


class PayloadTooLarge(InvalidInput):
    """A payload or result over the limit (default: 1 MiB)."""


class SerializationError(InvalidInput):
    """A value that cannot be encoded, or stored bytes that cannot be decoded to the requested type."""


class BadKey(InvalidInput):
    """A key that cannot identify a job: it is null, or its type has no canonical form."""


class BadRow(InvalidInput):
    """A row that cannot become a job."""


class UnknownTask(PenstockError, LookupError):
    """No task of that name is registered in this app."""


class StorageError(PenstockError):
    """The store did not carry out a call; see the subclasses for what to do about it."""


class StorageUnavailable(StorageError, ConnectionError):
    """The store cannot be reached, or the connection was lost. You can repeat the call."""


class StorageReplaced(StorageUnavailable):
    """The store's file was deleted or replaced while this process had it open. The call wrote nothing.

    The next call opens the file that exists then. A missing file is not created again.
    """


class NotReplicated(StorageUnavailable):
    """The call succeeded, but too few replicas confirmed it in time (``?replicas=1``).

    You can repeat the call: it does nothing twice, and waits for the replicas again.
    """


class StorageRefused(StorageError, PermissionError):
    """The store refused access: wrong user or password, or a missing permission."""


class StorageFull(StorageError):
    """The store is full. Workers can still finish its jobs; new jobs are refused."""


class StorageReadOnly(StorageError):
    """The store is read-only: a replica, or a file without write permission."""


class StorageVersion(StorageError):
    """The server is too old for Penstock, or a newer Penstock wrote the data."""


class StorageDamaged(StorageError):
    """Stored data cannot be read, and the store cannot set it aside itself. The message names the remedy."""


class EventsLost(PenstockError):
    """A reader of the event log fell behind: events ``first`` to ``last`` are no longer kept.

    If both are 0, the log has been replaced by another one.
    """

    def __init__(self, message: str, *, first: int, last: int) -> None:
        super().__init__(message)
        self.first = first
        self.last = last


class LeaseLost(PenstockError):
    """The caller no longer holds the job: its lease expired, or the job has finished."""


class ResultTimeout(PenstockError, TimeoutError):
    """The job did not finish before the timeout. The job continues.

    ``started`` says whether it has run, ``workers`` how many workers of its queue are alive; ``None`` if the store did
    not say.
    """

    def __init__(self, message: str, *, started: bool | None = None, workers: int | None = None) -> None:
        super().__init__(message)
        self.started = started
        self.workers = workers


class JobError(PenstockError):
    """The reason why a job has no result. ``job_id`` is the id of the job."""

    def __init__(self, message: str, *, job_id: str) -> None:
        super().__init__(message)
        self.job_id = job_id


class JobExists(JobError):
    """The task is unique, and ``job_id`` has the same arguments. Nothing was enqueued."""


class JobFailed(JobError):
    """The job failed for good. ``error_type`` is the class name of the last error of its handler."""

    def __init__(self, message: str, *, job_id: str, error_type: str = "", traceback: str = "") -> None:
        super().__init__(message, job_id=job_id)
        self.error_type = error_type
        self.traceback = traceback


class JobExpired(JobError):
    """The job's ``ttl`` passed before it was finished."""


class JobCancelled(JobError):
    """The job was cancelled."""


class JobNotFound(JobError, LookupError):
    """The id is unknown, or the job is no longer kept."""

    @classmethod
    def in_queue(
        cls, queue: str, id: str, remedy: str = "The id or the queue is wrong, or the job is no longer kept."
    ) -> JobNotFound:
        """Return the error for an id that ``queue`` does not have."""
        return cls(f"job {id!r} was not found in queue {queue!r}. {remedy}", job_id=id)


class CommandFailed(PenstockError):
    """A shell command returned ``exit_code``, or 128 + n if signal n killed it.

    The run fails and is retried, as with any other error.
    """

    def __init__(self, message: str, *, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class SandboxError(PenstockError):
    """A run in a sandbox was killed. It fails and is retried, as with any other error."""


class SandboxCrashed(SandboxError):
    """The process of a run died: a segmentation fault, ``os._exit``, the system's out-of-memory killer."""


class MemoryLimitExceeded(SandboxError):
    """The run asked for more memory than its task allows."""


class CpuLimitExceeded(SandboxError):
    """The run used more processor time than its task allows."""


# Data pipelines on Spark


class ArchiveTorn(PenstockError):
    """The archive differs from what the store had."""


class OutputBusy(PenstockError):
    """Another run is writing to the output."""


class OutputLost(PenstockError):
    """The run lost its lease on the output: it was away for too long, and another run took over."""


class TooManyFailures(PenstockError):
    """More rows failed than ``max_failures`` or ``max_failure_rate`` allows. Finished rows are in the output."""


class FleetFailed(PenstockError):
    """Spark gave up the fleet, its workers could not start, or they believed that its driver was dead. Other workers
    take over the jobs that were running."""


class Directive(PenstockError):
    """Base class of what a handler raises to decide how its job goes on."""

    @property
    def wrapped(self) -> BaseException | None:
        """Return the wrapped error: the first argument if that is an error, else the cause."""
        first = self.args[0] if self.args else None
        return first if isinstance(first, BaseException) else self.__cause__


class Unrecoverable(Directive):
    """Fail the job now: another attempt would not help.

    It may wrap another error: ``raise Unrecoverable("no such page") from error``, or
    ``Unrecoverable(error)``. The failure then keeps the class of that error.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        if args and isinstance(args[0], BaseException):
            self.__cause__ = args[0]


class StepFailed(Unrecoverable):
    """A durable step failed for good: it has used up its attempts. Handlers may catch it.

    ``step`` is the name of the step, ``error_type`` the class name of its last error, ``failures`` the number of
    failed attempts. A later run of the job raises the same again, without running the step.
    """

    def __init__(self, message: str, *, step: str, error_type: str = "", failures: int = 0) -> None:
        super().__init__(message)
        self.step = step
        self.error_type = error_type
        self.failures = failures


class StepError(Unrecoverable):
    """A durable step that cannot be recorded or replayed: a name that is used twice, arguments that differ from those
    that were recorded, or a result that is too large. Or a wait of a job in a batch. The message names the remedy."""


class Suspension(BaseException):
    """Ends a run that waits in ``context.sleep``, ``context.wait_for`` or for the next attempt of a step.

    The job runs again later. Not an ``Exception``, so that ``except Exception`` does not catch it. ``directive`` is
    what a handler would raise for the same effect.
    """

    def __init__(self, directive: Snooze | Suspend) -> None:
        super().__init__("the job waits, and its run has ended")
        self.directive = directive


_INSTEAD_OF: Final = {
    "countdown": "Use delay=....",
    "eta": "Use at=....",
    "exc": "Give the error first: Retry(error, delay=...).",
    "max_retries": "Give it to the task: @app.task(max_retries=...).",
    "throw": "Retry is raised: raise Retry(error, delay=...).",
}
"""Arguments of Celery's ``self.retry()``, and what to write here."""


class Retry(Directive):
    """Count a failure, and run again after ``delay``, or ``at`` a time, instead of the task's backoff.

    It may wrap another error: ``raise Retry("busy", delay="1m") from error``, or
    ``Retry(error, delay="1m")``. The failure then keeps the class of that error.
    """

    def __init__(
        self,
        message: str | BaseException = "",
        *unnamed: Never,
        delay: timedelta | str | float | None = None,
        at: datetime | None = None,
        **other: Never,
    ) -> None:
        if unnamed:
            raise TypeError(
                f"Retry takes one message, got {len(unnamed) + 1} arguments. "
                "Give the delay by name: Retry('busy', delay='5s')."
            )
        for name in other:
            raise TypeError(
                f"Retry takes no argument {name!r}. {_INSTEAD_OF.get(name, 'Use delay=... or at=....')}"
            )
        super().__init__(*([message] if message else []))
        if isinstance(message, BaseException):
            self.__cause__ = message
        self.delay = delay
        self.at = _with_zone(at)

    def __str__(self) -> str:
        if self.args or self.wrapped is not None:
            return super().__str__()
        return "the handler asked for a retry"


class Snooze(Directive):
    """Run again after ``delay``, or ``at`` a time, without counting a failure.

    The next run reads ``stage`` as ``context.stage``; by default the job keeps its stage.
    """

    def __init__(
        self,
        delay: timedelta | str | float | None = None,
        *,
        at: datetime | None = None,
        stage: str | None = None,
    ) -> None:
        super().__init__("the handler asked to run later")
        self.delay = delay
        self.at = _with_zone(at)
        self.stage = stage


class Suspend(Directive):
    """Run again when ``signal`` is sent to the job, or after ``timeout``, without counting a failure.

    The next run reads the signal as ``context.signal``, or sees ``context.timed_out``. A signal that was sent before
    is used immediately. ``stage`` is as for ``Snooze``.
    """

    def __init__(
        self, signal: str, *, timeout: timedelta | str | float | None = None, stage: str | None = None
    ) -> None:
        super().__init__(f"the handler asked to wait for the signal {_brief(signal)}")
        self.signal = signal
        self.timeout = timeout
        self.stage = stage


class RateLimited(Directive):
    """Hand the job back because an external service is busy for ``retry_in``, without counting a failure.

    Until then no job of its group starts; with ``scope="queue"``, or if it has no group, no job of its queue.
    """

    def __init__(
        self, retry_in: timedelta | str | float, *, scope: Literal["group", "queue"] = "group"
    ) -> None:
        if scope not in ("group", "queue"):
            raise InvalidOption(f"scope must be 'group' or 'queue', got {_brief(scope)}.")
        super().__init__("the handler met a rate limit")
        self.retry_in = retry_in
        self.scope = scope


class WaitForChildren(Directive):
    """Run again when all children of the job have finished, immediately if they have, without counting a failure.

    If it is raised again without new children, the run fails (``NothingToWaitFor``): the job would run forever.
    """

    def __init__(self) -> None:
        super().__init__("the handler waits for its children")


def _brief(value: object) -> str:
    """Return the start of a text, or the type of anything else: its ``repr`` may raise."""
    return f"{value!r:.80}" if isinstance(value, str) else f"<{type(value).__qualname__}>"


def _with_zone(at: datetime | None) -> datetime | None:
    if at is not None and at.utcoffset() is None:
        raise InvalidOption(
            f"at={at.isoformat()} has no time zone, so it could mean several instants. "
            "Use datetime.now(UTC) or value.astimezone()."
        )
    return at
