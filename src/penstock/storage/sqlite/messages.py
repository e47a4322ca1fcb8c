"""What a verb on one queue has to say to another, and how it gets there.

One lock is over all queues of a database, so messages are applied in the transaction that sends them.
"""

from __future__ import annotations

from typing import NamedTuple

from penstock.core.flow import DependencyState
from penstock.core.job import Dependent, NewJob
from penstock.core.outcome import Failure


class End(NamedTuple):
    """What became of a job that others depend on."""

    queue: str
    id: str
    state: DependencyState
    result: bytes | None
    failure: Failure | None


class Put(NamedTuple):
    """Enqueue this job. ``to_come``: jobs it depends on that tell it of their ends by themselves."""

    job: NewJob
    to_come: frozenset[tuple[str, str]] = frozenset()


class Link(NamedTuple):
    """Tell ``dependent`` of the end of the job of this id."""

    id: str
    dependent: Dependent


class Done(NamedTuple):
    """A dependency of ``dependent`` has ended."""

    dependent: Dependent
    end: End


Message = Put | Link | Done
