"""Processes that get killed and started again, and the check that nothing was lost or done twice."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType

from penstock.core.event import Event
from penstock.core.lifecycle import OPEN, TRANSITIONS, EventType, State
from penstock.storage import open_storage
from penstock.storage.contract import Storage

ROOT = Path(__file__).parents[2]
ROLES = "tests.slow.fleet"


class LocalProcesses:
    """Named processes, of the roles in a module such as ``tests.slow.fleet`` or of any command. All are dead when
    the block ends."""

    def __init__(
        self,
        url: str,
        directory: Path,
        *,
        seed: int,
        roles: str = ROLES,
        folder: Path = ROOT,
        **environment: str,
    ) -> None:
        self.directory = directory
        self._folder = folder
        self._roles = roles
        self.chance = random.Random(seed)
        self.kills = 0
        self._environment = os.environ | {"PENSTOCK_URL": url, "CRASH_DIR": str(directory)} | environment
        self._commands: dict[str, list[str]] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._dead_holders: set[str] = set()

    def __enter__(self) -> LocalProcesses:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
            process.wait()

    def launch(self, role: str, name: str, count: int = 0) -> None:
        """Start a process; ``name`` is how it is called from now on."""
        self.launch_command(name, ["-m", self._roles, role, name, str(count)])

    def launch_command(self, name: str, arguments: Sequence[str]) -> None:
        """Start Python with these."""
        self._commands[name] = [sys.executable, *arguments]
        self._start(name)

    def _start(self, name: str) -> None:
        with (self.directory / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                self._commands[name], cwd=self._folder, env=self._environment, stdout=log, stderr=log
            )

    def kill(self, name: str) -> None:
        """SIGKILL, and start it again. One that has ended by itself stays ended, if it ended well."""
        process = self._processes[name]
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.wait()
            self.kills += 1
        elif process.returncode == 0:
            return
        self._start(name)

    def pid(self, name: str) -> int:
        return self._processes[name].pid

    def names(self, role: str) -> list[str]:
        """The processes of a role."""
        return [name for name, command in self._commands.items() if command[-3] == role]

    def send(self, name: str, number: signal.Signals) -> None:
        self._processes[name].send_signal(number)

    def exit_status(self, name: str) -> int | None:
        """How the process ended; ``None`` while it runs."""
        return self._processes[name].poll()

    def start_again(self, name: str) -> None:
        """Replace a process that has ended."""
        assert not self.running(name)
        self._start(name)

    def kill_one(self) -> None:
        self.kill(self.chance.choice(list(self._processes)))

    async def until(
        self,
        reached: Callable[[], Awaitable[bool]],
        *,
        seconds: float,
        state: Callable[[], Awaitable[object]],
    ) -> None:
        """Wait until it is so. Fails with the logs of those that broke down, or with the state after so long."""
        deadline = asyncio.get_running_loop().time() + seconds
        while not await reached():
            self.check()
            assert asyncio.get_running_loop().time() < deadline, await state()
            await asyncio.sleep(0.02)

    def check(self) -> None:
        """Nobody has ended by itself with an error."""
        assert not self.failures(), {name: self.log_of(name) for name in self.failures()}

    async def kill_one_at_work(self, storage: Storage, queue: str, names: Sequence[str]) -> None:
        """SIGKILL to one of these workers that holds jobs of the queue, as soon as there is one.

        It is stopped while the store is asked, so that what it holds is not settled before it dies.
        """
        while not await self._catch_at_work(name := self.chance.choice(names), storage, queue):
            self.check()
            await asyncio.sleep(0.02)
        self.kill(name)

    async def _catch_at_work(self, name: str, storage: Storage, queue: str) -> bool:
        process = self._processes[name]
        process.send_signal(signal.SIGSTOP)
        active = (await storage.list_jobs(queue, State.ACTIVE, limit=1000)).jobs
        # The id of a worker is its name and a mark of its own; one killed before holds its jobs until they stall.
        holders = {job.worker for job in active if job.worker.rpartition("-")[0] == name} - self._dead_holders
        if not holders:
            process.send_signal(signal.SIGCONT)
            return False
        self._dead_holders |= holders
        return True

    def stop(self) -> dict[str, int]:
        """SIGTERM to all, and how each has ended."""
        for process in self._processes.values():
            process.send_signal(signal.SIGTERM)
        return {name: process.wait(60) for name, process in self._processes.items()}

    def running(self, name: str) -> bool:
        return self._processes[name].poll() is None

    def failures(self) -> dict[str, int]:
        """Processes that ended by themselves with an error."""
        return {
            name: process.returncode
            for name, process in self._processes.items()
            if process.poll() not in (None, 0, -signal.SIGKILL)
        }

    def log_of(self, name: str) -> str:
        return (self.directory / f"{name}.log").read_text()[-4000:]


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[Storage]:
    storage = open_storage(url)
    await storage.open()
    try:
        yield storage
    finally:
        await storage.close()


async def read_log(storage: Storage, queue: str) -> list[Event]:
    """The whole event log; fails if a number is missing."""
    events: list[Event] = []
    while True:
        page = await storage.read_events(queue, after=len(events))
        assert page.gap is None
        events += page.events
        if page.next >= page.last:
            break
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    return events


def check_history(events: list[Event], accepted: set[str]) -> None:
    """Every accepted job completed exactly once, by the holder of its last lease, and moved only as allowed."""
    allowed = {(row.source, row.target, row.event) for row in TRANSITIONS}
    state: dict[str, State | None] = defaultdict(lambda: None)
    token: dict[str, int] = {}
    completed: Counter[str] = Counter()
    for event in events:
        if not event.id:
            continue
        target = State(event.state)
        assert (state[event.id], target, event.type) in allowed, event
        state[event.id] = target
        if event.type is EventType.CLAIMED:
            assert event.token > token.get(event.id, 0), event
            token[event.id] = event.token
        if event.type is EventType.COMPLETED:
            assert event.token == token[event.id], event
            completed[event.id] += 1
    assert {id for id in accepted if completed[id] != 1} == set()
    assert {id: s for id, s in state.items() if s in OPEN} == {}
