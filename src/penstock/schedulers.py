"""What apps and queues do with schedulers."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, Unpack

from penstock.core.display import shown
from penstock.core.names import check_scheduler
from penstock.core.schedule import AfterCompletion, Plan, unpack_plan
from penstock.errors import InvalidInput, InvalidOption
from penstock.firing import job_of_slot
from penstock.handle import JobHandle
from penstock.scheduler import SchedulerInfo, When, put_scheduler, read_schedule
from penstock.task import JobSpec, Task

if TYPE_CHECKING:
    from penstock.core.job import NewJob
    from penstock.queue import Queue
    from penstock.source import Source
    from penstock.storage.base import Storage

__all__ = ["AppSchedulers", "QueueSchedulers"]


class _WithoutArguments(Protocol):
    """A task that can be enqueued without arguments."""

    def job(self) -> JobSpec[Any]: ...


S = TypeVar("S", bound=_WithoutArguments)


class AppSchedulers:
    """The schedulers of an app. ``App`` has all of this."""

    if TYPE_CHECKING:

        async def connect(self) -> Storage: ...
        async def queues(self) -> list[str]: ...
        def queue(self, name: str) -> Queue: ...

    def __init__(self) -> None:
        self._declared: dict[tuple[str, str], Plan] = {}

    async def schedule(self, name: str, job: JobSpec[Any], **when: Unpack[When]) -> SchedulerInfo:
        """Have a job come again: ``await app.schedule("nightly", report.job(), cron="0 3 * * *", tz="Europe/Berlin")``.

        ``job`` is a template, with whatever options it was made with but ``run_at``; the id of each job is the
        scheduler's name and the slot. ``when`` is in ``When``. A scheduler belongs to the job's queue; one of that
        name there is changed if it differs, and left alone if not.

        Raises:
            InvalidInput: a name, an expression, a zone or an option that is not valid. Nothing was written.
        """
        schedule = read_schedule(when)
        name = check_scheduler(name)
        if not isinstance(job, JobSpec):
            raise InvalidInput(
                f"{shown(job)} cannot be scheduled. Give task.job(...); for a flow, of a task that puts it in."
            )
        return await put_scheduler(await self.connect(), job.queue, name, schedule=schedule, job=job.job)

    def scheduled(self, *, name: str | None = None, **when: Unpack[When]) -> Callable[[S], S]:
        """Decorates a task that takes no arguments: ``@app.scheduled(cron="0 3 * * *")`` above ``@app.task``.

        A worker of the task's queue puts the scheduler in when it starts; it is called what the task is called.
        """
        schedule = read_schedule(when)

        def declare(task: S) -> S:
            if not isinstance(task, Task):
                raise InvalidInput(f"{shown(task)} is not a task. Put @app.scheduled(...) above @app.task.")
            try:
                job = task.job()
            except InvalidInput as error:
                raise InvalidInput(
                    f"Task {shown(task.name)} takes arguments, and @app.scheduled(...) gives none. Use "
                    f"app.schedule(name, {task.name}.job(...), ...) in a function under @app.on_start."
                ) from error
            self._declared[job.queue, check_scheduler(name or task.name)] = Plan(schedule, job.job)
            return task

        return declare

    async def schedulers(self) -> list[SchedulerInfo]:
        """The schedulers of all queues, by queue and name."""
        return [info for queue in await self.queues() for info in await self.queue(queue).schedulers()]

    async def put_declared(self, storage: Storage, queues: Collection[str] | None = None) -> None:
        """Put in the schedulers that decorators asked for on these queues, or all: what a starting worker does."""
        for (queue, name), plan in self._declared.items():
            if queues is None or queue in queues:
                await put_scheduler(storage, queue, name, schedule=plan.schedule, job=plan.job)


class QueueSchedulers:
    """The schedulers of one queue. ``Queue`` has all of this."""

    _source: Source

    async def schedulers(self) -> list[SchedulerInfo]:
        """All of them, by name."""
        storage, queue = await self._source.app.connect(), self._source.queue
        return [SchedulerInfo(queue, raw) for raw in (await storage.schedulers(queue)).schedulers]

    async def scheduler(self, name: str) -> SchedulerInfo | None:
        """The one of that name."""
        storage, queue = await self._source.app.connect(), self._source.queue
        found = (await storage.schedulers(queue, [check_scheduler(name)])).schedulers
        return SchedulerInfo(queue, found[0]) if found else None

    async def pause_scheduler(self, name: str) -> bool:
        """Fire no slot until it is resumed; false if there is none of that name. Jobs that are in go on."""
        storage = await self._source.app.connect()
        return await storage.pause_scheduler(self._source.queue, check_scheduler(name))

    async def resume_scheduler(self, name: str) -> bool:
        """The end of a pause. Slots of the time between are left out, whatever ``missed`` says."""
        storage, queue = await self._source.app.connect(), self._source.queue
        found = await storage.schedulers(queue, [check_scheduler(name)])
        if not found.schedulers:
            return False
        schedule = unpack_plan(found.schedulers[0].spec).schedule
        is_repeating = isinstance(schedule.timing, AfterCompletion)
        next_ms = None if is_repeating else schedule.next_after(found.now_ms) or 0
        return await storage.resume_scheduler(queue, name, next_ms=next_ms)

    async def remove_scheduler(self, name: str) -> bool:
        """Forget it; false if there is none of that name. Its jobs stay."""
        storage = await self._source.app.connect()
        return await storage.remove_scheduler(self._source.queue, check_scheduler(name))

    async def fire_now(self, name: str) -> JobHandle[Any]:
        """Put in one of its jobs beside its slots, also while it is paused. Counts in no limit.

        Raises ``InvalidOption`` if there is none of that name.
        """
        storage, queue = await self._source.app.connect(), self._source.queue
        found = await storage.schedulers(queue, [check_scheduler(name)])
        if not found.schedulers:
            raise InvalidOption(
                f"queue {shown(queue)} has no scheduler {shown(name)}. Look at queue.schedulers()."
            )
        job = job_of_slot(unpack_plan(found.schedulers[0].spec), name, found.now_ms)
        answer = await (await self._source.app.session()).enqueue(queue, job)
        return JobHandle(self._source, answer.id, answer)

    async def _put_scheduler(self, name: str, job: NewJob, when: When) -> SchedulerInfo:
        schedule = read_schedule(when)
        storage = await self._source.app.connect()
        return await put_scheduler(
            storage, self._source.queue, check_scheduler(name), schedule=schedule, job=job
        )
