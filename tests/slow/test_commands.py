"""Workers that run shell commands are killed, for real, and every command is counted."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from penstock import uuid7
from penstock.storage import open_storage
from tests.slow.crew import check_history, read_log

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
COMMANDS = 500
KILLS = 12
WORKERS = 3


class Workers:
    """``penstock worker`` processes that are killed and started again; all of them, and theirs, carry a mark."""

    def __init__(self, folder: Path) -> None:
        self.mark = f"CRASH_TEST={uuid7()}"
        name, value = self.mark.split("=")
        source = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))
        self._environment = os.environ | {name: value, "PYTHONPATH": source}
        self._folder = folder
        self._processes = [self._started() for _ in range(WORKERS)]

    def _started(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "penstock", "worker", "-c", "4", "--lease", "1500ms"]
        with (self._folder / "workers.log").open("ab") as log:
            return subprocess.Popen(command, cwd=self._folder, env=self._environment, stdout=log, stderr=log)

    def kill_one(self, chance: random.Random) -> None:
        at = chance.randrange(WORKERS)
        self._processes[at].kill()
        self._processes[at].wait()
        self._processes[at] = self._started()

    def stop(self) -> list[int]:
        for process in self._processes:
            process.send_signal(signal.SIGTERM)
        return [process.wait(60) for process in self._processes]

    def kill_all(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def left(self) -> list[int]:
        """Processes with our mark that still run."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and self.mark.encode() in (entry / "environ").read_bytes().split(
                    b"\0"
                ):
                    found.append(int(entry.name))
            except OSError:
                pass
        return found


def begun(folder: Path) -> int:
    return len(list((folder / "begun").iterdir()))


async def test_no_command_is_lost_and_none_is_left_running_when_workers_are_killed(tmp_path: Path) -> None:
    for name in ("begun", "done"):
        (tmp_path / name).mkdir()
    jobs = [
        {"id": f"c-{n}", "command": f"touch begun/{n}; sleep 0.0{n % 9}5; touch done/{n}", "max_stalls": 100}
        for n in range(COMMANDS)
    ]
    subprocess.run(
        [sys.executable, "-m", "penstock", "enqueue", "-"],
        input="\n".join(map(json.dumps, jobs)).encode(),
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        check=True,
    )
    storage = open_storage(f"sqlite:///{tmp_path}/penstock.db")
    await storage.open()
    workers, chance = Workers(tmp_path), random.Random(5)
    try:
        deadline = time.monotonic() + 300
        for kill in range(1, KILLS + 1):
            # Amid the work, not before or behind it.
            while begun(tmp_path) < kill * COMMANDS // (KILLS + 2):
                assert time.monotonic() < deadline, (tmp_path / "workers.log").read_text()[-3000:]
                time.sleep(0.01)
            workers.kill_one(chance)
        while (await storage.counts("default")).open:
            assert time.monotonic() < deadline, await storage.counts("default")
            time.sleep(0.1)
        assert workers.stop() == [0] * WORKERS
        assert workers.left() == []
        events = await read_log(storage, "default")
    finally:
        workers.kill_all()
        await storage.close()

    done = {path.name for path in (tmp_path / "done").iterdir()}
    assert done == {str(n) for n in range(COMMANDS)}
    check_history(events, {f"c-{n}" for n in range(COMMANDS)})
    assert sum(event.type == "stalled" for event in events) > 0
