"""A worker's own limits: starts in a sliding window, by not claiming more."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import pytest

from penstock import App, InvalidOption, Task
from penstock.core.limits import Rate
from penstock.worker import fetcher
from penstock.worker.slots import Limits, Window
from tests.worker.conftest import until, working


def most_in_any(times: list[float], seconds: float) -> int:
    """The most of ``times`` that lie in one stretch shorter than ``seconds``."""
    times = sorted(times)
    return max(sum(1 for t in times if start <= t < start + seconds) for start in times)


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[float]]:
    """The starts that the windows have counted, by the count of their rate.

    A handler notes the time when its task has its turn: a machine that stalls in between moves starts of two windows
    together. Here are the times that the limit is kept by.
    """
    starts: defaultdict[int, list[float]] = defaultdict(list)
    note = Window.note

    def spy(window: Window, count: int, now: float) -> None:
        starts[window.rate.count] += [now] * count
        note(window, count, now)

    monkeypatch.setattr(Window, "note", spy)
    return starts


def test_a_window_slides() -> None:
    window = Window(Rate(3, 1000))
    assert window.room(10.0) == 3
    window.note(2, 10.0)
    window.note(1, 10.5)
    assert window.room(10.9) == 0
    assert window.room_at() == 11.0
    assert window.room(11.0) == 2
    assert window.room(11.5) == 3
    assert window.room_at() == float("inf")


def test_what_is_under_way_counts_as_started() -> None:
    window = Window(Rate(3, 1000))
    window.reserved += 2
    assert window.room(10.0) == 1
    window.reserved -= 2
    window.note(1, 10.0)
    assert window.room(10.0) == 2


def test_a_queue_has_the_room_that_all_its_limits_leave() -> None:
    limits = Limits(Rate(5, 60_000), {"mail": Rate(2, 60_000)})
    assert (limits.room("mail"), limits.room("other"), limits.room_of_worker()) == (2, 5, 5)
    limits.note("other", 4)
    assert (limits.room("mail"), limits.room("other"), limits.room_of_worker()) == (1, 1, 1)
    limits.reserve("mail", 1)
    assert (limits.room("mail"), limits.room_of_worker()) == (0, 0)


async def test_no_more_jobs_start_in_any_stretch_than_the_limit_says(
    app: App, noted: dict[int, list[float]]
) -> None:
    @app.task
    async def note(n: int) -> None:
        return

    jobs = await note.enqueue_many([note.job(n) for n in range(35)])
    async with working(app, limit="10/300ms", concurrency=50):
        for job in jobs:
            await job.result(timeout="20s")

    starts = noted[10]
    assert len(starts) == 35
    assert most_in_any(starts, 0.299) <= 10
    assert max(starts) - min(starts) >= 0.9  # three windows had to pass


async def test_jobs_that_may_not_start_stay_where_others_can_have_them(memory_app: App) -> None:
    @memory_app.task
    async def note(n: int) -> None:
        return

    await note.enqueue_many([note.job(n) for n in range(5)])
    async with working(memory_app, limit="2/1h") as limited:
        await until(lambda: limited.stats.completed == 2)
        counts = await memory_app.queue("default").counts()
        assert (counts.waiting, counts.active) == (3, 0)
        assert limited.health().consuming
        async with working(memory_app) as other:
            await until(lambda: other.stats.completed == 3)
        assert limited.stats.claimed == 2


async def test_a_limited_worker_goes_on_with_what_came_while_it_could_not_claim(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetcher, "LONGEST_WAIT_MS", 60_000)  # else a wait that nobody woke ends soon

    @app.task
    async def note(n: int) -> int:
        return n

    async with working(app, limit=(1, 0.2), lease="3m"):
        first = await note.enqueue(1)
        await first.result(timeout="10s")
        second = await note.enqueue(2)
        assert await second.result(timeout="20s") == 2


async def test_each_queue_may_have_a_limit_of_its_own(memory_app: App) -> None:
    done: dict[str, int] = {"slow": 0, "fast": 0}

    @memory_app.task(queue="slow")
    async def slow(n: int) -> None:
        done["slow"] += 1

    @memory_app.task(queue="fast")
    async def fast(n: int) -> None:
        done["fast"] += 1

    await slow.enqueue_many([slow.job(n) for n in range(20)])
    await fast.enqueue_many([fast.job(n) for n in range(200)])
    async with working(memory_app, limits={"slow": "3/1h"}, concurrency=4) as worker:
        await until(lambda: done["fast"] == 200 and done["slow"] == 3)
        assert worker.stats.claimed == 203


async def test_limits_of_the_worker_are_shared_by_its_queues(memory_app: App) -> None:
    done: Counter[str] = Counter()

    def task_of(queue: str) -> Task[[int], None]:
        @memory_app.task(queue=queue, name=queue)
        async def note(n: int) -> None:
            done[queue] += 1

        return note

    for queue in ("a", "b", "c"):
        task = task_of(queue)
        await task.enqueue_many([task.job(n) for n in range(10)])
    async with working(memory_app, limit="5/1h", limits={"a": "1/1h"}) as worker:
        await until(lambda: done.total() == 5)
        assert worker.stats.claimed == 5
    assert done.total() == 5
    assert done["a"] <= 1


async def test_queues_that_share_a_limit_keep_it_in_any_stretch(
    memory_app: App, noted: dict[int, list[float]]
) -> None:
    async def note(n: int) -> None:
        return

    tasks = [memory_app.task(queue=queue, name=queue)(note) for queue in ("a", "b", "c")]
    for task in tasks:
        await task.enqueue_many([task.job(n) for n in range(10)])
    async with working(memory_app, limit="5/200ms", limits={"a": "1/100ms"}) as worker:
        await until(lambda: worker.stats.completed == 30)
    assert (len(noted[5]), len(noted[1])) == (30, 10)
    assert most_in_any(noted[5], 0.199) <= 5
    assert most_in_any(noted[1], 0.099) <= 1


async def test_a_limit_of_one_serves_all_queues_that_wake_it(memory_app: App) -> None:
    async def note(n: int) -> int:
        return n

    a, b = (memory_app.task(queue=queue, name=queue)(note) for queue in ("a", "b"))
    async with working(memory_app, limit="1/20ms"):
        for n in range(5):
            assert await b.options(wait="5s").call(n) == n
            assert await a.options(wait="5s").call(n) == n


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"limit": "many"}, "limit='many'"),
        ({"limit": 10}, "limit=10"),
        ({"limits": "10/s"}, "limits must be a mapping of rates"),
        ({"limits": {"other": "1/s"}}, "'other', which is not a queue of this worker"),
        ({"limits": {"mail": "1"}}, r"limits\['mail'\]='1'"),
    ],
)
def test_limits_that_are_none_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidOption, match=said):
        App("memory://").worker(queues=["mail"], **options)


async def test_a_paused_worker_stays_paused_when_its_limit_allows_more(memory_app: App) -> None:
    @memory_app.task
    async def note(n: int) -> None:
        return

    await note.enqueue_many([note.job(n) for n in range(10)])
    async with working(memory_app, limit="1/50ms") as worker:
        await until(lambda: worker.stats.completed == 1)
        worker.pause()
        await worker.idle()
        done = worker.stats.completed
        assert worker._session is not None
        limits = worker._session.fetcher.limits
        assert limits is not None
        await until(lambda: limits.room("default") == 1 and limits._timer is None)
        assert worker.stats.completed == done < 10
        assert worker._session.fetcher.idle
        worker.resume()
        await until(lambda: worker.stats.completed == 10)
