"""Keys that are named after a job, a group or a listener, and are of another type than they should be."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from itertools import pairwise

import pytest

from penstock.core.job import Dependency, Extras
from penstock.core.lifecycle import State
from penstock.core.limits import Limit, Rate
from penstock.core.outcome import Complete, Fail
from penstock.core.step import NewStep
from penstock.storage.valkey.engine import ValkeyStorage
from penstock.storage.values import Report
from tests.contract.factories import BOOM, Bench

LARGE = b"z" * 5000


@pytest.fixture
def bench(storage: ValkeyStorage) -> Bench:
    return Bench(storage, "q[1]*")


async def plant(bench: Bench, part: str) -> None:
    """Have something else write to a key of the queue."""
    assert isinstance(bench.storage, ValkeyStorage)
    calls = bench.storage._calls
    key = calls.keys.part(bench.queue, part)
    await calls.plain(key, "SET", key, "what is this")


async def report(bench: Bench) -> None:
    lease = await bench.bring(State.ACTIVE)
    assert lease is not None
    await plant(bench, "log:job")
    assert await bench.storage.report(bench.queue, [Report("job", lease.token, log=("line",))]) == [True]
    assert (await bench.storage.logs(bench.queue, "job")).lines == ["line"]


async def signal(bench: Bench) -> None:
    await bench.bring(State.ACTIVE)
    await plant(bench, "signals:job")
    assert await bench.storage.signal(bench.queue, "job", "go", b"") == "kept"


async def line_up_in_a_group(bench: Bench) -> None:
    await bench.storage.limit(bench.queue, "g", Limit(concurrency=1))
    await plant(bench, "group:g")
    await bench.put_all([bench.new(id, extras=Extras(group="g")) for id in "abc"])
    assert await bench.counts() == {State.WAITING: 1, State.BLOCKED: 2}


async def start_in_a_window(bench: Bench) -> None:
    await bench.storage.limit(bench.queue, "g", Limit(rate=Rate(2, 1000)))
    await bench.put_all([bench.new(id, extras=Extras(group="g")) for id in "abc"])
    await plant(bench, "starts:g")
    assert len(await bench.claim_all()) == 2


async def fail(bench: Bench) -> None:
    lease = await bench.bring(State.ACTIVE)
    assert lease is not None
    await plant(bench, "error:Boom")
    assert (await bench.settle(lease, Fail(BOOM, final=True))).applied
    assert await bench.storage.errors(bench.queue) == {"Boom": 1}


async def complete_what_is_held(bench: Bench) -> None:
    await bench.put(extras=Extras(holds={"ledger": 60_000}))
    await plant(bench, "held:ledger")
    await bench.settle(await bench.claim(), Complete(b"1"))
    assert [job.id for job in (await bench.storage.held(bench.queue, "ledger")).jobs] == ["job"]


async def depend(bench: Bench) -> None:
    await bench.put("child")
    await plant(bench, "deps:job")
    await bench.put(extras=Extras(flow="f", has_dependencies=True), after=(Dependency(bench.queue, "child"),))
    assert await bench.state("job") is State.BLOCKED


async def have_dependents(bench: Bench) -> None:
    await bench.put("child")
    await plant(bench, "dependents:child")
    await bench.put(extras=Extras(flow="f", has_dependencies=True), after=(Dependency(bench.queue, "child"),))
    await bench.settle(await bench.claim(), Complete(b"1"))
    assert await bench.state("job") is State.WAITING


async def use(bench: Bench) -> None:
    lease = await bench.bring(State.ACTIVE)
    assert lease is not None
    await plant(bench, "usage:")
    await bench.storage.report(bench.queue, [Report("job", lease.token, usage={"usd": 5})])
    assert (await bench.job()).extras.usage == {"usd": 5}  # type: ignore[union-attr]


async def record_a_step(bench: Bench) -> None:
    await record(bench, "steps:job", b"1")


async def record_a_large_result(bench: Bench) -> None:
    await record(bench, "step_results:job", LARGE)


async def record(bench: Bench, part: str, result: bytes) -> None:
    lease = await bench.bring(State.ACTIVE)
    assert lease is not None
    await plant(bench, part)
    steps = [NewStep("job", lease.token, "load", result=result)]
    assert await bench.storage.record_steps(bench.queue, steps) == ["recorded"]
    assert [step.result for step in await bench.storage.steps(bench.queue, "job", names=["load"])] == [result]
    assert [event.type for event in await bench.events()].count("recorded") == 1


async def copy_a_step(bench: Bench) -> None:
    await copy(bench, "steps:fork")


async def copy_a_large_result(bench: Bench) -> None:
    await copy(bench, "step_results:fork")


async def copy(bench: Bench, part: str) -> None:
    lease = await bench.bring(State.ACTIVE)
    assert lease is not None
    steps = [NewStep("job", lease.token, "load", result=LARGE), NewStep("job", lease.token, "tell")]
    await bench.storage.record_steps(bench.queue, steps)
    await bench.put("fork")
    await plant(bench, part)
    assert await bench.storage.copy_steps(bench.queue, "job", "fork", before="tell") == "copied"
    assert [step.result for step in await bench.storage.steps(bench.queue, "fork", names=["load"])] == [LARGE]


async def tell(bench: Bench) -> None:
    await bench.put(notify="ear")
    await plant(bench, "news:ear")
    await bench.settle(await bench.claim(), Complete(b"1"))
    assert [news.id for news in await bench.storage.listen(bench.queue, "ear", timeout_ms=1000)] == ["job"]


@pytest.mark.parametrize(
    "act",
    [
        report,
        signal,
        line_up_in_a_group,
        start_in_a_window,
        fail,
        complete_what_is_held,
        depend,
        have_dependents,
        use,
        record_a_step,
        record_a_large_result,
        copy_a_step,
        copy_a_large_result,
        tell,
    ],
)
async def test_a_named_key_of_another_type_is_dropped_and_the_call_is_whole(
    bench: Bench, act: Callable[[Bench], Awaitable[None]]
) -> None:
    await act(bench)
    assert not (await bench.storage.check(bench.queue)).problems
    events = (await bench.storage.read_events(bench.queue, after=0)).events
    assert all(later.seq == earlier.seq + 1 for earlier, later in pairwise(events))
    tokens = [event.token for event in events if event.type == "claimed"]
    before = max([event.incarnation for event in events] + tokens)
    await bench.put("afterwards")
    assert (await bench.job("afterwards")).incarnation > before
