"""Why a job does not run: the first cause in its way, in a sentence, with the remedy."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from penstock import App, Flow, JobNotFound, Limit, RateLimited, Reason, ResultTimeout, StorageReadOnly
from penstock.client.why import explain, explain_all
from penstock.core.command import COMMAND_TASK
from penstock.core.job import Extras, NewJob
from penstock.storage import open_storage
from penstock.storage.values import Budget, GroupPage, Take
from tests.causes import CAUSES, plant
from tests.client.spy import Spy, spy_on


@pytest.fixture(autouse=True)
def short_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the options of the store out of commands; ``test_why_remedies`` is about these."""
    monkeypatch.setattr("penstock.client.info.store_options", lambda named: ())


async def alive(app: App, queue: str, worker: str = "w", **info: object) -> None:
    """Have a worker describe itself."""
    said = json.dumps({"queues": [queue], "concurrency": 2, "consuming": True} | info)
    storage = await app.connect()
    await storage.extend(queue, [], worker=worker, lease_ms=60_000, info=said.encode())


async def test_each_planted_cause_is_named_with_its_remedy(app: App) -> None:
    await plant(app)

    for cause in CAUSES:
        reason = await app.job(f"{cause.queue}/{cause.id}").why()
        assert reason.kind == cause.kind, reason
        for words in cause.words:
            assert words in reason.text
        assert cause.remedy in reason.remedy
        assert str(reason) == f"{reason.text} {reason.remedy}"


async def test_a_reason_says_until_when_and_because_of_which_jobs(app: App) -> None:
    await plant(app)
    now = datetime.now(UTC)

    due = await app.job("timed/tomorrow").why()
    assert due.until is not None
    assert now + timedelta(hours=23) < due.until < now + timedelta(hours=25)
    rated = await app.job("rated/later").why()
    assert rated.until is not None
    assert now < rated.until < now + timedelta(hours=1)
    assert (await app.job("capped/second").why()).jobs == ("capped/first-of-queue",)
    assert (await app.job("grouped/behind").why()).jobs == ("grouped/first-of-group",)
    assert (await app.job("flows/parent").why()).jobs == ("flows/child-1", "flows/child-2")


async def test_running_and_finished_jobs_say_so(app: App) -> None:
    queue = app.queue("mail")
    await queue.enqueue(1, id="a")
    job = await queue.claim_one(worker="w-7")
    assert job is not None

    running = await app.job("mail/a").why()
    assert running.kind == "active"
    assert "on worker w-7" in running.text

    await job.complete()
    assert (await app.job("mail/a").why()).kind == "completed"
    await queue.enqueue(1, id="b", attempts=1)
    job = await queue.claim_one()
    assert job is not None
    await job.fail(ValueError("no route"))
    failed = await app.job("mail/b").why()
    assert failed.kind == "failed"
    assert "after 1 run: ValueError: no route" in failed.text
    assert "`penstock retry mail/b`" in failed.remedy
    assert failed.remedy.startswith("`penstock show mail/b --traceback` shows the traceback.")
    handle = await queue.enqueue(1, id="c")
    await handle.cancel()
    assert (await handle.why()).kind == "cancelled"


async def test_a_job_between_two_attempts_says_when_the_next_is(app: App) -> None:
    queue = app.queue("mail")
    handle = await queue.enqueue(1, attempts=3, backoff="10m")
    job = await queue.claim_one()
    assert job is not None
    await job.fail(ValueError("no route"))

    reason = await handle.why()
    assert reason.kind == "retry"
    assert reason.text.startswith("1 of 3 attempts failed (ValueError). It is retried at 20")


async def test_a_ready_job_says_whether_workers_are_free_busy_or_not_consuming(app: App) -> None:
    handle = await app.queue("mail").enqueue(1)
    await alive(app, "mail", active=1)
    assert (await handle.why()).kind == "ready"

    await alive(app, "mail", active=2)
    assert (await handle.why()).kind == "busy"

    await alive(app, "mail", consuming=False, reason="the worker is paused")
    reason = await handle.why()
    assert (reason.kind, "the worker is paused" in reason.text) == ("not consuming", True)


