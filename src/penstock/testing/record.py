"""The records of a harness: the jobs that were enqueued, and their runs. Also the search among them, and stubs.

The jobs are read from the event logs, which have each job once, whether a test, a task, a flow or a scheduler enqueued
it. They are recorded before they run.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias

from penstock.client.info import JobInfo
from penstock.core.lifecycle import EventType, State
from penstock.core.outcome import Failure
from penstock.core.units import milliseconds
from penstock.errors import InvalidInput, SerializationError
from penstock.storage.values import Counts

if TYPE_CHECKING:
    from penstock.client.app import App
    from penstock.client.task import Task
    from penstock.storage.contract import Storage


Match: TypeAlias = "Callable[[Recorded], bool]"


class Recorded(JobInfo):
    """A job as it was when it was enqueued. ``arguments`` are those of its task, by name."""

    __slots__ = ("_task",)

    def __init__(self, app: App, info: JobInfo) -> None:
        super().__init__(info._source, info.raw)
        self._task = app.tasks.get(info.task)

    def __repr__(self) -> str:
        what = f"{self.task}({_shown(self.arguments)})" if self._task else repr(self.payload)
        return f"<{self.ref}: {what}>"

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the arguments by name; empty without a task. Raise ``SerializationError`` if they do not fit."""
        return {} if self._task is None else arguments_of(self._task, self.raw.payload)

    @property
    def delay(self) -> timedelta:
        """Return how long the job was delayed when it was enqueued."""
        return timedelta(milliseconds=max(self.raw.run_at_ms - self.raw.enqueued_at_ms, 0))


class Recorder:
    """Reads new jobs from the event logs."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._read: dict[str, int] = {}
        self.jobs: list[Recorded] = []

    async def look(self, storage: Storage, queue: str) -> None:
        """Record the jobs enqueued since the last look."""
        while True:
            page = await storage.read_events(queue, after=self._read.get(queue, 0), limit=1000)
            self._read[queue] = page.next
            new = [event for event in page.events if event.type == EventType.ENQUEUED]
            source = self._app.queue(queue)
            for event, job in zip(
                new, await storage.get(queue, [event.id for event in new]) if new else [], strict=True
            ):
                if job is not None and job.incarnation == event.incarnation:
                    self.jobs.append(Recorded(self._app, JobInfo(source._source, job)))
            if page.next >= page.last:
                return


def arguments_of(task: Task[..., Any], payload: bytes) -> dict[str, Any]:
    """Return the arguments in this payload by name, in their annotated types, and the defaults of the others."""
    args, kwargs = task.signature.unpack(payload, task.serde)
    if task.batching is not None:  # The function takes lists; a job is one item.
        return dict(zip(task.signature.parameters, args, strict=True))
    bound = inspect.signature(task.func).bind(*args, **kwargs).arguments
    bound.pop(task.signature.context_parameter or "", None)
    return dict(bound)


def matcher(
    task: Task[..., Any] | str | None,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    queue: str | None,
    id: str | None,
    delay: Any,
    priority: int | None,
    payload: Any,
) -> Match:
    """Return a predicate on recorded jobs. ``None`` matches anything.

    Raises:
        InvalidInput: the task cannot take these arguments, or there are arguments without a task.
    """
    name = task if isinstance(task, str) or task is None else task.name
    expected = _expected(task, args, kwargs)
    delay_ms = None if delay is None else milliseconds(delay, what="delay")

    def matches(job: Recorded) -> bool:
        return (
            name in (None, job.task)
            and queue in (None, job.queue)
            and id in (None, job.id)
            and priority in (None, job.priority)
            and delay_ms in (None, job.delay / timedelta(milliseconds=1))
            and (payload is None or payload == job.payload)
            and all(_equal(value, key, job) for key, value in expected.items())
        )

    return matches


def _expected(
    task: Task[..., Any] | str | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    if isinstance(task, str) or task is None:
        if args or kwargs:
            raise InvalidInput("to match arguments, give the task itself, not its name, or use payload=...")
        return {}
    signature = inspect.signature(task.func)
    parameters = [p for p in signature.parameters.values() if p.name in task.signature.parameters]
    try:
        return dict(signature.replace(parameters=parameters).bind_partial(*args, **kwargs).arguments)
    except TypeError as error:
        raise InvalidInput(f"{task.name!r} cannot take these arguments: {error}.") from None


def _equal(expected: Any, name: str, job: Recorded) -> bool:
    actual = job.arguments.get(name)
    if expected == actual:
        return True
    assert job._task is not None
    serde = job._task.serde
    try:
        # Without an annotation the serde decides the type: a tuple arrives as a list.
        return bool(serde.decode(serde.encode(expected), Any) == serde.decode(serde.encode(actual), Any))
    except SerializationError:
        return False


def _shown(arguments: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in arguments.items())


RunOutcome: TypeAlias = Literal[
    "completed", "failed", "retrying", "snoozed", "released", "cancelled", "stalled"
]


@dataclass(frozen=True, slots=True)
class Ran:
    """One run of one job, with its ``outcome`` in the store and the job's ``state`` after it.

    ``error`` is the exception that the handler raised; ``failure`` is its stored form. ``scheduler`` is the schedule
    that made the job; empty for other jobs.
    """

    queue: str
    id: str
    task: str
    run: int
    outcome: RunOutcome
    state: State | None
    at: datetime
    result: Any = None
    error: BaseException | None = None
    failure: Failure | None = None
    scheduler: str = ""


@dataclass(frozen=True, slots=True)
class Drained:
    """The result of a drain: the ``runs`` in order, the counts of queues with open jobs (``left``), and how far the
    clock moved (``advanced``)."""

    runs: list[Ran] = field(default_factory=list)
    left: Mapping[str, Counts] = field(default_factory=dict)
    advanced: timedelta = timedelta()

    def __len__(self) -> int:
        return len(self.runs)

    def __bool__(self) -> bool:
        return bool(self.runs)

    @property
    def completed(self) -> list[Ran]:
        return self._with("completed")

    @property
    def failed(self) -> list[Ran]:
        """Return the runs whose job failed for good."""
        return self._with("failed")

    @property
    def retrying(self) -> list[Ran]:
        """Return the runs that failed with attempts left."""
        return self._with("retrying")

    def _with(self, outcome: RunOutcome) -> list[Ran]:
        return [run for run in self.runs if run.outcome == outcome]


@dataclass(eq=False, repr=False, kw_only=True)
class Stub:
    """Replaces the function of a task; made by ``Harness.stub``. ``calls`` has the arguments of each run, by name.

    It lasts until ``remove()`` or the end of its ``with`` block.
    """

    returns: Any
    raises: BaseException | None
    does: Callable[..., Any] | None
    end: Callable[[], None]
    calls: list[dict[str, Any]] = field(default_factory=list)

    async def answer(self, arguments: dict[str, Any]) -> Any:
        """Return or raise the stubbed outcome of a run."""
        self.calls.append(arguments)
        if self.raises is not None:
            raise self.raises.with_traceback(None)
        if self.does is None:
            return self.returns
        answer = self.does(**arguments)
        return await answer if inspect.isawaitable(answer) else answer

    def remove(self) -> None:
        """Restore the task's function."""
        self.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()
