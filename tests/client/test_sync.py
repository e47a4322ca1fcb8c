"""The sync face: for scripts, for Flask and Django threads."""

from __future__ import annotations

import asyncio
import inspect
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from penstock import App, JobFailed, PenstockError, Queue, ResultTimeout, State, Task
from penstock.admin import QueueAdmin
from penstock.claimed import ClaimedJob
from penstock.handle import JobHandle
from penstock.sync import SyncClaimedJob, SyncJobHandle, SyncQueue, SyncTask
from penstock.task import Dispatch
from tests.client.spy import Spy, spy_on


@pytest.fixture
def sync_app() -> Iterator[App]:
    app = App("memory://")
    yield app
    app.sync.close()


def test_a_task_is_enqueued_and_its_result_read(sync_app: App) -> None:
    @sync_app.task(queue="mail")
    def send(to: str) -> str:
        return to

    job = send.sync.enqueue("ada", id="a")
    assert (job.id, job.status, job.state, job.queue) == ("a", "queued", State.WAITING, "mail")
    assert send.sync.options(id="b", delay="1h").enqueue("bob").state is State.SCHEDULED
    assert [each.status for each in send.sync.enqueue_many([("cyd",), {"to": "a", "id": "a"}])] == [
        "queued",
        "duplicate",
    ]

    with sync_app.queue("mail").sync.claim() as claimed:
        assert claimed.payload == {"to": "ada"}
        claimed.result = "sent"

    assert job.result(timeout="5s") == "sent"
    assert send.sync.call("ada", id="a") == "sent"
    assert job.refresh() is State.COMPLETED


def test_a_block_that_raises_fails_the_job(sync_app: App) -> None:
    queue = sync_app.sync.queue("mail")
    job = queue.enqueue("x", attempts=1)

    with pytest.raises(ValueError, match="bad"), queue.claim():
        raise ValueError("bad")

    with pytest.raises(JobFailed, match="bad"):
        job.result(timeout="5s")


def test_jobs_are_claimed_and_settled(sync_app: App) -> None:
    queue = sync_app.sync.queue("mail")
    queue.enqueue_many(["a", "b", "c"], ids=["1", "2", "3"])

    one = queue.claim_one(wait=0)
    assert isinstance(one, SyncClaimedJob)
    assert (one.id, one.payload, one.run, one.failures, one.cancelled) == ("1", "a", 1, 0, False)
    one.log("line")
    one.progress(0.5)
    assert one.extend() == "extended"
    assert one.complete("done")
    rest = queue.claim_many(5)
    assert [job.release() for job in rest] == [True, True]
    assert sync_app.sync.job("mail", "1").logs() == ["line"]
    with queue.claim(wait=0) as job:
        assert job.id == "2"
    assert queue.counts().completed == 2


def test_iterators_are_plain_ones(sync_app: App) -> None:
    queue = sync_app.sync.queue("mail")
    queue.enqueue_many(range(3))

    assert [info.payload for info in queue.list_jobs("waiting")] == [0, 1, 2]
    assert [event.type for event in queue.events(follow=False)] == ["enqueued"] * 3
    following = queue.events(after=2)
    assert next(following).seq == 3
    queue.pause()
    assert next(following).type == "paused"
    following.close()


def test_many_threads_may_call_at_once(sync_app: App) -> None:
    queue = sync_app.sync.queue("mail")
    with ThreadPoolExecutor(16) as pool:
        handles = list(pool.map(lambda n: queue.enqueue(n, id=f"job-{n}"), range(200)))

    assert [handle.id for handle in handles] == [f"job-{n}" for n in range(200)]
    assert queue.open() == 200


async def test_calls_of_several_threads_travel_together() -> None:
    from penstock.loopthread import run
    from penstock.storage import open_storage

    async def opened() -> Spy:
        storage = open_storage("memory://")
        await storage.open()
        return spy_on(storage)

    spy = await asyncio.to_thread(run, opened())
    queue = App(spy).queue("mail").sync

    def fill() -> None:
        with ThreadPoolExecutor(32) as pool:
            list(pool.map(queue.enqueue, range(500)))

    await asyncio.to_thread(fill)

    assert sum(len(batch) for batch in spy.enqueues) == 500
    assert len(spy.enqueues) < 500
    await asyncio.to_thread(run, spy.close())


async def test_a_call_on_the_loop_thread_itself_is_refused_not_waited_for_ever() -> None:
    from penstock.loopthread import run

    app = App("memory://")

    async def wrong() -> None:
        app.queue("mail").sync.counts()

    with pytest.raises(PenstockError, match=r"Await the same method without \.sync"):
        await asyncio.to_thread(run, wrong())


async def test_it_may_be_used_beside_a_running_loop(sync_app: App) -> None:
    await sync_app.queue("mail").enqueue("async")
    sync_app.queue("mail").sync.enqueue("sync")

    assert await sync_app.queue("mail").open() == 2


def test_an_interrupt_ends_the_wait_and_nothing_else(sync_app: App) -> None:
    job = sync_app.sync.queue("mail").enqueue("x")
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(0.1, signal.pthread_kill, (main, signal.SIGINT))
    timer.start()

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        job.result(timeout="30s")

    assert time.monotonic() - began < 10
    assert job.refresh() is State.WAITING
    with pytest.raises(ResultTimeout):
        job.result(timeout="10ms")


def test_an_app_can_be_a_with_block(tmp_path: object) -> None:
    with App(f"sqlite:///{tmp_path}/jobs.db").sync as app:
        app.queue("mail").enqueue("x")
        assert app.queues() == ["mail"]


@pytest.mark.parametrize(
    ("original", "face"),
    [
        (Queue, SyncQueue),
        (QueueAdmin, SyncQueue),
        (Task, SyncTask),
        (JobHandle, SyncJobHandle),
        (ClaimedJob, SyncClaimedJob),
    ],
)
def test_the_face_has_every_method_of_the_original_with_its_arguments(original: type, face: type) -> None:
    methods = [name for name, value in vars(original).items() if inspect.isfunction(value) and name[0] != "_"]
    assert methods

    for name in methods:
        if original is Task and name == "job":
            continue  # has nothing to wait for, and belongs to the task
        wanted = [p for p in inspect.signature(getattr(original, name)).parameters if p != "self"]
        given = [p for p in inspect.signature(getattr(face, name)).parameters if p not in ("self", "face")]
        assert given == wanted, name


def test_a_dispatch_has_a_face_too(sync_app: App) -> None:
    @sync_app.task
    def send(n: int) -> None: ...

    dispatch = send.options(queue="other")

    assert isinstance(dispatch, Dispatch)
    assert dispatch.sync.enqueue(1).queue == "other"
    assert repr(dispatch.sync) != repr(send.sync)
