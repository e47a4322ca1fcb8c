"""pause and resume: nothing is claimed in between."""

from __future__ import annotations

from penstock.core.lifecycle import EventType, State
from penstock.core.outcome import Complete
from penstock.storage.values import Held, Settled
from tests.contract.factories import LEASE_MS, Bench, Seen

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


async def test_obliterate_leaves_a_paused_queue_paused(bench: Bench) -> None:
    await bench.storage.pause(bench.queue)
    await bench.storage.obliterate(bench.queue)
    await bench.put()

    assert await bench.claim_all() == []
