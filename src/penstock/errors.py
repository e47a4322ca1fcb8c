"""Every error Penstock raises, one class per decision a caller can take.

::

    PenstockError
    ├── InvalidInput (ValueError)         refused at the door; nothing was written
    │   ├── InvalidName                   an id, queue, task or namespace that is not allowed
    │   ├── InvalidOption                 an option that is unknown, or has a value it cannot have
    │   ├── CostTooHigh                   a job that costs more than the bucket of its group can hold
    │   ├── PayloadTooLarge               a payload or result over the limit
    │   └── SerializationError            a value that cannot be encoded, or bytes that cannot be decoded
    ├── UnknownTask (LookupError)         no task of that name is registered here
    ├── StorageError                      the store did not do what it was asked
    │   ├── StorageUnavailable            unreachable, or the connection was lost; try again later
    │   │   ├── StorageReplaced           the file was deleted or replaced while it was open; nothing was written
    │   │   └── NotReplicated             written, but not on as many replicas as asked for; repeating it is safe
    │   ├── StorageRefused                wrong user or password, or a right the user does not have
    │   ├── StorageFull                   out of memory or disk; nothing was written
    │   ├── StorageReadOnly               a replica, or a file that may not be written
    │   ├── StorageVersion                a server too old, or data written by a newer Penstock
    │   └── StorageDamaged                stored data that cannot be read
    ├── EventsLost                        events that were to be read are no longer kept
    ├── LeaseLost                         somebody else holds the job by now; the call changed nothing
    ├── ResultTimeout (TimeoutError)      the wait for a result ended; the job itself goes on
    ├── JobError                          why a job has no result
    │   ├── JobFailed
    │   ├── JobExpired                    its ttl passed before it was finished
    │   ├── JobCancelled
    │   └── JobNotFound (LookupError)     unknown id, or no longer kept
    ├── CommandFailed                     a shell command ended with another code than 0; fails that run only
    ├── SandboxError                      a run with runner="sandbox" was ended; fails that run only
    │   ├── SandboxCrashed                its process died: a crash, an exit, a kill from outside
    │   ├── MemoryLimitExceeded           it asked for more than the task's ``memory``
    │   └── CpuLimitExceeded              it used up the task's ``cpu_time``
    └── Verdict                           raised *by handlers* to say how the job goes on
        ├── Unrecoverable                 fail now, whatever attempts are left
        ├── Retry                         count a failure, and run again at a time of one's own
        ├── Snooze                        run again later; counts in no limit
        ├── Suspend                       run again when a signal comes; counts in no limit
        ├── RateLimited                   hand the job back, and hold up its group or queue for a while
        └── WaitForChildren               run again when its children have ended; counts in no limit
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Final, Literal, Never

__all__ = [
    "CommandFailed",
    "CostTooHigh",
    "CpuLimitExceeded",
    "EventsLost",
    "InvalidInput",
    "InvalidName",
    "InvalidOption",
    "JobCancelled",
    "JobError",
    "JobExpired",
    "JobFailed",
    "JobNotFound",
    "LeaseLost",
    "MemoryLimitExceeded",
    "PayloadTooLarge",
    "PenstockError",
    "RateLimited",
    "ResultTimeout",
    "Retry",
    "SandboxCrashed",
    "SandboxError",
    "SerializationError",
    "Snooze",
    "StorageDamaged",
    "StorageError",
    "StorageFull",
    "StorageReadOnly",
    "StorageRefused",
    "StorageReplaced",
    "StorageUnavailable",
    "StorageVersion",
    "Suspend",
    "UnknownTask",
    "Unrecoverable",
    "Verdict",
    "WaitForChildren",
]


class PenstockError(Exception):
    """The base of all of them."""


class InvalidInput(PenstockError, ValueError):
    """Refused before anything was written. The message names the problem, the cause and the remedy."""


class InvalidName(InvalidInput):
    """An id, queue, task or namespace that is empty, too long, or holds a character it may not hold."""


class InvalidOption(InvalidInput):
    """An option nobody knows, or a value outside its range."""


class CostTooHigh(InvalidInput):
    """A job costs more than the bucket of its group can hold, so it could never start."""


class PayloadTooLarge(InvalidInput):
    """A payload or result over the limit (1 MiB unless set)."""


class SerializationError(InvalidInput):
    """A value that cannot be encoded, or stored bytes that cannot be decoded to the type asked for."""


class UnknownTask(PenstockError, LookupError):
    """No task of that name is registered in this app."""


class StorageError(PenstockError):
    """The store did not do what it was asked; see the subclasses for what to do about it."""


class StorageUnavailable(StorageError, ConnectionError):
    """The store cannot be reached, or the connection went away. Repeating the call does no harm."""


class StorageReplaced(StorageUnavailable):
    """The store's file was deleted or replaced while this process had it open. Nothing of the call is in the store.

    The next call opens the file that is there by then. A file that is missing is not created again.
    """


class NotReplicated(StorageUnavailable):
    """The call was carried out, but too few replicas have confirmed it in time (``?replicas=1``). Repeating the call
    does no harm: it does nothing twice, and waits for the replicas again."""


class StorageRefused(StorageError, PermissionError):
    """The store knows us and says no: wrong user or password, or a missing right."""


class StorageFull(StorageError):
    """The store has no room. Jobs in it can still be worked off; new ones are refused."""


class StorageReadOnly(StorageError):
    """The store may be read, not written: a replica, or a file without write permission."""


class StorageVersion(StorageError):
    """The server is too old for Penstock, or the data was written by a Penstock newer than this one."""


class StorageDamaged(StorageError):
    """Stored data cannot be read, and the store cannot put it aside by itself. The message names the remedy."""


class EventsLost(PenstockError):
    """A reader of the event log fell behind what is kept: events ``first`` to ``last`` are gone, or (both 0) the
    log is another one than before."""

    def __init__(self, message: str, *, first: int, last: int) -> None:
        super().__init__(message)
        self.first = first
        self.last = last


class LeaseLost(PenstockError):
    """The caller no longer holds the job: its lease expired and somebody else has it, or it has ended."""


class ResultTimeout(PenstockError, TimeoutError):
    """The job had not ended when the wait did. The job is left alone."""


class JobError(PenstockError):
    """Why a job has no result. ``job_id`` names it."""

    def __init__(self, message: str, *, job_id: str) -> None:
        super().__init__(message)
        self.job_id = job_id


class JobFailed(JobError):
    """The job failed for good. ``error_type`` is the class name of what its handler raised last."""

    def __init__(self, message: str, *, job_id: str, error_type: str = "", traceback: str = "") -> None:
        super().__init__(message, job_id=job_id)
        self.error_type = error_type
        self.traceback = traceback


class JobExpired(JobError):
    """The job's ``ttl`` passed before it was finished."""


