"""Enqueue many jobs in chunks of a bounded size, a few at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from penstock.client.handle import JobHandle
from penstock.storage.coalesce import MAX_BYTES, MAX_COUNT

if TYPE_CHECKING:
    from penstock.client.codec import JobCodec
    from penstock.core.job import Enqueued, NewJob
    from penstock.storage.contract import Storage


_CONCURRENT_CHUNKS: Final = 3


async def enqueue_many(source: JobCodec, jobs: Sequence[NewJob]) -> list[JobHandle[Any]]:
    """Enqueue checked ``jobs``, and return a handle for each, in order.

    Each chunk is written as a whole or not at all. After an error, no more chunks are sent, and a note on the error
    says how many jobs were written.
    """
    session = await source.app.session()
    storage, queue = session.storage, source.queue
    if session.enqueue_chain.layers and jobs:
        answers = await session.enqueue_chain.enqueue(queue, jobs, lambda jobs: _send(storage, queue, jobs))
    else:
        answers = await _send(storage, queue, jobs)
    return [JobHandle(source, answer.id, answer) for answer in answers]


async def _send(storage: Storage, queue: str, jobs: Sequence[NewJob]) -> Sequence[Enqueued]:
    chunks = list(_chunks(jobs))
    if len(chunks) <= 1:
        return await storage.enqueue(queue, jobs) if jobs else []
    return await _send_chunks(storage, queue, chunks)


def _chunks(jobs: Sequence[NewJob]) -> Iterator[Sequence[NewJob]]:
    start = weight = 0
    for index, job in enumerate(jobs):
        weight += len(job.payload)
        if index > start and (index - start >= MAX_COUNT or weight > MAX_BYTES):
            yield jobs[start:index]
            start, weight = index, len(job.payload)
    if start < len(jobs):
        yield jobs[start:]


async def _send_chunks(storage: Storage, queue: str, chunks: list[Sequence[NewJob]]) -> list[Enqueued]:
    answers: list[list[Enqueued]] = [[] for _ in chunks]
    todo: Iterator[tuple[int, Sequence[NewJob]]] = iter(enumerate(chunks))

    async def send_some() -> None:
        for index, chunk in todo:
            answers[index] = await storage.enqueue(queue, chunk)

    senders = [asyncio.create_task(send_some()) for _ in range(min(_CONCURRENT_CHUNKS, len(chunks)))]
    try:
        await asyncio.wait(senders, return_when=asyncio.FIRST_EXCEPTION)
        if any(sender.done() and sender.exception() for sender in senders):
            todo = iter(())
            await asyncio.wait(senders)
    except asyncio.CancelledError:
        for sender in senders:
            sender.cancel()
        raise
    for error in filter(None, [sender.exception() for sender in senders]):
        written = sum(map(len, answers))
        error.add_note(f"{written} of {sum(map(len, chunks))} jobs had been written")
        raise error
    return [answer for chunk in answers for answer in chunk]
