"""A backend for ``django.tasks`` (Django 6): tasks of Django are jobs of Penstock.

::

    TASKS = {"default": {"BACKEND": "penstock.integrations.django.PenstockBackend", "QUEUES": ["default", "mail"]}}

Each task of Django is a task of the app by the path of its function. ``OPTIONS`` are options of its jobs, such as
``attempts`` and ``timeout``; and ``enqueue_on_commit``: true, or the alias of a database, to enqueue when the
transaction commits. ``@task(options={"attempts": 5})`` sets them for one task (Django 6.1).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from django.core import checks
from django.db import transaction
from django.tasks import Task, TaskResult, TaskResultStatus, task_backends
from django.tasks.backends.base import BaseTaskBackend
from django.tasks.exceptions import InvalidTask, TaskResultDoesNotExist
from django.tasks.signals import task_enqueued
from django.utils import timezone
from django.utils.json import normalize_json
from django.utils.module_loading import import_string

from penstock.client.app import App
from penstock.client.handle import JobHandle
from penstock.client.info import JobInfo
from penstock.client.loopthread import run as run_on_loop_thread
from penstock.client.task import Dispatch
from penstock.core.names import check_queue, ref_of, uuid7
from penstock.errors import InvalidName, PenstockError
from penstock.integrations.django.configuration import get_app
from penstock.integrations.django.results import enqueued_at, result_of
from penstock.integrations.django.runs import as_penstock_task

_OWN: Final = "enqueue_on_commit"
_LONGEST_RESULT_ID: Final = 63
"""Django promises that the ids of results are shorter than 64 characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PenstockTask(Task):  # type: ignore[misc]  # Django has no types
    """A task of Django with options of Penstock's jobs."""

    options: Mapping[str, Any] | None = field(default=None, hash=False)


class PenstockBackend(BaseTaskBackend):  # type: ignore[misc]
    """Enqueues tasks of Django as jobs of the app of the settings. ``manage.py penstock worker`` runs them."""

    task_class = PenstockTask
    supports_defer = True
    supports_async_task = True
    supports_get_result = True
    supports_priority = True

    def __init__(self, alias: str, params: Mapping[str, Any]) -> None:
        super().__init__(alias, params)
        self.job_options = {name: value for name, value in self.options.items() if name != _OWN}
        on_commit = self.options.get(_OWN, False)
        self.database = "default" if on_commit is True else on_commit or None
        """The database whose transactions are waited for, if any."""

    @property
    def app(self) -> App:
        """Return the app of the settings."""
        return get_app()

    def validate_task(self, task: Task) -> None:
        """Raise ``InvalidTask`` unless jobs can be made of ``task``. Workers that import it know it from here on."""
        super().validate_task(task)
        try:
            check_queue(task.queue_name)
            self._dispatch(task, id=uuid7())
        except PenstockError as error:
            raise InvalidTask(str(error)) from error
        longest = _LONGEST_RESULT_ID - len(ref_of("", uuid7()))
        if len(task.queue_name) > longest:
            raise InvalidTask(
                f"The name of queue {task.queue_name!r} is too long: the id of a result has the name of its queue, and "
                f"Django wants ids shorter than 64 characters. Use at most {longest} characters."
            )

    def enqueue(self, task: Task, args: Sequence[Any], kwargs: Mapping[str, Any]) -> TaskResult:
        """Enqueue a call of ``task``, or with ``enqueue_on_commit`` have the transaction enqueue it."""
        result, send = self._prepare(task, args, kwargs)
        if self.database is not None and transaction.get_connection(self.database).in_atomic_block:
            transaction.on_commit(partial(self._send, send, result), using=self.database)
        else:
            self._send(send, result)
        return result

    async def aenqueue(self, task: Task, args: Sequence[Any], kwargs: Mapping[str, Any]) -> TaskResult:
        """See ``enqueue``."""
        if self.database is not None:
            return await super().aenqueue(task, args, kwargs)
        result, send = self._prepare(task, args, kwargs)
        await send()
        self._enqueued(result)
        return result

    def get_result(self, result_id: str) -> TaskResult:
        """Return the result of a job that the store has. Raise ``TaskResultDoesNotExist``."""
        handle = self._handle(result_id)
        return self._result(result_id, run_on_loop_thread(handle.get_or_none(), may_block_loop=True))

    async def aget_result(self, result_id: str) -> TaskResult:
        """See ``get_result``."""
        return self._result(result_id, await self._handle(result_id).get_or_none())

    def check(self, **options: object) -> list[checks.CheckMessage]:
        """Return what is wrong with this entry of ``TASKS``."""
        found = []
        try:
            self.app.queue("default").prepare(None, **self.job_options)
        except PenstockError as error:
            hint = f"Give options of jobs, such as attempts or timeout, and {_OWN}."
            found.append(
                checks.Error(
                    f"TASKS[{self.alias!r}]['OPTIONS'] is not valid: {error}", hint=hint, id="penstock.E006"
                )
            )
        return found

    def _prepare(
        self, task: Task, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[TaskResult, Callable[[], Any]]:
        """Return the result of a call that waits to run, and a function that enqueues it."""
        self.validate_task(task)
        id = uuid7()
        result = TaskResult(
            task=task,
            id=ref_of(task.queue_name, id),
            status=TaskResultStatus.READY,
            enqueued_at=None,
            started_at=None,
            finished_at=None,
            last_attempted_at=None,
            args=list(args),
            kwargs=dict(kwargs),
            backend=self.alias,
            errors=[],
            worker_ids=[],
        )
        dispatch = self._dispatch(task, id=id)
        arguments = (normalize_json(list(args)), normalize_json(dict(kwargs)), _as_aware(task))
        return result, partial(dispatch.enqueue, *arguments)

    def _dispatch(self, task: Task, *, id: str) -> Dispatch[..., Any]:
        options = {**self.job_options, **(getattr(task, "options", None) or {})}
        return as_penstock_task(self.app, task, type(self)).options(
            **options, id=id, queue=task.queue_name, priority=-int(task.priority), run_at=_as_aware(task)
        )

    def _send(self, send: Callable[[], Any], result: TaskResult) -> None:
        run_on_loop_thread(send(), may_block_loop=True)
        self._enqueued(result)

    def _enqueued(self, result: TaskResult) -> None:
        object.__setattr__(result, "enqueued_at", enqueued_at(result.id))
        task_enqueued.send(type(self), task_result=result)

    def _handle(self, result_id: str) -> JobHandle[Any]:
        try:
            return self.app.job(result_id)
        except InvalidName:
            raise TaskResultDoesNotExist(result_id) from None

    def _result(self, result_id: str, job: JobInfo | None) -> TaskResult:
        if job is None:
            raise TaskResultDoesNotExist(result_id)
        try:
            task = import_string(job.task)
        except ImportError:
            raise TaskResultDoesNotExist(result_id) from None
        if not isinstance(task, Task):
            raise TaskResultDoesNotExist(result_id)
        return result_of(job, task, backend=self.alias)


def _as_aware(task: Task) -> Any:
    """Return when the task is due, with a zone: without ``USE_TZ``, Django has local times without one."""
    due = task.run_after
    return timezone.make_aware(due) if due is not None and timezone.is_naive(due) else due


def serve_backends(app: App) -> None:
    """Have workers of ``app`` serve the queues of all backends of Penstock in ``TASKS``."""
    for backend in task_backends.all():
        if isinstance(backend, PenstockBackend):
            app.served.update(backend.queues)
