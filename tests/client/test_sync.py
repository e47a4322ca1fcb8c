"""The sync face: for scripts, for Flask and Django threads."""

from __future__ import annotations

import asyncio
import inspect
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import pytest

from penstock import App, JobFailed, PenstockError, Queue, ResultTimeout, State, Task
from penstock.client.claim import ClaimedJob
from penstock.client.flow import Whole
from penstock.client.flow.handle import FlowHandle
from penstock.client.handle import JobHandle
from penstock.client.subscription import Subscription
from penstock.client.sync import (
    SyncApp,
    SyncClaimedJob,
    SyncDispatch,
    SyncFlowHandle,
    SyncJobHandle,
    SyncQueue,
    SyncSubscription,
    SyncWhole,
)
from penstock.client.task import Dispatch
from penstock.testing.harness import Harness, SyncHarness
from tests.client.spy import Spy, spy_on

IN_A_LOOP: Final = "thread that runs an event loop.*Await the same method without `.sync`"


@pytest.fixture
def sync_app() -> Iterator[App]:
    app = App("memory://")
    yield app
    app.sync.close()


def test_a_task_is_enqueued_and_its_result_read(sync_app: App) -> None:
    @sync_app.task(queue="mail")
    def send(to: str) -> str:
        return to

    job = send.sync.options(id="a").enqueue("ada")
    assert (job.id, job.status, job.state, job.queue) == ("a", "queued", State.WAITING, "mail")
    assert send.sync.options(id="b", delay="1h").enqueue("bob").state is State.SCHEDULED
    assert [
        each.status
        for each in send.sync.enqueue_many([send.sync.job("cyd"), send.sync.options(id="a").job(to="a")])
    ] == [
        "queued",
        "duplicate",
    ]

    with sync_app.queue("mail").sync.claim() as claimed:
        assert claimed.payload == {"to": "ada"}
        claimed.result = "sent"

    assert job.result(timeout="5s") == "sent"
    assert send.sync.options(id="a").call("ada") == "sent"
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
    assert sync_app.sync.job("mail/1").logs() == ["line"]
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


def test_many_threads_may_call_concurrently(sync_app: App) -> None:
    queue = sync_app.sync.queue("mail")
    with ThreadPoolExecutor(16) as pool:
        handles = list(pool.map(lambda n: queue.enqueue(n, id=f"job-{n}"), range(200)))

    assert [handle.id for handle in handles] == [f"job-{n}" for n in range(200)]
    assert queue.open() == 200


async def test_calls_of_several_threads_travel_together() -> None:
    from penstock.client.loopthread import run
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
    from penstock.client.loopthread import run

    app = App("memory://")

    async def wrong() -> None:
        app.queue("mail").sync.counts()

    with pytest.raises(PenstockError, match=IN_A_LOOP):
        await asyncio.to_thread(run, wrong())


async def test_a_call_in_a_running_loop_says_to_use_await(sync_app: App) -> None:
    @sync_app.task(queue="mail")
    async def send(to: str) -> str:
        return to

    job = await send.enqueue("ada")
    calls: list[Callable[[], object]] = [
        lambda: send.sync.enqueue("bob"),
        lambda: send.sync.call("bob"),
        lambda: sync_app.sync.job(f"mail/{job.id}").result(timeout="30s"),
        lambda: list(sync_app.queue("mail").sync.events(follow=False)),
        sync_app.sync.__enter__,
        sync_app.sync.close,
    ]
    for call in calls:
        with pytest.raises(PenstockError, match=IN_A_LOOP):
            call()
    asyncio.get_running_loop().call_soon(lambda: refused.set_exception(_raised_by(calls[0])))
    refused: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    with pytest.raises(PenstockError, match=IN_A_LOOP):
        await refused
    assert (await sync_app.queue("mail").counts()).waiting == 1


def _raised_by(call: Callable[[], object]) -> Exception:
    try:
        call()
    except PenstockError as error:
        return error
    return AssertionError("it raised nothing")


def test_a_program_that_waits_for_its_own_loop_ends_with_the_error() -> None:
    program = """
import asyncio
from penstock import App

app = App("memory://")

@app.task
async def send(to):
    return to

async def main():
    running = asyncio.create_task(app.worker().run())
    send.sync.call("ada")

asyncio.run(main())
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert "PenstockError: `.sync` cannot be used in a thread that runs an event loop" in ended.stderr
    assert ended.returncode == 1


async def test_handlers_in_threads_and_to_thread_may_use_it_beside_a_running_loop() -> None:
    app = App("memory://")

    @app.task(queue="mail")
    def first(to: str) -> str:
        return second.sync.options(id="second").enqueue(to).id

    @app.task(queue="mail")
    async def second(to: str) -> str:
        return await asyncio.to_thread(lambda: third.sync.options(id="third").enqueue(to).id)

    @app.task(queue="mail")
    async def third(to: str) -> str:
        return to

    async with app:
        worker = asyncio.create_task(app.worker(burst=True).run())
        assert await first.call("ada") == "second"
        await asyncio.wait_for(worker, 30)
        assert await app.job("mail/second").result(timeout="5s") == "third"
        assert await app.job("mail/third").result(timeout="5s") == "ada"


def test_a_program_that_used_the_default_executor_exits_without_a_traceback() -> None:
    program = """
