"""A job as it is in the store now, for people: decoded values, and times with a time zone."""

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
"""The fields that ``as_dict`` has as they are."""


class JobInfo:
    """A snapshot: it does not change. ``raw`` is what the store said; the rest is read from it when asked for.

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
        """The task's name; empty for a payload without a task."""
        return self.raw.options.task

    def as_dict(self, *, traceback: bool = False) -> dict[str, Any]:
        """Return the fields as plain values, for JSON. Times are ``datetime``s; values that JSON lacks are text.

        It has the payload, and with ``traceback`` lines of your code: choose what you show to whom.
        """
        failure = self.failure
        told = {name: getattr(self, name) for name in _PLAIN}
        return told | {
            "state": self.state.value,
            "payload": _readable(lambda: self.payload, self.raw.payload),
            "result": _readable(lambda: self.result, self.raw.result or b""),
            "progress": self.progress,
            "failure": None if failure is None else _failure_fields(failure, traceback=traceback),
            "headers": dict(self.headers),
        }

    async def why(self) -> Reason:
        """Return why the job, as it was read, does not run, with the remedy; or that it runs, or how it ended."""
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
        """What the job returned; ``None`` as long as it has not."""
        return self._source.decode_result(self.raw.result)

    @property
    def failure(self) -> Failure | None:
        """Why the last run that failed did: ``type``, ``message``, ``traceback``."""
        return self.raw.failure

    @property
    def progress(self) -> Any:
        """What the running job last said of itself."""
        return None if self.raw.progress is None else msgspec.json.decode(self.raw.progress)

    @property
    def usage(self) -> dict[str, float]:
        """What its runs said they used."""
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
        """How many failures end the job."""
        return self.raw.options.attempts

    @property
    def stalls(self) -> int:
        return self.raw.stalls

    @property
    def worker(self) -> str:
        return self.raw.worker

    @property
    def blocked_by(self) -> str:
        """What a blocked job waits for: ``group``, ``children`` or ``signal``."""
        return self.raw.blocked_by

    @property
    def group(self) -> str:
        """The key of the jobs it shares a limit with; empty if there is none."""
        return self.raw.extras.group if self.raw.extras else ""

    @property
    def cost(self) -> int:
        """What it takes from its group's bucket."""
        return (self.raw.extras or EMPTY_EXTRAS).cost

    @property
    def step(self) -> str:
        """Where the job goes on in its next run; empty at its beginning."""
        return self.raw.extras.step if self.raw.extras else ""

    @property
    def awaits(self) -> str:
        """The signal that a suspended job waits for; empty if it is not suspended."""
        return self.raw.extras.awaits if self.raw.extras and self.raw.blocked_by == "signal" else ""

    @property
    def awaits_until(self) -> datetime | None:
        """When it goes on without the signal; ``None``: never, or it is not suspended."""
        return _instant(self.raw.extras.awaits_until_ms) if self.awaits and self.raw.extras else None

    @property
    def holds(self) -> Mapping[str, timedelta]:
        """The consumers that keep the job once it has ended, and for how long after its end at most."""
        holds = (self.raw.extras and self.raw.extras.holds) or {}
        return {consumer: timedelta(milliseconds=ms) for consumer, ms in holds.items()}

    @property
    def headers(self) -> Mapping[str, str]:
        """What was sent along for middleware and handlers."""
        extras = self.raw.extras
        return (extras and extras.headers) or {}

    @property
    def scheduler(self) -> str:
        """The scheduler it comes from; empty if there is none."""
        return self.raw.extras.scheduler if self.raw.extras else ""

    @property
    def scheduled_for(self) -> datetime | None:
        """The slot of its scheduler that it stands for."""
        return _instant(self.raw.extras.slot_ms) if self.raw.extras else None

    @property
    def flow(self) -> str:
        """The flow it came with; empty if it came alone."""
        return self.raw.extras.flow if self.raw.extras else ""

    @property
    def has_children(self) -> bool:
        """Whether it waits, or waited, for other jobs: ``handle.children()`` has them."""
        return bool(self.raw.extras and self.raw.extras.has_dependencies)

    @property
    def dependents(self) -> list[tuple[str, str]]:
        """Queue and id of the jobs that came with it and wait for it."""
        extras = self.raw.extras
        return [(one.queue, one.id) for one in (extras and extras.dependents) or ()]

    @property
    def cancelling(self) -> bool:
        """Asked to stop, not stopped yet."""
        return self.raw.cancelling

    @property
    def has_rerun(self) -> bool:
        """Whether a rerun waits for the end of this active job."""
        return self.raw.has_rerun

    @property
    def enqueued_at(self) -> datetime | None:
        return _instant(self.raw.enqueued_at_ms)

    @property
    def run_at(self) -> datetime | None:
        """When it is, or was, due."""
        return _instant(self.raw.run_at_ms)

    @property
    def claimed_at(self) -> datetime | None:
        return _instant(self.raw.claimed_at_ms)

    @property
    def finished_at(self) -> datetime | None:
        return _instant(self.raw.finished_at_ms)

    @property
    def expires_at(self) -> datetime | None:
        """When its ttl is over."""
        return _instant(self.raw.expires_at_ms)

    @property
    def kept_until(self) -> datetime | None:
        """When a finished job is forgotten."""
        return _instant(self.raw.kept_until_ms)


