"""list_jobs: the jobs of a state in order, page by page."""

from __future__ import annotations

import pytest

from penstock.core.lifecycle import State
from penstock.core.outcome import Complete, Fail
from tests.contract.factories import BOOM, MINUTE_MS, STATES, Bench

S = State

IDS = [f"{i:02}" for i in range(25)]


async def fill(bench: Bench, state: State) -> None:
    """25 jobs in that state, whose order is that of their ids."""
    if state is S.BLOCKED:
        for id in IDS:
            await bench.bring(state, id)
        return
    new = [bench.new(id, delay_ms=MINUTE_MS if state is S.SCHEDULED else 0) for id in IDS]
    await bench.put_all(new)
    if state is S.CANCELLED:
        await bench.storage.cancel(bench.queue, IDS)
    if state in (S.ACTIVE, S.COMPLETED, S.FAILED):
        for lease in await bench.claim_all():
            if state is not S.ACTIVE:
                await bench.settle(lease, Complete() if state is S.COMPLETED else Fail(BOOM, final=True))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("state", STATES)
async def test_a_state_is_listed_in_order_page_by_page(bench: Bench, state: State, reverse: bool) -> None:
    await fill(bench, state)
    listed: list[str] = []
    cursor, pages = "", 0

    while pages == 0 or cursor:
        page = await bench.storage.list_jobs(bench.queue, state, cursor=cursor, limit=10, reverse=reverse)
        assert len(page.jobs) <= 10
        assert {job.state for job in page.jobs} <= {state}
        listed += [job.id for job in page.jobs]
        cursor, pages = page.cursor, pages + 1
        assert pages < 20, "the list does not end"

    assert listed == (IDS[::-1] if reverse else IDS)


@pytest.mark.parametrize("state", State)
async def test_an_empty_state_lists_nothing(bench: Bench, state: State) -> None:
    page = await bench.storage.list_jobs(bench.queue, state)

    assert (page.jobs, page.cursor) == ([], "")


async def test_scheduled_jobs_are_listed_as_they_come_due(bench: Bench) -> None:
    for id, minutes in [("c", 3), ("a", 1), ("b", 2)]:
        await bench.put(id, delay_ms=minutes * MINUTE_MS)

    assert await bench.ids(S.SCHEDULED) == ["a", "b", "c"]


async def test_active_jobs_are_listed_as_their_leases_run_out(bench: Bench) -> None:
    for id, minutes in [("c", 3), ("a", 1), ("b", 2)]:
        await bench.put(id)
        await bench.claim(lease_ms=minutes * MINUTE_MS)

    assert await bench.ids(S.ACTIVE) == ["a", "b", "c"]


@pytest.mark.parametrize("state", [S.COMPLETED, S.FAILED, S.CANCELLED])
async def test_finished_jobs_are_listed_as_they_expire_from_the_store(bench: Bench, state: State) -> None:
    for id, minutes in [("c", 3), ("a", 1), ("b", 2)]:
        await bench.bring(state, id, result_ttl_ms=minutes * MINUTE_MS, failure_ttl_ms=minutes * MINUTE_MS)

    assert await bench.ids(state) == ["a", "b", "c"]


async def test_waiting_jobs_are_listed_across_priorities_page_by_page(bench: Bench) -> None:
    await bench.put_all(
        [
            bench.new(f"{p}-{lifo:d}-{i}", priority=p, lifo=lifo)
            for i in range(2)
            for lifo in (0, 1)
            for p in (1, 0)
        ]
    )
    order = ["0-1-1", "0-1-0", "0-0-0", "0-0-1", "1-1-1", "1-1-0", "1-0-0", "1-0-1"]
    listed, cursor = [], ""
    for _ in range(len(order)):
        page = await bench.storage.list_jobs(bench.queue, S.WAITING, cursor=cursor, limit=1)
        listed += [job.id for job in page.jobs]
        cursor = page.cursor

    assert listed == order == [lease.id for lease in await bench.claim_all()]
