"""The result of a flow can be read after its end, whatever retention its last jobs have."""

from __future__ import annotations

from typing import Any

import pytest

from penstock import App, Dag, Flow, InvalidInput, JobFailed, chain, chord, group
from tests.worker import process_tasks


def declared(app: App) -> tuple[Any, Any]:
    @app.task
    async def add(x: int, y: int = 1) -> int:
        return x + y

    @app.task
    async def total(numbers: list[int]) -> int:
        return sum(numbers)

    return add, total


@pytest.mark.parametrize("shape", ["chain", "group", "chord", "dag", "flow", "job"])
async def test_a_result_ttl_of_0_does_not_lose_the_result_of_a_flow(app: App, shape: str) -> None:
    add, total = declared(app)
    last = add.options(result_ttl=0)
    dag = Dag()
    dag.add("first", add.job(1))
    dag.add("last", last.job(1), after=["first"])
    flows: dict[str, tuple[Any, Any]] = {
        "chain": (chain(add.job(1), last.partial(1)), 3),
        "group": (group([last.job(1), last.job(2)]), [2, 3]),
        "chord": (chord([add.job(1), last.job(2)], total.options(result_ttl=0).partial()), 5),
        "dag": (dag, 2),
        "flow": (Flow(last.job(1), [add.job(1)]), 2),
        "job": (last.job(1), 2),
    }
    flow, expected = flows[shape]
    handle = await app.enqueue_flow(flow)
    await app.worker(burst=True).run()
    assert await handle.result(timeout="10s") == expected


async def test_a_failure_ttl_of_0_does_not_lose_the_failure_of_a_flow(app: App) -> None:
    @app.task(attempts=1, failure_ttl=0)
    async def broken() -> None:
        raise ValueError("no such thing")

    add, _ = declared(app)
    handle = await app.enqueue_flow(chain(add.job(1), broken.job()))
    await app.worker(burst=True).run()
    with pytest.raises(JobFailed, match="ValueError: no such thing"):
        await handle.result(timeout="10s")


async def test_only_the_last_job_of_a_flow_is_kept_and_only_for_a_minute(app: App) -> None:
    add, _ = declared(app)
    quick = add.options(result_ttl=0)
    handle = await app.enqueue_flow(chain(quick.job(1), quick.partial(1)))
    await app.worker(burst=True).run()
    first, last = [await job.get_or_none() for job in handle.jobs]
    assert first is None
    assert last is not None
    assert last.raw.options.result_ttl_ms == 60_000


async def test_a_longer_result_ttl_stays_as_it_is(app: App) -> None:
    add, _ = declared(app)
    handle = await app.enqueue_flow(
        chain(add.job(1), add.options(result_ttl="2h", failure_ttl="3h").partial(1))
    )
    last = await handle.root.get()
    assert last is not None
    assert last.raw.options.result_ttl_ms == 2 * 3_600_000
    assert last.raw.options.failure_ttl_ms == 3 * 3_600_000


async def test_a_result_that_does_not_fit_the_next_job_is_named_as_such(app: App) -> None:
    add, total = declared(app)

    @app.task
    def name() -> str:
        return "ada"

    one = await app.enqueue_flow(chain(name.job(), add.partial(2)))
    many = await app.enqueue_flow(chord([name.job(), add.job(1)], total.partial()))
    await app.worker(burst=True).run()

    with pytest.raises(JobFailed) as caught:
        await one.result(timeout="10s")
    assert caught.value.error_type == "SerializationError"
    assert str(caught.value).endswith(
        "argument 'x' of declared.<locals>.add does not fit its type: got 'ada' (Expected `int`, got `str`). "
        "It is the result of the job before it in the flow. The signature is declared.<locals>.add(x: int, y: int = 1)."
    )
    with pytest.raises(JobFailed) as caught:
        await many.result(timeout="10s")
    assert str(caught.value).endswith(
        "argument 'numbers' of declared.<locals>.total does not fit its type: got ['ada', 2] (Expected `int`, got "
        "`str` - at `$[0]`). "
        "It is the list of results of the jobs before it in the flow. "
        "The signature is declared.<locals>.total(numbers: list[int])."
    )


async def test_a_result_that_does_not_fit_is_named_by_other_processes_as_well() -> None:
    async with process_tasks.app as app:
        flow = await app.enqueue_flow(chain(process_tasks.repeat.job(2), process_tasks.square.partial()))
        await app.worker(burst=True, child_processes=1).run()

        with pytest.raises(JobFailed, match=r"got 'éé' .*It is the result of the job before it"):
            await flow.result(timeout="10s")


async def test_a_group_is_found_again_by_the_refs_of_its_jobs(app: App) -> None:
    add, _ = declared(app)
    handle = await app.enqueue_flow(group(add.job(n) for n in range(4)))
    with pytest.raises(InvalidInput, match=r"no single ref.*\[job\.ref for job in flow\.ends\]"):
        _ = handle.ref
    assert "4 jobs" in repr(handle)
    refs = [job.ref for job in handle.ends]
    assert [node.ref for node in (await handle.tree()).walk()] == refs

    again = app.flow(refs)
    tree = await again.tree()
    assert [child.ref for child in tree.children] == refs
    assert tree.state is None
    assert tree.describe().splitlines() == ["group of 4", *(f"  {ref} waiting" for ref in refs)]
    await app.worker(burst=True).run()
    assert await again.result(timeout="10s") == [1, 2, 3, 4]
    assert await app.flow(refs[:1]).result(timeout="10s") == [1]


async def test_a_group_found_by_its_refs_is_cancelled_as_a_whole(app: App) -> None:
    add, _ = declared(app)
    handle = await app.enqueue_flow(group(add.job(n) for n in range(3)))
    answers = await app.flow([job.ref for job in handle.ends]).cancel()
    assert list(answers.values()) == ["cancelled"] * 3
    with pytest.raises(InvalidInput, match="at least one ref"):
        app.flow([])
