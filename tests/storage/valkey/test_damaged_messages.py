"""Messages to other queues that cannot be read: those behind them are delivered."""

from __future__ import annotations

import asyncio
import logging

import pytest

from penstock.core.flow import Node, link_nodes
from penstock.core.job import Dependency, NewJob
from penstock.core.lifecycle import State
from penstock.core.outcome import Complete, Fail
from penstock.storage.valkey.engine import ValkeyStorage
from penstock.storage.values import QueueSettings
from tests.contract.factories import BOOM, Bench

DAMAGED = [
    b"not a message",
    b"\xff" * 40,
    b"%016d" % 1 + b"other\0p\xc1\xff",
    b"%016d" % 1 + b"other\0d" + b"\x93\xa1a\xa1b\xa1c",
    b"%016d" % 1 + b"other\0l\x01",
    b"%016d" % 1 + b"other\0x" + b"\0" * 5,
    b"%016d" % 1 + b"no such {queue}\0d\xc0",
    b"%016d" % 1 + b"other\0p\x92\xa1i\xa1b",
]


async def put_first(storage: ValkeyStorage, queue: str, entry: bytes) -> None:
    """Have an entry stand before all messages, under a number that comes before theirs."""
    key = storage._calls.keys.part(queue, "outbox")
    await storage._calls.plain(key, "LPUSH", key, entry)


async def outbox(storage: ValkeyStorage, queue: str) -> list[bytes]:
    key = storage._calls.keys.part(queue, "outbox")
    found: list[bytes] = await storage._calls.plain(key, "LRANGE", key, 0, -1)
    return found


