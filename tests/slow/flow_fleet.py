"""The workers of the flow tests, each a process that may be killed: ``python -m tests.slow.flow_fleet worker NAME 0``.

A flow is a root, two jobs in the middle and two leaves under each. What fails is told by its numbers, so the test
knows how every flow must end.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from penstock import App, Flow, JobContext, Unrecoverable
from penstock.core.job import Policy

TOP, MIDDLE, LEAF = QUEUES = ("flows-top", "flows-middle", "flows-leaf")
POLICIES: tuple[Policy, ...] = ("fail", "ignore", "wait")

app = App(os.environ.get("PENSTOCK_URL", "memory://"), max_stalls=1000, backoff="20ms")


def policy_of(n: int) -> Policy:
    return POLICIES[n % 3]


def fails(n: int, middle: int, leaf: int) -> bool:
    """One leaf in ten, evenly over flows and places."""
    return (n * 4 + middle * 2 + leaf) * 7 % 10 == 0


@app.task(queue=LEAF)
async def grow(n: int, middle: int, leaf: int) -> int:
    """A leaf that is to fail does so for good; one whose flow waits for it completes once it was retried."""
    await asyncio.sleep(0.002)
    if fails(n, middle, leaf) and (policy_of(n) != "wait" or not is_mended()):
        raise Unrecoverable("this leaf fails")
    return 1


def is_mended() -> bool:
    """Whether leaves that somebody waits for complete by now."""
    return (Path(os.environ["CRASH_DIR"]) / "mended").exists()


@app.task(queue=MIDDLE)
async def gather(context: JobContext) -> int:
    return sum(child.result or 0 for child in await context.children())


@app.task(queue=TOP)
async def finish(context: JobContext) -> int:
    return sum(child.result or 0 for child in await context.children())


def flow(n: int) -> Flow:
    policy = policy_of(n)
    middles = [
        Flow(
            gather.options(id=f"{n}-{middle}").job(),
            [grow.options(id=f"{n}-{middle}-{leaf}").job(n, middle, leaf) for leaf in range(2)],
            on_failure=policy,
        )
        for middle in range(2)
    ]
    return Flow(finish.options(id=f"{n}").job(), middles, on_failure=policy)


async def serve(name: str) -> None:
    """A worker, until killed."""
    await app.worker(queues=list(QUEUES), name=name, concurrency=30, lease="1s", heartbeat="200ms").run()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[2]))
