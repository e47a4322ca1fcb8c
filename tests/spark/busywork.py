"""Queues in which a lot has happened, for the history to tell."""

from __future__ import annotations

import random
from collections.abc import Sequence

from penstock.core.job import Extras, NewJob, Options
from penstock.core.outcome import Complete, Fail, Failure, Outcome, Release, Snooze
from penstock.spark.store import Store
from penstock.storage.contract import Storage
from penstock.storage.values import QueueSettings, Report, Settlement, Take

__all__ = ["fill_days", "happen", "happenings"]

TASKS = ("send", "resize", "score")
LEASE_MS = 30_000


def happen(url: str, *, seed: int, steps: int, queues: Sequence[str] = ("mail",)) -> None:
    """So many random steps, over some hours or days of the queues' clocks."""
    with Store(url) as store:
        store.run(happenings(store.storage, seed=seed, steps=steps, queues=queues))


async def happenings(storage: Storage, *, seed: int, steps: int, queues: Sequence[str]) -> None:
    """The same on a storage that is open."""
    choice = random.Random(seed)
    for _ in range(steps):
        queue = choice.choice(queues)
        match choice.choices(("put", "run", "operate", "time"), (4, 6, 2, 1))[0]:
            case "put":
                ids = [f"j{choice.randrange(steps * 3)}" for _ in range(choice.randint(1, 4))]
                await storage.enqueue(queue, [_job(choice, id) for id in ids])
            case "run":
                await _run(storage, queue, choice)
            case "operate":
                await _operate(storage, queue, choice, [f"j{choice.randrange(steps * 3)}" for _ in range(20)])
            case _:
                await storage.shift_clock(queue, choice.choice((50, 1_000, 40_000, 7_200_000, 50_000_000)))
                await storage.sweep(queue)


def _job(choice: random.Random, id: str) -> NewJob:
    options = Options(task=choice.choice(TASKS), version="1", attempts=2)
    extras = Extras(group=choice.choice(("acme", "zeta"))) if choice.random() < 0.3 else None
    delay_ms = choice.choice((0, 0, 0, 60_000))
    return NewJob(id, b'"x"', options, delay_ms=delay_ms, extras=extras, run_id=choice.choice(("", "r1")))


async def _run(storage: Storage, queue: str, choice: random.Random) -> None:
    worker = f"w{choice.randrange(3)}"
    leases = (await storage.claim(queue, Take(worker, choice.randint(1, 5), LEASE_MS))).leases
    if choice.random() < 0.15:
        return  # the worker dies
    await storage.shift_clock(queue, choice.choice((0, 3, 250, 20_000)))
    if leases and choice.random() < 0.3:
        await storage.report(queue, [Report(leases[0].id, leases[0].token, usage={"usd": 1500})])
    done = [Settlement(lease.id, lease.token, _outcome(choice)) for lease in leases]
    if done:
        await storage.settle(queue, done)


def _outcome(choice: random.Random) -> Outcome:
    error = Failure(choice.choice(("ValueError", "TimeoutError")), "it did not work")
    return choice.choice(
        (Complete(b"1"), Complete(b"22"), Fail(error), Fail(error, final=True), Snooze(500), Release())
    )


async def _operate(storage: Storage, queue: str, choice: random.Random, ids: list[str]) -> None:
    match choice.randrange(8):
        case 0 | 1:
            await storage.cancel(queue, ids)
        case 2 | 3:
            await storage.retry(queue, ids)
        case 4 | 5:
            await storage.remove(queue, ids)
        case 6:
            await storage.pause(queue)
            await storage.resume(queue)
        case _:
            if choice.random() < 0.1:
                await storage.obliterate(queue, force=True)


def fill_days(url: str, queue: str, *, events: int, start_ms: int, length_ms: int) -> None:
    """Jobs with three events each, from ``start_ms`` after the queue's time on, spread over ``length_ms``. One in fifty
    fails, none is removed, and none of the log is trimmed."""
    with Store(url) as store:
        store.run(_fill_days(store.storage, queue, events // 3, start_ms, length_ms))


_AT_ONCE = 1000


async def _fill_days(storage: Storage, queue: str, jobs: int, start_ms: int, length_ms: int) -> None:
    await storage.configure(queue, QueueSettings(events_count=None))
    first = (await storage.read_entries(queue, after=0, limit=1)).last
    pause_ms = length_ms * _AT_ONCE // max(jobs, 1)
    await storage.shift_clock(queue, start_ms)
    for start in range(0, jobs, _AT_ONCE):
        numbers = range(first + start, first + min(start + _AT_ONCE, jobs))
        options = [Options(task=task, attempts=1) for task in TASKS]
        await storage.enqueue(queue, [NewJob(f"j{n}", b"1", options[n % len(TASKS)]) for n in numbers])
        await storage.shift_clock(queue, pause_ms // 2)
        take = Take(f"w{start // _AT_ONCE % 5}", len(numbers), 86_400_000)
        leases = (await storage.claim(queue, take)).leases
        await storage.shift_clock(queue, pause_ms - pause_ms // 2)
        ends: list[Outcome] = [
            Fail(Failure("TimeoutError", "no answer")) if number % 50 == 0 else Complete(b"1")
            for number in range(len(leases))
        ]
        await storage.settle(
            queue,
            [Settlement(lease.id, lease.token, end) for lease, end in zip(leases, ends, strict=True)],
        )
