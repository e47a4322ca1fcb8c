"""The remedies of ``why`` reach the store of the app, and help with jobs that are held up by a worker."""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from pathlib import Path

import pytest

from penstock import App, State
from penstock.client.session import StoreName, store_options
from penstock.client.why import explain
from penstock.core.job import NewJob, Options
from penstock.storage.values import Take


async def alive(app: App, queue: str, worker: str = "w", **info: object) -> None:
    """Have a worker describe itself."""
    said = json.dumps({"queues": [queue], "concurrency": 2, "consuming": True} | info)
    storage = await app.connect()
    await storage.extend(queue, [], worker=worker, lease_ms=60_000, info=said.encode())


async def test_a_remedy_names_the_store_that_the_code_names(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/jobs.db"
    async with App(url, namespace="shop") as app:
        job = await app.queue("mail").enqueue(1, id="a", delay="1h")
        remedy = f"`penstock promote mail/a --url {url} --namespace shop`"
        assert remedy in (await job.why()).remedy
        assert remedy in (await (await app.queue("mail").get("a")).why()).remedy
        await job.promote()
        # The code of the app names the store for its workers.
        await (await app.connect()).enqueue("mail", [NewJob("b", options=Options(task="send"))])
        assert "`penstock worker MODULE:APP -q mail`" in (await app.job("mail/b").why()).remedy


@pytest.mark.parametrize(
    ("named", "options"),
    [
        (StoreName(), ()),
        (StoreName("memory://"), ()),
        (StoreName("valkey://h:1/2"), ("--url", "valkey://h:1/2")),
        (StoreName("valkey://:secret@h"), ()),
        (StoreName("valkey://:secret@h", "shop"), ("--namespace", "shop")),
        (StoreName("sqlite:///jobs.db"), ("--url", f"sqlite:///{os.getcwd()}/jobs.db")),
    ],
)
def test_the_options_of_a_store_have_no_password(named: StoreName, options: tuple[str, ...]) -> None:
    assert store_options(named) == options


async def test_a_task_that_is_likely_to_be_misspelt_names_the_right_one(app: App) -> None:
    job = await app.queue("mail").enqueue(1, task="sendd")
    await alive(app, "mail", unknown=["sendd"], tasks={"send": "mail", "tidy": "mail"})
    assert (await job.why()).remedy.startswith("Did you mean the task 'send'? Import the module")
    await alive(app, "mail", unknown=["sendd"], tasks={"tidy": "mail"})
    assert (await job.why()).remedy.startswith("Import the module")


async def test_a_queue_without_a_worker_says_which_one_died_and_when(app: App) -> None:
    job, storage = await app.queue("mail").enqueue(1, task="send"), await app.connect()
    await alive(app, "mail", "first")
    await storage.shift_clock("mail", 300_000)
    assert "No worker runs for queue mail. Worker first died or fell silent 5m" in (await job.why()).text
    await alive(app, "mail", "second")
    await storage.shift_clock("mail", 120_000)
    assert "2 workers died or fell silent, the last one (second) 2m" in (await job.why()).text
    # A worker that ends properly takes its record along.
    await storage.depart("mail", "second")
    assert "Worker first died or fell silent 7m" in (await job.why()).text


async def test_a_run_that_was_asked_to_stop_names_the_process_to_end(app: App) -> None:
    queue = app.queue("mail")
    await queue.enqueue(1, id="a")
    await alive(app, "mail", pid=4711, host="box")
    assert await queue.claim_one(worker="w") is not None
    await app.job("mail/a").cancel()

    reason = await app.job("mail/a").why()
    assert "was asked to stop. A plain function goes on unless it checks context.cancelled" in reason.text
    assert "kill worker w (process 4711 on box): the job is then cancelled" in reason.remedy


async def test_a_limit_that_a_lost_worker_holds_names_the_job_to_reset(app: App) -> None:
    storage, queue = await app.connect(), app.queue("mail")
    await queue.limit(concurrency=1)
    await queue.enqueue_many([1, 2], ids=["held", "behind"])
    await alive(app, "mail")
    await storage.claim("mail", Take("w", 1, 3_600_000))
    await storage.shift_clock("mail", 120_000)
    await alive(app, "mail", "other")

    reason = await app.job("mail/behind").why()
    assert reason.kind == "queue limit"
    assert "mail/held: its worker w has been silent for 2m" in reason.text
    assert "penstock reset mail/held" in reason.remedy
    held = await app.job("mail/held").why()
    assert (held.kind, "penstock reset mail/held" in held.remedy) == ("worker died", True)


async def test_a_worker_that_started_after_the_hand_back_is_named(app: App) -> None:
    handle = await app.queue("mail").enqueue(1, task="elsewhere")
    app.task(name="known")(lambda: None)
    worker = app.worker(queues=["mail"], lease="3h", heartbeat="1h")
    running = asyncio.create_task(worker.run())
    async with asyncio.timeout(20):
        while not (job := (await handle.get()).raw).is_handed_back or job.state is not State.SCHEDULED:
            await asyncio.sleep(0.02)
    worker.stop(0)
    await running

    storage = await app.connect()
    # Its first heartbeat may have been late, so it may be the one that handed the job back.
    await alive(app, "mail", "new", up_ms=0)
    assert "The worker that took it last" in (await explain(storage, job)).text
    await storage.shift_clock("mail", 10_000)
    await alive(app, "mail", "new", up_ms=0)
    reason = await explain(storage, job)
    assert "Worker new has started since and is offered the job." in reason.text
    # Its own clock is ahead of the queue's.
    await alive(app, "mail", "new", up_ms=60_000, started_at_ms=round(time.time() * 1000) + 60_000)
    assert (await explain(storage, job)).kind == "unknown task"


async def test_a_job_that_blocks_the_event_loop_is_named(app: App) -> None:
    waiting = await app.queue("mail").enqueue(1)
    said = "job mail/hog has blocked the event loop for 12 s"
    await alive(app, "mail", consuming=False, reason=said, blocked_by="mail/hog", pid=4711, host="box")

    reason = await waiting.why()
    assert reason.kind == "not consuming"
    assert said in reason.text
    assert "penstock cancel mail/hog" in reason.remedy
    assert "kill worker w (process 4711 on box)" in reason.remedy
    assert reason.jobs == ("mail/hog",)


async def test_a_job_of_a_dead_worker_needs_another_worker(app: App) -> None:
    storage, queue = await app.connect(), app.queue("mail")
    await queue.limit(concurrency=1)
    await queue.enqueue_many([1, 2], ids=["held", "behind"], task="send")
    await alive(app, "mail")
    await storage.claim("mail", Take("w", 1, 30_000))
    await storage.shift_clock("mail", 120_000)

    for id in ("held", "behind"):
        reason = await app.job(f"mail/{id}").why()
        assert "no other worker runs for queue mail, so the job stays active" in reason.text
        assert reason.remedy == "Start one with `penstock worker MODULE:APP -q mail`."
    await alive(app, "mail", "other")
    reason = await app.job("mail/held").why()
    assert "has been silent for 2m. Its lease ended at 20" in reason.text
    assert (reason.until, "penstock reset mail/held" in reason.remedy) == (None, True)


async def test_a_rate_that_waiting_jobs_hold_names_the_missing_worker(app: App) -> None:
    queue = app.queue("mail")
    await queue.limit(group="*", rate="1/h")
    await queue.enqueue_many([1, 2], ids=["first", "second"], group="acme inc")

    assert (await app.job("mail/second").why()).kind == "no worker"
    await alive(app, "mail")
    reason = await app.job("mail/second").why()
    assert reason.text == "Group acme inc has used up its rate, with 1 job ahead."
    assert "`penstock limit set -q mail --group 'acme inc' --rate 2/h" in reason.remedy


async def test_the_limit_of_one_group_keeps_the_other_bounds_of_every_group(app: App) -> None:
    queue = app.queue("mail")
    await queue.limit(group="*", concurrency=1, rate="5/h")
    await queue.enqueue_many([1, 2], ids=["first", "second"], group="acme")
    await alive(app, "mail")
    assert await queue.claim_one(worker="w") is not None

    remedy = (await app.job("mail/second").why()).remedy
    assert "--group acme --concurrency 2 --rate 5/h" in remedy
    assert remedy.endswith(", which gives up the strict order.")


async def test_a_bucket_says_how_many_tokens_are_missing(app: App) -> None:
    queue = app.queue("mail")
    await queue.limit(group="acme", bucket=(10, "1/min"))
    await queue.enqueue(1, id="first", group="acme", cost=10)
    await alive(app, "mail")
    assert await queue.claim_one(worker="w") is not None
    await queue.enqueue(1, id="second", group="acme", cost=4)

    reason = await app.job("mail/second").why()
    assert "Group acme has used up its bucket: 4 tokens short, until 20" in reason.text
    assert reason.remedy.startswith("Wait. To fill the bucket faster, run `penstock limit set")


async def test_a_failed_dependency_is_retried_first(app: App) -> None:
    queue = app.queue("mail")
    first = await queue.enqueue(1, id="a1", attempts=1)
    await queue.enqueue(2, id="a2", after=[first])
    job = await queue.claim_one()
    assert job is not None
    await job.fail(ValueError("no route"))

    reason = await app.job("mail/a2").why()
    assert reason.kind == "failed"
    assert re.search(r"Run `penstock retry mail/a1.*` first\. .* run `penstock retry mail/a2", reason.remedy)
