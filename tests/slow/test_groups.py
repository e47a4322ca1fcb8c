"""Groups under four workers that get killed, with cancels in between: what the event log says of caps, order, rates."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock import App
from penstock.core.event import Event
from penstock.core.lifecycle import OPEN, TERMINAL, EventType, State
from penstock.core.limits import Limit
from tests.slow import group_fleet
from tests.slow.group_fleet import LIMITS, QUEUE
from tests.slow.local_processes import LocalProcesses, read_log

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PER_GROUP = 60
KILLS = 20
WORKERS = [f"worker-{n}" for n in range(4)]


@pytest.fixture(params=["sqlite", "valkey"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/groups.db"
    url: str = request.getfixturevalue("valkey_url")
    return f"{url}?namespace=groups-{random.randrange(10**9)}"


async def enqueue(app: App) -> list[str]:
    """All jobs, the groups mixed as they come; within a group the ids rise."""
    queue = app.queue(QUEUE)
    for key, limit in LIMITS.items():
        await (await app.connect()).limit(QUEUE, key, limit)
    places = [key for key in LIMITS for _ in range(PER_GROUP)]
    random.Random(3).shuffle(places)
    counts: Counter[str] = Counter()
    ids = []
    for key in places:
        n = counts[key]
        counts[key] += 1
        ids.append(f"{key}/{n:03}")
        await queue.enqueue(
            {"n": n}, task=group_fleet.work.name, id=ids[-1], group=key, attempts=4, max_stalls=1000
        )
    return ids


async def wait_until_open(app: App, processes: LocalProcesses, *, at_most: int, seconds: float) -> None:
    """Until no more jobs than these are open."""
    queue = app.queue(QUEUE)

    async def reached() -> bool:
        return await queue.open() <= at_most

    async def state() -> object:
        return await queue.counts(), [group async for group in queue.groups()]

    await processes.until(reached, seconds=seconds, state=state)


def of_groups(events: list[Event]) -> Iterator[tuple[str, list[Event]]]:
    found: defaultdict[str, list[Event]] = defaultdict(list)
    for event in events:
        if event.id:
            found[event.id.partition("/")[0]].append(event)
    yield from found.items()


def check_cap(events: list[Event], limit: Limit) -> None:
    active: set[str] = set()
    for event in events:
        (active.add if event.state == State.ACTIVE else active.discard)(event.id)
        assert len(active) <= (limit.concurrency or PER_GROUP), event


def check_order(events: list[Event]) -> None:
    """Jobs begin in order, and each has the group for itself from its first claim to its end."""
    ended: set[str] = set()
    running = ""
    for event in events:
        if event.type is EventType.CLAIMED:
            assert event.id >= running, event
            assert running in ("", event.id) or running in ended, event
            running = event.id
        if event.state in TERMINAL:
            ended.add(event.id)


def check_rate(events: list[Event], limit: Limit) -> None:
    if limit.rate is None:
        return
    starts = [event.at_ms for event in events if event.type is EventType.CLAIMED]
    for first, beyond in zip(starts, starts[limit.rate.count :], strict=False):
        assert beyond - first >= limit.rate.per_ms


async def test_caps_order_and_rates_hold_and_no_key_wedges_under_kills_and_cancels(
    store_url: str, tmp_path: Path
) -> None:
    async with App(store_url) as app:
        with LocalProcesses(store_url, tmp_path, seed=5, roles="tests.slow.group_fleet") as processes:
            for name in WORKERS:
                processes.launch("worker", name)
            processes.launch("sweeper", "sweeper")
            ids = await enqueue(app)
            for kill in range(1, KILLS + 1):
                # Amid the work, not before or behind it.
                left = len(ids) - kill * len(ids) // (KILLS + 2)
                await wait_until_open(app, processes, at_most=left, seconds=60)
                await processes.kill_one_at_work(await app.connect(), QUEUE, WORKERS)
                await app.queue(QUEUE).cancel(*processes.chance.sample(ids, 3))
            assert processes.kills == KILLS
            await wait_until_open(app, processes, at_most=0, seconds=90)
        checked = await app.queue(QUEUE).check()
        events = await read_log(await app.connect(), QUEUE)

    assert not any(checked.problems.values()), checked
    last = {event.id: event.state for event in events if event.id}
    assert set(last) == set(ids)
    assert not OPEN & {State(state) for state in last.values()}
    assert Counter(last.values())[State.COMPLETED] > len(ids) // 2
    assert EventType.STALLED in {event.type for event in events}
    for key, of_group in of_groups(events):
        limit = LIMITS[key]
        check_cap(of_group, limit)
        check_rate(of_group, limit)
        if limit.concurrency == 1:
            check_order(of_group)
