"""One storm on one store: start the processes, cause the faults, wait for the last job, check everything."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from penstock.core.limits import Limit
from penstock.errors import StorageError
from penstock.storage.contract import Storage
from penstock.storage.values import QueueSettings
from tests.slow.local_processes import LocalProcesses, opened
from tests.storm.checker import CLAIMS_LOST, ENQUEUES_LOST, Verdict, check_storm
from tests.storm.journal import GATE, Appender, calls_path, fault_line
from tests.storm.plan import CAPS, GRACE_S, GROUPS, LEASE_S, LONGEST_PAUSE_S, PRODUCERS, QUEUES
from tests.storm.roles import AWAY
from tests.storm.stores import STORES, Store

RAGE = 0.85
"""The share of the time in which faults happen; in the rest the last jobs end."""
PER_KILL = {
    "kill": 1.0,
    "pause": 0.2,
    "stop": 0.2,
    "server": 0.05,
    "network": 0.5,
    "sentinel": 0.1,
    "cluster": 0.1,
    "slots": 0.2,
    "crash": 0.1,
}
"""How many faults of each kind there are for every kill."""
OF_PROCESSES = frozenset({"kill", "pause", "stop"})
MOST_OPEN = 5000
AT_LEAST_QUEUED = 0.95
"""The share of the jobs that are queued at least. One unit in ten has pairs with the same dedup key."""
MOST_FAILED_STARTS = 2
"""A worker tries for 30 s to reach the store at its start. That often in a row, a fault may be in its way."""
AT_WORK_BYTES = 200
"""A call file that is longer has calls in it."""


@dataclass(frozen=True)
class Plan:
    """The size of a storm. Faults are spread over ``seconds``; the storm ends soon after. The time stands still while
    workers are far behind, until ``most_seconds`` have passed. ``replicas``: that many must have a job before it counts
    as accepted."""

    store: str
    jobs: int
    kills: int
    seconds: float
    faults: frozenset[str]
    seed: int = 1
    workers: int = 4
    replicas: int = 0
    most_seconds: float = 0.0
    """The default is four times ``seconds``, and two minutes at least."""


@dataclass(frozen=True)
class Outcome:
    """The end of a storm."""

    plan: Plan
    verdict: Verdict
    seconds: float
    faults: Counter[str]


async def rage(plan: Plan, folder: Path) -> Outcome:
    """Run a storm in an empty folder."""
    make, _ = STORES[plan.store]
    begun = time.monotonic()
    with make(folder, plan.faults, seed=plan.seed) as store:
        store.wait_for(plan.replicas)
        storm = Storm(plan, store, folder)
        await storm.run()
        async with opened(store.own_url) as storage:
            verdict = await check_storm(
                storage, folder, jobs=plan.jobs, excused=_excused(plan), calm=plan.faults <= OF_PROCESSES
            )
    return Outcome(plan, verdict, time.monotonic() - begun, storm.done)


def _excused(plan: Plan) -> frozenset[str]:
    """What a failover by a crash may lose."""
    if "crash" not in plan.faults:
        return frozenset()
    return CLAIMS_LOST if plan.replicas else CLAIMS_LOST | ENQUEUES_LOST


class Pace:
    """The time of a storm in seconds, which stands still while too many of the released jobs have not ended.

    On a busy machine a worker needs seconds to start. Without this, it would be killed before it has done anything.
    """

    def __init__(self, plan: Plan) -> None:
        self.seconds = 0.0
        self._most_open = min(MOST_OPEN, plan.jobs // 4)
        self._begun = self._at = time.monotonic()
        self._most_seconds = plan.most_seconds or max(4 * plan.seconds, 120.0)

    @property
    def is_over(self) -> bool:
        """Whether the storm has taken too long."""
        return time.monotonic() - self._begun > self._most_seconds

    def go_on(self, *, released: int, ended: int) -> None:
        """Let time pass, if workers keep up."""
        now = time.monotonic()
        if released * AT_LEAST_QUEUED - ended <= self._most_open:
            self.seconds += now - self._at
        self._at = now

    async def until(self, seconds: float) -> bool:
        """Wait for that time; false: it will not come."""
        while self.seconds < seconds and not self.is_over:
            await asyncio.sleep(0.02)
        return not self.is_over


class Storm:
    """The processes of a storm, and the faults that befall them and their store. ``done`` counts the faults."""

    def __init__(self, plan: Plan, store: Store, folder: Path) -> None:
        self.done: Counter[str] = Counter()
        self._plan = plan
        self._store = store
        self._folder = folder
        self._chance = random.Random(plan.seed)
        self._faults = Appender(folder / "faults")
        self._busy: set[str] = set()
        self._topology = asyncio.Lock()
        self._pace = Pace(plan)

    async def run(self) -> None:
        """Return when the last job has ended and the workers have stopped."""
        self._open_gate(0)
        async with opened(self._store.own_url) as storage:
            await _prepare(storage)
        with LocalProcesses(
            self._store.url,
            self._folder,
            seed=self._plan.seed,
            roles="tests.storm.roles",
            **self._store.environment,
        ) as self._processes:
            for n in range(PRODUCERS):
                self._processes.launch("producer", f"producer-{n}", self._plan.jobs)
            for n in range(self._plan.workers):
                self._processes.launch("worker", f"worker-{n}")
            supervision = asyncio.create_task(self._supervise())
            try:
                await self._cause_faults()
                self._store.heal()
                await self._drain()
            finally:
                supervision.cancel()
                await asyncio.gather(supervision, return_exceptions=True)
            await asyncio.gather(*(self._end(name) for name in self._processes.names("worker")))
        self._faults.close()

    # Faults

    async def _cause_faults(self) -> None:
        """Every fault at its time, beside the others; the gate opens as time goes by."""
        span = self._plan.seconds * RAGE
        causes: dict[str, Callable[[], Awaitable[str]]] = {
            "kill": self._kill,
            "pause": self._pause,
            "stop": self._stop,
        } | {kind: self._of_store(fault) for kind, fault in self._store.faults.items()}
        self._pace = Pace(self._plan)
        opening = asyncio.create_task(self._open_gate_slowly(span))
        async with asyncio.TaskGroup() as faults:
            for at, kind in self._timetable(causes.keys(), span):
                if not await self._pace.until(at):
                    break
                faults.create_task(self._cause(kind, causes[kind]))
        await opening

    def _timetable(self, kinds: Collection[str], span: float) -> list[tuple[float, str]]:
        """Each kind evenly over the time, but never on the beat."""
        table = []
        for kind in sorted(self._plan.faults.intersection(kinds)):
            count = max(1, round(self._plan.kills * PER_KILL[kind]))
            table += [((n + self._chance.random()) * span / count, kind) for n in range(count)]
        return sorted(table)

    async def _cause(self, kind: str, cause: Callable[[], Awaitable[str]]) -> None:
        try:
            detail = await cause()
        except Exception as error:
            self._note("fault failed", detail=f"{kind}: {error!r}")
            return
        self.done[kind] += 1
        if kind not in OF_PROCESSES:
            self._note(kind, detail=detail)

    def _of_store(self, fault: Callable[[], str]) -> Callable[[], Awaitable[str]]:
        async def cause() -> str:
            async with self._topology:
                return await asyncio.to_thread(fault)

        return cause

    async def _kill(self) -> str:
        role = "producer" if self._chance.random() < 0.15 else "worker"
        name = await self._choose(role)
        self._note("kill", name)
        self._processes.kill(name)
        self._busy.discard(name)
        return name

    async def _pause(self) -> str:
        """Suspend a worker until its leases have run out, then let it go on."""
        name = await self._choose("worker")
        self._note("pause", name)
        pid = self._processes.pid(name)
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(self._chance.uniform(1.3 * LEASE_S, LONGEST_PAUSE_S))
        os.kill(pid, signal.SIGCONT)
        self._busy.discard(name)
        return name

    async def _stop(self) -> str:
        """Stop a worker as a deployment does, and replace it."""
        name = await self._choose("worker")
        await self._end(name)
        self._processes.start_again(name)
        self._busy.discard(name)
        return name

    async def _choose(self, role: str) -> str:
        """A process that is at work, or after a while any; it is busy from then on."""
        deadline = time.monotonic() + 10
        while True:
            running = filter(self._processes.running, self._processes.names(role))
            names = [name for name in running if name not in self._busy]
            self._chance.shuffle(names)
            for name in names:
                if self._is_at_work(name) or time.monotonic() > deadline:
                    self._busy.add(name)
                    return name
            if role == "producer":
                role = "worker"  # all producers are done
            await asyncio.sleep(0.05)

    def _is_at_work(self, name: str) -> bool:
        path = calls_path(self._folder, name, self._processes.pid(name))
        return name.startswith("producer") or (path.exists() and path.stat().st_size > AT_WORK_BYTES)

    async def _end(self, name: str) -> None:
        """SIGTERM, and a note if the worker does not end in time."""
        self._note("stop", name)
        if self._processes.running(name):
            self._processes.send(name, signal.SIGTERM)
        allowed = GRACE_S + (10 if self._plan.faults <= OF_PROCESSES else 40)
        deadline = time.monotonic() + allowed
        while self._processes.running(name) and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        if self._processes.running(name):
            self._note("stop hung", name, detail=f"not over after {allowed:.0f} s")
            self._processes.send(name, signal.SIGKILL)
            while self._processes.running(name):
                await asyncio.sleep(0.02)
        elif self._processes.exit_status(name) not in (0, AWAY, -signal.SIGTERM):
            self._note("died by itself", name, detail=f"{self._processes.log_of(name)[-500:]!r}")

    async def _supervise(self) -> None:
        """Replace what ended by itself. Only a worker that cannot reach the store at its start may do so, and not again
        and again."""
        failed_starts: Counter[str] = Counter()
        while True:
            for name in self._processes.names("worker") + self._processes.names("producer"):
                status = self._processes.exit_status(name)
                if status is None and self._is_at_work(name):
                    failed_starts[name] = 0
                if status in (None, 0) or name in self._busy:
                    continue
                failed_starts[name] += 1
                if status != AWAY or failed_starts[name] > MOST_FAILED_STARTS:
                    kind = "cannot start" if status == AWAY else "died by itself"
                    self._note(kind, name, detail=f"{status}: {self._processes.log_of(name)[-500:]!r}")
                self.done["starts repeated"] += 1
                self._processes.start_again(name)
            await asyncio.sleep(0.1)

    def _note(self, kind: str, name: str = "-", *, detail: str = "") -> None:
        pid = self._processes.pid(name) if name != "-" else 0
        self._faults.write(fault_line(kind.replace(" ", "_"), name, pid, detail))

    # The jobs

    def _open_gate(self, jobs: int) -> None:
        """Let producers enqueue jobs up to this number; -1 ends them."""
        new = self._folder / f"{GATE}.new"
        new.write_text(str(jobs))
        new.rename(self._folder / GATE)

    async def _open_gate_slowly(self, span: float) -> None:
        """Spread the jobs over the time of the faults, a little ahead, so that workers always have some."""
        jobs, pace, ended = self._plan.jobs, self._pace, 0
        async with opened(self._store.own_url) as storage:
            while pace.seconds < span and not pace.is_over:
                released = min(jobs, int((pace.seconds + 2) / span * jobs))
                self._open_gate(released)
                ended = await self._ended_jobs(storage) or ended
                pace.go_on(released=released, ended=ended)
                await asyncio.sleep(0.1)
        self._open_gate(-1 if pace.is_over else 2 * jobs + 1000)

    async def _drain(self) -> None:
        """Wait until all producers are done and no job is open, for as long as the storm may take once more."""
        deadline = time.monotonic() + max(60.0, self._plan.seconds)
        ending = time.monotonic() + max(30.0, self._plan.seconds * (1 - RAGE))
        async with opened(self._store.own_url) as storage:
            while await self._open_jobs(storage) or self._are_producing():
                if time.monotonic() > ending and self._are_producing():
                    self._open_gate(-1)
                if time.monotonic() > deadline:
                    self._note("not drained", detail=str([await storage.counts(queue) for queue in QUEUES]))
                    return
                await asyncio.sleep(0.1)

    def _are_producing(self) -> bool:
        return any(self._processes.exit_status(name) != 0 for name in self._processes.names("producer"))

    async def _open_jobs(self, storage: Storage) -> int:
        try:
            return sum([(await storage.counts(queue)).open for queue in QUEUES])
        except StorageError:  # a failover is not over yet
            return -1

    async def _ended_jobs(self, storage: Storage) -> int:
        """The number of jobs that have ended; 0 during a failover."""
        try:
            counts = [await storage.counts(queue) for queue in QUEUES]
        except StorageError:
            return 0
        return sum(count.completed + count.failed for count in counts)


async def _prepare(storage: Storage) -> None:
    """Keep the whole log, and limit the groups."""
    for queue in QUEUES:
        await storage.configure(queue, QueueSettings(events_count=None))
        for kind, cap in CAPS.items():
            for n in range(GROUPS):
                await storage.limit(queue, f"{kind}-{n}", Limit(concurrency=cap))
