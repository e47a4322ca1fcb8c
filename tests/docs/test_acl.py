"""The ACL rule that docs/stores.md gives is enough for all that clients and workers do, and for no more keys."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock import App, StorageRefused
from tests.servers import HOST, ValkeyCluster, ValkeyServer

PAGE = (Path(__file__).parents[2] / "docs" / "stores.md").read_text()
[RULE] = re.findall(r"^ACL SETUSER (.*)$", PAGE, re.MULTILINE)
LOGIN = "penstock:secret"
PROD_KEYS = "~penstock:prod:* ~penstock:{prod/*"
IN_CLUSTER = "+cluster|slots +asking"


@pytest.fixture
def guarded(request: pytest.FixtureRequest) -> Iterator[ValkeyServer]:
    with ValkeyServer(password="root", users=(request.param,)) as server:
        yield server


async def do_everything(app: App) -> None:
    """Every verb at least once, through the public methods."""

    @app.task(queue="mail", attempts=2, backoff="10ms")
    async def half(n: int) -> int:
        if n % 2:
            raise ValueError("odd")
        return n // 2

    queue = app.queue("mail")
    jobs = await half.enqueue_many([half.job(n) for n in range(4)])
    await half.options(id="later", delay="1h").enqueue(4)
    worker = app.worker(queues=["mail"], grace=0, heartbeat="50ms")
    running = asyncio.create_task(worker.run())
    assert await jobs[2].result(timeout="10s") == 1
    assert await half.options(wait="10s").call(8) == 4
    while (await queue.counts()).failed < 2:
        await asyncio.sleep(0.01)
    while not await queue.workers():
        await asyncio.sleep(0.01)
    worker.stop()
    await running

    seen = [event.seq async for event in queue.events(follow=False)]
    newest = asyncio.ensure_future(anext(queue.events(after=seen[-1])))
    assert await queue.promote("later") == {"later": "promoted"}
    assert (await asyncio.wait_for(newest, 10)).id == "later"
    async with queue.claim() as job:
        await job.progress(1)
        await job.log("half way")
        await job.update_payload({"n": 6})
        await job.extend()
    assert await queue.logs("later") == ["half way"]
    assert await queue.retry_all() == 2
    assert await queue.cancel(jobs[1].id) == {jobs[1].id: "cancelled"}
    assert await queue.retry(jobs[1].id) == {jobs[1].id: "retried"}
    assert await queue.change(jobs[1].id, priority=3) == "changed"
    await queue.hold_events("reader", offset=1)
    assert [consumer.name for consumer in await queue.consumers()] == ["reader"]
    await queue.release_events("reader")
    await queue.pause()
    await queue.resume()
    await queue.configure(keep_failed=10)
    assert [job async for job in queue.list_jobs("waiting")]
    assert await queue.remove(jobs[1].id) == {jobs[1].id: "removed"}
    assert await queue.clean("completed") > 0
    assert (await queue.check(repair=True)).problems == {}
    assert await queue.drain(scheduled=True) == 1
    assert await queue.obliterate() == 0
    assert await app.queues() == ["mail"]


def denied(server: ValkeyServer) -> list[str]:
    """What the server refused; that a connection may not name itself does not matter."""
    with server.client() as admin:
        return [entry["object"] for entry in admin.acl_log() if entry["object"] != "client|setname"]


@pytest.mark.parametrize("guarded", [RULE], indirect=True)
async def test_the_rule_is_enough_for_all_verbs(guarded: ValkeyServer) -> None:
    async with App(f"valkey://{LOGIN}@{HOST}:{guarded.port}") as app:
        await do_everything(app)
    assert denied(guarded) == []


@pytest.mark.parametrize("guarded", [RULE.replace("~penstock:*", PROD_KEYS)], indirect=True)
async def test_the_rule_for_one_namespace_opens_that_one_and_no_other(guarded: ValkeyServer) -> None:
    assert PROD_KEYS in PAGE
    url = f"valkey://{LOGIN}@{HOST}:{guarded.port}"
    async with App(url, namespace="prod") as app:
        await do_everything(app)
    assert denied(guarded) == []
    async with App(url, namespace="test") as app:
        with pytest.raises(StorageRefused):
            await app.queue("mail").enqueue(1)
        with pytest.raises(StorageRefused):
            await app.queue("mail").waiting()


@pytest.mark.parametrize("guarded", [f"{RULE} +select"], indirect=True)
async def test_another_database_needs_select(guarded: ValkeyServer) -> None:
    async with App(f"valkey://{LOGIN}@{HOST}:{guarded.port}/3") as app:
        assert (await app.queue("mail").enqueue(1)).status == "queued"


@pytest.mark.cluster
async def test_the_rule_with_two_more_rights_is_enough_in_a_cluster() -> None:
    assert IN_CLUSTER in PAGE
    with ValkeyCluster(f"user {RULE} {IN_CLUSTER}") as cluster:
        async with App(cluster.url.replace("//", f"//{LOGIN}@")) as app:
            await do_everything(app)
        assert [denied(node) for node in cluster.nodes] == [[], [], []]
