"""The processes of a storm, each of which may be killed: ``python -m tests.storm.roles ROLE NAME JOBS``.

A producer records an answer only after the store gave it, so the ledgers say which jobs must not be lost. A producer
that was killed repeats the enqueues it has no answer for.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock import (
    App,
    Dedup,
    Dispatch,
    Flow,
    JobContext,
    JobHandle,
    JobSpec,
    Snooze,
    StorageError,
    Task,
    current_job,
)
from penstock.errors import StorageUnavailable
from tests.storm.journal import GATE, Answer, Appender, Calls, answer_line, read_answers
from tests.storm.network import redirect
from tests.storm.plan import (
    ATTEMPTS,
    FATAL_ATTEMPTS,
    GRACE_S,
    LEASE_S,
    PRODUCERS,
    QUEUES,
    UNIT,
    Planned,
    children_of,
    dedup_key,
    mode_of,
    numbers_of,
    planned,
    root_of,
    square,
    units,
)

UNITS_AT_A_TIME = 6
AWAY = 75
"""Exit status of a worker that could not reach the store at its start."""

app = App(
    os.environ.get("PENSTOCK_URL", "memory://"),
    attempts=ATTEMPTS,
    backoff="30ms",
    max_stalls=1_000_000,
    result_ttl="30d",
    failure_ttl="30d",
)
calls: Calls | None = None


class Planted(Exception):
    """The failure that the plan asks for."""


@contextmanager
def recorded(context: JobContext) -> Iterator[None]:
    """Write down the call, and how it ends."""
    assert calls is not None, "a worker opens its file first"
    call = (context.queue, context.id, context.run, context.token)
    calls.begin(*call)
    outcome = "cancelled"
    try:
        yield
        outcome = "completed"
    except Snooze:
        outcome = "snoozed"
        raise
    except Exception:
        outcome = "failed"
        raise
    finally:
        calls.end(*call, outcome)


@app.task
async def work(n: int, pad: str) -> int:
    context, job = current_job(), planned(n)
    with recorded(context):
        await asyncio.sleep(0.25 if job.kind == "long" else n % 7 / 1000)
        if job.kind == "dies" or (job.kind == "fails_once" and context.failures == 0):
            raise Planted(job.kind)
        if job.kind == "snoozes" and context.run == 1:
            raise Snooze("40ms")
        return square(n) + len(pad)


@app.task
def work_in_thread(n: int, pad: str) -> int:
    with recorded(current_job()):
        time.sleep(n % 5 / 1000)
        return square(n) + len(pad)


@app.task
async def add_up(context: JobContext, n: int) -> int:
    with recorded(context):
        results: list[int] = [child.result for child in await context.children()]
        return square(n) + sum(results)


def task_of(job: Planned) -> Task[[int, str], int]:
    return work_in_thread if job.kind == "thread" else work


def dispatch(job: Planned) -> Dispatch[[int, str], int]:
    """The task of the job, with the options the job is enqueued with."""
    options: dict[str, Any] = {"id": job.id, "queue": job.queue}
    match job.kind:
        case "delayed":
            options["delay"] = f"{50 + job.n % 450}ms"
        case "dies":
            options |= {"attempts": FATAL_ATTEMPTS, "on_conflict": "absent"}
        case "strict" | "capped":
            options["group"] = job.group
        case "urgent":
            options |= {"priority": job.n % 7 - 3, "lifo": job.n % 2 == 0}
        case _:
            pass
    if job.mode == "dedup":
        options["dedup"] = Dedup.simple(dedup_key(job.n))
    return task_of(job).options(**options)


def spec(job: Planned) -> JobSpec:
    return dispatch(job).job(job.n, job.pad)


async def enqueue(job: Planned) -> JobHandle[int]:
    return await dispatch(job).enqueue(job.n, job.pad)


def flow(root: int) -> Flow:
    job = planned(root)
    parent = add_up.options(id=job.id, queue=job.queue).job(root)
    return Flow(parent, [spec(planned(n)) for n in children_of(root)])


class Producer:
    """Enqueues its units, some of them at a time, and writes every answer into its ledger."""

    def __init__(self, folder: Path, name: str, jobs: int) -> None:
        self._folder = folder
        self._number = int(name.rpartition("-")[2])
        self._jobs = jobs
        path = folder / "ledgers" / name
        self._ledger = Appender(path)
        self._answered = {answer.id for answer in read_answers(path)}

    async def run(self) -> None:
        """Return when every unit is answered, or the storm is over."""
        under_way = asyncio.Semaphore(UNITS_AT_A_TIME)
        async with asyncio.TaskGroup() as group:
            for unit in units(self._number, self._jobs):
                if self._missing(unit):
                    if not await self._passes(unit):
                        break
                    await under_way.acquire()
                    group.create_task(self._take(unit)).add_done_callback(lambda _: under_way.release())
        await app.close()

    def _missing(self, unit: int) -> list[int]:
        """The numbers of the unit that are not answered yet."""
        return [n for n in numbers_of(unit, self._jobs) if planned(n).id not in self._answered]

    async def _take(self, unit: int) -> None:
        await self._until_taken(unit, self._missing(unit))
        await self._repeat(unit)

    async def _passes(self, unit: int) -> bool:
        """Wait until the storm lets this unit through; false: the storm is over."""
        while True:
            limit = int((self._folder / GATE).read_text())
            if limit < 0 or unit * UNIT < limit:
                return limit >= 0
            await asyncio.sleep(0.02)

    async def _until_taken(self, unit: int, numbers: list[int]) -> None:
        """Repeat until the store answers, as a careful caller does."""
        while True:
            try:
                return await self._enqueue(unit, numbers)
            except StorageError as error:
                print(f"unit {unit}: {error!r}", flush=True)
                await asyncio.sleep(0.1)

    async def _enqueue(self, unit: int, numbers: list[int]) -> None:
        jobs = [planned(n) for n in numbers]
        match mode_of(unit):
            case "bulk":
                for task in (work, work_in_thread):
                    if some := [job for job in jobs if task_of(job) is task]:
                        source = task.options(queue=some[0].queue)
                        self._note(some, await source.enqueue_many([spec(job) for job in some]))
            case "together" | "dedup":
                self._note(jobs, await asyncio.gather(*map(enqueue, jobs)))
            case "one_by_one":
                for job in jobs:
                    self._note([job], [await enqueue(job)])
            case "flow":
                for root in sorted({root_of(n) for n in numbers}):
                    handle = await app.enqueue_flow(flow(root))
                    nodes = [planned(n) for n in (root, *children_of(root))]
                    self._write([Answer(False, job.id, str(handle.status), job.id, "-") for job in nodes])

    async def _repeat(self, unit: int) -> None:
        """Enqueue jobs of an earlier unit once more: the store must know them."""
        earlier = unit - 2 * PRODUCERS
        if earlier < 0 or mode_of(earlier) in ("flow", "dedup") or self._missing(earlier):
            return
        for n in list(numbers_of(earlier, self._jobs))[::9]:
            try:
                self._note([planned(n)], [await enqueue(planned(n))], again=True)
            except StorageError as error:
                print(f"again {n}: {error!r}", flush=True)

    def _note(
        self, jobs: Iterable[Planned], handles: Iterable[JobHandle[Any]], *, again: bool = False
    ) -> None:
        self._write(
            [
                Answer(again, job.id, str(handle.status), handle.id, _result(handle))
                for job, handle in zip(jobs, handles, strict=True)
            ]
        )

    def _write(self, answers: list[Answer]) -> None:
        self._ledger.write(*map(answer_line, answers))
        self._answered |= {answer.id for answer in answers}


def _result(handle: JobHandle[Any]) -> str:
    answer = handle._answer
    return answer.result.decode() if answer is not None and answer.result is not None else "-"


async def serve(folder: Path, name: str, *, burst: bool = False) -> None:
    """A worker, until it is killed or stopped."""
    global calls
    worker = app.worker(
        queues=QUEUES,
        name=name,
        concurrency=16,
        lease=f"{LEASE_S}s",
        heartbeat=f"{LEASE_S / 5}s",
        grace=f"{GRACE_S}s",
        burst=burst,
    )
    calls = Calls(folder, name=name, worker=worker.id)
    await worker.run()


def main() -> None:
    role, name, jobs = sys.argv[1], sys.argv[2], int(sys.argv[3])
    folder = Path(os.environ["CRASH_DIR"])
    redirect()
    try:
        match role:
            case "producer":
                asyncio.run(Producer(folder, name, jobs).run())
            case "worker":
                asyncio.run(serve(folder, name))
            case _:
                raise SystemExit(f"unknown role {role!r}")
    except StorageUnavailable as error:
        print(error, flush=True)
        raise SystemExit(AWAY) from error


if __name__ == "__main__":
    main()
