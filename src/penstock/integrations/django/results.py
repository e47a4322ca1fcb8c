"""Results of ``django.tasks``, read from jobs.

A job keeps a record of its runs beside the arguments: see ``runs``.
"""

from __future__ import annotations

import builtins
from datetime import UTC, datetime
from typing import Any, Final
from uuid import UUID

import msgspec
from django.conf import settings
from django.tasks import Task, TaskResult, TaskResultStatus
from django.tasks.base import TaskError
from django.utils import timezone

from penstock import errors
from penstock.client.info import JobInfo
from penstock.core.lifecycle import State
from penstock.core.outcome import Failure

_STATUS: Final = {
    State.SCHEDULED: TaskResultStatus.READY,
    State.WAITING: TaskResultStatus.READY,
    State.BLOCKED: TaskResultStatus.READY,
    State.ACTIVE: TaskResultStatus.RUNNING,
    State.COMPLETED: TaskResultStatus.SUCCESSFUL,
    State.FAILED: TaskResultStatus.FAILED,
    State.CANCELLED: TaskResultStatus.FAILED,
}
_OWN_FAILURES: Final = {"Timeout": "builtins.TimeoutError", "Expired": "penstock.errors.JobExpired"}


class Attempt(msgspec.Struct, omit_defaults=True):
    """One run of a task: its worker, when it began, and the path of its error, if it failed."""

    worker: str
    at: datetime
    error: str = ""
    traceback: str = ""


class Payload(msgspec.Struct, frozen=True):
    """The payload of a job: the arguments of the task, what ``run_after`` said, and its runs."""

    args: list[Any]
    kwargs: dict[str, Any]
    run_after: datetime | None = None
    runs: list[Attempt] = []


def moment(at: datetime | None) -> datetime | None:
    """Return a time as the project has it: with a zone, or as local time without ``USE_TZ``."""
    return at if at is None or settings.USE_TZ else timezone.make_naive(at)


def made_at(result_id: str) -> datetime | None:
    """Return when the id of a result was made, which it begins with; ``None`` for a job enqueued by other means."""
    try:
        ms = UUID(result_id.rpartition("/")[2]).int >> 80
    except ValueError:
        return None
    return datetime.fromtimestamp(ms / 1000, UTC)


def enqueued_at(result_id: str) -> datetime | None:
    """Return when the id of a result was made, as the project has times."""
    return moment(made_at(result_id))


def error_of(attempt: Attempt) -> TaskError:
    """Return the error of a failed run."""
    return TaskError(exception_class_path=attempt.error, traceback=attempt.traceback)


def result_of(job: JobInfo, task: Task, *, backend: str) -> TaskResult:
    """Return the result of ``task`` that ``job`` stands for, as it is now."""
    payload = msgspec.convert(job.payload, Payload)
    attempts = list(payload.runs)
    if job.state is State.ACTIVE and job.claimed_at is not None and len(attempts) < job.runs:
        attempts.append(Attempt(worker=job.worker, at=job.claimed_at))
    finished_at = job.finished_at
    if finished_at is not None and attempts:
        # The store's clock may be a little behind the worker's.
        finished_at = max(finished_at, attempts[-1].at)
    result = TaskResult(
        task=task.using(
            priority=-job.priority,
            queue_name=job.queue,
            backend=backend,
            run_after=moment(payload.run_after),
        ),
        id=job.ref,
        status=_STATUS[job.state],
        enqueued_at=enqueued_at(job.id) or moment(job.enqueued_at),
        started_at=moment(attempts[0].at) if attempts else None,
        last_attempted_at=moment(attempts[-1].at) if attempts else None,
        finished_at=moment(finished_at),
        args=payload.args,
        kwargs=payload.kwargs,
        backend=backend,
        errors=_errors(job, attempts),
        worker_ids=[attempt.worker for attempt in attempts],
    )
    if job.state is State.COMPLETED:
        object.__setattr__(result, "_return_value", job.result)
    return result


def _errors(job: JobInfo, attempts: list[Attempt]) -> list[TaskError]:
    """Return the errors of the runs, with the last one of the job if its run could not record it."""
    found = [error_of(attempt) for attempt in attempts if attempt.error]
    failure = job.failure
    ended = job.state in (State.FAILED, State.CANCELLED)
    if ended and not (attempts and attempts[-1].error):
        if failure is None:
            found.append(TaskError(exception_class_path="penstock.errors.JobCancelled", traceback=""))
        else:
            path, text = _class_path(failure), failure.traceback or f"{failure.type}: {failure.message}\n"
            found.append(TaskError(exception_class_path=path, traceback=text))
    return found


def _class_path(failure: Failure) -> str:
    """Return the path of an error that the worker itself stored, such as a time-out."""
    if failure.type in _OWN_FAILURES:
        return _OWN_FAILURES[failure.type]
    for module in (builtins, errors):
        if isinstance(getattr(module, failure.type, None), type):
            return f"{module.__name__}.{failure.type}"
    return "penstock.errors.JobFailed"
