"""pause and resume: nothing is claimed in between."""

from __future__ import annotations

import pytest

from penstock.core.job import Extras
from penstock.core.lifecycle import EventType, State
from penstock.core.outcome import Complete, Limited
from penstock.storage.values import Held, Settled, Take
from tests.contract.factories import LEASE_MS, MINUTE_MS, Bench, Seen

E, S = EventType, State


async def test_a_paused_queue_takes_jobs_and_gives_none_until_it_is_resumed(bench: Bench) -> None:
    await bench.storage.pause(bench.queue)
    answer = await bench.put()

    assert (answer.status, answer.state) == ("queued", S.WAITING)
    assert (await bench.storage.counts(bench.queue)).paused
    assert await bench.claim_all() == []

    await bench.storage.resume(bench.queue)
    assert not (await bench.storage.counts(bench.queue)).paused
    assert (await bench.claim()).id == "job"


async def test_there_is_an_event_when_the_flag_changes_and_none_when_it_does_not(bench: Bench) -> None:
    for verb in ("resume", "pause", "pause", "resume", "resume"):
        await getattr(bench.storage, verb)(bench.queue)

    assert await bench.seen() == [Seen(E.PAUSED, "", ""), Seen(E.RESUMED, "", "")]


async def test_running_jobs_of_a_paused_queue_go_on(bench: Bench) -> None:
    lease = await bench.bring(S.ACTIVE)
    assert lease
    await bench.storage.pause(bench.queue)

    held = [Held("job", lease.token)]
    assert await bench.storage.extend(bench.queue, held, worker="w", lease_ms=LEASE_MS) == ["extended"]
    assert await bench.settle(lease, Complete()) == Settled(True, S.COMPLETED)


@pytest.mark.parametrize("group", ["", "g"])
async def test_a_pause_for_a_time_ends_by_itself(bench: Bench, group: str) -> None:
    await bench.storage.pause(bench.queue, group=group, duration_ms=MINUTE_MS)
    await bench.put(extras=Extras(group="g"))

    claimed = await bench.storage.claim(bench.queue, Take("w", 1, LEASE_MS))
    assert (claimed.leases, claimed.paused) == ([], False)
    assert claimed.wait_ms is not None
    assert 0 < claimed.wait_ms <= MINUTE_MS
    await bench.shift(MINUTE_MS)
    assert (await bench.claim()).id == "job"
    assert not (await bench.storage.counts(bench.queue)).paused


@pytest.mark.parametrize("group", ["", "g"])
async def test_a_shorter_pause_does_not_shorten_a_longer_one(bench: Bench, group: str) -> None:
    for minutes in (2, 1):
        await bench.storage.pause(bench.queue, group=group, duration_ms=minutes * MINUTE_MS)
    await bench.put(extras=Extras(group="g"))
    await bench.shift(MINUTE_MS + 1)
    assert await bench.claim_all() == []
    await bench.shift(MINUTE_MS)
    assert len(await bench.claim_all()) == 1


@pytest.mark.parametrize("group", ["", "g"])
async def test_resume_ends_a_pause_for_a_time_and_one_without_end(bench: Bench, group: str) -> None:
    await bench.put(extras=Extras(group="g"))
    await bench.storage.pause(bench.queue, group=group, duration_ms=MINUTE_MS)
    await bench.storage.pause(bench.queue, group=group)
    assert await bench.claim_all() == []
    await bench.events()
    for _ in range(2):
        await bench.storage.resume(bench.queue, group=group)
    events = await bench.events()
    assert [(event.type, event.group) for event in events if event.type != E.UNBLOCKED] == [
        (E.RESUMED, group)
    ]
    assert len(await bench.claim_all()) == 1


async def test_resume_ends_a_time_that_a_handler_asked_for(bench: Bench) -> None:
    await bench.put()
    await bench.settle(await bench.claim(), Limited(MINUTE_MS))
    assert await bench.claim_all() == []
    await bench.storage.resume(bench.queue)
    assert len(await bench.claim_all()) == 1


async def test_the_event_of_a_pause_for_a_time_says_how_long(bench: Bench) -> None:
    for duration_ms in (5000, 4000, 6000):
        await bench.storage.pause(bench.queue, group="g", duration_ms=duration_ms)
    await bench.storage.pause(bench.queue, duration_ms=7000)
    seen = [(event.type, event.group, event.data) for event in await bench.events()]
    assert seen == [
        (E.PAUSED, "g", '{"for_ms":5000}'),
        (E.PAUSED, "g", '{"for_ms":6000}'),
        (E.PAUSED, "", '{"for_ms":7000}'),
    ]


async def test_obliterate_leaves_a_paused_queue_paused(bench: Bench) -> None:
    await bench.storage.pause(bench.queue)
    await bench.storage.obliterate(bench.queue)
    await bench.put()

    assert await bench.claim_all() == []
