"""Snapshots of jobs, workers and children, with decoded values and times with a zone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timedelta
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, Generic, Never, TypeVar

import msgspec

from penstock.client.causes import Reason
from penstock.client.hints import Hinting
from penstock.client.limits import in_units
from penstock.client.session import store_options
from penstock.client.situation import commands_from_code, instant
from penstock.client.why import explain, in_store
from penstock.core.flow import DependencyRecord, DependencyState
from penstock.core.job import EMPTY_EXTRAS, JOB_FIELDS, Extras, Policy
from penstock.core.lifecycle import State
from penstock.core.names import ref_of
from penstock.core.outcome import Failure
from penstock.errors import SerializationError

if TYPE_CHECKING:
    from penstock.client.codec import JobCodec
    from penstock.client.flow import Part
    from penstock.client.handle import JobHandle
    from penstock.core.job import Job
    from penstock.storage.contract import Storage
    from penstock.storage.values import WorkerRecord


T_co = TypeVar("T_co", covariant=True)


class Field(property, Generic[T_co]):
    """A read-only property: the attribute at a path, ``Field[int]("raw.runs")``, or what a function returns."""

    def __init__(self, read: str | Callable[[Any], T_co]) -> None:
        super().__init__(attrgetter(read) if isinstance(read, str) else read, doc="")

    if TYPE_CHECKING:

        def __get__(self, of: object, owner: type[Any] | None = None) -> T_co: ...  # type: ignore[override]
        def __set__(self, of: object, value: Never) -> None: ...


def ref_field() -> Field[str]:
    """Return the field ``ref`` of an object with a ``queue`` and an ``id``."""
    return Field(lambda job: ref_of(job.queue, job.id))


def moment_field(path: str) -> Field[datetime | None]:
    """Return a field for the milliseconds at ``path``: an instant, or ``None`` for 0."""
    read = attrgetter(path)
    return Field(lambda of: instant(ms) if (ms := read(of)) else None)


class ExtrasFields:
    """The fields of a job's extras that ``JobInfo``, ``JobContext`` and ``ClaimedJob`` share."""

    __slots__ = ()

    if TYPE_CHECKING:

        @property
        def _extras(self) -> Extras: ...

    group = Field[str]("_extras.group")
    """The key of the jobs that share its limits; empty if there is none."""
    cost = Field[int]("_extras.cost")
    """The tokens that it takes from the bucket of its group."""
    stage = Field[str]("_extras.stage")
    """The stage of the last ``Snooze`` or ``Suspend``, at which the job continues; empty before the first."""
    scheduler = Field[str]("_extras.scheduler")
    """The name of the scheduler that made it; empty if there is none."""
    scheduled_for = moment_field("_extras.slot_ms")
    """The slot of its scheduler, even if the job runs later."""

    @property
    def headers(self) -> Mapping[str, str]:
        """Return the headers, for middleware and handlers."""
        return self._extras.headers or {}


_PLAIN: Final = ("text", "name", "number", "count", "flag", "time", "amounts")
"""The kinds of fields whose values JSON can hold, or that are times."""


