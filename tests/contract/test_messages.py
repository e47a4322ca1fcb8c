"""Messages to other queues: whoever's call has something to say sees to it that it is delivered, without a sweep."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

import pytest

from penstock.core.flow import Node, link_nodes
from penstock.core.job import Dependency, NewJob, Policy
from penstock.core.lifecycle import EventType, State
from penstock.core.outcome import Cancel, Fail
from penstock.storage.values import NewScheduler
from tests.contract.factories import BOOM, MINUTE_MS, Bench

E, S = EventType, State


async def put_flow(bench: Bench, policy: Policy = "fail", *, ttl_ms: int = 0) -> Bench:
    """A root here and what it waits for, "a", in another queue, which is given."""
    child = Bench(bench.storage, f"{bench.queue}-other")
    nodes = [
        Node(bench.queue, NewJob("root", after=(Dependency(child.queue, "a", policy),))),
        Node(child.queue, NewJob("a", ttl_ms=ttl_ms)),
    ]
    await bench.storage.enqueue_flows(bench.queue, [link_nodes(nodes, flow="flow")])
    await until(lambda: child.find("a"))
    return child


async def until(condition: Callable[[], Awaitable[object]]) -> None:
    async with asyncio.timeout(10):
        while not await condition():
            await asyncio.sleep(0.002)


async def has_failed(bench: Bench) -> bool:
    return (await bench.job("root")).state is S.FAILED


async def claim(bench: Bench) -> None:
    child = await put_flow(bench, ttl_ms=MINUTE_MS)
    await child.shift(MINUTE_MS)
    assert await child.claim_all() == []


async def drain(bench: Bench) -> None:
    child = await put_flow(bench)
    assert (await child.storage.drain(child.queue)).done == 1


async def clean(bench: Bench) -> None:
    child = await put_flow(bench, "wait")
    await child.settle(await child.claim(), Cancel())
    assert (await child.storage.clean(child.queue, S.CANCELLED)).done == 1


async def obliterate(bench: Bench) -> None:
    child = await put_flow(bench)
    assert await child.storage.obliterate(child.queue) == 1


async def fire(bench: Bench) -> None:
    """The job of a slot takes the place of one that has failed, and whose retry is waited for."""
    child = await put_flow(bench, "wait")
    await child.settle(await child.claim(), Fail(BOOM, final=True))
    await child.storage.put_scheduler(child.queue, NewScheduler("tick", b"", 1))
    fired = await child.storage.fire(child.queue, "tick", slot_ms=1, next_ms=0, job=NewJob("a"))
    assert fired.fired


async def retry_all(bench: Bench) -> None:
    """It asks the other queue once more, where nothing has changed."""
    child = await put_flow(bench)
    await child.settle(await child.claim(), Fail(BOOM, final=True))
    await until(lambda: has_failed(bench))
    assert (await bench.storage.retry_all(bench.queue)).done == 1
    await until(lambda: has_failed(bench))
    types = [event.type for event in await bench.events()]
    assert types == [E.ENQUEUED, E.FAILED, E.RETRIED, E.FAILED]


VERBS: Final = (claim, drain, clean, obliterate, fire, retry_all)


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.__name__)
async def test_what_a_verb_has_to_tell_is_delivered_without_a_sweep(
    bench: Bench, verb: Callable[[Bench], Awaitable[None]]
) -> None:
    await verb(bench)
    await until(lambda: has_failed(bench))