@pytest.mark.parametrize("entry", DAMAGED)
async def test_a_damaged_message_is_put_aside_and_those_behind_it_arrive(
    storage: ValkeyStorage, entry: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    here, other = Bench(storage, "here"), Bench(storage, "other")
    nodes = [
        Node("other", NewJob("parent", after=(Dependency("here", "child"),))),
        Node("here", NewJob("child")),
    ]
    await storage.enqueue_flows("other", [link_nodes(nodes, flow="flow")])
    lease = await here.claim()
    storage._outbox.send_soon = lambda queue: None  # type: ignore[method-assign]
    await here.settle(lease, Complete(b"1"))
    await put_first(storage, "here", entry)

    with caplog.at_level(logging.ERROR, "penstock.storage"):
        await storage.sweep("here")

    assert await other.state("parent") is State.WAITING
    assert await outbox(storage, "here") == []
    assert "1 messages to other queues cannot be read" in caplog.text
    key = storage._calls.keys.part("here", "damaged")
    assert len(await storage._calls.plain(key, "HKEYS", key)) == 1
    assert (await storage.sweep("here")).wait_ms is not None


async def test_a_dead_letter_behind_a_damaged_one_arrives(storage: ValkeyStorage) -> None:
    here, letters = Bench(storage, "here"), Bench(storage, "letters")
    await storage.configure("here", QueueSettings(dead_letter="letters", dead_letter_task="bury"))
    await here.put()
    lease = await here.claim()
    storage._outbox.send_soon = lambda queue: None  # type: ignore[method-assign]
    await here.settle(lease, Fail(BOOM, final=True))
    await put_first(storage, "here", b"%016d" % 1 + b"letters\0x" + b"\xff" * 30)

    await storage.sweep("here")

    assert await letters.counts() == {State.WAITING: 1}
    assert await outbox(storage, "here") == []


class DamagedOutbox:
    """A parent in ``other`` waits for three children in ``here``, whose ends stand in the outbox."""

    def __init__(self, storage: ValkeyStorage) -> None:
        self.storage = storage
        self.parent = Bench(storage, "other")
        self._key = storage._calls.keys.part("here", "outbox")

    async def prepare(self) -> None:
        """Deliver the end of one before: messages that are not above its number count as known."""
        nodes = [
            Node("other", NewJob("earlier", after=(Dependency("here", "z"),))),
            Node("here", NewJob("z")),
        ]
        await self.storage.enqueue_flows("other", [link_nodes(nodes, flow="before")])
        here = Bench(self.storage, "here")
        await self.storage.sweep("other")
        await here.settle(await here.claim(), Complete(b"1"))
        await self.storage.sweep("here")
        children = [Node("here", NewJob(id)) for id in "abc"]
        after = tuple(Dependency("here", id) for id in "abc")
        flow = link_nodes([Node("other", NewJob("parent", after=after)), *children], flow="flow")
        await self.storage.enqueue_flows("other", [flow])
        await self.storage.sweep("other")
        self.storage._outbox.send_soon = lambda queue: None  # type: ignore[method-assign]
        for _ in "abc":
            await here.settle(await here.claim(), Complete(b"1"))

    async def replace(self, place: int, number: int | bytes) -> None:
        """Damage the number of a message."""
        entries = await outbox(self.storage, "here")
        entries[place] = (number if isinstance(number, bytes) else b"%016d" % number) + entries[place][16:]
        await self.storage._calls.plain(self._key, "DEL", self._key)
        await self.storage._calls.plain(self._key, "RPUSH", self._key, *entries)

    async def numbers(self) -> list[bytes]:
        return [entry[:16] for entry in await outbox(self.storage, "here")]


@pytest.fixture
async def damaged(storage: ValkeyStorage) -> DamagedOutbox:
    damaged = DamagedOutbox(storage)
    await damaged.prepare()
    return damaged


WRONG_NUMBERS = [9_999_999_999_999_999, 1, b"x" * 16]


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("number", WRONG_NUMBERS)
async def test_a_message_whose_number_is_damaged_arrives_like_those_beside_it(
    storage: ValkeyStorage, damaged: DamagedOutbox, place: int, number: int | bytes
) -> None:
    await damaged.replace(place, number)

    async with asyncio.timeout(20):
        await storage.sweep("here")

    assert await damaged.parent.state("parent") is State.WAITING
    assert await outbox(storage, "here") == []


@pytest.mark.parametrize("number", WRONG_NUMBERS)
async def test_messages_arrive_after_one_whose_number_was_damaged(
    storage: ValkeyStorage, damaged: DamagedOutbox, number: int | bytes
) -> None:
    await damaged.replace(2, number)
    vars(storage._outbox).pop("send_soon")
    async with asyncio.timeout(20):
        await storage.sweep("here")
        nodes = [
            Node("other", NewJob("next", after=(Dependency("here", "d"),))),
            Node("here", NewJob("d")),
        ]
        await storage.enqueue_flows("other", [link_nodes(nodes, flow="later")])
        await storage.sweep("other")
        here = Bench(storage, "here")
        await here.settle(await here.claim(), Complete(b"1"))
        await storage.sweep("here")
    assert await damaged.parent.state("next") is State.WAITING


@pytest.mark.parametrize("entry", DAMAGED)
async def test_check_counts_damaged_messages_and_repair_puts_them_aside(
    storage: ValkeyStorage, damaged: DamagedOutbox, entry: bytes
) -> None:
    await put_first(storage, "here", entry)

    assert (await storage.check("here")).problems == {"damaged_messages": 1}
    assert (await storage.check("here", repair=True)).problems == {"damaged_messages": 1}

    assert (await storage.check("here")).problems == {}
    assert len(await damaged.numbers()) == 3
    key = storage._calls.keys.part("here", "damaged")
    [kept] = await storage._calls.plain(key, "HVALS", key)
    assert entry in kept


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("number", WRONG_NUMBERS[:2])
async def test_check_counts_damaged_numbers_and_repair_makes_them_anew(
    storage: ValkeyStorage, damaged: DamagedOutbox, place: int, number: int
) -> None:
    await damaged.replace(place, number)

    assert (await storage.check("here")).problems == {"damaged_messages": 1}
    assert (await storage.check("here", repair=True)).problems == {"damaged_messages": 1}

    assert (await storage.check("here")).problems == {}
    numbers = await damaged.numbers()
    assert numbers == sorted(set(numbers))


async def test_intact_messages_are_not_a_problem(storage: ValkeyStorage, damaged: DamagedOutbox) -> None:
    assert (await storage.check("here")).problems == {}
