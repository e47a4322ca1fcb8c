"""A worker that kills itself at a boundary of a step: ``python -m tests.slow.step_fleet BOUNDARY COUNT``.

It dies when it reaches the boundary for the COUNT-th time; with an empty boundary, never. Whatever the steps do is a
line in the journal, which outlives the worker.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence

from penstock import App, JobContext
from penstock.core.lifecycle import StepAnswer
from penstock.core.step import NewStep

QUEUE = "steps"
STEPS = 5
MOMENTS = ("before", "ran", "committed", "recorded")
BOUNDARIES = [f"{moment} {step}" for step in range(STEPS) for moment in MOMENTS]
"""Before a step, after its effect and before its record, once the store has the record, once the handler knows."""

app = App(os.environ.get("PENSTOCK_URL", "memory://"))
_journal = os.open(os.environ.get("JOURNAL", os.devnull), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
_left = 0
_boundary = ""


def note(what: str, job: str, step: int, token: int = 0) -> None:
    """Write a line, in one piece; die at the boundary."""
    global _left
    os.write(_journal, f"{what} {step} {job} {token}\n".encode())
    if f"{what} {step}" == _boundary:
        _left -= 1
        if not _left:
            os.kill(os.getpid(), signal.SIGKILL)


@app.task(queue=QUEUE, attempts=1, max_stalls=1000, result_ttl="1h")
async def work(context: JobContext) -> list[str]:
    results = []
    for step in range(STEPS):

        async def act(job: str, step: int) -> str:
            note("ran", job, step, context._lease.token)
            return f"{job}:{step}"

        note("before", context.id, step)
        results.append(await context.step("act", act, context.id, step, key=step))
        note("recorded", context.id, step)
    return results


async def run() -> None:
    storage = await app.connect()
    record = storage.record_steps

    async def record_steps(queue: str, steps: Sequence[NewStep], *, lease_ms: int = 0) -> list[StepAnswer]:
        answers = await record(queue, steps, lease_ms=lease_ms)
        for step in steps:
            note("committed", step.id, int(step.name.removeprefix("act[").removesuffix("]")))
        return answers

    storage.record_steps = record_steps  # type: ignore[method-assign]
    await app.worker(queues=[QUEUE], concurrency=20, lease="1s", heartbeat="200ms", burst=True).run()


def main() -> None:
    global _boundary, _left
    _boundary, _left = sys.argv[1], int(sys.argv[2])
    asyncio.run(run())


if __name__ == "__main__":
    main()
