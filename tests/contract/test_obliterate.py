"""obliterate: all jobs of a queue go; counters, log, pause flag and settings stay."""

from __future__ import annotations

import pytest

from penstock.core.lifecycle import EventType, State
from penstock.errors import StorageError
from penstock.storage.values import Finished, QueueSettings
from tests.contract.factories import STATES, Bench, Seen

E, S = EventType, State


@pytest.mark.parametrize("state", STATES)
async def test_a_job_in_any_state_is_gone_and_there_is_one_event(bench: Bench, state: State) -> None:
    await bench.bring(state)
    await bench.events()

    assert await bench.storage.obliterate(bench.queue, force=True) == 1

    assert await bench.find() is None
    assert await bench.counts() == {}
    assert await bench.claim_all() == []
    [event] = await bench.events()
    assert (event.type, event.id, event.size) == (E.OBLITERATED, "", 1)
    assert (await bench.storage.check(bench.queue)).records == 0


async def test_it_is_refused_while_a_job_is_active(bench: Bench) -> None:
    await bench.bring_all()
    picture = await bench.picture()

    with pytest.raises(
        StorageError, match=r"^queue '.*' was not obliterated: 1 of its jobs is active\. .*force=True"
    ):
        await bench.storage.obliterate(bench.queue)

    assert await bench.picture() == picture


async def test_without_active_jobs_it_needs_no_force(bench: Bench) -> None:
    await bench.put_all([bench.new(str(i)) for i in range(5000)])

    assert await bench.storage.obliterate(bench.queue) == 5000
    assert await bench.counts() == {}


async def test_waiters_of_open_jobs_are_notified_of_their_cancellation(bench: Bench) -> None:
    put = {id: await bench.put(id, notify="ear") for id in ("active", "waiting")}
    await bench.claim()

    await bench.storage.obliterate(bench.queue, force=True)

    news: list[Finished] = []
    while len(news) < 2:
        heard = await bench.storage.listen(bench.queue, "ear", timeout_ms=5000)
        assert heard
        news += heard
    assert sorted(news, key=lambda item: item.id) == [
        Finished(id, put[id].incarnation, S.CANCELLED) for id in ("active", "waiting")
    ]


async def test_log_settings_and_epoch_stay(bench: Bench) -> None:
    await bench.storage.configure(bench.queue, QueueSettings(keep_failed=7))
    await bench.put()
    before = await bench.storage.read_events(bench.queue, after=0)

    await bench.storage.obliterate(bench.queue)

    after = await bench.storage.read_events(bench.queue, after=0)
    assert after.epoch == before.epoch
    assert after.events[:-1] == before.events
    assert (await bench.storage.settings(bench.queue)).keep_failed == 7


async def test_the_queue_can_be_used_again(bench: Bench) -> None:
    await bench.bring_all()
    await bench.storage.obliterate(bench.queue, force=True)
    await bench.events()

    assert (await bench.put("waiting")).status == "queued"
    assert await bench.seen() == [Seen(E.ENQUEUED, "waiting", S.WAITING)]
    assert (await bench.claim()).run == 1
