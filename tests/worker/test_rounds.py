"""A queue that is out of reach, such as one whose cluster slot is moving, holds up no other queue."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from penstock import App
from penstock.core.job import NewJob
from penstock.core.outcome import Release
from penstock.errors import StorageUnavailable
from penstock.storage.contract import Storage
from penstock.storage.values import Claimed, Held, SettledBatch, Settlement, Take
from penstock.worker.heartbeat import Heartbeat
from penstock.worker.recovery import Rounds
from penstock.worker.slots import ServedQueue
from penstock.worker.sweeper import DeathWatch, Sweeper
from tests.worker.conftest import until, working

ROUNDS = 3


class Reach:
    """A verb of a store that does not reach the queue ``away``: it fails, or hangs until it is given up.

    ``done`` is set after some calls to ``near``.
    """

    def __init__(self, verb: Callable[..., Any], *, hangs: bool) -> None:
        self.calls = {"away": 0, "near": 0}
        self.done = asyncio.Event()
        self.given_up = asyncio.Event()
        self._verb = verb
        self._hangs = hangs

    async def __call__(self, queue: str, *args: Any, **options: Any) -> Any:
        self.calls[queue] += 1
        if self.calls["near"] >= ROUNDS:
            self.done.set()
        if queue == "near":
            return await self._verb(queue, *args, **options)
        if self._hangs:
            await self.given_up.wait()
        raise StorageUnavailable("the slot of the queue is moving")


@asynccontextmanager
async def duty(run: Callable[[], Any]) -> AsyncIterator[None]:
    task = asyncio.create_task(run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.fixture(params=["hangs", "fails"])
def hangs(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "hangs")


@pytest.fixture
async def storage(app: App) -> Storage:
    return await app.connect()


async def test_the_leases_of_other_queues_are_renewed(
    storage: Storage, hangs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    extend = Reach(storage.extend, hangs=hangs)
    monkeypatch.setattr(storage, "extend", extend)
    heartbeat = Heartbeat(
        storage,
        [ServedQueue("away"), ServedQueue("near")],
        worker_id="w",
        lease_ms=30_000,
        interval_s=0.02,
        info=lambda: b"",
        notify=lambda notices: None,
    )
    before = heartbeat.last_at
    async with duty(heartbeat.run):
        await asyncio.wait_for(extend.done.wait(), 20)
    assert heartbeat.last_at == before
    assert (extend.calls["away"] == 1) is hangs


async def test_other_queues_are_swept(
    storage: Storage, hangs: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await storage.enqueue("near", [NewJob("lost")])
    await storage.claim("near", Take("gone", 1, 1_000))
    await storage.shift_clock("near", 60_000)
    sweep = Reach(storage.sweep, hangs=hangs)
    monkeypatch.setattr(storage, "sweep", sweep)
    async with duty(Sweeper(storage, ["away", "near"], interval="20ms").run):
        await asyncio.wait_for(sweep.done.wait(), 20)
    assert (await storage.counts("near")).waiting == 1
    assert (sweep.calls["away"] == 1) is hangs
    assert ("the sweep failed" in caplog.text) is not hangs


async def test_the_dead_workers_of_other_queues_are_found(
    storage: Storage, hangs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    await storage.enqueue("near", [NewJob("lost")])
    await storage.claim("near", Take("gone", 1, 60_000))

    async def lives(queue: str) -> dict[str, bool]:
        return {"gone": False}

    monkeypatch.setattr(storage, "lives", Reach(lives, hangs=hangs))
    watch = DeathWatch(storage, ["away", "near"])
    if hangs:
        assert await watch.run_once() == 1
    else:
        with pytest.raises(StorageUnavailable):
            await watch.run_once()
    assert (await storage.counts("near")).waiting == 1


@pytest.mark.parametrize("concurrency", [1, 4])
async def test_the_jobs_of_other_queues_run(
    app: App, storage: Storage, concurrency: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.worker.fetcher._LATE_S", 0.01)

    @app.task(queue="near")
    async def square(n: int) -> int:
        return n * n

    claim = Reach(storage.claim, hangs=True)
    monkeypatch.setattr(storage, "claim", claim)
    async with working(app, queues=["away", "near"], concurrency=concurrency):
        await until(lambda: claim.calls["away"])
        jobs = await square.enqueue_many([square.job(n) for n in range(20)])
        assert [await job.result(timeout="20s") for job in jobs] == [n * n for n in range(20)]
        claim.given_up.set()


async def test_a_late_answer_brings_no_more_jobs_than_there_is_room_for(
    app: App, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.worker.fetcher._LATE_S", 0.01)
    gate, running, claim = asyncio.Event(), asyncio.Semaphore(1), storage.claim
    begun: list[str] = []

    @app.task
    async def work(queue: str) -> str:
        assert not running.locked()
        async with running:
            begun.append(queue)
            if queue == "near":
                gate.set()
                await until(lambda: handed_back)
        return queue

    handed_back: list[Held] = []
    settle = storage.settle

    async def claim_late(queue: str, take: Take, *, wait_ms: int = 0) -> Claimed:
        if queue == "away" and not wait_ms:
            await gate.wait()
        return await claim(queue, take, wait_ms=wait_ms)

    async def settle_noted(queue: str, settlements: Sequence[Settlement], **options: Any) -> SettledBatch:
        batch = await settle(queue, settlements, **options)
        handed_back.extend(
            Held(done.id, done.token) for done in settlements if isinstance(done.outcome, Release)
        )
        return batch

    away = await work.options(queue="away").enqueue("away")
    near = await work.options(queue="near").enqueue("near")
    monkeypatch.setattr(storage, "claim", claim_late)
    monkeypatch.setattr(storage, "settle", settle_noted)
    async with working(app, queues=["away", "near"], concurrency=1):
        assert await near.result(timeout="20s") == "near"
        assert await away.result(timeout="20s") == "away"
    assert begun == ["near", "away"]
    assert [lease.id for lease in handed_back] == [away.id]
    assert ((await away.get()).runs, (await away.get()).stalls) == (2, 0)


async def test_a_worker_that_stops_says_so_to_other_queues(
    app: App, storage: Storage, hangs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "depart", Reach(storage.depart, hangs=hangs))
    async with working(app, queues=["away", "near"]):
        await until(lambda: storage.workers("near"))
    assert await storage.workers("near") == []


async def test_a_late_call_is_answered_in_a_later_round() -> None:
    gate = asyncio.Event()

    async def call(queue: str) -> str:
        if queue == "late":
            await gate.wait()
        return queue.upper()

    rounds = Rounds(call, patience_s=0.01)
    assert await rounds.run(["late", "early"]) == ({"early": "EARLY"}, None, True)
    gate.set()
    assert await rounds.run(["late"]) == ({"late": "LATE"}, None, False)
