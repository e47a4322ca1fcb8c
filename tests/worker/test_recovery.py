"""A worker that lost its store waits for it, keeps its outcomes, and hands back what it does not know."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from penstock import App, State, StorageError, StorageFull, StorageUnavailable
from penstock.storage.contract import Storage
from penstock.storage.values import Held, SettledBatch, Take
from penstock.worker import recovery
from penstock.worker.slots import ServedQueue
from tests.servers import ValkeyServer
from tests.worker.conftest import recorded, until, working


@pytest.fixture(autouse=True)
def _short_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "_FIRST_BACKOFF_S", 0.01)
    monkeypatch.setattr(recovery, "_LONGEST_BACKOFF_S", 0.05)


class Outage:
    """Makes calls of a storage fail while ``away``; ``swallow`` lets them through and loses the answer."""

    def __init__(self, storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
        self.away = False
        self.swallow: set[str] = set()
        self.refused: list[str] = []
        for name in ("claim", "settle", "leases_of", "wait"):
            monkeypatch.setattr(storage, name, self._wrapped(name, getattr(storage, name)))

    def _wrapped(self, name: str, call: Any) -> Any:
        async def wrapped(*args: Any, **kwargs: Any) -> Any:
            if self.away:
                self.refused.append(name)
                raise StorageUnavailable("gone for a moment")
            answer = await call(*args, **kwargs)
            if name in self.swallow:
                self.swallow.discard(name)
                raise StorageUnavailable("the answer was lost")
            return answer

        return wrapped


async def test_an_outcome_is_kept_while_the_store_is_away(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    finish, started = asyncio.Event(), asyncio.Event()

    @app.task
    async def wait() -> str:
        started.set()
        await finish.wait()
        return "not lost"

    outage = Outage(await app.connect(), monkeypatch)
    async with working(app) as worker:
        events = recorded(worker, "error", "reconnected")
        job = await wait.enqueue()
        await asyncio.wait_for(started.wait(), 10)
        outage.away = True
        finish.set()
        await until(lambda: outage.refused.count("leases_of") > 2)
        assert worker.health().connected is False
        assert worker.health().consuming is False
        outage.away = False
        assert await job.result(timeout="10s") == "not lost"
        await until(lambda: worker.health().consuming)
        assert {event.type for event in events} == {"error", "reconnected"}
        info = await job.get()
        assert info.runs == 1


@pytest.mark.parametrize("verb", ["claim", "settle"])
async def test_leases_of_a_lost_answer_are_handed_back(
    verb: str, app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    @app.task
    async def echo(n: int) -> int:
        return n

    storage = await app.connect()
    outage = Outage(storage, monkeypatch)
    await echo.enqueue_many([echo.job(n=n) for n in range(10)])
    outage.swallow.add(verb)
    async with working(app, concurrency=2, lease="1h", heartbeat="1s", sweep=False) as worker:
        await until(lambda: _all_completed(storage, 10))
        assert worker.stats.errors == 1
    jobs = (await storage.list_jobs("default", State.COMPLETED)).jobs
    assert [job.failures + job.stalls for job in jobs] == [0] * 10


async def test_an_outcome_that_no_store_can_take_does_not_keep_the_others(
    memory_app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    @memory_app.task
    async def echo(n: int) -> int:
        return n

    storage = await memory_app.connect()
    settle = storage.settle

    async def picky(queue: str, settlements: Any, **kwargs: Any) -> SettledBatch:
        if any(settlement.id == "poison" for settlement in settlements):
            raise TypeError("cannot be encoded")
        return await settle(queue, settlements, **kwargs)

    monkeypatch.setattr(storage, "settle", picky)
    async with working(memory_app, concurrency=5):
        await echo.options(id="poison").enqueue(0)
        assert await asyncio.gather(*(echo.call(n) for n in range(5))) == list(range(5))


async def test_unknown_leases_of_an_earlier_life_are_left_to_their_holder(memory_app: App) -> None:
    """Two workers never share an id, so what another one holds is none of our business."""

    @memory_app.task
    async def echo(n: int) -> int:
        return n

    storage = await memory_app.connect()
    job = await echo.enqueue(1)
    await storage.claim("default", Take("somebody", 1, 60_000))
    async with working(memory_app):
        assert await echo.call(2) == 2
        assert await job.refresh() is State.ACTIVE


async def test_a_worker_on_valkey_resumes_after_the_server_was_killed_and_restarted() -> None:
    with ValkeyServer(aof=True) as server:
        async with App(server.url) as app:

            @app.task(queue="again")
            async def echo(n: int) -> int:
                await asyncio.sleep(0.001)
                return n

            storage = await app.connect()
            await echo.enqueue_many([echo.job(n=n) for n in range(1500)])
            async with working(app, concurrency=20, lease="2s") as worker:
                await until(lambda: worker.stats.completed > 100)
                server.kill()
                await asyncio.to_thread(server.start)
                await until(lambda: _all_completed(storage, 1500, "again"), seconds=60)
                assert await echo.call(7) == 7
                assert (await storage.counts("again")).open == 0


async def _all_completed(storage: Storage, count: int, queue: str = "default") -> bool:
    return (await storage.counts(queue)).completed == count


async def test_what_a_waiting_claim_got_while_it_was_given_up_is_handed_back(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = await app.connect()
    claim = storage.claim
    got = asyncio.Event()

    async def claim_that_never_answers(queue: str, take: Take, **options: Any) -> Any:
        claimed = await claim(queue, take, **options)
        if options.get("wait_ms") and claimed.leases:
            got.set()
            await asyncio.Event().wait()
        return claimed

    monkeypatch.setattr(storage, "claim", claim_that_never_answers)

    @app.task(queue="given-up")
    async def work() -> None:
        raise AssertionError("no call learned of the lease")

    async with working(app, queues=["given-up"]) as worker:
        await until(lambda: worker.health().consuming)
        while not got.is_set():
            handle = await work.enqueue()
            await until(lambda: got.is_set() or worker.stats.failed)
    job = await app.queue("given-up").get(handle.id)

    assert job.state is State.WAITING
    assert job.stalls == 0


async def test_a_store_that_can_be_read_and_not_written_is_left_alone_for_longer_and_longer() -> None:
    class Readable:
        async def leases_of(self, queue: str, worker: str) -> list[Held]:
            return []

    served = ServedQueue("q")

    async def recover() -> float:
        await recovery.until_it_answers(
            cast(Storage, Readable()),
            served,
            StorageError("the disk is full"),
            worker_id="w",
            settled=lambda runs, answers: None,
            failed=lambda served, error: None,
        )
        return served.backoff_s

    assert [await recover() for _ in range(4)] == [0.02, 0.04, 0.05, 0.05]
    served.recovered_at -= 10
    assert await recover() == 0.02


async def test_a_full_store_is_distinguished_from_an_unreachable_one(
    memory_app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors: list[Exception] = [StorageFull("jobs.db: no room to write. Free disk space.")]
    storage = await memory_app.connect()

    async def fail(*args: Any, **kwargs: Any) -> Any:
        raise errors[0]

    async with working(memory_app) as worker:
        monkeypatch.setattr(storage, "claim", fail)
        await memory_app.queue("default").enqueue(1)
        await until(lambda: not worker.health().connected)
        assert worker.health().reason == f"the store fails for default: {errors[0]}"
        errors[0] = StorageUnavailable("jobs.db: away")
        await until(lambda: worker.health().reason == "the store does not answer for default")
