"""Flows in a harness: results are passed on, and a job may look at, and wait for, its children."""

from __future__ import annotations

import pytest

from penstock import App, Flow, JobContext, Unrecoverable, WaitForChildren, chain, chord, group
from penstock.testing import Harness, harness


@pytest.mark.parametrize("runner", ["async", "thread"])
async def test_results_are_passed_along_a_chord_of_chains(app: App, h: Harness, runner: str) -> None:
    if runner == "async":

        @app.task(queue="numbers", name="double")
        async def double(n: int) -> int:
            return 2 * n

    else:

        @app.task(queue="numbers", name="double")
        def double(n: int) -> int:
            return 2 * n

    @app.task(queue="sums")
    async def total(numbers: list[int]) -> int:
        return sum(numbers)

    flow = await chord(
        group(chain(double.job(n), double.partial()) for n in range(4)), total.partial()
    ).enqueue()
    drained = await h.drain(raise_failures=True)

    assert await flow.result(timeout="5s") == 24
    assert len(drained.completed) == 9


async def test_a_flow_has_run_when_its_enqueue_returns_inline(app: App) -> None:
    @app.task
    async def one(n: int) -> int:
        return n

    @app.task
    async def total(numbers: list[int]) -> int:
        return sum(numbers)

    async with harness(app, mode="inline"):
        flow = await chord([one.job(1), one.job(2)], total.partial()).enqueue()
        assert await flow.root.refresh() == "completed"
        assert await flow.result(timeout="5s") == 3


async def test_a_parent_sees_what_became_of_its_children(app: App, h: Harness) -> None:
    @app.task(queue="frames")
    async def render(frame: int) -> str:
        if frame == 1:
            raise Unrecoverable("the scene is empty")
        return f"{frame}.png"

    @app.task(queue="films")
    async def join(context: JobContext) -> list[str]:
        return [child.result or child.state for child in await context.children()]

    flow = await app.enqueue_flow(Flow(join.job(), [render.job(n) for n in range(2)], on_failure="ignore"))
    await h.drain()

    assert await flow.result(timeout="5s") == ["0.png", "failed"]


async def test_a_job_adds_children_and_waits_for_them(app: App, h: Harness) -> None:
    @app.task(queue="pages")
    async def visit(page: str) -> int:
        return len(page)

    @app.task(queue="sites")
    def crawl(context: JobContext) -> int:
        children = context.sync.children()
        if not children:
            context.sync.add_children(
                [visit.options(id="home").job("home"), visit.options(id="about").job("about")]
            )
            raise WaitForChildren
        return sum(child.result for child in children)

    assert await h.perform(crawl) == 9
    assert [run.task for run in h.runs] == ["crawl", "visit", "visit", "crawl"]
