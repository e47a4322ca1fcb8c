"""The manual clock of a harness, and the drain, which runs jobs one after the other in a fixed order."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from msgspec.structs import asdict

from penstock.client.firing import sweep
from penstock.core.lifecycle import State
from penstock.core.units import MAX_MS, Duration, milliseconds
from penstock.errors import PenstockError, Retry
from penstock.storage.values import Held, Take
from penstock.testing.record import Ran
from penstock.worker.recovery import releases

if TYPE_CHECKING:
    from penstock.core.job import Job, Lease
    from penstock.storage.contract import Storage
    from penstock.storage.values import Swept
    from penstock.testing.bench import Bench
    from penstock.testing.record import Recorder
    from penstock.worker.worker import Worker


RaiseFailures: TypeAlias = bool | Literal["final"]

# After this many jumps without an effect, no open job waits for time alone.
_MOST_IDLE_JUMPS: Final = 1_000
# A time this recent may have come after the last sweep.
_JUST_NOW_MS: Final = 1_000
_SWEPT_AT_ONCE: Final = 1_000
# Parts of a sweep's answer that do not mean that a job may be ready.
_HOUSEKEEPING: Final = frozenset({"pruned", "trimmed", "more", "wait_ms", "slot_wait_ms", "awaiting"})


class ManualClock:
    """The time of all queues of a harness: real time, plus what ``advance`` adds. Any thread may use it.

    The store moves the time of a queue when the queue is next used, so queues that are created later have it too.
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
        """Let ``duration`` pass. This runs no jobs; ``Harness.drain`` does."""
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

    Queues take turns in the order of their names, each until nothing in it can be claimed, for as long as anything
    changes. Within a queue the store decides the order. Without ``schedules``, no schedule makes a job, and its slots
    stay due.
    """

    storage: Storage
    bench: Bench
    clock: ManualClock
    recorder: Recorder
    worker: Worker
    queues: Sequence[str]
    raise_failures: RaiseFailures
    max_runs: int
    schedules: bool
    ran: Callable[[Ran], None]
    runs: list[Ran] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._claim_waits: dict[str, int | None] = {}
        self._sweep_waits: dict[str, int | None] = {}
        self._paused: set[str] = set()
        # The number of changes so far, and by queue the number when it was last empty.
        self._changes = 0
        self._empty_at: dict[str, int] = {}
        self._changes_at_jump = 0
        self._idle_jumps = 0

    async def run_due(self) -> None:
        """Run everything that is due now, and the jobs this leads to, until nothing can be claimed."""
        while True:
            # A run or a sweep may have added jobs to a queue that was empty.
            queues = [queue for queue in await self._queues() if self._empty_at.get(queue) != self._changes]
            if not queues:
                return
            for queue in queues:
                await self._empty(queue)

    async def run_through(self, ms: int) -> None:
        """Run everything that falls due while ``ms`` pass, moving the clock from one moment to the next."""
        end_ms = self.clock.moved_ms + ms
        while True:
            await self.run_due()
            # The waits of sweeps include those for slots.
            waits = [*self._claim_waits.values(), *(self._sweep_waits if self.schedules else {}).values()]
            waits += [] if self.schedules else [await self._next_job_ms()]
            wait_ms = min((wait for wait in waits if wait is not None), default=ms)
            left_ms = end_ms - self.clock.moved_ms
            if left_ms <= 0:
                return
            self._jump(min(wait_ms, left_ms), most_ms=left_ms)

    async def run_to_end(self) -> None:
        """Run everything until no job is open, or the open jobs wait for more than time."""
        while True:
            await self.run_due()
            wait_ms = await self._next_job_ms()
            if wait_ms is None or self._idle_jumps > _MOST_IDLE_JUMPS:
                return
            self._jump(wait_ms)

    async def until_begun(self, queue: str, id: str, *, most_ms: int, benches: Sequence[Bench]) -> None:
        """Let up to ``most_ms`` pass, until neither the job nor a job it waits for is scheduled or held by a rate.

        The runs on ``benches`` keep their leases, because one of them may be the caller.
        """
        end_ms = self.clock.moved_ms + most_ms
        while await self._awaits_time(queue, id):
            waits = [wait_ms for wait_ms in self._claim_waits.values() if wait_ms is not None]
            wait_ms, left_ms = min(waits, default=MAX_MS), end_ms - self.clock.moved_ms
            if wait_ms > left_ms or self._idle_jumps > _MOST_IDLE_JUMPS:
                return
            for bench in benches:
                await bench.hold_leases(self.storage, wait_ms)
            self._jump(wait_ms, most_ms=left_ms)

    async def _awaits_time(self, queue: str, id: str) -> bool:
        await self.run_due()
        [job] = await self.storage.get(queue, [id])
        if job is None:
            return False
        if job.state is State.WAITING or job.blocked_by == "group":
            # A rate holds it, if the queue said when to claim again.
            return queue not in self._paused and self._claim_waits.get(queue) is not None
        return job.state is State.SCHEDULED or job.blocked_by == "children"

    def _jump(self, ms: int, *, most_ms: int = MAX_MS) -> None:
        # A store may report a time that is slightly too early, so jump twice as far after each jump without effect.
        self._idle_jumps = self._idle_jumps + 1 if self._changes == self._changes_at_jump else 0
        step_ms = max(ms, 1 << min(self._idle_jumps, 30)) if ms <= 1 else ms
        self.clock.advance_ms(min(step_ms, most_ms))
        self._changes_at_jump = self._changes
        self._empty_at.clear()

    async def _queues(self) -> Sequence[str]:
        return self.queues or await self.storage.queues()

    async def _empty(self, queue: str) -> None:
        await self._sweep(queue)
        while await self._run_claimable(queue):
            if not await self._sweep(queue):
                break
        self._empty_at[queue] = self._changes

    async def _run_claimable(self, queue: str) -> bool:
        before = self._changes
        while True:
            await self.recorder.look(self.storage, queue)
            options = self.worker.options
            take = Take(options.id, self.bench.batch_size(queue), options.lease_ms)
            claimed = await self.storage.claim(queue, take)
            self._claim_waits[queue] = claimed.wait_ms
            (self._paused.add if claimed.paused else self._paused.discard)(queue)
            if not claimed.leases:
                return self._changes > before
            await self._run(queue, claimed.leases)

    async def _run(self, queue: str, leases: Sequence[Lease]) -> None:
        groups = self.bench.grouped(queue, leases)
        try:
            while groups:
                ran = await self.bench.run(queue, groups.pop(0))
                self._changes += 1
                self._note(ran)
        finally:
            # If a run raised, hand back the leases of the others.
            if unstarted := [Held(lease.id, lease.token) for group in groups for lease in group]:
                await self.storage.settle(queue, releases(unstarted))

    async def _sweep(self, queue: str) -> bool:
        before, more = self._changes, True
        while more:
            swept = await self._swept(queue)
            more = swept.more
            self._changes += any(count for name, count in asdict(swept).items() if name not in _HOUSEKEEPING)
            self._sweep_waits[queue] = swept.wait_ms
        return self._changes > before

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
        if run.failure is not None and self._raises(run):
            error = run.error or PenstockError(f"{run.failure.type}: {run.failure.message}")
            error.add_note(f"in run {run.run} of job {run.id!r} of queue {run.queue!r}")
            raise error

    def _raises(self, run: Ran) -> bool:
        if self.raise_failures == "final":
            return run.state is State.FAILED
        return self.raise_failures and not isinstance(run.error, Retry)

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
