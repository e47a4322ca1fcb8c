"""The outcomes of one run of a job: plain data that a worker returns and a store applies.

Times are delays, never timestamps: the store's clock decides. An exception of a handler becomes an outcome here too;
that is pure, except for the clock that ``Retry(at=…)`` needs.
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Final, Literal, assert_never

import msgspec

from penstock.core.names import check_signal, check_stage
from penstock.core.retry import EVERY_ERROR, Backoff, BackoffFunction, RetryRule, RetryRules, delay_ms
from penstock.core.text import storable
from penstock.core.units import MAX_MS, Duration, describe, milliseconds
from penstock.errors import (
    CommandFailed,
    Directive,
    InvalidInput,
    RateLimited,
    Retry,
    SandboxError,
    StepFailed,
    Unrecoverable,
    WaitForChildren,
)
from penstock.errors import Snooze as SnoozeDirective
from penstock.errors import Suspend as SuspendDirective

if TYPE_CHECKING:
    from penstock.core.job import Lease

DAMAGED: Final = "Damaged"
"""The error class of a job whose stored record cannot be read."""


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """The reason why a run failed. ``type`` is the exception's class name. The sender limits the size of all
    three."""

    type: str
    message: str
    traceback: str = ""


FAILURE_TEXTS: Final = {
    "Expired": "the job's ttl passed before it was finished",
    "Stalled": "its worker died or stopped renewing the lease %d times; the last one was %s",
    "StalledInStep": "its worker died or stopped renewing the lease %d times; the last one was %s, in step %s",
    "BudgetExceeded": "the budget of its flow was spent before it started",
    "NothingToWaitFor": "the job waited for its children again, but has had no new ones since its last wait. "
    "Add children before it waits, or finish it.",
    "Damaged": "the stored record cannot be read: %s. Its bytes are kept with the job",
    "DependencyFailed": "dependency %s failed",
    "DependencyFailedWith": "dependency %s failed: %s: %s",
    "DependencyCancelled": "dependency %s was cancelled",
    "DependencyRemoved": "dependency %s was removed",
    "DependencyRefused": "dependency %s was refused: %s",
    "DependencyUnknown": "dependency %s is not known",
    "DependencyNotFound": "job %s is not known: it never was, or is no longer kept",
}
"""The messages of failures that a store creates, by type or cause. All engines use these texts."""


def damaged_failure(why: str) -> Failure:
    """Return the failure of a job whose record cannot be read because of ``why``."""
    return Failure(DAMAGED, FAILURE_TEXTS[DAMAGED] % why)


class Complete(msgspec.Struct, frozen=True):
    """The run succeeded. Ends the job, even if its cancellation was requested or its ttl has passed.

    ``ttl_ms`` overrides how long the result is kept.
    """

    result: bytes = b""
    ttl_ms: int | None = None


class Fail(msgspec.Struct, frozen=True):
    """The run failed. The job runs again in ``retry_in_ms`` if attempts are left, unless ``final``.

    A job whose cancellation was requested is cancelled instead of retried; one past its ttl ends as ``expired``.
    ``ttl_ms`` overrides how long the failure is kept if this failure ends the job.
    """

    failure: Failure
    retry_in_ms: int = 0
    final: bool = False
    ttl_ms: int | None = None


class Snooze(msgspec.Struct, frozen=True):
    """Run again in ``delay_ms``, at ``stage`` (``None``: the present one). Counts towards no limit.

    ``unknown``: the worker handed the job back because it does not know the task.
    """

    delay_ms: int
    stage: str | None = None
    unknown: bool = False


class Suspend(msgspec.Struct, frozen=True):
    """Run again when ``signal`` arrives, or after ``timeout_ms`` (0: no timeout). Counts towards no limit.

    If the signal has arrived before, the job waits for a worker immediately.
    """

    signal: str
    timeout_ms: int = 0
    stage: str | None = None


class Release(msgspec.Struct, frozen=True):
    """Hand the job back unfinished. It keeps its place in line. Counts towards no limit."""


class Limited(msgspec.Struct, frozen=True):
    """Hand the job back like ``Release``, because an external service accepts no more for ``delay_ms``.

    Until then no job of the group starts; with the scope ``queue``, or without a group, no job of the queue.
    """

    delay_ms: int
    scope: Literal["group", "queue"] = "group"


class Await(msgspec.Struct, frozen=True):
    """Run again when all children have ended, immediately if they have. Counts towards no limit.

    A job that has waited for all of them before, and has no new ones, fails instead.
    """


class Cancel(msgspec.Struct, frozen=True):
    """The handler stopped because the cancellation was requested."""

    reason: str = ""


Outcome = Complete | Fail | Snooze | Suspend | Release | Limited | Await | Cancel


class Abort(StrEnum):
    """The reason to stop a run before its handler returns."""

    CANCEL = "cancel"
    EXPIRED = "expired"
    TIMEOUT = "timeout"
    LOST = "lost"
    RELEASE = "release"


class Undecodable(Exception):
    """The payload does not fit the task: no run can succeed."""


class HandedBack(SnoozeDirective):
    """This worker does not know the task. The job runs again later, perhaps on another worker."""


class RemoteError(Exception):
    """An error of a handler in another process. A note on it carries the traceback from there."""


_LONGEST_MESSAGE: Final = 2_000
_LONGEST_TRACEBACK: Final = 8_000
_MOST_FRAMES: Final = 30
_BACKOFF_FAILED_MS: Final = 1_000

chance: ContextVar[Callable[[], float]] = ContextVar("penstock_chance", default=random.random)
"""The source of jitter. Tests replace it with predictable numbers."""
wall_clock: ContextVar[Callable[[], datetime]] = ContextVar(
    "penstock_wall_clock", default=lambda: datetime.now(UTC)
)
"""The clock for ``Retry(at=...)``. It moves along where tests move the store's clock."""

