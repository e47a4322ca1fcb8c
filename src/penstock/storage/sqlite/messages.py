"""Messages between queues.

One lock covers all queues of a database, so the transaction that sends a message also applies it.
"""

from __future__ import annotations

from typing import NamedTuple

from penstock.core.flow import DependencyState
from penstock.core.job import Dependent, NewJob
from penstock.core.outcome import Failure


class End(NamedTuple):
    """The outcome of a job that others depend on."""

    queue: str
    id: str
    state: DependencyState
    result: bytes | None
    failure: Failure | None


class Put(NamedTuple):
    """Enqueue this job. The jobs in ``to_come`` are dependencies that notify it of their ends themselves."""

    job: NewJob
    to_come: frozenset[tuple[str, str]] = frozenset()


class Link(NamedTuple):
    """Notify ``dependent`` of the end of the job of this id."""

    id: str
    dependent: Dependent


class Done(NamedTuple):
    """Report the end of a dependency to ``dependent``."""

    dependent: Dependent
    end: End


Message = Put | Link | Done
