"""limit: of the queue. How many at a time, how many in a stretch of time, and how it is changed while running."""

from __future__ import annotations

import asyncio
import json

from penstock.core.lifecycle import EventType, State
from penstock.core.limits import Bucket, Limit, Rate
from penstock.core.outcome import Complete, Limited, Release
from penstock.storage.values import Claimed, Settlement, Take, Ticket
from tests.contract.factories import LEASE_MS, MINUTE_MS, Bench

S, E = State, EventType
TWO = Limit(concurrency=2)
THREE_A_MINUTE = Limit(rate=Rate(3, MINUTE_MS))


async def claim(bench: Bench, count: int = 10, *, ticket: Ticket | None = None) -> Claimed:
    return await bench.storage.claim(bench.queue, Take("w", count, 10 * LEASE_MS), ticket=ticket)


async def put(bench: Bench, count: int) -> None:
    await bench.put_all([bench.new(f"{number:02}") for number in range(count)])


async def test_a_queue_without_limits_has_none(bench: Bench) -> None:
    assert await bench.storage.limits(bench.queue) == {}


async def test_limits_are_read_back_as_they_were_set_and_are_gone_once_removed(bench: Bench) -> None:
    every = Limit(rate=Rate(5, 2000), bucket=Bucket(10, 1, 500))
    await bench.storage.limit(bench.queue, "", TWO)
    await bench.storage.limit(bench.queue, "*", every)
    await bench.storage.limit(bench.queue, "tenant 7", Limit())

    assert await bench.storage.limits(bench.queue) == {"": TWO, "*": every, "tenant 7": Limit()}

    for group in ("", "*", "tenant 7"):
        await bench.storage.limit(bench.queue, group, None)
    assert await bench.storage.limits(bench.queue) == {}


async def test_a_limit_is_changed_only_if_it_is_the_one_that_is_expected(bench: Bench) -> None:
    storage, queue = bench.storage, bench.queue
    assert not await storage.limit(queue, "key", TWO, expected=Limit())
    assert await storage.limit(queue, "key", TWO, expected=None)
    assert not await storage.limit(queue, "key", THREE_A_MINUTE, expected=None)
    assert not await storage.limit(queue, "key", None, expected=THREE_A_MINUTE)
    assert await storage.limits(queue) == {"key": TWO}
    assert len(await bench.events()) == 1
    assert await storage.limit(queue, "key", THREE_A_MINUTE, expected=TWO)
    assert await storage.limit(queue, "key", None, expected=THREE_A_MINUTE)
    assert await storage.limits(queue) == {}


async def test_setting_a_limit_is_an_event_that_says_what_was_set(bench: Bench) -> None:
    await bench.storage.limit(bench.queue, "key", THREE_A_MINUTE)
    await bench.storage.limit(bench.queue, "key", None)

    set_event, removed = await bench.events()

    assert (set_event.type, set_event.group, set_event.id) == (E.CONFIGURED, "key", "")
    assert json.loads(set_event.data) == {"limit": {"rate": [3, MINUTE_MS]}}
    assert json.loads(removed.data) == {"limit": None}


async def test_no_more_are_active_than_the_concurrency_and_the_rest_stays_waiting(bench: Bench) -> None:
    await bench.storage.limit(bench.queue, "", TWO)
    await put(bench, 5)

    first = await claim(bench)
    second = await claim(bench)

    assert [lease.id for lease in first.leases] == ["00", "01"]
    assert (first.limited, first.wait_ms, first.paused) == (True, None, False)
    assert (second.leases, second.limited, second.wait_ms) == ([], True, None)
    assert await bench.counts() == {S.ACTIVE: 2, S.WAITING: 3}


async def test_an_end_makes_room_for_the_next_in_the_same_call(bench: Bench) -> None:
    await bench.storage.limit(bench.queue, "", TWO)
    await put(bench, 5)
    leases = (await claim(bench)).leases

    done = [Settlement(lease.id, lease.token, Complete()) for lease in leases[:1]]
    batch = await bench.storage.settle(bench.queue, done, take=Take("w", 10, LEASE_MS))

    assert batch.claimed
    assert [lease.id for lease in batch.claimed.leases] == ["02"]
    assert batch.claimed.limited


async def test_a_claim_that_gets_all_it_asked_for_was_not_limited(bench: Bench) -> None:
    await bench.storage.limit(bench.queue, "", TWO)
    await put(bench, 2)

    assert not (await claim(bench, 2)).limited
    assert not (await claim(bench)).limited, "nothing waits, so nothing is kept back"


