"""Filling and looking at stores, from tests that have no event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from penstock.core.job import NewJob, Options
from penstock.core.outcome import Complete, Fail, Failure
from penstock.storage import open_storage
from penstock.storage.contract import Storage
from penstock.storage.values import Settlement, Take

T = TypeVar("T")


def ask(url: str, question: Callable[[Storage], Awaitable[T]]) -> T:
    """The answer of a storage that is opened for this one question."""

    async def answer() -> T:
        storage = open_storage(url)
        await storage.open()
        try:
            return await question(storage)
        finally:
            await storage.close()

    return asyncio.run(answer())


def fill(url: str, queue: str, *, waiting: int = 0, completed: int = 0, failed: int = 0) -> None:
    """Jobs ``w0``, ``c0``, ``f0`` and so on; their payloads are ``{"n": 0}``, their results the doubles."""

    async def put(storage: Storage) -> None:
        options = Options(task="double", attempts=1)
        ended = [*((f"c{n}", n) for n in range(completed)), *((f"f{n}", n) for n in range(failed))]
        await storage.enqueue(queue, [NewJob(id, b'{"n":%d}' % n, options) for id, n in ended])
        if ended:
            leases = (await storage.claim(queue, Take("w", len(ended), 60_000))).leases
            await storage.settle(
                queue,
                [
                    Settlement(
                        lease.id,
                        lease.token,
                        Complete(b"%d" % (2 * n))
                        if lease.id[0] == "c"
                        else Fail(Failure("ValueError", "no"), final=True),
                    )
                    for lease, (_, n) in zip(leases, ended, strict=True)
                ],
            )
        await storage.enqueue(queue, [NewJob(f"w{n}", b'{"n":%d}' % n, options) for n in range(waiting)])

    ask(url, put)
