"""Workers that are stopped under load, in processes of their own, and the check of what they leave behind.

``python -m tests.worker.stop_fleet cycles 50`` starts and stops a worker 50 times in one process and prints one
line of JSON per stop. ``serve`` runs one worker until a signal stops it. Handlers append to the file ``CALLS``.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from penstock import App, State, current_job

QUEUE = "stops"
GRACE_S = 60
ROOT = Path(__file__).parents[2]


class Fleet:
    """The app of one process, and what its handlers recorded."""

    def __init__(self, url: str, calls: Path) -> None:
        self.app = App(url)
        self._calls = os.open(calls, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self.ended: list[str] = []
        self.last_end = 0.0
        self.progress = asyncio.Event()

        @self.app.task(name="work", queue=QUEUE)
        async def work(ms: int) -> int:
            id = current_job().id
            os.write(self._calls, f"start {id}\n".encode())
            await asyncio.sleep(ms / 1000)
            os.write(self._calls, f"end {id}\n".encode())
            self.ended.append(id)
            self.last_end = time.monotonic()
            self.progress.set()
            return ms

        self.work = work

    def worker(self) -> Any:
        return self.app.worker(queues=[QUEUE], concurrency=30, grace=f"{GRACE_S}s")

    async def cycle(self, chance: random.Random) -> dict[str, Any]:
        """Start a worker, stop it amid its jobs, and report how long that took and what it left unsettled."""
        self.ended.clear()
        await self.work.enqueue_many([self.work.job(ms=chance.choice([0, 1, 5, 20])) for _ in range(150)])
        worker, wanted = self.worker(), chance.randint(1, 120)
        run = asyncio.create_task(worker.run())
        while len(self.ended) < wanted:
            self.progress.clear()
            await asyncio.wait_for(self.progress.wait(), 30)
        stopped_at = time.monotonic()
        worker.stop()
        await run
        late_s = time.monotonic() - max(stopped_at, self.last_end)
        storage = await self.app.connect()
        jobs = await storage.get(QUEUE, self.ended)
        unsettled = [job.id for job in jobs if job is not None and job.state is not State.COMPLETED]
        held = [lease.id for lease in await storage.leases_of(QUEUE, worker.id)]
        return {"late_s": late_s, "unsettled": unsettled, "held": held, "ended": len(self.ended)}


async def cycles(fleet: Fleet, count: int) -> None:
    chance = random.Random(os.getpid())
    async with fleet.app:
        for _ in range(count):
            print(json.dumps(await fleet.cycle(chance)), flush=True)


async def serve(fleet: Fleet) -> None:
    async with fleet.app:
        worker = fleet.worker()
        worker.on("ready", lambda _: print("ready", flush=True))
        await worker.run()


def _start(url: str, calls: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.worker.stop_fleet", *arguments],
        cwd=ROOT,
        env=os.environ | {"PENSTOCK_URL": url, "CALLS": str(calls)},
        stdout=subprocess.PIPE,
        text=True,
    )


async def stop_workers(url: str, folder: Path, *, stops: int, signals: int) -> list[float]:
    """Stop workers of two processes: ``stops`` by ``stop()``, ``signals`` by SIGTERM. Return how late each ended.

    Late is counted from the end of its last handler. Asserts that no finished job was left unsettled or ran twice.
    """
    calls = folder / "calls"
    processes = [_start(url, calls, "cycles", str(stops // 2)) for _ in range(2)]
    outputs = await asyncio.gather(*(asyncio.to_thread(process.communicate) for process in processes))
    assert [process.returncode for process in processes] == [0, 0]
    reports = [json.loads(line) for output, _ in outputs for line in output.splitlines()]
    assert len(reports) == stops // 2 * 2
    assert [report for report in reports if report["unsettled"] or report["held"]] == []
    late = [report["late_s"] for report in reports]
    async with App(url) as app:
        for _ in range(signals // 2):
            late += await _signal_two(app, url, calls)
        await check_calls(app, calls)
    return late


async def _signal_two(app: App, url: str, calls: Path) -> list[float]:
    before = calls.stat().st_size
    work = app.queue(QUEUE)
    for _ in range(10):
        await work.enqueue_many([{"ms": 5} for _ in range(100)], task="work")
    processes = [_start(url, calls, "serve") for _ in range(2)]
    for process in processes:
        assert process.stdout is not None
        assert (await asyncio.to_thread(process.stdout.readline)).strip() == "ready"
    async with asyncio.timeout(30):
        while calls.stat().st_size < before + 2_000:
            await asyncio.sleep(0.005)
    for process in processes:
        process.send_signal(signal.SIGTERM)
    stopped_at = time.monotonic()
    late = [await asyncio.to_thread(_ended_after, process, stopped_at) for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    return late


def _ended_after(process: subprocess.Popen[str], stopped_at: float) -> float:
    process.communicate(timeout=2 * GRACE_S)
    return time.monotonic() - stopped_at


async def check_calls(app: App, calls: Path) -> None:
    """No handler was called twice, none was cut short, and the store has completed exactly what ended."""
    lines = [line.split(" ", 1) for line in calls.read_text().splitlines()]
    started = Counter(id for word, id in lines if word == "start")
    ended = {id for word, id in lines if word == "end"}
    assert [id for id, count in started.items() if count > 1] == []
    assert started.keys() == ended
    counts = await (await app.connect()).counts(QUEUE)
    assert (counts.active, counts.completed) == (0, len(ended))


def main() -> None:
    async def role() -> None:
        fleet = Fleet(os.environ["PENSTOCK_URL"], Path(os.environ["CALLS"]))
        await (cycles(fleet, int(sys.argv[2])) if sys.argv[1] == "cycles" else serve(fleet))

    asyncio.run(role())


if __name__ == "__main__":
    main()
