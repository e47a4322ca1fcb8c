"""Everything that was ever enqueued under a harness, read from the event logs, and how to look for some of it.

The log has every accepted job, whoever made it: code under test, a task, a flow, a scheduler. A duplicate is not in
it. The record of a job is taken before the job runs, so nothing that becomes of it hides how it came.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

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
        """Raises ``SerializationError`` if the payload is none of the task's; empty without a task."""
        return {} if self._task is None else arguments_of(self._task, self.raw.payload)

    @property
    def delay(self) -> timedelta:
        """How long after its enqueue it was to wait."""
        return timedelta(milliseconds=max(self.raw.run_at_ms - self.raw.enqueued_at_ms, 0))


class Recorder:
    """Reads on in the logs whenever it is told to look."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._read: dict[str, int] = {}
        self.jobs: list[Recorded] = []

    async def look(self, storage: Storage, queue: str) -> None:
        """Note what was enqueued since the last look."""
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
    """The arguments that a run with this payload gets, by name, in their annotated types, defaults included."""
    args, kwargs = task.signature.unpack(payload, task.serde)
    if task.batching is not None:  # the function takes lists, a job is one item
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
    """Whether a recorded job is one of those that are looked for; what is not given does not matter.

    Raises:
        InvalidInput: arguments that the task could never have got, or arguments without a task.
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
            raise InvalidInput("arguments are a task's: give the task itself, not its name, or payload=...")
        return {}
    signature = inspect.signature(task.func)
    parameters = [p for p in signature.parameters.values() if p.name in task.signature.parameters]
    try:
        return dict(signature.replace(parameters=parameters).bind_partial(*args, **kwargs).arguments)
    except TypeError as error:
        raise InvalidInput(f"no job of {task.name!r} could have these arguments: {error}.") from None


def _equal(expected: Any, name: str, job: Recorded) -> bool:
    actual = job.arguments.get(name)
    if expected == actual:
        return True
    assert job._task is not None
    serde = job._task.serde
    try:
        # Without an annotation the function gets what the serde makes of it: a list for a tuple.
        return bool(serde.decode(serde.encode(expected), Any) == serde.decode(serde.encode(actual), Any))
    except SerializationError:
        return False


def _shown(arguments: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in arguments.items())


# What a harness tells: which runs there were, and what is left.


RunOutcome: TypeAlias = Literal[
    "completed", "failed", "retrying", "snoozed", "released", "cancelled", "stalled"
]


@dataclass(frozen=True, slots=True)
class Ran:
    """One run of one job. ``outcome`` is what the store made of it, ``state`` the job's state after that.

    ``error`` is what the handler raised, the exception itself; ``failure`` is what was stored of it.
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


@dataclass(frozen=True, slots=True)
class Drained:
    """What a drain did: ``runs`` in their order, ``left`` the counts of queues that have open jobs, ``advanced`` how
    far it moved the clock."""

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
        """Runs after which their job had failed for good."""
        return self._with("failed")

    @property
    def retrying(self) -> list[Ran]:
        """Runs that failed, with attempts left."""
        return self._with("retrying")

    def _with(self, outcome: RunOutcome) -> list[Ran]:
        return [run for run in self.runs if run.outcome == outcome]
