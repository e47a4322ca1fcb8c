"""The roles of the crash tests, each a process that may be killed: ``python -m tests.slow.fleet ROLE NAME COUNT``.

A producer writes an id into its ledger only after the store has accepted it; so the ledgers say what must not be lost.
A producer that was killed goes on after the last id of its ledger.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from penstock import App
from penstock.worker.context import current_job
from penstock.worker.sweeper import Sweeper
from tests.slow.fleet_names import QUEUE, TICKS

BATCH = 10

app = App(os.environ["PENSTOCK_URL"])


@app.task(queue=QUEUE, attempts=3, backoff="50ms", max_stalls=1000, result_ttl="1h")
async def work(n: int) -> int:
    """Fails its first run for every tenth job, so that retries are among what gets killed."""
    await asyncio.sleep(0.005)
    if n % 10 == 0 and current_job().failures == 0:
        raise RuntimeError("every tenth job fails once")
    return n * n


@app.task(queue=TICKS, max_stalls=1000, result_ttl="1h")
async def tick() -> str:
    """What a scheduler puts in: says which slot it ran for."""
    slot = current_job().scheduled_for
    assert slot is not None
    return slot.isoformat()


def ledger_of(directory: Path, name: str) -> list[int]:
    """The numbers a producer has recorded as accepted. A line cut off by a kill does not count."""
    path = directory / f"{name}.ledger"
    if not path.exists():
        return []
    return [int(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


async def produce(directory: Path, name: str, count: int) -> None:
    """Enqueue ``name-0`` … ``name-<count-1>``, recording each batch once it was accepted."""
    start = len(ledger_of(directory, name)) // BATCH * BATCH
    with (directory / f"{name}.ledger").open("a") as ledger:
        for first in range(start, count, BATCH):
            numbers = range(first, min(first + BATCH, count))
            await work.enqueue_many([work.options(id=f"{name}-{n}").job(n) for n in numbers])
            ledger.write("".join(f"{n}\n" for n in numbers if n >= len(ledger_of(directory, name))))
            ledger.flush()
    await app.close()


async def sweep() -> None:
    """A sweeper on its own, until killed."""
    await Sweeper(await app.connect(), queues=[QUEUE], interval="100ms").run()


async def serve(name: str, queue: str) -> None:
    """A worker, until killed or told to stop."""
    await app.worker(queues=[queue], name=name, concurrency=20, lease="1s", heartbeat="200ms").run()


def main() -> None:
    role, name, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
    match role:
        case "producer":
            asyncio.run(produce(Path(os.environ["CRASH_DIR"]), name, count))
        case "worker":
            asyncio.run(serve(name, QUEUE))
        case "ticker":
            asyncio.run(serve(name, TICKS))
        case "sweeper":
            asyncio.run(sweep())
        case _:
            raise SystemExit(f"unknown role {role!r}")


if __name__ == "__main__":
    main()
