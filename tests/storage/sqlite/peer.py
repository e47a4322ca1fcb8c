"""Another process on the same database, for tests. Run by path: ``peer.py <what> <url> [arguments]``.

It prints one line per thing done, at once, so that a test knows what had been answered when it is killed.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import sys
import time

from penstock.core.job import NewJob
from penstock.core.outcome import Complete
from penstock.storage import Storage, open_storage
from penstock.storage.sqlite import checkpoint, connection
from penstock.storage.sqlite.transaction import Transaction
from penstock.storage.values import Settlement, Take

QUEUE = "shared"


def say(word: object) -> None:
    """Write a line, whole even if two threads have something to say."""
    os.write(sys.stdout.fileno(), f"{word}\n".encode())


async def enqueue_forever(storage: Storage, name: str) -> None:
    """Say each id once it was accepted, until killed."""
    for number in range(1_000_000):
        answers = await asyncio.gather(
            *(storage.enqueue(QUEUE, [NewJob(f"{name}-{number}-{i}", b"x")]) for i in range(5))
        )
        for (answer,) in answers:
            say(answer.id)


async def fill(storage: Storage, name: str, due_frames: str) -> None:
    """Enqueue 400 times, some pages each, with checkpoints that often; look between, from another connection."""
    vars(checkpoint).update(_DUE_FRAMES=int(due_frames), _LOOK_COMMITS=4)
    for number in range(400):
        await storage.enqueue(QUEUE, [NewJob(f"{name}-{number}", bytes(2000))])
        await storage.counts(QUEUE)
        say(f"{name}-{number}")


async def checkpoint_forever(storage: Storage, name: str) -> None:
    """Enqueue until killed, with a checkpoint after every few; say each id, and each checkpoint as it begins."""

    def tell(statement: str) -> None:
        if "wal_checkpoint" in statement:
            say("checkpoint")

    def connect(path: str) -> sqlite3.Connection:
        sql = connection.connect(path)
        sql.set_trace_callback(tell)
        return sql

    vars(checkpoint).update(_DUE_FRAMES=60, _LOOK_COMMITS=2, connect=connect)
    for number in range(1_000_000):
        await storage.enqueue(QUEUE, [NewJob(f"{name}-{number}-{i}", bytes(3000)) for i in range(10)])
        for i in range(10):
            say(f"{name}-{number}-{i}")


async def enqueue_once(storage: Storage, id_: str) -> None:
    """Enqueue when a line comes in; say when (monotonic clock) the commit was asked for."""
    say("ready")
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    say(time.monotonic())
    await storage.enqueue(QUEUE, [NewJob(id_)])


async def enqueue_suspended(storage: Storage, id_: str) -> None:
    """Enqueue when a line comes in, and suspend this process just before it commits."""
    flush = Transaction.flush

    def flush_and_stop(transaction: Transaction) -> None:
        flush(transaction)
        os.kill(os.getpid(), signal.SIGSTOP)

    setattr(Transaction, "flush", flush_and_stop)  # noqa: B010
    say("ready")
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
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
            case "fill":
                await fill(storage, *arguments)
            case "checkpoint-forever":
                await checkpoint_forever(storage, *arguments)
            case "enqueue-once":
                await enqueue_once(storage, *arguments)
            case "enqueue-suspended":
                await enqueue_suspended(storage, *arguments)
            case "work-off":
                await work_off(storage, *arguments)
            case _:
                raise ValueError(what)
    finally:
        await storage.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
