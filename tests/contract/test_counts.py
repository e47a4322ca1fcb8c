"""counts and queues: how much there is, and where."""

from __future__ import annotations

from penstock.core.job import Extras
from penstock.core.lifecycle import State
from penstock.core.limits import Limit, Rate
from penstock.core.outcome import Suspend
from penstock.storage.values import Counts
from tests.contract.factories import LEASE_MS, MINUTE_MS, STATES, Bench

S = State


async def test_an_unused_queue_is_empty(bench: Bench) -> None:
    assert await bench.storage.counts(bench.queue) == Counts()
    assert bench.queue not in await bench.storage.queues()


async def test_every_state_is_counted(bench: Bench) -> None:
    await bench.bring_all()
    await bench.put("another")

    counts = await bench.storage.counts(bench.queue)

    assert {state: getattr(counts, state) for state in STATES} == dict.fromkeys(STATES, 1) | {S.WAITING: 2}
    assert counts.open == 5
    assert not counts.paused


async def test_oldest_waiting_is_how_long_the_next_in_line_has_been_ready(bench: Bench) -> None:
    await bench.put("first")
    await bench.shift(5 * MINUTE_MS)
    await bench.put("second")

    async def minutes() -> int:
        return (await bench.storage.counts(bench.queue)).oldest_waiting_ms // MINUTE_MS

    assert await minutes() == 5
    await bench.claim(lease_ms=LEASE_MS)
    assert await minutes() == 0
    await bench.claim()
    assert (await bench.storage.counts(bench.queue)).oldest_waiting_ms == 0


async def test_a_promoted_job_has_been_ready_since_its_promotion(bench: Bench) -> None:
    await bench.put(delay_ms=9 * MINUTE_MS)
    await bench.shift(5 * MINUTE_MS)
    await bench.storage.promote(bench.queue, ["job"])
    await bench.shift(2 * MINUTE_MS)

    assert (await bench.storage.counts(bench.queue)).oldest_waiting_ms // MINUTE_MS == 2


async def test_due_jobs_count_as_due_before_a_sweep(bench: Bench) -> None:
    await bench.put("soon", delay_ms=MINUTE_MS)
    await bench.put("sooner", delay_ms=MINUTE_MS // 2)
    await bench.put("later", delay_ms=60 * MINUTE_MS)
    assert (await bench.storage.counts(bench.queue)).due == 0
    await bench.shift(5 * MINUTE_MS)

    counts = await bench.storage.counts(bench.queue)

    assert (counts.scheduled, counts.waiting, counts.due) == (3, 0, 2)
    assert counts.oldest_waiting_ms // (MINUTE_MS // 2) == 9
    await bench.claim()
    counts = await bench.storage.counts(bench.queue)
    assert (counts.scheduled, counts.waiting, counts.due) == (1, 1, 0)


async def test_the_time_until_time_moves_a_job_is_known(bench: Bench) -> None:
    async def next_minutes() -> int | None:
        ms = (await bench.storage.counts(bench.queue)).next_ms
        return None if ms is None else round(ms / MINUTE_MS)

    await bench.put("waiting")
    assert await next_minutes() is None
    await bench.put("later", delay_ms=60 * MINUTE_MS)
    assert await next_minutes() == 60
    lease = await bench.claim()
    await bench.settle(lease, Suspend("signal", 30 * MINUTE_MS))
    assert await next_minutes() == 30
    await bench.storage.limit(bench.queue, "g", Limit(rate=Rate(1, 20 * MINUTE_MS)))
    await bench.put_all([bench.new(id, extras=Extras(group="g")) for id in ("one", "two")])
    await bench.claim()
    assert await next_minutes() == 20
    await bench.storage.pause(bench.queue, group="g")
    assert await next_minutes() == 30
    await bench.shift(40 * MINUTE_MS)
    assert await next_minutes() == 0


async def test_queues_that_were_ever_enqueued_to_are_listed_in_order(bench: Bench) -> None:
    names = [f"{bench.queue}-{letter}" for letter in "cab"]
    for name in names:
        await bench.storage.enqueue(name, [bench.new("job")])
    await bench.storage.obliterate(names[0])

    ours = [name for name in await bench.storage.queues() if name.startswith(bench.queue)]
    assert ours == sorted(names)
