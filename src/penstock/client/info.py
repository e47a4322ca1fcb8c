"""Snapshots of jobs, workers and children, with decoded values and times with a zone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import msgspec

from penstock.client.causes import Reason
from penstock.client.limits import in_units
from penstock.client.session import store_options
from penstock.client.situation import commands_from_code
from penstock.client.why import explain
from penstock.core.flow import DependencyRecord, DependencyState
from penstock.core.job import EMPTY_EXTRAS, Policy
from penstock.core.names import ref_of
from penstock.errors import SerializationError

if TYPE_CHECKING:
    from penstock.client.codec import JobCodec
    from penstock.client.flow.parts import Part
    from penstock.client.handle import JobHandle
    from penstock.core.job import Job
    from penstock.core.lifecycle import State
    from penstock.core.outcome import Failure
    from penstock.storage.values import WorkerRecord


_PLAIN: Final = (
    "id", "ref", "queue", "task", "priority", "runs", "failures", "attempts", "stalls", "worker", "blocked_by", "group",
    "cost", "flow", "scheduler", "usage", "cancelling", "has_rerun", "enqueued_at", "run_at", "claimed_at",
    "finished_at", "expires_at", "kept_until",
)  # fmt: skip
"""The fields that ``as_dict`` copies."""


class JobInfo:
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

    @property
    def id(self) -> str:
        return self.raw.id

    @property
    def queue(self) -> str:
        return self.raw.queue

    @property
    def ref(self) -> str:
        """Return queue and id as one string: ``app.job(ref)`` accepts it."""
        return ref_of(self.queue, self.id)

    @property
    def task(self) -> str:
        """Return the name of the task; empty for a payload without a task."""
        return self.raw.options.task

    def as_dict(self, *, traceback: bool = False) -> dict[str, Any]:
        """Return the fields as plain values, for JSON. Times are ``datetime``s; other special values are text.

        It contains the payload and, with ``traceback``, lines of your code. Do not show it to everyone.
        """
        failure = self.failure
        fields = {name: getattr(self, name) for name in _PLAIN}
        return fields | {
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
            return await explain(await app.connect(), self.raw)

    @property
    def state(self) -> State:
        return self.raw.state

    @property
    def payload(self) -> Any:
        return self._source.decode_payload(self.raw.payload)

    @property
    def result(self) -> Any:
        """Return the result of the job; ``None`` until it completes."""
        return self._source.decode_result(self.raw.result)

    @property
    def failure(self) -> Failure | None:
        """Return the last failure, with ``type``, ``message`` and ``traceback``; ``None`` if no run failed."""
        return self.raw.failure

    @property
    def progress(self) -> Any:
        """Return the last value of ``context.progress(...)``."""
        return None if self.raw.progress is None else msgspec.json.decode(self.raw.progress)

    @property
    def usage(self) -> dict[str, float]:
        """Return the usage that its runs reported."""
        return in_units(self.raw.extras.usage if self.raw.extras else None)

    @property
    def priority(self) -> int:
        return self.raw.priority

    @property
    def runs(self) -> int:
        return self.raw.runs

    @property
    def failures(self) -> int:
        return self.raw.failures

    @property
    def attempts(self) -> int:
        """Return the number of failures after which the job fails for good."""
        return self.raw.options.attempts

    @property
    def stalls(self) -> int:
        return self.raw.stalls

    @property
    def worker(self) -> str:
        return self.raw.worker

    @property
    def blocked_by(self) -> str:
        """Return what a blocked job waits for: ``group``, ``children`` or ``signal``."""
        return self.raw.blocked_by

    @property
    def group(self) -> str:
        """Return the key of the jobs that share its limits; empty if there is none."""
        return self.raw.extras.group if self.raw.extras else ""

    @property
    def cost(self) -> int:
        """Return the tokens that it takes from the bucket of its group."""
        return (self.raw.extras or EMPTY_EXTRAS).cost

    @property
    def step(self) -> str:
        """Return the step of its next run; empty before the first step."""
        return self.raw.extras.step if self.raw.extras else ""

    @property
    def awaits(self) -> str:
        """Return the signal that a suspended job waits for; empty if it is not suspended."""
        return self.raw.extras.awaits if self.raw.extras and self.raw.blocked_by == "signal" else ""

    @property
    def awaits_until(self) -> datetime | None:
        """Return when the suspension times out; ``None`` for never, or if it is not suspended."""
        return _instant(self.raw.extras.awaits_until_ms) if self.awaits and self.raw.extras else None

    @property
    def holds(self) -> Mapping[str, timedelta]:
        """Return the consumers that keep the finished job, each with its maximum time."""
        holds = (self.raw.extras and self.raw.extras.holds) or {}
        return {consumer: timedelta(milliseconds=ms) for consumer, ms in holds.items()}

    @property
    def headers(self) -> Mapping[str, str]:
        """Return the headers, for middleware and handlers."""
        extras = self.raw.extras
        return (extras and extras.headers) or {}

    @property
    def scheduler(self) -> str:
        """Return the name of the scheduler that made it; empty if there is none."""
        return self.raw.extras.scheduler if self.raw.extras else ""

    @property
    def scheduled_for(self) -> datetime | None:
        """Return the slot of its scheduler."""
        return _instant(self.raw.extras.slot_ms) if self.raw.extras else None

    @property
    def flow(self) -> str:
        """Return its flow; empty if there is none."""
        return self.raw.extras.flow if self.raw.extras else ""

    @property
    def has_children(self) -> bool:
        """Return whether it waits or waited for other jobs. ``handle.children()`` returns them."""
        return bool(self.raw.extras and self.raw.extras.has_dependencies)

    @property
    def dependents(self) -> list[tuple[str, str]]:
        """Return queue and id of the jobs of its flow that wait for it."""
        extras = self.raw.extras
        return [(job.queue, job.id) for job in (extras and extras.dependents) or ()]

    @property
    def cancelling(self) -> bool:
        """Return whether the active job was asked to stop."""
        return self.raw.cancelling

    @property
    def has_rerun(self) -> bool:
        """Return whether a rerun waits behind this active job."""
        return self.raw.has_rerun

    @property
    def enqueued_at(self) -> datetime | None:
        return _instant(self.raw.enqueued_at_ms)

    @property
    def run_at(self) -> datetime | None:
        """Return when the job is or was due."""
        return _instant(self.raw.run_at_ms)

    @property
    def claimed_at(self) -> datetime | None:
        return _instant(self.raw.claimed_at_ms)

    @property
    def finished_at(self) -> datetime | None:
        return _instant(self.raw.finished_at_ms)

    @property
    def expires_at(self) -> datetime | None:
        """Return when its ttl ends."""
        return _instant(self.raw.expires_at_ms)

    @property
    def kept_until(self) -> datetime | None:
        """Return when the finished job is deleted."""
        return _instant(self.raw.kept_until_ms)


def _readable(read: Callable[[], Any], raw: bytes) -> Any:
    try:
        return msgspec.to_builtins(read(), str_keys=True, enc_hook=str)
    except SerializationError:
        return f"<{len(raw)} bytes>"


def _failure_fields(failure: Failure, *, traceback: bool) -> dict[str, str]:
    fields = {"type": failure.type, "message": failure.message}
    return fields | {"traceback": failure.traceback} if traceback else fields


class WorkerInfo:
    """A worker, as of its last heartbeat."""

    __slots__ = ("raw",)

    def __init__(self, raw: WorkerRecord) -> None:
        self.raw = raw

    def __repr__(self) -> str:
        return f"<WorkerInfo {self.id} seen {self.raw.age_ms} ms ago>"

    @property
    def id(self) -> str:
        return self.raw.id

    @property
    def info(self) -> dict[str, Any]:
        """Return its own description: host, process, running jobs."""
        described: dict[str, Any] = msgspec.json.decode(self.raw.info) if self.raw.info else {}
        return described

    @property
    def dead(self) -> bool:
        """Return whether its process is known to be dead; false if the store does not know."""
        return self.raw.dead

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
        return datetime.fromtimestamp(self.raw.seen_at_ms / 1000, UTC)

    @property
    def age(self) -> timedelta:
        """Return the time since its last heartbeat, by the clock of the store."""
        return timedelta(milliseconds=self.raw.age_ms)


def _instant(ms: int) -> datetime | None:
    return datetime.fromtimestamp(ms / 1000, UTC) if ms else None


class Child:
    """A job that another job waits or waited for. ``raw`` is the record of the store."""

    __slots__ = ("_source", "raw")

    def __init__(self, source: JobCodec, raw: DependencyRecord) -> None:
        self._source = source
        self.raw = raw

    def __repr__(self) -> str:
        return f"<Child {self.ref} {self.state}>"

    @property
    def queue(self) -> str:
        return self.raw.queue

    @property
    def id(self) -> str:
        return self.raw.id

    @property
    def ref(self) -> str:
        """Return queue and id as one string: ``app.job(ref)`` accepts it."""
        return ref_of(self.queue, self.id)

    @property
    def state(self) -> DependencyState:
        """Return ``pending``, ``completed``, ``failed``, ``cancelled`` or ``removed``."""
        return self.raw.state

    @property
    def policy(self) -> Policy:
        """Return what its failure does to the waiting job."""
        return self.raw.policy

    @property
    def result(self) -> Any:
        """Return its result, decoded with the app's serde; ``None`` unless it completed."""
        return None if self.raw.result is None else self._source.decode_result(self.raw.result)

    @property
    def failure(self) -> Failure | None:
        """Return its failure, or ``None``."""
        return self.raw.failure


async def read_children(source: JobCodec, id: str) -> list[Child]:
    """Return the children of a job, in the order they were added."""
    from penstock.client.flow.handle import read_dependencies

    plain = source.app.queue(source.queue).job(id).source
    storage = await source.app.connect()
    return [Child(plain, record) for record in await read_dependencies(storage, source.queue, id)]


async def add_children(
    source: JobCodec, id: str, parts: Iterable[Part], *, on_failure: Policy
) -> list[JobHandle[Any]]:
    """Call ``flow.enqueue.add_children``, which is imported only when it is used."""
    from penstock.client.flow.enqueue import add_children

    return await add_children(source, id, parts, on_failure=on_failure)