class JobCancelled(JobError):
    """The job was cancelled."""


class JobNotFound(JobError, LookupError):
    """The id is unknown, or what became of it is no longer kept."""

    @classmethod
    def in_queue(
        cls, queue: str, id: str, remedy: str = "The id is wrong, or the job is no longer kept."
    ) -> JobNotFound:
        """Return the error for an id that ``queue`` does not have."""
        return cls(f"job {id!r} was not found in queue {queue!r}. {remedy}", job_id=id)


class CommandFailed(PenstockError):
    """A shell command ended with ``exit_code``; 128 + n if signal n ended it. A failure of the run like any other:
    retried."""

    def __init__(self, message: str, *, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class SandboxError(PenstockError):
    """Why a run in a sandbox ended before its function did. A failure of the run like any other: retried."""


class SandboxCrashed(SandboxError):
    """The process died: a segmentation fault, ``os._exit``, the system's out-of-memory killer."""


class MemoryLimitExceeded(SandboxError):
    """The run asked for more memory than its task allows."""


class CpuLimitExceeded(SandboxError):
    """The run used up the processor time its task allows."""


class Verdict(PenstockError):
    """Raised by a handler to say how its job goes on."""

    @property
    def wrapped(self) -> BaseException | None:
        """The error it wraps: its first argument if that is an error, else its cause."""
        first = self.args[0] if self.args else None
        return first if isinstance(first, BaseException) else self.__cause__


class Unrecoverable(Verdict):
    """Fail now: no further attempt would help.

    It may wrap the error that decided it: ``raise Unrecoverable("no such page") from error``, or
    ``Unrecoverable(error)``. The failure then keeps the class of that error.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        if args and isinstance(args[0], BaseException):
            self.__cause__ = args[0]


_INSTEAD_OF: Final = {
    "countdown": "Use delay=....",
    "eta": "Use at=....",
    "exc": "Give the error first: Retry(error, delay=...).",
    "max_retries": "Give it to the task: @app.task(max_retries=...).",
    "throw": "Retry is raised: raise Retry(error, delay=...).",
}
"""Arguments of Celery's ``self.retry()``, and what to write here."""


class Retry(Verdict):
    """Count a failure and run again after ``delay``, or ``at`` a time, instead of the task's backoff.

    It may wrap the error that decided it: ``raise Retry("busy", delay="1m") from error``, or
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


class Snooze(Verdict):
    """Run again after ``delay``, or ``at`` a time. Not a failure: counts in no limit.

    ``step`` is what the next run finds as ``context.step``; without it the job stays at the step it is at.
    """

    def __init__(
        self,
        delay: timedelta | str | float | None = None,
        *,
        at: datetime | None = None,
        step: str | None = None,
    ) -> None:
        super().__init__("the handler asked to run later")
        self.delay = delay
        self.at = _with_zone(at)
        self.step = step


class Suspend(Verdict):
    """Run again when ``signal`` is sent to the job, or after ``timeout``. Not a failure: counts in no limit.

    The next run finds the signal as ``context.signal``, or ``context.timed_out``. A signal that was sent before
    is taken at once. ``step`` is as for ``Snooze``.
    """

    def __init__(
        self, signal: str, *, timeout: timedelta | str | float | None = None, step: str | None = None
    ) -> None:
        super().__init__(f"the handler asked to wait for the signal {_brief(signal)}")
        self.signal = signal
        self.timeout = timeout
        self.step = step


class RateLimited(Verdict):
    """Something out there takes no more for ``retry_in``. The job is handed back, counted in no limit, and until then
    nothing of its group is started; with ``scope="queue"``, or if it has no group, nothing of its queue."""

    def __init__(
        self, retry_in: timedelta | str | float, *, scope: Literal["group", "queue"] = "group"
    ) -> None:
        if scope not in ("group", "queue"):
            raise InvalidOption(f"scope must be 'group' or 'queue', got {_brief(scope)}.")
        super().__init__("the handler met a rate limit")
        self.retry_in = retry_in
        self.scope = scope


class WaitForChildren(Verdict):
    """Run again when all children of the job have ended, at once if they have. Not a failure: counts in no limit.

    Raised again without new children, it is one (``NothingToWaitFor``): the job would run for ever.
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