class JobInfo(ExtrasFields):
    """A snapshot of a job, which does not change. ``raw`` is the record of the store.

    ``payload`` and ``result`` raise ``SerializationError`` if they cannot be decoded.
    """

    __slots__ = ("_source", "raw")

    def __init__(self, source: JobCodec, raw: Job) -> None:
        self._source = source
        self.raw = raw

    def __repr__(self) -> str:
        task = f" {self.task}" if self.task else ""
        return f"<JobInfo {self.ref}{task} {self.state}>"

    id = Field[str]("raw.id")
    queue = Field[str]("raw.queue")
    ref = ref_field()
    """Queue and id as one string: ``app.job(ref)`` accepts it."""

    task = Field[str]("raw.options.task")
    """The name of the task; empty for a payload without a task."""
    version = Field[str]("raw.options.version")
    """The version of the task that enqueued it."""
    incarnation = Field[int]("raw.incarnation")
    """The number of this life of its id, which identifies it in the log."""
    run_id = Field[str]("raw.run_id")
    """The table run that it belongs to; empty if there is none."""
    write_id = Field[str]("raw.write_id")
    """The write that it belongs to; empty if there is none."""

    def as_dict(self, *, traceback: bool = False) -> dict[str, Any]:
        """Return the fields as plain values, for JSON. Times are ``datetime``s; other special values are text.

        It contains the payload and, with ``traceback``, lines of your code. Do not show it to everyone.
        """
        failure = self.failure
        plain = {field.name: getattr(self, field.name) for field in JOB_FIELDS if field.kind in _PLAIN}
        return plain | {
            "ref": self.ref,
            "state": self.state.value,
            "payload": _readable(lambda: self.payload, self.raw.payload),
            "result": _readable(lambda: self.result, self.raw.result or b""),
            "progress": self.progress,
            "failure": None if failure is None else _failure_fields(failure, traceback=traceback),
            "headers": dict(self.headers),
        }

    async def why(self) -> Reason:
        """Return why the job of this snapshot does not run, with the remedy; or that it runs, or how it finished."""
        app = self._source.app
        with commands_from_code(store_options(app.named)):
            reason = await explain(await app.connect(), self.raw)
        return in_store(reason, app.url, app.namespace)

    state = Field[State]("raw.state")

    @property
    def payload(self) -> Any:
        return self._source.decode_payload(self.raw.payload)

    @property
    def result(self) -> Any:
        """Return the result of the job; ``None`` until it completes."""
        return self._source.decode_result(self.raw.result)

    failure = Field[Failure | None]("raw.failure")
    """The last failure, with ``type``, ``message`` and ``traceback``; ``None`` if no run failed."""

    @property
    def progress(self) -> Any:
        """Return the last value of ``context.progress(...)``."""
        return None if self.raw.progress is None else msgspec.json.decode(self.raw.progress)

    @property
    def usage(self) -> dict[str, float]:
        """Return the usage that its runs reported."""
        return in_units(self._extras.usage)

    priority = Field[int]("raw.priority")
    runs = Field[int]("raw.runs")
    failures = Field[int]("raw.failures")
    attempts = Field[int]("raw.options.attempts")
    """The number of failures after which the job fails for good."""
    stalls = Field[int]("raw.stalls")
    worker = Field[str]("raw.worker")
    blocked_by = Field[str]("raw.blocked_by")
    """The obstacle of a blocked job: ``group``, ``children`` or ``signal``."""

    @property
    def awaits(self) -> str:
        """Return the signal that a suspended job waits for; empty if it is not suspended."""
        return self._extras.awaits if self.blocked_by == "signal" else ""

    @property
    def awaits_until(self) -> datetime | None:
        """Return when the suspension times out; ``None`` for never, or if it is not suspended."""
        until_ms = self._extras.awaits_until_ms
        return instant(until_ms) if self.awaits and until_ms else None

    @property
    def holds(self) -> Mapping[str, timedelta]:
        """Return the consumers that keep the finished job, each with its maximum time."""
        holds = self._extras.holds or {}
        return {consumer: timedelta(milliseconds=ms) for consumer, ms in holds.items()}

    flow = Field[str]("_extras.flow")
    """Its flow; empty if there is none."""

    has_children = Field[bool]("_extras.has_dependencies")
    """True if it waits or waited for other jobs. ``handle.children()`` returns them."""

    @property
    def dependents(self) -> list[tuple[str, str]]:
        """Return queue and id of the jobs of its flow that wait for it."""
        return [(job.queue, job.id) for job in self._extras.dependents or ()]

    @property
    def _extras(self) -> Extras:
        return self.raw.extras or EMPTY_EXTRAS

    cancelling = Field[bool]("raw.cancelling")
    """True if the active job was asked to stop."""
    has_rerun = Field[bool]("raw.has_rerun")
    """True if a rerun waits behind this active job."""
    enqueued_at = moment_field("raw.enqueued_at_ms")
    run_at = moment_field("raw.run_at_ms")
    """The time when the job is or was due."""
    claimed_at = moment_field("raw.claimed_at_ms")
    finished_at = moment_field("raw.finished_at_ms")
    expires_at = moment_field("raw.expires_at_ms")
    """The time when its ttl ends."""
    kept_until = moment_field("raw.kept_until_ms")
    """The time when the finished job is deleted."""


def _readable(read: Callable[[], Any], raw: bytes) -> Any:
    try:
        return msgspec.to_builtins(read(), str_keys=True, enc_hook=str)
    except SerializationError:
        return f"<{len(raw)} bytes>"