async def test_a_limit_may_be_raised_lowered_and_removed_while_jobs_run(bench: Bench) -> None:
    await bench.storage.limit(bench.queue, "", TWO)
    await put(bench, 9)
    assert len((await claim(bench)).leases) == 2

    await bench.storage.limit(bench.queue, "", Limit(concurrency=4))
    leases = (await claim(bench)).leases
    assert len(leases) == 2

    await bench.storage.limit(bench.queue, "", Limit(concurrency=1))
    await bench.settle(leases[0], Complete())
    assert (await claim(bench)).leases == []

    await bench.storage.limit(bench.queue, "", None)
    rest = await claim(bench)
    assert len(rest.leases) == 5
    assert not rest.limited


async def test_the_rate_holds_in_every_stretch_of_its_length(bench: Bench) -> None:
    await bench.storage.limit(bench.queue, "", THREE_A_MINUTE)
    await put(bench, 9)

    assert len((await claim(bench, 1)).leases) == 1
    await bench.shift(MINUTE_MS // 2)
    second = await claim(bench)
    assert len(second.leases) == 2
    assert second.limited
    assert second.wait_ms
    assert MINUTE_MS // 2 - 5000 < second.wait_ms <= MINUTE_MS // 2

    await bench.shift(second.wait_ms)
    third = await claim(bench)
    assert len(third.leases) == 1, "only the first start has left the window"
    assert third.wait_ms
    await bench.shift(third.wait_ms)
    assert len((await claim(bench)).leases) == 2


async def test_a_start_counts_whatever_became_of_it(bench: Bench) -> None:
    await bench.storage.limit(bench.queue, "", THREE_A_MINUTE)
    await put(bench, 9)

    for lease in (await claim(bench)).leases:
        await bench.settle(lease, Release())

    assert (await claim(bench)).leases == []


async def test_a_repeated_claim_gets_the_same_answer(bench: Bench) -> None:
    await bench.storage.limit(bench.queue, "", TWO)
    await put(bench, 5)
    ticket = Ticket("stream", 1)

    first = await claim(bench, ticket=ticket)
    again = await claim(bench, ticket=ticket)

    assert [lease.token for lease in again.leases] == [lease.token for lease in first.leases]
    assert (again.limited, again.wait_ms) == (True, None)


async def test_a_job_that_met_a_limit_out_there_holds_up_the_queue_and_counts_in_nothing(
    bench: Bench,
) -> None:
    await put(bench, 3)
    lease = await bench.claim()
    await bench.events()

    answer = await bench.settle(lease, Limited(MINUTE_MS))

    assert (answer.applied, answer.state) == (True, S.WAITING)
    [event] = await bench.events()
    assert (event.type, event.state, event.token) == (E.LIMITED, "waiting", lease.token)
    job = await bench.job("00")
    assert (job.failures, job.stalls, job.runs) == (0, 0, 1)
    held_up = await claim(bench)
    assert (held_up.leases, held_up.limited) == ([], True)
    assert held_up.wait_ms
    await bench.shift(held_up.wait_ms)
    assert [lease.id for lease in (await claim(bench)).leases] == ["00", "01", "02"]


async def test_a_sweep_forgets_a_hold_up_that_is_over(bench: Bench) -> None:
    await put(bench, 1)
    await bench.settle(await bench.claim(), Limited(MINUTE_MS))
    await bench.shift(MINUTE_MS)

    await bench.storage.sweep(bench.queue)

    assert len((await claim(bench)).leases) == 1


async def test_a_waiting_claim_is_not_woken_by_jobs_that_a_limit_holds_back(bench: Bench) -> None:
    await bench.storage.limit(bench.queue, "", Limit(concurrency=1))
    await put(bench, 3)
    await claim(bench)
    await claim(bench)

    assert not await bench.storage.wait(bench.queue, timeout_ms=200)


async def test_the_end_of_an_active_job_wakes_a_claim_that_waits_for_room(bench: Bench) -> None:
    await bench.storage.limit(bench.queue, "", Limit(concurrency=1))
    await put(bench, 3)
    [lease] = (await claim(bench)).leases
    await claim(bench)

    waiting = asyncio.create_task(bench.storage.wait(bench.queue, timeout_ms=20_000))
    await bench.storage.counts(bench.queue)  # a round trip: the waiter has gone to sleep
    await bench.settle(lease, Complete())

    assert await asyncio.wait_for(waiting, 10)


async def test_obliterate_leaves_limits_and_forgets_starts(bench: Bench) -> None:
    await bench.storage.limit(bench.queue, "", THREE_A_MINUTE)
    await put(bench, 3)
    await claim(bench)

    await bench.storage.obliterate(bench.queue, force=True)
    await put(bench, 5)

    assert len((await claim(bench)).leases) == 3
    assert (await claim(bench)).limited
