"""One run of one job, from the claim to the settle.

Only the worker's loop changes a run. Other threads may read it, and may set ``started_at`` (the thread that
starts the run) and ``saw_abort`` (the handler that checked).
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
"""Runs the handler of a run and returns its result; middleware wraps one call in another."""


class EncodedResult(NamedTuple):
    """A result from another process, already encoded for the store."""

    data: bytes


class Handler(NamedTuple):
    """The code that runs the jobs of one task; made when its first job arrives."""

    task: str
    runner: Runner
    call: Call
    encode: Callable[[Any], bytes]
    pack: Callable[[tuple[Any, ...], dict[str, Any]], bytes]


class Run:
    """One run of one job. ``outcome`` is set once; whatever the handler does after that is ignored."""

    __slots__ = (
        "abort",
        "aio_task",
        "claimed_at",
        "context",
        "discarded",
        "error",
        "handler",
        "kill",
        "lease",
        "outcome",
        "saw_abort",
        "served",
        "started_at",
        "stuck",
    )

    def __init__(self, lease: Lease, served: ServedQueue, handler: Handler, now: float) -> None:
        self.lease = lease
        self.served = served
        self.handler = handler
        self.claimed_at = now
        # 0.0 while the run waits for a thread or a process. The timeout counts from here, not from the claim.
        self.started_at = now
        self.abort: Abort | None = None
        self.outcome: Outcome | None = None
        # The exception that failed the run, until it is logged.
        self.error: BaseException | None = None
        self.aio_task: asyncio.Task[None] | None = None
        self.context: JobContext | None = None
        self.kill: Callable[[], None] | None = None
        self.discarded = False
        self.saw_abort = False
        self.stuck = False
