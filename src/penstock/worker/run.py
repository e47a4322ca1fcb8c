"""One run of one job: what the worker knows of a lease from the claim to the settle.

All of it is changed on the worker's loop only. Other threads may read, and may set ``started_at`` (the thread
that takes the run up) and ``saw_abort`` (the handler that looked).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.core.job import Lease
from penstock.core.outcome import Outcome
from penstock.core.verdict import Abort

if TYPE_CHECKING:
    from penstock.client.task import Runner
    from penstock.worker.context import JobContext
    from penstock.worker.slots import ServedQueue


Call = Callable[["Run"], Awaitable[Any]]
"""Runs the handler of a run and gives its result; middleware wraps one in another."""


class EncodedResult(NamedTuple):
    """A result that came from another process, in the bytes that are to be stored."""

    data: bytes


class Plan(NamedTuple):
    """How the runs of one task are made; bound once, when its first job comes."""

    task: str
    runner: Runner
    call: Call
    encode: Callable[[Any], bytes]
    pack: Callable[[tuple[Any, ...], dict[str, Any]], bytes]


class Run:
    """See the module. ``outcome`` is set once; what the handler does after that counts for nothing."""

    __slots__ = (
        "abort",
        "aio_task",
        "claimed_at",
        "context",
        "discarded",
        "error",
        "kill",
        "lease",
        "outcome",
        "plan",
        "saw_abort",
        "served",
        "started_at",
        "stuck",
    )

    def __init__(self, lease: Lease, served: ServedQueue, plan: Plan, now: float) -> None:
        self.lease = lease
        self.served = served
        self.plan = plan
        self.claimed_at = now
        # 0.0: still waits for a thread or a process. A timeout counts from here, not from the claim.
        self.started_at = now
        self.abort: Abort | None = None
        self.outcome: Outcome | None = None
        # The exception that made it fail, until that is logged.
        self.error: BaseException | None = None
        self.aio_task: asyncio.Task[None] | None = None
        self.context: JobContext | None = None
        self.kill: Callable[[], None] | None = None
        self.discarded = False
        self.saw_abort = False
        self.stuck = False
