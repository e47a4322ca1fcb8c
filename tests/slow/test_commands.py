"""Workers that run shell commands are killed, for real, and every command is counted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from penstock import uuid7
from tests.slow.local_processes import ROOT, LocalProcesses, check_history, opened, read_log

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

SOURCE = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))
MARK = "CRASH_TEST"
COMMANDS = 500
KILLS = 12
WORKERS = ["worker-0", "worker-1", "worker-2"]


def left_running(mark: str) -> list[int]:
    """Processes with this in their environment."""
    return [
        one.pid for one in psutil.process_iter(["environ"]) if (one.info["environ"] or {}).get(MARK) == mark
    ]


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
        env=os.environ | {"PYTHONPATH": SOURCE},
        check=True,
    )
    url, mark = f"sqlite:///{tmp_path}/penstock.db", uuid7()
    async with opened(url) as storage:
        with LocalProcesses(
            url, tmp_path, seed=5, folder=tmp_path, PYTHONPATH=SOURCE, **{MARK: mark}
        ) as processes:
            for name in WORKERS:
                arguments = ["-m", "penstock", "worker", "-c", "4", "--lease", "1500ms", "--name", name]
                processes.launch_command(name, arguments)
            deadline = time.monotonic() + 300
            for kill in range(1, KILLS + 1):
                # Amid the work, not before or behind it.
                while begun(tmp_path) < kill * COMMANDS // (KILLS + 2):
                    assert time.monotonic() < deadline, processes.log_of(WORKERS[0])
                    time.sleep(0.01)
                await processes.kill_one_at_work(storage, "default", WORKERS)
            while (await storage.counts("default")).open:
                assert time.monotonic() < deadline, await storage.counts("default")
                time.sleep(0.1)
            assert processes.stop() == dict.fromkeys(WORKERS, 0)
            assert left_running(mark) == []
        events = await read_log(storage, "default")

    done = {path.name for path in (tmp_path / "done").iterdir()}
    assert done == {str(n) for n in range(COMMANDS)}
    check_history(events, {f"c-{n}" for n in range(COMMANDS)})
    assert sum(event.type == "stalled" for event in events) > 0
