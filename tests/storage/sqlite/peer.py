"""Another process on the same database, for tests. Run by path: ``peer.py <what> <url> [arguments]``.

It prints one line per thing done, at once, so that a test knows what had been answered when it is killed.
"""

from __future__ import annotations

import asyncio
import sys
import time

from penstock.core.job import NewJob
from penstock.core.outcome import Complete
from penstock.storage import Storage, open_storage
from penstock.storage.values import Settlement, Take

QUEUE = "shared"


def say(*words: object) -> None:
    print(*words, flush=True)


async def enqueue_forever(storage: Storage, name: str) -> None:
    """Say each id once it was accepted, until killed."""
    for number in range(1_000_000):
        answers = await asyncio.gather(
            *(storage.enqueue(QUEUE, [NewJob(f"{name}-{number}-{i}", b"x")]) for i in range(5))
        )
        for (answer,) in answers:
            say(answer.id)


async def enqueue_once(storage: Storage, id_: str) -> None:
    """Enqueue when a line comes in; say when (monotonic clock) the commit was asked for."""
    say("ready")
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    say(time.monotonic())
    await storage.enqueue(QUEUE, [NewJob(id_)])


async def work_off(storage: Storage, name: str) -> None:
    """Claim and complete until nothing is left; say each id."""
    say("ready")
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    while leases := (await storage.claim(QUEUE, Take(name, 7, 60_000))).leases:
        settlements = [Settlement(lease.id, lease.token, Complete()) for lease in leases]
        batch = await storage.settle(QUEUE, settlements)
        assert all(answer.applied for answer in batch.answers)
        for lease in leases:
            say(lease.id)


async def main(what: str, url: str, *arguments: str) -> None:
    storage = open_storage(url)
    await storage.open()
    try:
        match what:
            case "enqueue-forever":
                await enqueue_forever(storage, *arguments)
            case "enqueue-once":
                await enqueue_once(storage, *arguments)
            case "work-off":
                await work_off(storage, *arguments)
            case _:
                raise ValueError(what)
    finally:
        await storage.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
