"""Middleware around enqueue: what it sees, what it may change, and what it may not."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock import App, EnqueueCall, InvalidInput, InvalidOption, PayloadTooLarge, chain, chord
from penstock.core.job import Enqueued, NewJob
from tests.client.conftest import working
from tests.client.spy import Spy


async def test_one_call_of_the_users_is_one_call_of_the_layer(app: App) -> None:
    seen: list[tuple[str, list[str], list[bytes]]] = []

    @app.enqueue_middleware
    async def note(call: EnqueueCall, call_next: Any) -> Any:
        seen.append((call.queue, [job.options.task for job in call.jobs], [job.payload for job in call.jobs]))
        return await call_next(call)

    @app.task(queue="mail")
    async def send(to: str) -> str:
        return to

    await send.enqueue("ada")
    await send.options(priority=3).enqueue("bob")
    await send.enqueue_many([send.job("a"), send.job("b")])
    await app.queue("raw").enqueue(1)
    await app.queue("raw").enqueue_many([1, 2])

    assert seen == [
        ("mail", ["send"], [b'{"to":"ada"}']),
        ("mail", ["send"], [b'{"to":"bob"}']),
        ("mail", ["send", "send"], [b'{"to":"a"}', b'{"to":"b"}']),
        ("raw", [""], [b"1"]),
        ("raw", ["", ""], [b"1", b"2"]),
    ]


async def test_a_layer_changes_what_is_stored(app: App) -> None:
    @app.enqueue_middleware
    async def urgent(call: EnqueueCall, call_next: Any) -> Any:
        return await call_next(call.changed(priority=-5, payload=b'"changed"'))

    queue = app.queue("mail")
    handles = [await queue.enqueue("x"), *await queue.enqueue_many(["y"])]
    infos = [await handle.get() for handle in handles]
    assert [(info.priority, info.payload) for info in infos] == [(-5, "changed")] * 2


async def test_a_job_that_waits_for_others_goes_through_the_layers(app: App) -> None:
    @app.enqueue_middleware
    async def urgent(call: EnqueueCall, call_next: Any) -> Any:
        return await call_next(call.changed(priority=-5))

    queue = app.queue("mail")
    first = await queue.enqueue("first")
    info = await (await queue.enqueue("second", after=[first])).get()
    assert (info.priority, info.blocked_by) == (-5, "children")


async def test_a_call_goes_through_the_layers_and_gets_its_result(app: App) -> None:
    @app.enqueue_middleware
    async def greeting(call: EnqueueCall, call_next: Any) -> Any:
        return await call_next(call.changed(payload=b'"hello"'))

    queue = app.queue("mail")

    async def shout(job: Any) -> str:
        return str(job.payload).upper()

    async with working(queue, shout):
        assert await queue.call("x", wait="10s") == "HELLO"


async def test_layers_are_around_each_other_in_the_order_they_came(memory_app: App) -> None:
    steps: list[str] = []

    def layer(name: str) -> Any:
        async def around(call: EnqueueCall, call_next: Any) -> Any:
            steps.append(f"{name} in")
            answers = await call_next(call)
            steps.append(f"{name} out: {answers[0].status}")
            return answers

        return around

    queue = memory_app.queue("mail")
    await queue.enqueue("x", id="a")  # one that came before them does not matter
    memory_app.enqueue_middleware(layer("outer"))
    memory_app.enqueue_middleware(layer("inner"))
    handle = await queue.enqueue("x", id="a")

    assert handle.status == "duplicate"
    assert steps == ["outer in", "inner in", "inner out: duplicate", "outer out: duplicate"]


async def test_a_layer_that_raises_keeps_the_jobs_out(memory_app: App) -> None:
    @memory_app.enqueue_middleware
    async def closed(call: EnqueueCall, call_next: Any) -> Any:
        raise InvalidInput("closed today")

    queue = memory_app.queue("mail")
    for attempt in (queue.enqueue(1), queue.enqueue_many([1, 2]), queue.call(1)):
        with pytest.raises(InvalidInput, match="closed today"):
            await attempt
    assert await queue.waiting() == 0


@pytest.mark.parametrize(
    "change",
    [
        lambda call: call.changed(id="another"),
        lambda call: EnqueueCall("elsewhere", call.jobs),
        lambda call: EnqueueCall(call.queue, ()),
        lambda call: EnqueueCall(call.queue, (*call.jobs, NewJob("more"))),
    ],
    ids=["id", "queue", "fewer", "more"],
)
async def test_what_handles_name_already_cannot_be_changed(memory_app: App, change: Any) -> None:
    @memory_app.enqueue_middleware
    async def meddling(call: EnqueueCall, call_next: Any) -> Any:
        return await call_next(change(call))

    queue = memory_app.queue("mail")
    for attempt in (queue.enqueue(1), queue.enqueue_many([1, 2])):
        with pytest.raises(InvalidOption, match="changed the queue or the ids"):
            await attempt
    assert await memory_app.queues() == []


async def test_answers_have_to_be_those_of_the_jobs(memory_app: App) -> None:
    @memory_app.enqueue_middleware
    async def silent(call: EnqueueCall, call_next: Any) -> Any:
        await call_next(call)
        return []

    with pytest.raises(InvalidOption, match="Return what call_next returned"):
        await memory_app.queue("mail").enqueue(1)


async def test_a_payload_made_too_large_is_refused(memory_app: App) -> None:
    @memory_app.enqueue_middleware
    async def verbose(call: EnqueueCall, call_next: Any) -> Any:
        return await call_next(call.each(lambda job: NewJob(job.id, b"x" * (1 << 20) + b"x")))

    with pytest.raises(PayloadTooLarge, match="enqueue middleware made a payload of 1"):
        await memory_app.queue("mail").enqueue(1)


async def test_concurrent_calls_still_travel_together(spy: Spy) -> None:
    app = App(spy)

    @app.enqueue_middleware
    async def through(call: EnqueueCall, call_next: Any) -> Any:
        return await call_next(call)

    queue = app.queue("mail")
    await asyncio.gather(*(queue.enqueue(n) for n in range(100)))
    assert sum(map(len, spy.enqueues)) == 100
    assert len(spy.enqueues) < 10


def test_sync_code_goes_through_the_layers_too(tmp_path: Any) -> None:
    app = App(f"sqlite:///{tmp_path}/jobs.db")
    seen: list[int] = []

    @app.enqueue_middleware
    async def note(call: EnqueueCall, call_next: Any) -> Any:
        seen.append(len(call.jobs))
        return await call_next(call)

    with app.sync:
        app.sync.queue("mail").enqueue(1)
        app.sync.queue("mail").enqueue_many([1, 2, 3])
    assert seen == [1, 3]


def test_a_layer_has_to_be_callable() -> None:
    with pytest.raises(InvalidOption, match="cannot be called"):
        App("memory://").enqueue_middleware("layer")  # type: ignore[arg-type]


async def test_the_layers_see_the_jobs_of_flows_queue_by_queue(app: App) -> None:
    seen: list[tuple[str, list[str], list[str]]] = []

    @app.enqueue_middleware
    async def urgent(call: EnqueueCall, call_next: Any) -> Any:
        answers = await call_next(call.changed(priority=-5))
        tasks = [job.options.task for job in call.jobs]
        seen.append((call.queue, tasks, [answer.status for answer in answers]))
        return answers

    @app.task(queue="pages")
    async def fetch(page: str) -> str:
        return page

    @app.task(queue="sums")
    async def count(pages: list[str]) -> int:
        return len(pages)

    flow = await chord([fetch.job("a"), fetch.job("b")], count.options(id="count").partial()).enqueue()
    assert sorted(seen) == [
        ("pages", ["fetch", "fetch"], ["queued", "queued"]),
        ("sums", ["count"], ["queued"]),
    ]
    infos = [await job.get() for job in flow.jobs]
    assert [info.priority for info in infos] == [-5, -5, -5]
    await app.worker(burst=True).run()
    assert await flow.result(timeout="10s") == 2

    again = await chord([fetch.job("c")], count.options(id="count").partial()).enqueue()
    assert again.status == "completed"
    assert {status for _, _, statuses in seen[2:] for status in statuses} == {"completed"}


async def test_the_layers_see_jobs_that_wait_for_others_and_children_that_are_added(app: App) -> None:
    seen: list[str] = []

    @app.enqueue_middleware
    async def note(call: EnqueueCall, call_next: Any) -> Any:
        seen.extend(job.id for job in call.jobs)
        return await call_next(call)

    @app.task
    async def step(n: int) -> int:
        return n

    first = await step.options(id="first", delay="1h").enqueue(1)
    second = await step.options(id="second", after=[first]).enqueue(2)
    [child] = await second.add_children([step.options(id="child").job(3)])
    assert seen == ["first", "second", "child"]
    assert await child.refresh() == "waiting"
    assert [one.id for one in await second.children()] == ["first", "child"]


async def test_a_flow_that_a_layer_refuses_is_not_written(app: App) -> None:
    @app.enqueue_middleware
    async def refuse(call: EnqueueCall, call_next: Any) -> Any:
        if call.queue == "pages":
            raise PermissionError("not these")
        return await call_next(call)

    @app.task(queue="pages")
    async def fetch(page: str) -> str:
        return page

    @app.task(queue="sums")
    async def count(pages: list[str]) -> int:
        return len(pages)

    with pytest.raises(PermissionError):
        await chord([fetch.job("a")], count.partial()).enqueue()
    assert [(await app.queue(name).counts()).open for name in ("pages", "sums")] == [0, 0]


async def test_a_layer_cannot_answer_for_a_flow_itself(app: App) -> None:
    @app.enqueue_middleware
    async def swallow(call: EnqueueCall, call_next: Any) -> Any:
        return [Enqueued(job.id, "duplicate", None, 0) for job in call.jobs]

    @app.task
    async def step(n: int) -> int:
        return n

    with pytest.raises(InvalidOption, match="did not call call_next"):
        await chain(step.job(1), step.partial()).enqueue()
    assert await app.queue("default").open() == 0


async def test_a_layer_changes_headers_group_and_cost(memory_app: App) -> None:
    @memory_app.enqueue_middleware
    async def traced(call: EnqueueCall, call_next: Any) -> Any:
        return await call_next(call.changed(headers={"trace": "1"}, priority=3))

    job = await (await memory_app.queue("mail").enqueue("x", group="ada")).get()
    assert (job.headers, job.group, job.priority) == ({"trace": "1"}, "ada", 3)


async def test_a_field_that_jobs_do_not_have_is_refused() -> None:
    call = EnqueueCall("mail", (NewJob("a"),))
    with pytest.raises(InvalidOption, match=r"has no option 'heders'\. Did you mean 'headers'"):
        call.changed(heders={})


def _plain(call: Any, call_next: Any) -> Any: ...


async def _of_one(call: Any) -> Any: ...


@pytest.mark.parametrize(
    ("layer", "said"), [(_plain, "is not a coroutine function"), (_of_one, "must take two arguments")]
)
def test_a_middleware_that_cannot_work_is_refused_when_it_is_registered(layer: Any, said: str) -> None:
    for register in (App("memory://").middleware, App("memory://").enqueue_middleware):
        with pytest.raises(InvalidOption, match=f"{said}.*Give async def f"):
            register(layer)
