"""Reading one job: ``get`` insists on it, ``get_or_none`` does not."""

from __future__ import annotations

import pytest

from penstock import App, JobNotFound


async def test_get_of_an_unknown_id_raises(app: App) -> None:
    queue = app.queue("mail")

    for unknown in (queue.get("nobody"), queue.job("nobody").get()):
        with pytest.raises(JobNotFound, match="job 'nobody' was not found in queue 'mail'") as caught:
            await unknown
        assert caught.value.job_id == "nobody"


async def test_get_or_none_of_an_unknown_id_is_none(app: App) -> None:
    queue = app.queue("mail")

    assert await queue.get_or_none("nobody") is None
    assert await queue.job("nobody").get_or_none() is None


async def test_both_return_a_known_job_and_renew_the_handle(app: App) -> None:
    queue = app.queue("mail")
    job = await queue.enqueue("x", id="known")
    other = queue.job("known")

    assert (await queue.get("known")).payload == (await job.get()).payload == "x"
    for read in (await queue.get_or_none("known"), await other.get_or_none()):
        assert read is not None
        assert read.id == "known"
    assert other.state == "waiting"


async def test_get_many_keeps_the_place_of_an_unknown_id(app: App) -> None:
    queue = app.queue("mail")
    await queue.enqueue("x", id="known")

    infos = await queue.get_many(["nobody", "known"])

    assert [info and info.id for info in infos] == [None, "known"]


def test_sync_code_gets_the_same() -> None:
    app = App("memory://")
    queue = app.queue("mail").sync
    try:
        queue.enqueue("x", id="known")
        assert queue.get("known").id == queue.job("known").get().id == "known"
        assert queue.get_or_none("nobody") is queue.job("nobody").get_or_none() is None
        for get in (lambda: queue.get("nobody"), queue.job("nobody").get):
            with pytest.raises(JobNotFound):
                get()
    finally:
        app.sync.close()