Backoffs = Mapping[str, BackoffFunction]


def failed(
    error: BaseException,
    lease: Lease,
    *,
    discarded: bool,
    backoffs: Backoffs,
    backoff: Backoff | BackoffFunction | None = None,
) -> Outcome:
    """Return the outcome of a run whose handler raised ``error``. ``backoff`` replaces that of the job."""
    try:
        match error:
            case SnoozeDirective() | SuspendDirective():
                return _postponed(error)
            case RateLimited():
                return Limited(milliseconds(error.retry_in, what="retry_in"), error.scope)
            case WaitForChildren():
                return Await()
            case Unrecoverable() | Undecodable():
                return Fail(failure_of(error), final=True)
            case _:
                explicit_ms = retry_delay_ms(error)
        if explicit_ms is not None:
            retry_in_ms = explicit_ms
        elif backoff is not None:
            retry_in_ms = own_delay_ms(backoff, lease.failures + 1, error)
        else:
            retry_in_ms = _backoff_ms(error, lease, backoffs)
        return Fail(failure_of(error), retry_in_ms=retry_in_ms, final=discarded)
    except Exception as broken:
        # A failing backoff function or delay must not cost the job its retries. Report both errors.
        note = f" (and its backoff failed: {message_of(broken)})"
        return Fail(failure_of(error, note=note), retry_in_ms=_BACKOFF_FAILED_MS, final=discarded)


def retry_delay_ms(error: BaseException) -> int | None:
    """Return the delay that an error asks for; ``None`` if it leaves that to the backoff."""
    if isinstance(error, Retry):
        return _delay_ms(error.delay, error.at)
    # Clients of rate-limited services often know when to come back, and set it on their exception.
    at = getattr(error, "retry_at", None)
    return _delay_ms(None, at) if isinstance(at, datetime) else None


def undecided(error: BaseException, broken: BaseException) -> Fail:
    """Return the outcome of a run that raised ``error``, when the code that decides about it raised ``broken``."""
    note = f" (and deciding about it failed: {type(broken).__name__}: {message_of(broken)})"
    return Fail(failure_of(error, note=note), retry_in_ms=_BACKOFF_FAILED_MS)


def _postponed(directive: SnoozeDirective | SuspendDirective) -> Outcome:
    try:
        if isinstance(directive, SuspendDirective):
            return suspension(directive)
        delay_ms, stage = _delay_ms(directive.delay, directive.at) or 0, check_stage(directive.stage)
        return Snooze(delay_ms, stage, unknown=isinstance(directive, HandedBack))
    except InvalidInput as error:  # The handler's mistake: the next run would make it again.
        return Fail(failure_of(error.with_traceback(directive.__traceback__)), final=True)


def suspension(directive: SuspendDirective) -> Suspend:
    """Return the outcome for a handler's ``Suspend``. Raise ``InvalidInput`` for invalid values."""
    timeout_ms = 0 if directive.timeout is None else max(milliseconds(directive.timeout, what="timeout"), 1)
    return Suspend(check_signal(directive.signal), timeout_ms, check_stage(directive.stage))


def final_failure(error: Exception) -> Fail:
    """Return the outcome of a run that another run could not improve."""
    return Fail(failure_of(error), final=True)


def is_last(outcome: Fail, lease: Lease) -> bool:
    """Return whether this failure uses up the last attempt."""
    return outcome.final or lease.failures + 1 >= lease.options.attempts


