"""A thousand flows of three levels, some of whose leaves fail, while workers are killed: every parent is released
once, and ends as its policy says."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from penstock import App
from penstock.core.lifecycle import OPEN, TRANSITIONS, EventType, State
from penstock.storage.contract import Storage
from tests.slow import flow_fleet
from tests.slow.flow_fleet import LEAF, MIDDLE, QUEUES, TOP, fails, policy_of
from tests.slow.local_processes import LocalProcesses, opened, read_log

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

FLOWS = 1000
KILLS = 12
E, S = EventType, State


@pytest.fixture(params=["sqlite", "valkey", pytest.param("cluster", marks=pytest.mark.cluster)])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/flows.db"
    url: str = request.getfixturevalue(f"{request.param}_url")
    return f"{url}?namespace=flows-{random.randrange(10**9)}"


async def test_every_parent_is_released_once_and_ends_as_its_policy_says(
    store_url: str, tmp_path: Path
) -> None:
    async with opened(store_url) as storage:
        with LocalProcesses(store_url, tmp_path, seed=3, roles="tests.slow.flow_fleet") as processes:
            for n in range(3):
                processes.launch("worker", f"worker-{n}")
            producing = asyncio.create_task(produce(store_url))
            for kill in range(1, KILLS + 1):
                await until_ended(storage, processes, kill * 4 * FLOWS // (KILLS + 2))
                processes.kill_one()
            await producing
            await until_only_waiting(storage, processes)
            (tmp_path / "mended").touch()
            await retry_what_is_waited_for(storage)
            await until_drained(storage, processes)
        await check(storage)


async def produce(url: str) -> None:
    async with App(url) as app:
        for first in range(0, FLOWS, 50):
            await app.enqueue_flows(flow_fleet.flow(n) for n in range(first, first + 50))


async def until_ended(storage: Storage, processes: LocalProcesses, leaves: int) -> None:
    """So many leaves are done with: kills come amid the work, not before or behind it."""

    async def reached() -> bool:
        counts = await storage.counts(LEAF)
        return counts.completed + counts.failed >= leaves

    await processes.until(reached, seconds=60, state=lambda: storage.counts(LEAF))


async def until_only_waiting(storage: Storage, processes: LocalProcesses) -> None:
    """All has ended but for flows that wait for a leaf to be retried."""
    stuck = {
        n
        for n in range(FLOWS)
        if policy_of(n) == "wait" and any(fails(n, middle, leaf) for middle in range(2) for leaf in range(2))
    }
    await _until(storage, processes, {TOP: len(stuck), LEAF: 0})


async def until_drained(storage: Storage, processes: LocalProcesses) -> None:
    await _until(storage, processes, dict.fromkeys(QUEUES, 0))


async def _until(storage: Storage, processes: LocalProcesses, opens: dict[str, int]) -> None:
    async def counts() -> dict[str, int]:
        return {queue: (await storage.counts(queue)).open for queue in QUEUES}

    async def reached() -> bool:
        now = await counts()
        return all(now[queue] == count for queue, count in opens.items())

    await processes.until(reached, seconds=120, state=counts)


async def retry_what_is_waited_for(storage: Storage) -> None:
    ids = [
        f"{n}-{middle}-{leaf}"
        for n in range(FLOWS)
        for middle in range(2)
        for leaf in range(2)
        if policy_of(n) == "wait" and fails(n, middle, leaf)
    ]
    assert set(await storage.retry(LEAF, ids)) == {"retried"}


async def check(storage: Storage) -> None:
    unblocked: defaultdict[str, Counter[str]] = defaultdict(Counter)
    ended: defaultdict[str, dict[str, list[str]]] = defaultdict(dict)
    for queue in QUEUES:
        allowed = {(row.source, row.target, row.event) for row in TRANSITIONS}
        state: dict[str, State] = {}
        for event in await read_log(storage, queue):
            if not event.id:
                continue
            target = State(event.state)
            assert (state.get(event.id), target, event.type) in allowed, event
            state[event.id] = target
            if event.type is E.UNBLOCKED:
                unblocked[queue][event.id] += 1
            if target in (S.COMPLETED, S.FAILED, S.CANCELLED):
                ended[queue].setdefault(event.id, []).append(event.state)
        assert {id: s for id, s in state.items() if s in OPEN} == {}
    for n in range(FLOWS):
        check_flow(n, unblocked, ended)


def check_flow(n: int, unblocked: dict[str, Counter[str]], ended: dict[str, dict[str, list[str]]]) -> None:
    policy, middles_fail = policy_of(n), []
    for middle in range(2):
        broken = any(fails(n, middle, leaf) for leaf in range(2))
        id, fails_too = f"{n}-{middle}", broken and policy == "fail"
        middles_fail.append(fails_too)
        assert ended[MIDDLE][id] == ["failed" if fails_too else "completed"], id
        assert unblocked[MIDDLE][id] == (0 if fails_too else 1), id
        for leaf in range(2):
            check_leaf(n, middle, leaf, ended[LEAF][f"{n}-{middle}-{leaf}"])
    assert ended[TOP][f"{n}"] == ["failed" if any(middles_fail) else "completed"], n
    assert unblocked[TOP][f"{n}"] == (0 if any(middles_fail) else 1), n


def check_leaf(n: int, middle: int, leaf: int, ends: list[str]) -> None:
    if not fails(n, middle, leaf):
        assert ends == ["completed"]
    elif policy_of(n) == "wait":
        assert ends == ["failed", "completed"]
    else:
        assert ends == ["failed"]
