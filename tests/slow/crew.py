"""Processes that get killed and started again, and the check that nothing was lost or done twice."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from types import TracebackType

from penstock.core.event import Event
from penstock.core.lifecycle import OPEN, TRANSITIONS, EventType, State
from penstock.storage.base import Storage

ROOT = Path(__file__).parents[2]
ROLES = "tests.slow.fleet"


class Crew:
    """Named processes of the roles in a module such as ``tests.slow.fleet``. All are dead when the block ends."""

    def __init__(self, url: str, directory: Path, *, seed: int, roles: str = ROLES) -> None:
        self.directory = directory
        self._roles = roles
        self.chance = random.Random(seed)
        self.kills = 0
        self._environment = os.environ | {"PENSTOCK_URL": url, "CRASH_DIR": str(directory)}
        self._commands: dict[str, list[str]] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
            process.wait()

    def hire(self, role: str, name: str, count: int = 0) -> None:
        """Start a process; ``name`` is how it is called from now on."""
        self._commands[name] = [sys.executable, "-m", self._roles, role, name, str(count)]
        self._start(name)

    def _start(self, name: str) -> None:
        with (self.directory / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                self._commands[name], cwd=ROOT, env=self._environment, stdout=log, stderr=log
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

    def kill_somebody(self) -> None:
        self.kill(self.chance.choice(list(self._processes)))

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