def retry_rule(error: BaseException, retries: RetryRules) -> RetryRule | None:
    """Return the rule by which a task with these rules is retried after ``error``; ``None`` if it is not.

    A directive decides for itself. A subprocess that ran the function has already checked its error. A sandbox that
    crashed is retried, unless the rules give up on it.
    """
    if isinstance(error, (Directive, RemoteError)):
        return EVERY_ERROR
    if isinstance(error, SandboxError):
        return None if retries.gives_up_on(error) else EVERY_ERROR
    return retries.rule_for(error)


def own_delay_ms(backoff: Backoff | BackoffFunction, failures: int, error: BaseException) -> int:
    """Return the delay of a rule's own backoff, which may be a function without a name."""
    if callable(backoff):
        return milliseconds(backoff(failures, error), what="delay returned by the backoff of retry_on")
    return delay_ms(backoff, failures, random=chance.get(), error=error)


def aborted(abort: Abort, lease: Lease, *, discarded: bool, backoffs: Backoffs) -> Outcome | None:
    """Return the outcome of a stopped run; ``None`` if the run's lease is lost."""
    match abort:
        case Abort.CANCEL:
            return Cancel("the run was stopped")
        case Abort.EXPIRED:
            # Hand the job back: the store then sees that the ttl has passed, and ends the job as expired.
            return Snooze(0)
        case Abort.TIMEOUT:
            text = f"the run took longer than its timeout of {describe(lease.options.timeout_ms)}"
            try:
                rest = _backoff_ms(TimeoutError(text), lease, backoffs)
            except Exception as broken:
                text += f" (and its backoff failed: {storable(message_of(broken))})"
                rest = _BACKOFF_FAILED_MS
            return Fail(Failure("Timeout", text), retry_in_ms=rest, final=discarded)
        case Abort.LOST:
            return None
        case Abort.RELEASE:
            return Release()
        case _ as never:
            assert_never(never)


def _backoff_ms(error: BaseException, lease: Lease, backoffs: Backoffs) -> int:
    return delay_ms(
        lease.options.backoff, lease.failures + 1, random=chance.get(), custom=backoffs, error=error
    )


def _delay_ms(delay: Duration | None, at: datetime | None) -> int | None:
    if at is not None:
        # The user's timestamp. On other libraries' errors a naive one is local time, as usual in Python.
        rest = (at.astimezone(UTC) - wall_clock.get()()).total_seconds()
        return min(max(round(rest * 1000), 0), MAX_MS)
    return None if delay is None else milliseconds(delay)


def failure_of(error: BaseException, *, note: str = "") -> Failure:
    """Return the failure to store for an error, bounded in size and encodable as UTF-8."""
    source = error.__cause__ if isinstance(error, Undecodable) and error.__cause__ else error
    kind, message = kind_and_message(source)
    # The traceback of a failed command would show only Penstock's code.
    has_traceback = source is error and not isinstance(error, CommandFailed)
    return Failure(
        storable(kind),
        _bounded(message + note, _LONGEST_MESSAGE),
        _bounded(traceback_of(error), _LONGEST_TRACEBACK, keep_end=True) if has_traceback else "",
    )


def kind_and_message(error: BaseException) -> tuple[str, str]:
    """Return the class name and message to store. A directive that wraps an error gets its class."""
    # A user's own class is as informative as the error that it wraps.
    if isinstance(error, StepFailed) and error.error_type:
        return error.error_type, message_of(error)
    is_ours = type(error) in (Unrecoverable, Retry)
    wrapped = error.wrapped if is_ours and isinstance(error, Directive) else None
    if wrapped is None:
        return type(error).__name__, message_of(error)
    own, cause = message_of(error), message_of(wrapped)
    return type(wrapped).__name__, own if cause in own else f"{own}: {cause}" if own else cause


def message_of(error: BaseException) -> str:
    """Return ``str(error)``, or a note if that raises."""
    try:
        return str(error)
    except Exception as broken:
        return f"<its message is not available: {type(broken).__name__}>"


def traceback_of(error: BaseException) -> str:
    """Return the traceback as text, or a note if formatting it raises."""
    try:
        return "".join(traceback.format_exception(error, limit=-_MOST_FRAMES))
    except Exception as broken:
        return f"<its traceback is not available: {type(broken).__name__}>"


def _bounded(text: str, longest: int, *, keep_end: bool = False) -> str:
    """Return ``text`` made storable, and cut if it is too long."""
    plain = storable(text)
    if len(plain) <= longest:
        return plain
    return "… " + plain[-longest:] if keep_end else plain[:longest] + " …"
