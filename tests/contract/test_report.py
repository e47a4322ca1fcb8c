"""report: what a running job says of itself."""

from __future__ import annotations

import json

import pytest

from penstock.core.lifecycle import EventType, State
from penstock.core.outcome import Complete, Fail, Release
from penstock.storage.values import LogPage, Report
from tests.contract.factories import BOOM, STATES, Bench

E, S = EventType, State


async def report(bench: Bench, *reports: Report) -> list[bool]:
    return await bench.storage.report(bench.queue, reports)


async def lines_of(bench: Bench, *, id: str = "job", **options: int) -> list[str]:
    return (await bench.storage.logs(bench.queue, id, **options)).lines


async def test_progress_log_and_payload_are_kept_with_the_job(bench: Bench) -> None:
    lease = await bench.bring(S.ACTIVE, payload=b"old")
    assert lease
    await bench.events()

    assert await report(bench, Report("job", lease.token, b'{"done":3}', ("one", "zwölf"), b"new")) == [True]

    job = await bench.job()
    assert (job.progress, job.payload, job.state) == (b'{"done":3}', b"new", S.ACTIVE)
    assert await lines_of(bench) == ["one", "zwölf"]
    [event] = await bench.events()
    assert (event.type, event.id, event.state) == (E.PROGRESSED, "job", S.ACTIVE)
    assert json.loads(event.data) == {"done": 3}


async def test_log_lines_alone_are_not_an_event(bench: Bench) -> None:
    lease = await bench.bring(S.ACTIVE)
    assert lease
    await bench.events()

    await report(bench, Report("job", lease.token, log=("a",)), Report("job", lease.token, log=("b", "c")))

    assert await lines_of(bench) == ["a", "b", "c"]
    assert await lines_of(bench, start=1, limit=1) == ["b"]
    assert await bench.events() == []


async def test_the_next_run_sees_the_payload_and_the_finished_job_the_rest(bench: Bench) -> None:
    lease = await bench.bring(S.ACTIVE, payload=b"old")
    assert lease
    await report(bench, Report("job", lease.token, b"1", ("line",), b"new"))
    await bench.settle(lease, Release())

    again = await bench.claim()
    await bench.settle(again, Complete())

    assert again.payload == b"new"
    assert (await bench.job()).progress == b"1"
    assert await lines_of(bench) == ["line"]


@pytest.mark.parametrize("state", STATES)
async def test_only_the_holder_is_heard(bench: Bench, state: State) -> None:
    lease = await bench.bring(state)
    token = lease.token if lease and state is not S.ACTIVE else 123_456
    picture = await bench.picture()

    answers = await report(bench, Report("job", token, b"1", ("line",), b"new"), Report("nobody", 1, b"1"))

    assert answers == [False, False]
    assert await bench.picture() == picture
    assert await lines_of(bench) == []


async def test_at_most_a_thousand_lines_are_kept_and_the_oldest_go(bench: Bench) -> None:
    lease = await bench.bring(S.ACTIVE)
    assert lease
    for start in (0, 700):
        lines = tuple(str(i) for i in range(start, start + 700))
        await report(bench, Report("job", lease.token, log=lines))

    assert await lines_of(bench, limit=5000) == [str(i) for i in range(400, 1400)]


async def test_lines_are_counted_from_the_first_ever_written(bench: Bench) -> None:
    """Whoever reads on from ``written`` gets each line once, even if all lines are alike."""
    lease = await bench.bring(S.ACTIVE)
    assert lease
    for _ in range(2):
        await report(bench, Report("job", lease.token, log=("same",) * 700))

    logs = bench.storage.logs
    assert await logs(bench.queue, "job") == LogPage(["same"] * 1000, 400, 1400)
    assert await logs(bench.queue, "job", start=100, limit=2) == LogPage(["same"] * 2, 400, 1400)
    assert await logs(bench.queue, "job", start=1390) == LogPage(["same"] * 10, 1390, 1400)
    assert await logs(bench.queue, "job", start=1400) == LogPage([], 1400, 1400)
    assert await logs(bench.queue, "job", start=2000, limit=0) == LogPage([], 1400, 1400)


async def test_skipped_lines_count_and_those_before_them_go(bench: Bench) -> None:
    lease = await bench.bring(S.ACTIVE)
    assert lease
    await report(bench, Report("job", lease.token, log=("a", "b")))
    await report(bench, Report("job", lease.token, log=("c", "d"), log_skipped=10))
    assert await bench.storage.logs(bench.queue, "job") == LogPage(["c", "d"], 12, 14)
    await report(bench, Report("job", lease.token, log=("e",)))
    assert await bench.storage.logs(bench.queue, "job") == LogPage(["c", "d", "e"], 12, 15)


async def test_a_job_that_is_enqueued_again_counts_its_lines_anew(bench: Bench) -> None:
    lease = await bench.bring(S.ACTIVE)
    assert lease
    await report(bench, Report("job", lease.token, log=("old",) * 1200))
    await bench.settle(lease, Fail(BOOM, final=True))
    await bench.put()
    assert await bench.storage.logs(bench.queue, "job") == LogPage()

    again = await bench.claim()
    await report(bench, Report("job", again.token, log=("new",)))
    assert await bench.storage.logs(bench.queue, "job") == LogPage(["new"], 0, 1)


async def test_obliterate_forgets_the_count(bench: Bench) -> None:
    lease = await bench.bring(S.ACTIVE)
    assert lease
    await report(bench, Report("job", lease.token, log=("old",) * 1200))
    await bench.storage.obliterate(bench.queue, force=True)
    await bench.put()
    assert await bench.storage.logs(bench.queue, "job") == LogPage()


async def test_a_job_that_is_unknown_has_no_log(bench: Bench) -> None:
    assert await lines_of(bench, id="nobody") == []
    assert await report(bench) == []
