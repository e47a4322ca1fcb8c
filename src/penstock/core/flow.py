"""Jobs that other jobs lead to: dead letters, which report permanent failures to another queue, and flows."""

from __future__ import annotations

import base64
import hashlib
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Final, Literal, NamedTuple

import msgspec

from penstock.core.job import EMPTY_EXTRAS, Conflict, Dependency, Dependent, NewJob, Options, Policy
from penstock.core.names import ref_of
from penstock.core.outcome import FAILURE_TEXTS, Failure

_LONGEST_ID: Final = 200
_AGAIN: Final = Conflict(mode="redispatch")
_encode = msgspec.json.Encoder().encode
_decode_options = msgspec.json.Decoder(Options).decode


class DeadLetter(msgspec.Struct, frozen=True, kw_only=True):
    """A job that failed for good, as the handler of its dead letter receives it.

    ``payload`` is the parsed JSON, or base64 text if the bytes are not JSON. ``error`` has the keys ``type`` and
    ``message``. ``failed_at`` is the store's time in epoch milliseconds.
    """

    queue: str
    id: str
    task: str
    payload: Any
    error: dict[str, str]
    failures: int
    failed_at: int

    @property
    def ref(self) -> str:
        """Return queue and id of the failed job as one string: ``app.job(ref)`` accepts it."""
        return ref_of(self.queue, self.id)


def dead_letter_job(
    *,
    queue: str,
    id: str,
    incarnation: int,
    task: str,
    payload: bytes,
    failure: Failure | None,
    failures: int,
    failed_at_ms: int,
    handled_by: str,
) -> NewJob:
    """Return the job that carries the dead letter. ``handled_by`` is the name of its task, or the encoded options.

    The id derives from the failed job's, so one life of a job has one letter. A job that is retried and fails again
    renews its letter.
    """
    cause = failure or Failure("", "")
    letter = DeadLetter(
        queue=queue,
        id=id,
        task=task,
        payload=_readable(payload),
        error={"type": cause.type, "message": cause.message},
        failures=failures,
        failed_at=failed_at_ms,
    )
    options = _decode_options(handled_by) if handled_by.startswith("[") else Options(task=handled_by)
    return NewJob(_letter_id(queue, id, incarnation), _encode(letter), options, conflict=_AGAIN)


def encode_options(options: Options) -> str:
    """Return the options of a letter's task as queue settings store them. A task name never begins with ``[``."""
    return _encode(options).decode()


def _readable(payload: bytes) -> Any:
    try:
        msgspec.json.decode(payload)
        return msgspec.Raw(payload)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return base64.b64encode(payload).decode()


def _letter_id(queue: str, id: str, incarnation: int) -> str:
    plain = f"{queue}:{id}:{incarnation}"
    return plain if len(plain) <= _LONGEST_ID else f"{queue}:{hashlib.sha256(plain.encode()).hexdigest()}"


# Flows: jobs that depend on others. docs/verbs.md describes how they run.


DependencyState = Literal["pending", "completed", "failed", "cancelled", "removed"]
POLICIES: Final[tuple[Policy, ...]] = ("fail", "ignore", "wait")


class Node(NamedTuple):
    """One job of a flow, and the queue it goes to."""

    queue: str
    job: NewJob


class DependencyRecord(msgspec.Struct, frozen=True):
    """A dependency as its dependent knows it."""

    queue: str
    id: str
    policy: Policy
    state: DependencyState
    result: bytes | None = None
    failure: Failure | None = None


def link_nodes(
    nodes: Sequence[Node], *, flow: str, into: Dependent | None = None, after: Sequence[Dependency] = ()
) -> list[Node]:
    """Return the nodes linked to each other: the extras of each list the dependents that its end concerns.

    ``into`` is a job outside the flow that depends on ``after``: the parent that the nodes are attached to.
    """
    dependents: defaultdict[tuple[str, str], list[Dependent]] = defaultdict(list)
    for dependency in after:
        if into is not None:
            dependents[dependency.queue, dependency.id].append(into)
    for queue, job in nodes:
        for dependency in job.after:
            dependents[dependency.queue, dependency.id].append(Dependent(queue, job.id, flow))
    return [Node(queue, _linked(job, flow, dependents.get((queue, job.id)))) for queue, job in nodes]


def _linked(job: NewJob, flow: str, dependents: list[Dependent] | None) -> NewJob:
    extras = msgspec.structs.replace(
        job.extras or EMPTY_EXTRAS, flow=flow, dependents=dependents, has_dependencies=bool(job.after)
    )
    return msgspec.structs.replace(job, extras=extras)


NOTHING_TO_WAIT_FOR: Final = Failure("NothingToWaitFor", FAILURE_TEXTS["NothingToWaitFor"])
"""The failure of a job that waits for dependencies but has no new ones."""
UNKNOWN_DEPENDENCY: Final = (
    "No job can wait for it, and nothing was written. Enqueue it first, or put both in one flow."
)


def failure_from(queue: str, id: str, state: DependencyState, failure: Failure | None) -> Failure:
    """Return the failure of a job whose dependency ended like this. Along a chain, the first cause stays."""
    if failure is not None and failure.type == "DependencyFailed":
        return failure
    ref = f"{queue}/{id}"
    match state:
        case "failed" if failure is not None:
            message = FAILURE_TEXTS["DependencyFailedWith"] % (ref, failure.type, failure.message)
        case "removed" if failure is not None and failure.type == "DependencyNotFound":
            message = FAILURE_TEXTS["DependencyUnknown"] % ref
        case "removed" if failure is not None:
            message = FAILURE_TEXTS["DependencyRefused"] % (ref, failure.message)
        case _:
            message = FAILURE_TEXTS[f"Dependency{state.capitalize()}"] % ref
    return Failure("DependencyFailed", message)


def not_found(queue: str, id: str) -> Failure:
    """Return the failure of a dependency that has no record."""
    return Failure("DependencyNotFound", FAILURE_TEXTS["DependencyNotFound"] % f"{queue}/{id}")