async def test_slots_that_filled_up_since_the_heartbeat_count_as_full(app: App) -> None:
    queue = app.queue("mail")
    await alive(app, "mail", active=0)
    for _ in range(3):
        handle = await queue.enqueue(1)
    for _ in range(2):
        assert await queue.claim_one(wait=0, worker="w") is not None

    reason = await handle.why()
    assert (reason.kind, reason.text) == ("busy", "All slots are full: 1 worker runs 2 of 2 jobs.")

    await alive(app, "mail", "other")
    assert (await handle.why()).text == "It is ready: 1 job in line. 2 workers run 2 of 4 jobs."


async def test_a_pause_requested_by_a_handler_is_reported_as_such(app: App) -> None:
    queue = app.queue("api")
    await queue.enqueue(1, id="first")
    handle = await queue.enqueue(1, id="second")
    job = await queue.claim_one(wait=0)
    assert job is not None
    await job.fail(RateLimited("1h"))

    reason = await handle.why()
    assert (reason.kind, reason.until is not None) == ("paused", True)
    assert "Queue api starts no jobs until 20" in reason.text
    assert reason.text.endswith("because job api/first raised RateLimited.")
    assert "`penstock resume -q api`" in reason.remedy
    [listed] = (await explain_all(await app.connect(), [(await handle.get()).raw])).values()
    assert listed.text.startswith("Queue api starts no jobs until 20")

    await queue.pause("5h")
    assert (await handle.why()).text.startswith("Queue api has been paused since 20")


async def test_a_pause_of_one_group_by_a_handler_names_the_job(app: App) -> None:
    queue = app.queue("api")
    for id in ("first", "second"):
        await queue.enqueue(1, id=id, group="tenant")
    job = await queue.claim_one(wait=0)
    assert job is not None
    await job.fail(RateLimited("1h"))

    reason = await app.job("api/second").why()
    assert reason.kind == "group paused"
    assert "Group tenant starts no jobs until 20" in reason.text
    assert "job api/first raised RateLimited" in reason.text


async def test_a_limit_that_all_groups_share_is_raised_for_one_group(app: App) -> None:
    queue = app.queue("mail")
    await alive(app, "mail")
    await queue.limit(group="*", bucket=(10, "1/1h"))
    await queue.enqueue(1, group="a", cost=10)
    behind = await queue.enqueue(1, group="a", cost=10)

    reason = await behind.why()
    assert reason.kind == "group rate limit"
    assert "`penstock limit set -q mail --group a --bucket 20:2/h" in reason.remedy


async def test_a_budget_of_a_flow_is_raised_by_its_flow(app: App) -> None:
    queue = app.queue("flows")
    flow = await app.enqueue_flow(Flow(queue.prepare(0, id="parent"), [queue.prepare(1, id="child")]))
    await flow.set_budget("usd", 0)

    remedy = (await app.job("flows/child").why()).remedy
    assert remedy.startswith("Raise it with `penstock budget set usd 2 -q flows --flow ")


async def test_a_task_that_some_live_worker_may_know_is_not_unknown(app: App) -> None:
    handle = await app.queue("mail").enqueue(1, task="send")
    await alive(app, "mail", "old", unknown=["send"])
    assert (await handle.why()).kind == "unknown task"

    await alive(app, "mail", "new")
    assert (await handle.why()).kind == "ready"


async def test_a_group_behind_unserved_jobs_names_their_cause(app: App) -> None:
    queue = app.queue("mail")
    await queue.limit(group="*", concurrency=1)
    await queue.enqueue(1, group="a")
    behind = await queue.enqueue(2, group="a")

    assert (await behind.why()).kind == "no worker"


async def test_an_unknown_job_raises(app: App) -> None:
    with pytest.raises(JobNotFound, match="nobody"):
        await app.job("mail/nobody").why()


def test_synchronous_code_can_ask_too() -> None:
    with App("memory://").sync as app:
        reason = app.queue("mail").enqueue(1, id="a").why()
    assert isinstance(reason, Reason)
    assert reason.kind == "no worker"


async def test_a_wait_that_is_over_says_why(app: App) -> None:
    queue = app.queue("mail")
    await queue.pause()
    job = await queue.enqueue(1, id="a")

    with pytest.raises(
        ResultTimeout, match=r"within 20ms\. Queue mail has been paused since .* `penstock resume -q mail`"
    ):
        await job.result(timeout="20ms")
    with pytest.raises(ResultTimeout, match="Queue mail has been paused"):
        await queue.call(1, id="b", wait="500ms")


