"""The processes of the group tests, which may be killed: ``python -m tests.slow.group_fleet ROLE NAME COUNT``."""

from __future__ import annotations

import asyncio
import os
import sys

from penstock import App, RateLimited, Snooze
from penstock.core.limits import Limit, Rate
from penstock.worker.context import current_job
from penstock.worker.sweeper import Sweeper

QUEUE = "groups"

LIMITS = {
    **{f"strict-{n}": Limit(concurrency=1) for n in range(6)},
    **{f"capped-{n}": Limit(concurrency=3) for n in range(3)},
    **{f"rated-{n}": Limit(rate=Rate(10, 500)) for n in range(2)},
    "strict-rated": Limit(concurrency=1, rate=Rate(10, 500)),
}

app = App(os.environ.get("PENSTOCK_URL", "memory://"))


@app.task(queue=QUEUE, attempts=4, backoff="30ms", max_stalls=1000, result_ttl="1h")
async def work(n: int) -> None:
    """Some fail, some are put off, some meet a limit, each once: what holds a slot, and what gives it back."""
    await asyncio.sleep(0.002 * (n % 7))
    job = current_job()
    if n % 11 == 3 and job.failures == 0:
        raise RuntimeError("fails once")
    if n % 13 == 5 and job.run == 1:
        raise Snooze("40ms")
    if n % 17 == 7 and job.run == 1:
        raise RateLimited("50ms")


async def sweep() -> None:
    """A sweeper on its own, until killed."""
    await Sweeper(await app.connect(), queues=[QUEUE], interval="100ms").run()


async def serve(name: str) -> None:
    """A worker, until killed."""
    await app.worker(queues=[QUEUE], name=name, concurrency=20, lease="1s", heartbeat="200ms").run()


def main() -> None:
    role, name = sys.argv[1], sys.argv[2]
    match role:
        case "worker":
            asyncio.run(serve(name))
        case "sweeper":
            asyncio.run(sweep())
        case _:
            raise SystemExit(f"unknown role {role!r}")


if __name__ == "__main__":
    main()
