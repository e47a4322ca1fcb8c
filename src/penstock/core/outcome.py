"""What became of one run of a job: plain data that a worker returns and a store applies.

Times are delays, never instants: the store's clock decides.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

DAMAGED: Final = "Damaged"
"""The error class of a job whose stored record cannot be read."""


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """Why a run failed. ``type`` is the exception's class name; all three are bounded in size by the sender."""

    type: str
    message: str
    traceback: str = ""


FAILURE_TEXTS: Final = {
    "Expired": "the job's ttl passed before it was finished",
    "Stalled": "its worker died or stopped renewing the lease %d times; the last one was %s",
    "BudgetExceeded": "the budget of its flow was spent before it began",
    "NothingToWaitFor": "the job was to wait for its children, and was given none since it last did. "
    "Add children before it waits, or end it.",
    "Damaged": "the stored record cannot be read: %s. Its bytes are kept with the job",
}
"""The messages of failures that a store itself gives a job, by type. Every engine uses these texts."""


def damaged_failure(why: str) -> Failure:
    """Return the failure of a job whose record cannot be read because of ``why``."""
    return Failure(DAMAGED, FAILURE_TEXTS[DAMAGED] % why)


class Complete(msgspec.Struct, frozen=True):
    """The run succeeded. Ends the job, even if it was to be cancelled or its ttl has passed.

    With ``ttl_ms`` the job's result is kept that long, whatever its options said.
    """

    result: bytes = b""
    ttl_ms: int | None = None


class Fail(msgspec.Struct, frozen=True):
    """The run failed. The job runs again in ``retry_in_ms`` if attempts are left, unless ``final``.

    A job that is to be cancelled is cancelled instead of retried; one past its ttl ends as ``expired``. With
    ``ttl_ms`` the failure is kept that long, whatever the job's options said, if it is the job's end.
    """

    failure: Failure
    retry_in_ms: int = 0
    final: bool = False
    ttl_ms: int | None = None


class Snooze(msgspec.Struct, frozen=True):
    """Run again in ``delay_ms``, at that ``step`` (``None``: where it is); counts in no limit.

    ``unknown``: the worker handed the job back because it does not know the task.
    """

    delay_ms: int
    step: str | None = None
    unknown: bool = False


class Suspend(msgspec.Struct, frozen=True):
    """Run again when ``signal`` comes, or after ``timeout_ms`` (0: never without it); counts in no limit.

    A signal that came earlier is taken, and the job waits for a worker at once.
    """

    signal: str
    timeout_ms: int = 0
    step: str | None = None


class Release(msgspec.Struct, frozen=True):
    """Handed back unfinished: waiting again under the number it had, counted in no limit."""


class Limited(msgspec.Struct, frozen=True):
    """Handed back as by ``Release``, because something out there takes no more for ``delay_ms``.

    Until then nothing of the job's group is started; with the scope ``queue``, or without a group, nothing of the
    queue.
    """

    delay_ms: int
    scope: Literal["group", "queue"] = "group"


class Await(msgspec.Struct, frozen=True):
    """Run again when all children have ended, at once if they have; counted in no limit.

    A job that has waited for all of them before, and was given no more since, fails instead.
    """


class Cancel(msgspec.Struct, frozen=True):
    """The handler stopped because it was asked to."""

    reason: str = ""


Outcome = Complete | Fail | Snooze | Suspend | Release | Limited | Await | Cancel
