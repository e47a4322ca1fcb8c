"""The manual clock of a harness, and draining: run what is due, one job after the other, in a fixed order."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

from msgspec.structs import asdict

from penstock.client.firing import sweep
from penstock.core.lifecycle import State
from penstock.core.outcome import Release
from penstock.core.units import MAX_MS, Duration, milliseconds
from penstock.errors import PenstockError, Retry
from penstock.storage.values import Settlement, Take
from penstock.testing.record import Ran

if TYPE_CHECKING:
    from penstock.core.job import Job, Lease
    from penstock.storage.contract import Storage
    from penstock.storage.values import Swept
    from penstock.testing.bench import Bench
    from penstock.testing.record import Recorder
    from penstock.worker.worker import Worker


# After this many jumps without an effect, time alone changes nothing.
_MOST_FRUITLESS: Final = 1_000
# A moment may have come since the last sweep.
_JUST_NOW_MS: Final = 1_000
_SWEPT_AT_ONCE: Final = 1_000
# Parts of a sweep's answer that do not mean that a job may be ready.
_HOUSEKEEPING: Final = frozenset({"pruned", "trimmed", "more", "wait_ms", "slot_wait_ms", "awaiting"})


class ManualClock:
    """Moves the time of all queues of a harness forward. Real time passes as well.

    A queue's clock moves when the queue is next used, so that queues created later have the same time. Any thread may
    move the clock.
    """

    def __init__(self) -> None:
        self.moved_ms = 0
        self._applied: dict[str, int] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<ManualClock {self.now().isoformat()}, moved by {timedelta(milliseconds=self.moved_ms)}>"

    def now(self) -> datetime:
        """Return the time of the queues."""
        return datetime.now(UTC) + timedelta(milliseconds=self.moved_ms)

    def advance(self, duration: Duration) -> None:
        """Let ``duration`` pass. This runs no jobs: see ``Harness.drain``."""
        self.advance_ms(milliseconds(duration, what="duration"))

    def advance_ms(self, ms: int) -> None:
        with self._lock:
            self.moved_ms += ms

    async def apply(self, storage: Storage, queue: str) -> None:
        """Move the time of ``queue`` to this clock."""
        with self._lock:
            behind_ms = self.moved_ms - self._applied.get(queue, 0)
            self._applied[queue] = self.moved_ms
        if behind_ms:
            await storage.shift_clock(queue, behind_ms)


@dataclass(eq=False, kw_only=True)
class Drain:
    """One call of ``drain`` or ``run_all``, on ``queues``, or on all queues if empty, including new ones.

    Queues run by name, each until nothing in it can be claimed, and again from the first while anything happens. Within
    a queue the store decides the order. Without ``schedules``, no schedule makes a job, and its slots stay due.
    """

    storage: Storage
    bench: Bench
    clock: ManualClock
    recorder: Recorder
    worker: Worker
    queues: Sequence[str]
    raise_failures: bool
    max_runs: int
    schedules: bool
    ran: Callable[[Ran], None]
    runs: list[Ran] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._claim_waits: dict[str, int | None] = {}
        self._sweep_waits: dict[str, int | None] = {}
        # The number of changes so far, and by queue the number when it was last empty.
        self._happened = 0
        self._emptied: dict[str, int] = {}
        self._happened_at_jump = 0
        self._fruitless = 0

    async def due(self) -> None:
        """Run everything that is due now, and the jobs this leads to, until nothing can be claimed."""
        while True:
            # A run or sweep of another queue may have enqueued jobs here since.
            unsure = [queue for queue in await self._queues() if self._emptied.get(queue) != self._happened]
            if not unsure:
                return
            for queue in unsure:
                await self._empty(queue)

    async def through(self, ms: int) -> None:
        """Run everything that falls due while ``ms`` pass, moving the clock from one moment to the next."""
        end_ms = self.clock.moved_ms + ms
        while True:
            await self.due()
            # The waits of sweeps include those for slots.
            waits = [*self._claim_waits.values(), *(self._sweep_waits if self.schedules else {}).values()]
            waits += [] if self.schedules else [await self._next_job_ms()]
            wait_ms = min((wait for wait in waits if wait is not None), default=ms)
            left_ms = end_ms - self.clock.moved_ms
            if left_ms <= 0:
                return
            self._jump(min(wait_ms, left_ms), most_ms=left_ms)

    async def to_the_end(self) -> None:
        """Run everything until no job is open, or time alone does not help the open jobs."""
        while True:
            await self.due()
            wait_ms = await self._next_job_ms()
            if wait_ms is None or self._fruitless > _MOST_FRUITLESS:
                return
            self._jump(wait_ms)

    async def until_begun(self, queue: str, id: str, *, most_ms: int, benches: Sequence[Bench]) -> None:
        """Let up to ``most_ms`` pass until neither the job nor those it waits for are scheduled for later.

        Current runs on ``benches`` keep their leases: they may be waiting for this.
        """
        end_ms = self.clock.moved_ms + most_ms
        while await self._awaits_time(queue, id):
            waits = [wait_ms for wait_ms in self._claim_waits.values() if wait_ms is not None]
            wait_ms, left_ms = min(waits, default=MAX_MS), end_ms - self.clock.moved_ms
            if wait_ms > left_ms or self._fruitless > _MOST_FRUITLESS:
                return
            for bench in benches:
                await bench.hold_leases(self.storage, wait_ms)
            self._jump(wait_ms, most_ms=left_ms)

    async def _awaits_time(self, queue: str, id: str) -> bool:
        await self.due()
        [job] = await self.storage.get(queue, [id])
        return job is not None and (job.state is State.SCHEDULED or job.blocked_by == "children")

    def _jump(self, ms: int, *, most_ms: int = MAX_MS) -> None:
        # Double the step after each jump without effect: a store may report a moment slightly too early.
        self._fruitless = self._fruitless + 1 if self._happened == self._happened_at_jump else 0
        step_ms = max(ms, 1 << min(self._fruitless, 30)) if ms <= 1 else ms
        self.clock.advance_ms(min(step_ms, most_ms))
        self._happened_at_jump = self._happened
        self._emptied.clear()

    async def _queues(self) -> Sequence[str]:
        return self.queues or await self.storage.queues()

    async def _empty(self, queue: str) -> None:
        await self._sweep(queue)
        while await self._run_claimable(queue):
            if not await self._sweep(queue):
                break
        self._emptied[queue] = self._happened

    async def _run_claimable(self, queue: str) -> bool:
        before = self._happened
        while True:
            await self.recorder.look(self.storage, queue)
            options = self.worker.options
            take = Take(options.id, self.bench.at_once(queue), options.lease_ms)
            claimed = await self.storage.claim(queue, take)
            self._claim_waits[queue] = claimed.wait_ms
            if not claimed.leases:
                return self._happened > before
            await self._run(queue, claimed.leases)

    async def _run(self, queue: str, leases: Sequence[Lease]) -> None:
        parts = self.bench.parted(queue, leases)
        try:
            while parts:
                ran = await self.bench.run(queue, parts.pop(0))
                self._happened += 1
                self._note(ran)
        finally:
            left = [Settlement(lease.id, lease.token, Release()) for part in parts for lease in part]
            if left:  # a failure before them was raised
                await self.storage.settle(queue, left)

    async def _sweep(self, queue: str) -> bool:
        before, more = self._happened, True
        while more:
            swept = await self._swept(queue)
            more = swept.more
            self._happened += any(count for name, count in asdict(swept).items() if name not in _HOUSEKEEPING)
            self._sweep_waits[queue] = swept.wait_ms
        return self._happened > before

    async def _swept(self, queue: str) -> Swept:
        if not self.schedules:
            return await self.storage.sweep(queue, limit=_SWEPT_AT_ONCE)
        return await sweep(self.storage, queue, enqueue_chain=self.worker.app.enqueue_chain)

    def _note(self, ran: Sequence[Ran]) -> None:
        for run in ran:
            self.runs.append(run)
            self.ran(run)
        for run in ran:
            self._check(run)

    def _check(self, run: Ran) -> None:
        if len(self.runs) >= self.max_runs:
            raise PenstockError(self._too_many(run))
        if self.raise_failures and run.failure is not None and not isinstance(run.error, Retry):
            error = run.error or PenstockError(f"{run.failure.type}: {run.failure.message}")
            error.add_note(f"in run {run.run} of job {run.id!r} of queue {run.queue!r}")
            raise error

    def _too_many(self, run: Ran) -> str:
        schedulers = Counter(ran.scheduler for ran in self.runs if ran.scheduler)
        if 2 * schedulers.total() < len(self.runs):
            why = f"does {run.task or 'a job'!r} of queue {run.queue!r} enqueue itself again?"
            return f"stopped after {len(self.runs)} runs: {why} Raise max_runs if you expect that many runs."
        [(name, count)] = schedulers.most_common(1)
        return (
            f"stopped after {len(self.runs)} runs: the schedule {name!r} made {count} of these jobs. Leave schedules "
            "out with schedules=False, or raise max_runs if you expect that many runs."
        )

    async def _next_job_ms(self) -> int | None:
        """Return the milliseconds until time can change an open job; retention does not count."""
        waits: list[int] = []
        for queue in await self._queues():
            wait_ms = self._claim_waits.get(queue)
            waits += [] if wait_ms is None else [wait_ms]
            now_ms = round(self.clock.now().timestamp() * 1000)
            for state in (State.WAITING, State.BLOCKED, State.ACTIVE):
                page = await self.storage.list_jobs(queue, state, limit=1000)
                moments = [at_ms for job in page.jobs for at_ms in _moments(job)]
                waits += [max(at_ms - now_ms, 0) for at_ms in moments if at_ms > now_ms - _JUST_NOW_MS]
        return min(waits, default=None)


def _moments(job: Job) -> tuple[int, ...]:
    """Return when time moves an open job that is not scheduled: at its ttl, suspend timeout and lease end."""
    until_ms = job.extras.awaits_until_ms if job.extras and job.state is State.BLOCKED else 0
    return (job.expires_at_ms, until_ms, job.lease_until_ms)