def _readable(read: Callable[[], Any], raw: bytes) -> Any:
    try:
        return msgspec.to_builtins(read(), str_keys=True, enc_hook=str)
    except SerializationError:
        return f"<{len(raw)} bytes>"


def _failure_fields(failure: Failure, *, traceback: bool) -> dict[str, str]:
    told = {"type": failure.type, "message": failure.message}
    return told | {"traceback": failure.traceback} if traceback else told


class WorkerInfo:
    """A worker as it last described itself."""

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
        """What it says of itself: host, process, what it runs."""
        described: dict[str, Any] = msgspec.json.decode(self.raw.info) if self.raw.info else {}
        return described

    @property
    def dead(self) -> bool:
        """Return true if its process is known to have died; false if it lives, or if the store cannot tell."""
        return self.raw.dead

    @property
    def host(self) -> str:
        return str(self.info.get("host", ""))

    @property
    def pid(self) -> int:
        return int(self.info.get("pid", 0))

    @property
    def jobs(self) -> list[tuple[str, str]]:
        """The jobs it runs, as queue and id; of more than a hundred, the first hundred."""
        return [(job["queue"], job["id"]) for job in self.info.get("running", ())]

    @property
    def seen_at(self) -> datetime:
        return datetime.fromtimestamp(self.raw.seen_at_ms / 1000, UTC)

    @property
    def age(self) -> timedelta:
        """How long ago that was, by the store's clock."""
        return timedelta(milliseconds=self.raw.age_ms)


def _instant(ms: int) -> datetime | None:
    return datetime.fromtimestamp(ms / 1000, UTC) if ms else None


# The children of a job, as the job sees them: what became of each.


class Child:
    """One job that another waits, or waited, for. ``raw`` is what the store said."""

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
        """``pending``, ``completed``, ``failed``, ``cancelled`` or ``removed``."""
        return self.raw.state

    @property
    def policy(self) -> Policy:
        """What its failure does to the job that waits."""
        return self.raw.policy

    @property
    def result(self) -> Any:
        """What it returned, read with the app's serde for results; ``None`` unless it completed."""
        return None if self.raw.result is None else self._source.decode_result(self.raw.result)

    @property
    def failure(self) -> Failure | None:
        """Why it failed."""
        return self.raw.failure


async def read_children(source: JobCodec, id: str) -> list[Child]:
    """The children of a job of the source's queue, in the order they were given."""
    from penstock.client.flow.handle import read_dependencies

    plain = source.app.queue(source.queue).job(id).source
    storage = await source.app.connect()
    return [Child(plain, record) for record in await read_dependencies(storage, source.queue, id)]


async def add_children(
    source: JobCodec, id: str, parts: Iterable[Part], *, on_failure: Policy
) -> list[JobHandle[Any]]:
    """See ``flow.enqueue.add_children``, which is imported by those who need it only."""
    from penstock.client.flow.enqueue import add_children

    return await add_children(source, id, parts, on_failure=on_failure)