def _failure_fields(failure: Failure, *, traceback: bool) -> dict[str, str]:
    fields = {"type": failure.type, "message": failure.message}
    return fields | {"traceback": failure.traceback} if traceback else fields


class WorkerInfo(Hinting):
    """A worker, as of its last heartbeat."""

    __slots__ = ("raw",)
    hints_for = "worker info"

    def __init__(self, raw: WorkerRecord) -> None:
        self.raw = raw

    def __repr__(self) -> str:
        return f"<WorkerInfo {self.id} seen {self.raw.age_ms} ms ago>"

    id = Field[str]("raw.id")

    @property
    def info(self) -> dict[str, Any]:
        """Return its own description: host, process, running jobs."""
        described: dict[str, Any] = msgspec.json.decode(self.raw.info) if self.raw.info else {}
        return described

    dead = Field[bool]("raw.dead")
    """True if its process is known to be dead; false if the store does not know."""

    @property
    def host(self) -> str:
        return str(self.info.get("host", ""))

    @property
    def pid(self) -> int:
        return int(self.info.get("pid", 0))

    @property
    def jobs(self) -> list[tuple[str, str]]:
        """Return queue and id of the jobs it runs, at most the first hundred."""
        return [(job["queue"], job["id"]) for job in self.info.get("running", ())]

    @property
    def seen_at(self) -> datetime:
        return instant(self.raw.seen_at_ms)

    @property
    def age(self) -> timedelta:
        """Return the time since its last heartbeat, by the clock of the store."""
        return timedelta(milliseconds=self.raw.age_ms)


class Child:
    """A job that another job waits or waited for. ``raw`` is the record of the store."""

    __slots__ = ("_source", "raw")

    def __init__(self, source: JobCodec, raw: DependencyRecord) -> None:
        self._source = source
        self.raw = raw

    def __repr__(self) -> str:
        return f"<Child {self.ref} {self.state}>"

    queue = Field[str]("raw.queue")
    id = Field[str]("raw.id")
    ref = ref_field()
    """Queue and id as one string: ``app.job(ref)`` accepts it."""

    state = Field[DependencyState]("raw.state")
    """``pending``, ``completed``, ``failed``, ``cancelled`` or ``removed``."""
    policy = Field[Policy]("raw.policy")
    """The effect of its failure on the waiting job."""

    @property
    def result(self) -> Any:
        """Return its result, decoded with the app's serde; ``None`` unless it completed."""
        return None if self.raw.result is None else self._source.decode_result(self.raw.result)

    failure = Field[Failure | None]("raw.failure")
    """Its failure, or ``None``."""


_PAGE: Final = 1000


async def read_dependencies(storage: Storage, queue: str, id: str) -> list[DependencyRecord]:
    """Return all dependencies of a job, read page by page."""
    records: list[DependencyRecord] = []
    while page := await storage.dependencies(queue, id, start=len(records), limit=_PAGE):
        records += page
        if len(page) < _PAGE:
            break
    return records


class Parent:
    """The children of a job, which ``JobHandle``, ``ClaimedJob`` and ``JobContext`` inherit."""

    __slots__ = ()

    if TYPE_CHECKING:
        id: Field[str]

        @property
        def _source(self) -> JobCodec: ...

    async def add_children(
        self, children: Iterable[Part], *, on_failure: Policy = "fail"
    ) -> list[JobHandle[Any]]:
        """Make the open job wait for more jobs: ``task.job(...)``, handles, or flows. Return their handles.

        A running job waits if its run ends with ``WaitForChildren`` (``wait_for_children()`` of a claimed job): it runs
        again when they have finished, and ``children()`` returns their results. A repeated run adds them again, so
        give them ids.

        Raises ``JobNotFound``, ``JobError`` if the job has finished, or ``InvalidInput``.
        """
        source = self._source
        return await source.app.add_children(source, self.id, children, on_failure=on_failure)

    async def children(self) -> list[Child]:
        """Return the jobs it waits or waited for, in the order added, with state, result or failure."""
        source = self._source
        plain = source.app.queue(source.queue).job(self.id).source
        records = await read_dependencies(await source.app.connect(), source.queue, self.id)
        return [Child(plain, record) for record in records]
