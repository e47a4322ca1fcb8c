"""Messages to other queues that cannot be read: those behind them are delivered."""

from __future__ import annotations

import logging

import pytest

from penstock.core.flow import Node, woven
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
    await storage.enqueue_flows("other", [woven(nodes, flow="flow")])
    lease = await here.claim()
    storage._courier.send_soon = lambda queue: None  # type: ignore[method-assign]
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
    storage._courier.send_soon = lambda queue: None  # type: ignore[method-assign]
    await here.settle(lease, Fail(BOOM, final=True))
    await put_first(storage, "here", b"%016d" % 1 + b"letters\0x" + b"\xff" * 30)

    await storage.sweep("here")

    assert await letters.counts() == {State.WAITING: 1}
    assert await outbox(storage, "here") == []