async def test_a_call_that_times_out_names_the_cause(app: App) -> None:
    await plant(app)
    for cause in CAUSES:
        if cause.kind not in ("paused", "no worker", "unknown task", "queue limit", "rate limit"):
            continue
        task = {"foreign": "other.task"}.get(cause.id, "")
        if cause.id == "shy":
            # A new job of its task has not been handed back yet.
            continue
        with pytest.raises(ResultTimeout) as late:
            await app.queue(cause.queue).call(1, id=f"{cause.id}-call", task=task, wait="20ms")
        assert all(words in str(late.value) for words in cause.words), late.value
        assert cause.remedy in str(late.value)


async def test_the_cost_does_not_grow_with_the_queue(spy: Spy) -> None:
    await spy.enqueue("mail", [NewJob(f"j-{number}") for number in range(500)])
    await spy.pause("mail")
    [job] = await spy.get("mail", ["j-250"])
    assert job is not None
    spy.calls.clear()

    assert (await explain(spy, job)).kind == "paused"
    assert len(spy.calls) <= 8
    assert not {"scan_jobs", "search"} & set(spy.calls)


class Replica(Spy):
    """A store that refuses what may write."""

    async def groups(self, *arguments: Any, **options: Any) -> GroupPage:
        raise StorageReadOnly("a replica does not write")

    async def budgets(self, queue: str) -> list[Budget]:
        raise StorageReadOnly("a replica does not write")


async def test_a_store_that_only_reads_tells_what_it_can() -> None:
    storage = open_storage("memory://")
    await storage.open()
    try:
        await storage.enqueue("mail", [NewJob("a"), NewJob("b", extras=Extras(group="g"))])
        jobs = [job for job in await storage.get("mail", ["a", "b"]) if job is not None]
        replica = spy_on(storage, Replica)
        assert {one.kind for one in (await explain_all(replica, jobs)).values()} == {"no worker"}
        await storage.limit("mail", "", Limit(concurrency=1))
        await storage.claim("mail", Take("w", 1, 60_000))
        assert (await explain(replica, jobs[1])).kind == "queue limit"
        await storage.pause("mail")
        assert (await explain(replica, jobs[1])).kind == "paused"
    finally:
        await storage.close()


async def test_a_list_reads_each_queue_once(spy: Spy) -> None:
    await spy.enqueue(
        "mail", [NewJob(f"j-{number}", extras=Extras(group=f"g-{number}")) for number in range(50)]
    )
    jobs = [job for job in await spy.get("mail", [f"j-{number}" for number in range(50)]) if job is not None]
    spy.calls.clear()

    assert len(await explain_all(spy, jobs)) == 50
    assert len(spy.calls) <= 6


async def test_a_worker_that_does_not_know_the_task_is_found_out(app: App) -> None:
    handle = await app.queue("mail").enqueue(1, task="elsewhere")
    app.task(name="known")(lambda: None)
    worker = app.worker(queues=["mail"], heartbeat="50ms")
    running = asyncio.create_task(worker.run())
    try:
        async with asyncio.timeout(20):
            while (await handle.why()).kind != "unknown task":
                await asyncio.sleep(0.02)
    finally:
        worker.stop()
        await running


async def test_a_task_that_was_handed_back_is_unknown_from_the_first_moment_to_the_last(app: App) -> None:
    handle = await app.queue("mail").enqueue(1, task="elsewhere")
    app.task(name="known")(lambda: None)
    worker = app.worker(queues=["mail"], lease="3h", heartbeat="1h")
    running = asyncio.create_task(worker.run())
    try:
        async with asyncio.timeout(20):
            while not (job := (await handle.get()).raw).is_handed_back:
                await asyncio.sleep(0.02)
        reason = await explain(await app.connect(), job)
        assert reason.kind == "unknown task"
        assert "task 'elsewhere'" in reason.text
    finally:
        worker.stop()
        await running

    reason = await handle.why()
    assert reason.kind == "unknown task"
    assert "No worker runs for queue mail now." in reason.text
    assert "`penstock worker MODULE:APP -q mail`" in reason.remedy


async def test_a_command_needs_a_worker_that_runs_commands(app: App) -> None:
    job = await app.queue("shell").enqueue({"command": "true"}, task=COMMAND_TASK)

    assert "`penstock worker --commands -q shell`" in (await job.why()).remedy
