"""The outcomes of one run of a job: plain data that a worker returns and a store applies.

Times are delays, never timestamps: the store's clock decides.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

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
    "BudgetExceeded": "the budget of its flow was spent before it started",
    "NothingToWaitFor": "the job waited for its children again, but has had no new ones since its last wait. "
    "Add children before it waits, or finish it.",
    "Damaged": "the stored record cannot be read: %s. Its bytes are kept with the job",
}
"""The messages of failures that a store creates, by type. All engines use these texts."""


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
