"""The runs of tasks of ``django.tasks`` in workers of Penstock.

A run adds itself to the payload of its job when it begins, and its error when it fails, so that a result can list the
workers and the errors of all attempts, even of those whose worker died.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable
from datetime import UTC, datetime
from traceback import format_exception
from typing import Any, Final

from asgiref.sync import sync_to_async
from django.tasks import Task, TaskContext, TaskResult, TaskResultStatus
from django.tasks.signals import task_finished, task_started
from django.utils.json import normalize_json

import penstock.client.task as tasks
from penstock.client.app import App
from penstock.errors import Directive, Retry, Suspension, Unrecoverable
from penstock.integrations.django.configuration import worker_ids
from penstock.integrations.django.results import Attempt, Payload, enqueued_at, error_of, made_at, moment
from penstock.worker.context import JobContext

_MOST_FRAMES: Final = 50
_MOST_TRACEBACKS: Final = 10
"""The number of attempts whose tracebacks are kept in full."""


def as_penstock_task(app: App, task: Task, sender: type) -> tasks.Task[..., Any]:
    """Return the task of ``app`` that runs ``task``; the first call makes it. ``sender`` is that of the signals."""
    known = app.tasks.get(task.module_path)
    if known is not None:
        return known

    def begin(context: JobContext, payload: Payload) -> _Run:
        run = _Run(context, task, payload, worker=worker_ids.get(app, ""), sender=sender)
        run.record()
        return run

    run = _async_run(task, begin) if inspect.iscoroutinefunction(task.func) else _sync_run(task, begin)
    run.__module__, run.__qualname__ = task.func.__module__, task.func.__qualname__
    made: tasks.Task[..., Any] = app.task(name=task.module_path, queue=task.queue_name)(run)
    return made


def _sync_run(task: Task, begin: Callable[[JobContext, Payload], _Run]) -> Callable[..., Any]:
    def run(
        context: JobContext,
        args: list[Any],
        kwargs: dict[str, Any],
        run_after: datetime | None = None,
        runs: list[Attempt] = [],  # noqa: B006 (decoded for each job)
    ) -> Any:
        this = begin(context, Payload(args, kwargs, run_after, runs))
        this.started()
        try:
            value = this.json(task.func(*this.arguments, **kwargs))
        except BaseException as error:
            this.failed(error)
            raise
        this.completed(value)
        return value

    return run


def _async_run(task: Task, begin: Callable[[JobContext, Payload], _Run]) -> Callable[..., Any]:
    async def run(
        context: JobContext,
        args: list[Any],
        kwargs: dict[str, Any],
        run_after: datetime | None = None,
        runs: list[Attempt] = [],  # noqa: B006 (decoded for each job)
    ) -> Any:
        this = begin(context, Payload(args, kwargs, run_after, runs))
        # Receivers of signals may use the database, which they must not on a loop.
        await sync_to_async(this.started)()
        try:
            value = this.json(await task.func(*this.arguments, **kwargs))
        except Exception as error:
            await sync_to_async(this.failed)(error)
            raise
        except BaseException as error:
            this.failed(error)
            raise
        await sync_to_async(this.completed)(value)
        return value

    return run


class _Run:
    """One run of a task, with the result as the task and the receivers of signals see it."""

    def __init__(
        self, context: JobContext, task: Task, payload: Payload, *, worker: str, sender: type
    ) -> None:
        self._context = context
        self._task = task
        self._payload = payload
        self._sender = sender
        # The worker's clock may be behind the one that made the id.
        self._attempt = Attempt(worker=worker, at=max(_now(), made_at(context.id) or context.enqueued_at))
        self._runs = [*payload.runs, self._attempt]
        self.result = TaskResult(
            task=task,
            id=context.ref,
            status=TaskResultStatus.RUNNING,
            enqueued_at=enqueued_at(context.id) or moment(context.enqueued_at),
            started_at=moment(self._runs[0].at),
            last_attempted_at=moment(self._attempt.at),
            finished_at=None,
            args=payload.args,
            kwargs=payload.kwargs,
            backend=task.backend,
            errors=[error_of(each) for each in payload.runs if each.error],
            worker_ids=[each.worker for each in self._runs],
        )

    @property
    def arguments(self) -> list[Any]:
        """Return the positional arguments of the function."""
        args: list[Any] = self._payload.args
        return [TaskContext(task_result=self.result), *args] if self._task.takes_context else args

    def started(self) -> None:
        task_started.send(self._sender, task_result=self.result)

    def json(self, value: Any) -> Any:
        """Return what JSON makes of the return value. No retry helps if it is something else."""
        try:
            return normalize_json(value)
        except TypeError as error:
            raise Unrecoverable(error) from error

    def completed(self, value: Any) -> None:
        object.__setattr__(self.result, "_return_value", value)
        self._finish(TaskResultStatus.SUCCESSFUL)

    def failed(self, error: BaseException) -> None:
        """Record an error of the function, unless it is one that only says when the job goes on."""
        if isinstance(error, asyncio.CancelledError | Suspension):
            return
        if isinstance(error, Directive) and not isinstance(error, Retry | Unrecoverable):
            return
        kind = type(_cause(error))
        self._attempt.error = f"{kind.__module__}.{kind.__qualname__}"
        self._attempt.traceback = "".join(format_exception(error, limit=-_MOST_FRAMES))
        self.record()
        if isinstance(error, Unrecoverable) or self._context.failures + 1 >= self._context.attempts:
            self.result.errors.append(error_of(self._attempt))
            self._finish(TaskResultStatus.FAILED)

    def record(self) -> None:
        """Put this run into the payload. The worker sends it while the task runs, or before the outcome."""
        for each in self._runs[:-_MOST_TRACEBACKS]:
            each.traceback = each.traceback.rstrip("\n").rpartition("\n")[2]
        payload = self._payload
        self._context.update_payload(payload.args, payload.kwargs, payload.run_after, self._runs)

    def _finish(self, status: TaskResultStatus) -> None:
        object.__setattr__(self.result, "status", status)
        object.__setattr__(self.result, "finished_at", moment(max(_now(), self._attempt.at)))
        task_finished.send(self._sender, task_result=self.result)


def _cause(error: BaseException) -> BaseException:
    """Return the error that ``Retry`` or ``Unrecoverable`` wraps, or the error itself."""
    return error.__cause__ or error if isinstance(error, Retry | Unrecoverable) else error


def _now() -> datetime:
    """Return the time, no more exactly than stores keep it."""
    return datetime.fromtimestamp(time.time_ns() // 1_000_000 / 1000, UTC)