import asyncio
from penstock.client.loopthread import run

async def length():
    return await asyncio.to_thread(len, "abc")

print(run(length()))
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )

    assert (ended.stdout, ended.stderr, ended.returncode) == ("3\n", "", 0)


async def test_a_thread_may_use_it_beside_a_running_loop(sync_app: App) -> None:
    await sync_app.queue("mail").enqueue("async")
    await asyncio.to_thread(sync_app.queue("mail").sync.enqueue, "sync")

    assert await sync_app.queue("mail").open() == 2


def test_an_interrupt_ends_the_wait_and_nothing_else(sync_app: App) -> None:
    job = sync_app.sync.queue("mail").enqueue("x")
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(0.1, signal.pthread_kill, (main, signal.SIGINT))

    # The timer starts in the block: the interrupt of one that comes early would end the whole run.
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        timer.start()
        job.result(timeout="30s")

    assert job.refresh() is State.WAITING
    with pytest.raises(ResultTimeout):
        job.result(timeout="10ms")


def test_an_app_can_be_a_with_block(tmp_path: object) -> None:
    with App(f"sqlite:///{tmp_path}/jobs.db").sync as app:
        app.queue("mail").enqueue("x")
        assert app.queues() == ["mail"]


FACES: Final[dict[type, tuple[type, frozenset[str]]]] = {
    # The names after each face are not on it: they wait for nothing, or belong to Penstock's own parts.
    App: (
        SyncApp,
        frozenset(
            {
                "add_children",
                "add_handler",
                "add_task",
                "after_execution",
                "connect",
                "dead_letter",
                "enqueue_middleware",
                "exchange_sessions",
                "handler",
                "handlers",
                "load",
                "middleware",
                "move_to",
                "on_start",
                "on_stop",
                "put_declared",
                "scheduled",
                "sync",
                "sync_middleware",
                "task",
                "task_named",
                "tasks",
                "with_policy",
                "worker",
            }
        ),
    ),
    Queue: (SyncQueue, frozenset({"sync"})),
    Task: (SyncDispatch, frozenset({"given", "rules", "rules_beside", "sync", "task"})),
    Dispatch: (SyncDispatch, frozenset({"given", "rules", "sync", "task"})),
    JobHandle: (SyncJobHandle, frozenset({"source"})),
    ClaimedJob: (SyncClaimedJob, frozenset()),
    FlowHandle: (SyncFlowHandle, frozenset()),
    Whole: (SyncWhole, frozenset({"sync"})),
    Subscription: (SyncSubscription, frozenset({"sync"})),
    Harness: (SyncHarness, frozenset({"aclose", "begin", "close", "stub", "sync"})),
}


@pytest.mark.parametrize("original", FACES, ids=lambda original: original.__name__)
def test_the_face_has_every_public_name_of_the_original(original: type) -> None:
    face, left_out = FACES[original]

    assert public(original) - public(face) == left_out


@pytest.mark.parametrize("original", FACES, ids=lambda original: original.__name__)
def test_the_face_takes_the_arguments_of_the_original(original: type) -> None:
    face, left_out = FACES[original]

    for name in public(original) - left_out:
        if not inspect.isfunction(method := getattr(original, name)) or not callable(getattr(face, name)):
            continue  # a property, or a method that the face borrows from its target
        wanted, given = parameters(method), parameters(getattr(face, name))
        if inspect.Parameter.VAR_KEYWORD in given.values():  # takes every keyword, and passes it on
            wanted, given = by_position(wanted), by_position(given)
        assert list(given) == list(wanted), name


def parameters(method: Callable[..., object]) -> dict[str, inspect._ParameterKind]:
    named = inspect.signature(method).parameters
    return {name: each.kind for name, each in named.items() if name not in ("self", "face")}


def by_position(named: dict[str, inspect._ParameterKind]) -> dict[str, inspect._ParameterKind]:
    keywords = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
    return {name: kind for name, kind in named.items() if kind not in keywords}


def public(cls: type) -> set[str]:
    return {name for name in dir(cls) if not name.startswith("_")}


def test_a_claimed_job_tells_the_same_on_both_faces(sync_app: App) -> None:
    queue = sync_app.sync.queue("mail")
    queue.enqueue("x", group="eu", cost=2, headers={"trace": "1"}, attempts=7)
    job = queue.claim_one(wait=0)
    assert job is not None

    assert (job.queue, job.attempts, job.group, job.cost) == ("mail", 7, "eu", 2)
    assert (job.headers, job.scheduler, job.scheduled_for) == ({"trace": "1"}, "", None)


def test_a_dispatch_has_a_face_too(sync_app: App) -> None:
    @sync_app.task
    def send(n: int) -> None: ...

    dispatch = send.options(queue="other")

    assert isinstance(dispatch, Dispatch)
    assert dispatch.sync.enqueue(1).queue == "other"
    assert repr(dispatch.sync) != repr(send.sync)
