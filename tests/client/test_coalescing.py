from __future__ import annotations

import asyncio

from penstock.errors import StorageFull
from penstock.storage.coalesce import Coalescer
from tests.client.conftest import until


class Store:
    """Answers a batch of numbers with their doubles, when it is let."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.errors: dict[int, Exception] = {}
        """By the number of the batch that gets it, from 0."""

    async def send(self, items: list[int]) -> list[int]:
        error = self.errors.get(len(self.batches))
        self.batches.append(items)
        await asyncio.sleep(0)
        await self.gate.wait()
        if error is not None:
            raise error
        return [item * 2 for item in items]

    def coalescer(self, **bounds: int) -> Coalescer[int, int]:
        return Coalescer(self.send, size=lambda item: item, **bounds)


async def test_sequential_calls_are_sent_immediately_and_alone() -> None:
    store = Store()
    doubles = store.coalescer()

    assert [await doubles.call(item) for item in (1, 2, 3)] == [2, 4, 6]
    assert store.batches == [[1], [2], [3]]


async def test_calls_made_while_one_is_under_way_travel_together_in_order() -> None:
    store = Store()
    doubles = store.coalescer()

    answers = await asyncio.gather(*(doubles.call(item) for item in range(100)))

    assert answers == [item * 2 for item in range(100)]
    assert store.batches == [[0], list(range(1, 100))]


async def test_a_batch_is_bounded_by_count() -> None:
    store = Store()
    doubles = store.coalescer(max_count=4)

    await asyncio.gather(*(doubles.call(item) for item in range(10)))

    assert [len(batch) for batch in store.batches] == [1, 4, 4, 1]


async def test_a_batch_is_bounded_by_weight_but_one_item_always_goes() -> None:
    store = Store()
    doubles = store.coalescer(max_bytes=10)

    await asyncio.gather(*(doubles.call(item) for item in (1, 6, 5, 50, 2, 3)))

    assert store.batches == [[1], [6], [5], [50], [2, 3]]


async def test_an_error_reaches_every_caller_of_its_batch_and_no_other() -> None:
    store = Store()
    doubles = store.coalescer(max_count=2)
    store.errors[1] = StorageFull("no room")

    results = await asyncio.gather(*(doubles.call(item) for item in range(5)), return_exceptions=True)

    assert store.batches == [[0], [1, 2], [3, 4]]
    assert [result if isinstance(result, int) else type(result) for result in results] == [
        0,
        StorageFull,
        StorageFull,
        6,
        8,
    ]


async def test_an_error_of_a_call_that_goes_alone_lets_the_pending_ones_go_on() -> None:
    store = Store()
    doubles = store.coalescer()
    store.errors[0] = StorageFull("no room")

    first, second = await asyncio.gather(doubles.call(1), doubles.call(2), return_exceptions=True)

    assert isinstance(first, StorageFull)
    assert second == 4
    assert await doubles.call(21) == 42


async def test_a_caller_cancelled_before_its_turn_takes_its_item_back() -> None:
    store = Store()
    doubles = store.coalescer()
    store.gate.clear()
    calls = [asyncio.create_task(doubles.call(item)) for item in (1, 2, 3)]
    await until(lambda: len(store.batches) == 1)

    calls[1].cancel()
    store.gate.set()
    results = await asyncio.gather(*calls, return_exceptions=True)

    assert store.batches == [[1], [3]]
    assert isinstance(results[1], asyncio.CancelledError)
    assert results[2] == 6


async def test_a_caller_cancelled_amid_its_batch_leaves_the_others_their_answers() -> None:
    store = Store()
    doubles = store.coalescer()
    store.gate.clear()
    calls = [asyncio.create_task(doubles.call(item)) for item in (1, 2, 3)]
    await until(lambda: len(store.batches) == 1)
    calls[0].cancel()
    await until(lambda: len(store.batches) == 2)

    calls[1].cancel()
    store.gate.set()
    results = await asyncio.gather(*calls, return_exceptions=True)

    assert store.batches == [[1], [2, 3]]
    assert results[2] == 6
