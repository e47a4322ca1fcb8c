"""Flows: jobs that depend on others. docs/verbs.md describes how they run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

import msgspec

from penstock.core.job import EMPTY_EXTRAS, Dependency, Dependent, NewJob, Policy
from penstock.core.outcome import FAILURE_TEXTS, Failure

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
    match state:
        case "failed" if failure is not None:
            cause = f"failed: {failure.type}: {failure.message}"
        case "removed" if failure is not None and failure.type == "DependencyNotFound":
            cause = "is not known"
        case "removed" if failure is not None:
            cause = f"was refused: {failure.message}"
        case "failed" | "cancelled" | "removed":
            cause = {"failed": "failed", "cancelled": "was cancelled", "removed": "was removed"}[state]
        case _:
            raise AssertionError(state)
    return Failure("DependencyFailed", f"dependency {queue}/{id} {cause}")


def not_found(queue: str, id: str) -> Failure:
    """Return the failure of a dependency that has no record."""
    return Failure("DependencyNotFound", f"job {queue}/{id} is not known: it never was, or is no longer kept")
