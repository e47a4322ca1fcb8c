"""Flows from the user's side: what is drawn, what runs, what comes out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from penstock import (
    App,
    Dag,
    Flow,
    InvalidInput,
    InvalidOption,
    JobCancelled,
    JobContext,
    JobError,
    JobFailed,
    JobNotFound,
    State,
    Unrecoverable,
    WaitForChildren,
    chain,
    chord,
    group,
)


class Shop:
    """An app with a few tasks in several queues."""

    def __init__(self, url: str) -> None:
        self.app = app = App(url)
        self.ran: list[str] = []
        self.broken = True

        @app.task(queue="numbers")
        async def add(x: int, y: int = 1) -> int:
            self.ran.append("add")
            return x + y

        @app.task(queue="sums")
        async def total(numbers: list[int | None], *, label: str = "") -> str:
            return f"{label}{sum(number or 0 for number in numbers)}"

        @app.task(queue="numbers", serde="msgpack")
        def packed(text: str) -> bytes:
            return text.encode()

        @app.task(queue="sums", serde="msgpack")
        async def unpacked(data: bytes) -> str:
            return data.decode()

        @app.task(queue="sums")
        async def report(context: JobContext) -> list[Any]:
            return [
                child.result if child.state == "completed" else child.state
                for child in await context.children()
            ]

        @app.task(queue="numbers")
        async def breaks(*, only_once: bool = False) -> str:
            if self.broken or not only_once:
                raise Unrecoverable("it broke")
            return "mended"

        @app.task(queue="sums")
        async def nothing() -> str:
            return "nothing was needed"

        @app.task(queue="sums", attempts=1)
        async def spawn(context: JobContext, count: int) -> int:
            children = await context.children()
            if not children:
                await context.add_children([add.options(id=f"child-{n}").job(n) for n in range(count)])
                raise WaitForChildren
            return sum(child.result for child in children)

        @app.task(queue="sums")
        def spawn_in_a_thread(context: JobContext, count: int) -> int:
            children = context.sync.children()
            if not children:
                context.sync.add_children([add.job(n) for n in range(count)])
                raise WaitForChildren
            return sum(child.result for child in children)

        self.add, self.total, self.packed, self.unpacked, self.report = add, total, packed, unpacked, report
        self.breaks, self.nothing, self.spawn, self.spawn_in_a_thread = (
            breaks,
            nothing,
            spawn,
            spawn_in_a_thread,
        )

    async def work(self) -> None:
        await self.app.worker(burst=True, queues=["numbers", "sums"]).run()


@pytest.fixture(params=["memory", "valkey"])
async def shop(request: pytest.FixtureRequest) -> AsyncIterator[Shop]:
    url = "memory://"
    if request.param == "valkey":
        url = f"{request.getfixturevalue('valkey_url')}?namespace=flow-{id(request)}"
    shop = Shop(url)
    yield shop
    await shop.app.close()


async def test_a_chain_passes_results_on_as_first_arguments(shop: Shop) -> None:
    handle = await chain(shop.add.job(1), shop.add.partial(10), shop.add.partial()).enqueue()
    assert handle.status == "queued"
    await shop.work()
    assert await handle.result(timeout="5s") == 13


async def test_a_chain_may_pass_nothing(shop: Shop) -> None:
    handle = await shop.app.enqueue_flow(chain(shop.add.job(1), shop.add.job(10)))
    await shop.work()
    assert await handle.result(timeout="5s") == 11


async def test_a_task_without_parameters_may_stand_in_a_chain(shop: Shop) -> None:
    handle = await shop.app.enqueue_flow(chain(shop.add.job(1), shop.nothing.job()))
    await shop.work()
    assert await handle.result(timeout="5s") == "nothing was needed"


async def test_results_are_passed_between_serdes(shop: Shop) -> None:
    handle = await shop.app.enqueue_flow(chain(shop.packed.job("żółw"), shop.unpacked.partial()))
    await shop.work()
    assert await handle.result(timeout="5s") == "żółw"


async def test_a_chord_gets_the_results_of_its_group_in_order(shop: Shop) -> None:
    handle = await shop.app.enqueue_flow(
        chord(group([shop.add.job(n) for n in range(3)]), shop.total.partial(label="sum "))
    )
    await shop.work()
    assert await handle.result(timeout="5s") == "sum 6"


async def test_a_chord_that_ignores_failures_gets_none_in_their_place(shop: Shop) -> None:
    handle = await shop.app.enqueue_flow(
        chord([shop.add.job(4), shop.breaks.job()], shop.total.partial(), on_failure="ignore")
    )
    await shop.work()
    assert await handle.result(timeout="5s") == "5"


async def test_a_group_in_the_middle_of_a_chain_fans_out_and_in(shop: Shop) -> None:
    handle = await shop.app.enqueue_flow(
        chain(shop.add.job(1), group([shop.add.partial(1), shop.add.partial(2)]), shop.total.partial())
    )
    await shop.work()
    assert await handle.result(timeout="5s") == "7"


async def test_a_group_by_itself_gives_all_results(shop: Shop) -> None:
    handle = await shop.app.enqueue_flow(group([shop.add.job(1), shop.nothing.job(), shop.add.job(2)]))
    await shop.work()
    assert await handle.result(timeout="5s") == [2, "nothing was needed", 3]


async def test_what_ends_in_a_group_gives_the_list_of_its_results(shop: Shop) -> None:
    both = group([shop.add.partial(1), shop.add.partial(2)])
    several = Dag().add("a", shop.add.job(1)).add("b", shop.add.job(2)).add("c", shop.add.job(3), after=["a"])
    flows: list[Any] = [
        chain(shop.add.job(1), group([shop.add.partial(), shop.add.partial()])),
        chain(chain(shop.add.job(1), both), shop.total.partial()),
        chord([shop.add.job(1)], group([shop.total.partial(), shop.total.partial()])),
        several,
        chain(several, shop.total.partial()),
    ]
    handles = [await shop.app.enqueue_flow(flow) for flow in flows]
    await shop.work()
    results = [await handle.result(timeout="5s") for handle in handles]
    assert results == [[3, 3], "7", ["2", "2"], [3, 4], "7"]


async def test_the_body_of_a_chord_may_be_a_chain(shop: Shop) -> None:
    numbers = [shop.add.job(1), shop.add.job(2)]
    handle = await chord(numbers, chain(shop.total.partial(), shop.packed.partial())).enqueue()
    await shop.work()
    assert await handle.result(timeout="5s") == b"5"


async def test_a_parent_sees_its_children_and_the_tree_shows_all(shop: Shop) -> None:
    inner = Flow(shop.report.options(id="inner").job(), [shop.add.options(id="leaf").job(1)])
    handle = await shop.app.enqueue_flow(
        Flow(shop.report.options(id="root").job(), [shop.add.options(id="five").job(5), inner])
    )
    await shop.work()
    assert await handle.result(timeout="5s") == [6, [2]]
    tree = await shop.app.flow("sums/root").tree()
    assert tree.describe().splitlines() == [
        "sums/root completed",
        "  numbers/five completed",
        "  sums/inner completed",
        "    numbers/leaf completed",
    ]
    assert [(node.id, node.policy) for node in tree.walk()][:2] == [("root", None), ("five", "fail")]
    info = await shop.app.job("numbers/leaf").get()
    assert info.dependents == [("sums", "inner")]
    assert info.flow


async def test_a_job_that_two_wait_for_runs_once(shop: Shop) -> None:
    shared = shop.add.job(1)
    left, right = Flow(shop.report.job(), [shared]), Flow(shop.report.job(), [shared])
    handle = await shop.app.enqueue_flow(Flow(shop.report.job(), [left, right]))
    await shop.work()
    assert await handle.result(timeout="5s") == [[2], [2]]
    assert shop.ran == ["add"]


async def test_a_graph_by_names_runs_in_its_order(shop: Shop) -> None:
    dag = Dag()
    dag.add("join", shop.total.partial(), after=["left", "right"])
    dag.add("left", shop.add.job(1), after=["load"])
    dag.add("right", shop.add.job(2), after=["load"])
    dag.add("load", shop.nothing.job())
    handle = await dag.enqueue()
    assert handle.root.id == handle.names["join"].id
    await shop.work()
    assert await handle.result(timeout="5s") == "5"
    assert await handle.names["load"].result() == "nothing was needed"


async def test_a_cycle_is_named_and_nothing_is_written(shop: Shop) -> None:
    dag = Dag()
    for name, before in (("a", "c"), ("b", "a"), ("c", "b")):
        dag.add(name, shop.add.job(1), after=[before])
    with pytest.raises(InvalidInput, match="a -> c -> b -> a"):
        await shop.app.enqueue_flow(dag)
    assert await shop.app.queues() == []


async def test_what_a_flow_cannot_be_is_refused_at_the_door(shop: Shop) -> None:
    with pytest.raises(InvalidInput, match="comes after 'nobody'"):
        await shop.app.enqueue_flow(Dag().add("a", shop.add.job(1), after=["nobody"]))
    with pytest.raises(InvalidInput, match="already"):
        Dag().add("a", shop.add.job(1)).add("a", shop.add.job(2))
    with pytest.raises(InvalidInput, match="at least one job"):
        group([])
    with pytest.raises(InvalidInput, match="at least one job"):
        await Dag().enqueue()
    with pytest.raises(InvalidInput, match="body of a chord"):
        chord([shop.add.job(1)], shop.app.job("numbers/known"))  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="cannot be part"):
        group([3])  # type: ignore[arg-type]
    with pytest.raises(InvalidOption, match="on_failure must be 'fail', 'ignore' or 'wait', got 'retry'"):
        Flow(shop.report.job(), [shop.add.job(1)], on_failure="retry")  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="issing"):
        await shop.app.enqueue_flow(shop.add.job())  # type: ignore[call-arg]
    with pytest.raises(InvalidInput, match="there is no such job here"):
        await shop.app.enqueue_flow(shop.add.partial())
    with pytest.raises(InvalidInput, match="there is no such job here"):
        await chain(shop.add.partial(), shop.add.partial()).enqueue()
    with pytest.raises(InvalidInput, match="there is no such job here"):
        await Flow(shop.add.partial(), [shop.add.job(1)]).enqueue()
    with pytest.raises(InvalidInput, match="no first argument"):
        shop.nothing.partial()
    with pytest.raises(InvalidInput, match="'z'"):
        shop.add.job(z=3)  # type: ignore[call-arg]
    assert await shop.app.queues() == []


async def test_many_flows_are_enqueued_together(shop: Shop) -> None:
    handles = await shop.app.enqueue_flows(chain(shop.add.job(n), shop.add.partial()) for n in range(300))
    await shop.work()
    assert [await handle.result(timeout="5s") for handle in handles] == [n + 2 for n in range(300)]


async def test_jobs_in_other_queues_are_there_when_the_call_returns(shop: Shop) -> None:
    flow = await shop.app.enqueue_flow(Flow(shop.nothing.job(), [shop.add.job(1), shop.add.job(2)]))
    assert [await job.refresh() for job in flow.jobs] == ["waiting", "waiting", "blocked"]
    [added] = await flow.root.add_children([shop.add.job(3)])
    assert await added.refresh() == "waiting"
    assert await added.cancel() == "cancelled"


async def test_a_flow_enqueued_twice_is_one_flow(shop: Shop) -> None:
    def flow() -> Flow:
        return Flow(shop.report.options(id="root").job(), [shop.add.options(id="child").job(1)])

    first = await shop.app.enqueue_flow(flow())
    again = await shop.app.enqueue_flow(flow())
    assert (first.status, again.status) == ("queued", "duplicate")
    await shop.work()
    assert await again.result(timeout="5s") == [2]
    assert (await shop.app.enqueue_flow(flow())).status == "completed"
    assert shop.ran == ["add"]


async def test_after_waits_for_handles_and_goes_by_its_policy(shop: Shop) -> None:
    first = await shop.add.enqueue(1)
    broken = await shop.breaks.enqueue()
    after = await shop.report.options(after=[first, broken], after_failure="ignore").enqueue()
    strict = await shop.nothing.options(after=[broken]).enqueue()
    pair = await shop.nothing.options(after=[("numbers", first.id)]).enqueue()
    await shop.work()
    assert await after.result(timeout="5s") == [2, "failed"]
    assert await pair.result(timeout="5s") == "nothing was needed"
    with pytest.raises(JobFailed, match=f"numbers/{broken.id} failed: Unrecoverable: it broke"):
        await strict.result(timeout="5s")


async def test_after_refuses_a_value_that_is_not_a_job(shop: Shop) -> None:
    with pytest.raises(InvalidOption, match="after must list handles"):
        await shop.nothing.options(after=["some id"]).enqueue()
    with pytest.raises(InvalidOption, match="after_failure"):
        await shop.nothing.options(after=[("numbers", "a")], after_failure="maybe").enqueue()  # type: ignore[arg-type]
    with pytest.raises(JobNotFound):
        await shop.nothing.options(after=[("sums", "nobody")]).enqueue()


async def test_a_flow_is_cancelled_as_a_whole(shop: Shop) -> None:
    handle = await shop.app.enqueue_flow(Flow(shop.report.job(), [shop.add.job(1), shop.add.job(2)]))
    await asyncio.wait_for(_delivered(shop, handle), 30)
    answers = await handle.cancel()
    assert list(answers.values()) == ["cancelled"] * 3
    assert set((await handle.cancel()).values()) == {"already_cancelled"}
    with pytest.raises(JobCancelled):
        await handle.result(timeout="5s")


async def _delivered(shop: Shop, handle: Any) -> None:
    while any(node.state is None for node in (await handle.tree()).walk()):
        await asyncio.sleep(0.01)


async def test_a_failed_flow_is_retried_as_a_whole(shop: Shop) -> None:
    inner = Flow(shop.report.job(), [shop.breaks.job(only_once=True), shop.add.job(1)])
    handle = await shop.app.enqueue_flow(Flow(shop.report.job(), [inner]))
    await shop.work()
    with pytest.raises(JobFailed, match="it broke"):
        await handle.result(timeout="5s")
    shop.broken = False
    answers = await handle.retry()
    assert sorted(answers.values()) == ["not_failed", "retried", "retried", "retried"]
    await shop.work()
    assert await handle.result(timeout="5s") == [["mended", 2]]
    assert shop.ran == ["add"]


@pytest.mark.parametrize("task", ["spawn", "spawn_in_a_thread"])
async def test_a_running_job_adds_children_and_waits_for_them(shop: Shop, task: str) -> None:
    handle = await getattr(shop, task).enqueue(3)
    await shop.work()
    assert await handle.result(timeout="5s") == 6
    info = await handle.get()
    assert info is not None
    assert (info.runs, info.failures) == (2, 0)
    assert [child.state for child in await handle.children()] == ["completed"] * 3


async def test_children_are_added_to_a_job_from_outside(shop: Shop) -> None:
    parent = await shop.report.enqueue()
    existing = await shop.add.enqueue(1)
    [added] = await parent.add_children([shop.add.job(2)])
    await parent.add_children([existing], on_failure="ignore")
    assert await parent.refresh() is State.BLOCKED
    await shop.work()
    assert await parent.result(timeout="5s") == [3, 2]
    assert await added.result(timeout="5s") == 3
    with pytest.raises(JobError, match="has finished"):
        await parent.add_children([shop.add.job(2)])
    with pytest.raises(JobNotFound):
        await shop.app.job("sums/nobody").add_children([shop.add.job(2)])
    with pytest.raises(InvalidInput, match="its own child"):
        await parent.add_children([parent])


async def test_payloads_without_a_task_make_flows_too(shop: Shop) -> None:
    app = shop.app
    parent = app.queue("sums").prepare({"n": 1}, id="parent")
    handle = await app.enqueue_flow(Flow(parent, [app.queue("numbers").prepare([1, 2])]))
    async with app.queue("numbers").claim(wait="5s") as child:
        assert child is not None
        child.result = sum(child.payload)
    async with app.queue("sums").claim(wait="5s") as job:
        assert job is not None
        assert [one.result for one in await job.children()] == [3]
        await job.add_children([app.queue("numbers").prepare([4])])
        assert await job.wait_for_children()
    assert await handle.root.refresh() is State.BLOCKED


def test_flows_have_a_sync_face(tmp_path: Path) -> None:
    shop = Shop(f"sqlite:///{tmp_path}/jobs.db")
    with shop.app.sync as app:
        handle = app.enqueue_flow(chain(shop.add.job(1), shop.add.partial()))
        asyncio.run(shop.work())
        assert handle.result(timeout="5s") == 3
        assert handle.tree().state is State.COMPLETED
        [other] = app.enqueue_flows([group([shop.add.job(1)])])
        assert list(other.cancel().values()) == ["cancelled"]
        assert list(other.retry().values()) == ["retried"]
        [child] = other.root.add_children([shop.add.job(2)])
        assert child.queue == "numbers"
        assert [one.state for one in other.root.children()] == ["pending"]
        assert chain(shop.add.job(1)).sync.enqueue().status == "queued"
        assert app.flow(other.ref).root.id == other.root.id


async def test_a_flow_stops_when_its_budget_is_spent() -> None:
    async with App("memory://") as app:

        @app.task(queue="llm", attempts=1)
        async def ask(context: JobContext) -> None:
            await context.use(usd=2)

        flow = await app.enqueue_flow(chain(*(ask.job() for _ in range(3))))
        await flow.set_budget("usd", 3)
        await app.worker(burst=True, concurrency=1).run()
        with pytest.raises(JobFailed, match="BudgetExceeded"):
            await flow.result(timeout="5s")
        assert await flow.usage() == {"usd": 4}


async def test_a_flow_over_several_queues_takes_no_budget() -> None:
    async with App("memory://") as app:

        @app.task(queue="one")
        async def one() -> None: ...

        @app.task(queue="two")
        async def two() -> None: ...

        flow = await app.enqueue_flow(Flow(one.job(), [two.job()]))
        with pytest.raises(InvalidOption, match="one, two"):
            await flow.set_budget("usd", 3)
