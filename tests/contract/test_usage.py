"""usage and budgets: what running jobs report is summed exactly, and holds further jobs back once it is too much."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from penstock.core.job import Extras
from penstock.core.lifecycle import EventType, State
from penstock.core.outcome import Complete, Snooze
from penstock.storage.values import Budget, Claimed, QueueSettings, Report, Take, Ticket, Usage
from tests.contract.factories import LEASE_MS, MINUTE_MS, Bench

DAY_MS = 24 * 60 * MINUTE_MS


async def use(bench: Bench, id: str, token: int, **amounts: int) -> bool:
    [heard] = await bench.storage.report(bench.queue, [Report(id, token, usage=amounts)])
    return heard


async def take(bench: Bench, count: int = 10) -> Claimed:
    return await bench.storage.claim(bench.queue, Take("worker", count, LEASE_MS))


async def test_usage_is_summed_by_queue_task_and_group(bench: Bench) -> None:
    await bench.put("a", task="embed", extras=Extras(group="tenant"))
    await bench.put("b")
    for lease in await bench.claim_all():
        assert await use(bench, lease.id, lease.token, tokens=100, usd=1)
        assert await use(bench, lease.id, lease.token, tokens=20)
    assert await bench.storage.usage(bench.queue) == [
        Usage("queue", "", "tokens", 240),
        Usage("queue", "", "usd", 2),
        Usage("task", "embed", "tokens", 120),
        Usage("task", "embed", "usd", 1),
        Usage("group", "tenant", "tokens", 120),
        Usage("group", "tenant", "usd", 1),
    ]


async def test_a_job_keeps_what_it_used_through_its_runs_and_its_end(bench: Bench) -> None:
    await bench.put(payload=b"payload")
    lease = await bench.claim()
    await use(bench, "job", lease.token, tokens=5)
    await bench.settle(lease, Snooze(0))
    lease = await bench.claim()
    assert (lease.extras, lease.payload) == (Extras(usage={"tokens": 5}), b"payload")
    await use(bench, "job", lease.token, tokens=2)
    await bench.settle(lease, Complete(b"done"))
    job = await bench.job()
    assert (job.extras, job.result) == (Extras(usage={"tokens": 7}), b"done")
    await bench.put(conflict=bench.new("x").conflict, unchecked=True)
    assert (await bench.job()).extras is None


async def test_only_the_holder_is_heard(bench: Bench) -> None:
    await bench.put()
    lease = await bench.claim()
    assert not await use(bench, "job", lease.token + 1, tokens=5)
    assert await bench.storage.usage(bench.queue) == []


async def test_each_report_is_an_event(bench: Bench) -> None:
    await bench.put()
    lease = await bench.claim()
    await bench.events()
    await use(bench, "job", lease.token, usd=3, tokens=5)
    [event] = await bench.events()
    assert (event.type, event.id, event.run, event.data) == (EventType.USED, "job", 1, '{"tokens":5,"usd":3}')


async def test_large_sums_stay_exact(bench: Bench) -> None:
    await bench.put()
    lease = await bench.claim()
    for _ in range(3):
        await use(bench, "job", lease.token, usd=2**50 + 1)
    assert (await bench.storage.usage(bench.queue))[0].micros == 3 * (2**50 + 1)


async def test_sums_are_forgotten_when_nothing_was_added_for_long(bench: Bench) -> None:
    await bench.put()
    lease = await bench.claim(lease_ms=40 * DAY_MS)
    await use(bench, "job", lease.token, tokens=5)
    await bench.shift(29 * DAY_MS)
    await bench.storage.sweep(bench.queue)
    assert await bench.storage.usage(bench.queue)
    await bench.shift(2 * DAY_MS)
    await bench.storage.sweep(bench.queue)
    assert await bench.storage.usage(bench.queue) == []


async def test_a_spent_budget_stops_claims_until_it_is_raised(bench: Bench) -> None:
    await bench.put("a")
    await bench.put("b")
    await bench.storage.set_budget(bench.queue, Budget("usd", 10))
    lease = await bench.claim()
    await use(bench, "a", lease.token, usd=9)
    assert await bench.storage.budgets(bench.queue) == [Budget("usd", 10, spent=9)]
    await use(bench, "a", lease.token, usd=9)
    assert await take(bench) == Claimed([], None, over_budget=True)
    assert (await bench.storage.settle(bench.queue, [], take=Take("worker", 1, LEASE_MS))).claimed == Claimed(
        [], None, over_budget=True
    )
    await bench.storage.set_budget(bench.queue, Budget("usd", 100))
    assert [lease.id for lease in (await take(bench)).leases] == ["b"]


async def test_new_settings_leave_a_spent_budget_spent(bench: Bench) -> None:
    await bench.put("a")
    await bench.put("b")
    await bench.storage.set_budget(bench.queue, Budget("usd", 10))
    lease = await bench.claim()
    await use(bench, "a", lease.token, usd=18)
    for settings in (QueueSettings(keep_completed=10), QueueSettings(dead_letter="dead"), QueueSettings()):
        await bench.storage.configure(bench.queue, settings)
        assert (await take(bench)).over_budget


async def test_a_repeated_claim_says_again_that_the_budget_is_spent(bench: Bench) -> None:
    await bench.put("a")
    await bench.storage.set_budget(bench.queue, Budget("usd", 0))
    asked = Take("worker", 1, LEASE_MS)
    first = await bench.storage.claim(bench.queue, asked, ticket=Ticket("stream", 1))
    settled = await bench.storage.settle(bench.queue, [], take=asked, ticket=Ticket("other stream", 1))

    assert first.over_budget
    assert await bench.storage.claim(bench.queue, asked, ticket=Ticket("stream", 1)) == first
    again = await bench.storage.settle(bench.queue, [], take=asked, ticket=Ticket("other stream", 1))
    assert again == settled


async def test_a_budget_per_period_delays_until_the_next_one(bench: Bench) -> None:
    await bench.put("a")
    await bench.storage.set_budget(bench.queue, Budget("usd", 10, per_ms=MINUTE_MS))
    lease = await bench.claim(lease_ms=DAY_MS)
    await use(bench, "a", lease.token, usd=10)
    await bench.put("b")
    claimed = await take(bench)
    assert claimed.over_budget
    assert claimed.wait_ms is not None
    assert 0 < claimed.wait_ms <= MINUTE_MS
    await bench.shift(MINUTE_MS)
    assert [lease.id for lease in (await take(bench)).leases] == ["b"]
    await use(bench, "a", lease.token, usd=4)
    [budget] = await bench.storage.budgets(bench.queue)
    assert budget.spent == 4


async def test_a_budget_that_is_raised_keeps_its_period_and_what_was_spent_in_it(bench: Bench) -> None:
    await bench.put("a")
    await bench.storage.set_budget(bench.queue, Budget("usd", 10, per_ms=MINUTE_MS))
    lease = await bench.claim(lease_ms=DAY_MS)
    await use(bench, "a", lease.token, usd=10)
    await bench.put("b")
    [spent] = await bench.storage.budgets(bench.queue)

    await bench.shift(MINUTE_MS // 2)
    await bench.storage.set_budget(bench.queue, Budget("usd", 20, per_ms=MINUTE_MS))

    assert await bench.storage.budgets(bench.queue) == [replace(spent, micros=20)]
    await use(bench, "a", lease.token, usd=10)
    assert (await take(bench)).over_budget
    await bench.shift(MINUTE_MS // 2)
    assert [lease.id for lease in (await take(bench)).leases] == ["b"]


async def test_a_budget_that_is_raised_in_a_later_period_has_nothing_spent(bench: Bench) -> None:
    await bench.put("a")
    await bench.storage.set_budget(bench.queue, Budget("usd", 10, per_ms=MINUTE_MS))
    lease = await bench.claim(lease_ms=DAY_MS)
    await use(bench, "a", lease.token, usd=10)

    await bench.shift(MINUTE_MS)
    await bench.storage.set_budget(bench.queue, Budget("usd", 20, per_ms=MINUTE_MS))

    assert [budget.spent for budget in await bench.storage.budgets(bench.queue)] == [0]


@pytest.mark.parametrize("per_ms", [MINUTE_MS, 2 * MINUTE_MS])
async def test_another_period_begins_when_it_is_set(bench: Bench, per_ms: int) -> None:
    await bench.put("a")
    first = 0 if per_ms == MINUTE_MS else MINUTE_MS
    await bench.storage.set_budget(bench.queue, Budget("usd", 10, per_ms=first))
    lease = await bench.claim(lease_ms=DAY_MS)
    await use(bench, "a", lease.token, usd=10)

    await bench.storage.set_budget(bench.queue, Budget("usd", 10, per_ms=per_ms))

    assert [budget.spent for budget in await bench.storage.budgets(bench.queue)] == [0]


async def test_what_was_used_before_counts_unless_there_is_a_period(bench: Bench) -> None:
    await bench.put("a")
    lease = await bench.claim()
    await use(bench, "a", lease.token, usd=7)
    await bench.storage.set_budget(bench.queue, Budget("usd", 10))
    await bench.storage.set_budget(bench.queue, Budget("tokens", 10, per_ms=MINUTE_MS))
    spent = {budget.name: budget.spent for budget in await bench.storage.budgets(bench.queue)}
    assert spent == {"usd": 7, "tokens": 0}


async def test_a_flow_that_has_spent_its_budget_begins_no_further_jobs(bench: Bench) -> None:
    for id in ("a", "b"):
        await bench.put(id, extras=Extras(flow="flow-1"))
    await bench.put("other", extras=Extras(flow="flow-2"))
    await bench.storage.set_budget(bench.queue, Budget("usd", 5, flow="flow-1"))
    lease = await bench.claim()
    await use(bench, "a", lease.token, usd=5)
    assert Usage("flow", "flow-1", "usd", 5) in await bench.storage.usage(bench.queue)
    await bench.events()
    assert [lease.id for lease in (await take(bench)).leases] == ["other"]
    job = await bench.job("b")
    assert job.failure is not None
    assert (job.state, job.failure.type) == (State.FAILED, "BudgetExceeded")
    assert [(event.type, event.id) for event in await bench.events()] == [
        (EventType.FAILED, "b"),
        (EventType.CLAIMED, "other"),
    ]
    await bench.settle(lease, Complete(b""))
    assert await bench.state("a") is State.COMPLETED


async def test_resetting_usage_and_removing_a_budget_let_jobs_through(bench: Bench) -> None:
    await bench.put("a")
    lease = await bench.claim()
    await bench.storage.set_budget(bench.queue, Budget("usd", 5))
    await use(bench, "a", lease.token, usd=5)
    await bench.put("b")
    assert (await take(bench)).over_budget
    await bench.storage.reset_usage(bench.queue)
    assert await bench.storage.usage(bench.queue) == []
    assert [lease.id for lease in (await take(bench)).leases] == ["b"]
    await bench.storage.set_budget(bench.queue, Budget("usd", 0))
    await bench.put("c")
    assert (await take(bench)).over_budget
    assert await bench.storage.remove_budget(bench.queue, "usd")
    assert not await bench.storage.remove_budget(bench.queue, "usd")
    assert [lease.id for lease in (await take(bench)).leases] == ["c"]
