"""Reading one job: ``get`` insists on it, ``get_or_none`` does not."""

from __future__ import annotations

import inspect
import json
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import msgspec
import pytest

from penstock import App, JobInfo, JobNotFound
from penstock.core.job import JOB_FIELDS


async def test_get_of_an_unknown_id_raises(app: App) -> None:
    queue = app.queue("mail")

    with pytest.raises(JobNotFound) as caught:
        await queue.get("nobody")

    assert caught.value.job_id == "nobody"


async def test_every_call_names_an_unknown_job_in_the_same_words(app: App) -> None:
    queue = app.queue("mail")
    job = queue.job("nobody")

    for asked in (
        queue.get("nobody"),
        job.get(),
        job.result(),
        job.why(),
        job.refresh(),
        job.add_children([queue.job("child")]),
        anext(job.events()),
        queue.enqueue("x", after=[job]),
    ):
        with pytest.raises(JobNotFound, match=r"^job 'nobody' was not found in queue 'mail'") as caught:
            await asked
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


class Receipt(msgspec.Struct):
    total: Decimal
    at: datetime


async def test_a_job_is_shown_as_plain_values(app: App) -> None:
    @app.task(queue="mail", attempts=1)
    async def pay(n: int) -> Receipt:
        if n < 0:
            raise ValueError("no money")
        return Receipt(Decimal("1.50"), datetime(2026, 1, 2, tzinfo=UTC))

    good = await pay.options(id="good", headers={"tenant": "x"}).enqueue(1)
    bad = await pay.options(id="bad").enqueue(-1)
    await app.worker(burst=True).run()

    told = (await good.get()).as_dict()
    assert json.loads(json.dumps(told, default=str))["result"] == {
        "total": "1.50",
        "at": "2026-01-02T00:00:00Z",
    }
    assert (told["ref"], type(told["state"]), told["payload"], told["failure"]) == (
        *("mail/good", str, {"n": 1}, None),
    )
    failure = (await bad.get()).as_dict()["failure"]
    assert failure == {"type": "ValueError", "message": "no money"}
    assert "in pay" in (await bad.get()).as_dict(traceback=True)["failure"]["traceback"]


def test_a_job_has_every_field_of_the_list_and_a_few_more() -> None:
    more = {
        *(
            "ref",
            "raw",
            "stage",
            "awaits",
            "awaits_until",
            "holds",
            "scheduled_for",
            "has_children",
            "dependents",
        ),
    }
    properties = inspect.getmembers(JobInfo, lambda value: isinstance(value, property))
    fields = {name for name, _ in properties if name[0] != "_"}

    assert fields - more == {field.name for field in JOB_FIELDS}


async def test_the_fields_of_a_job_are_those_of_its_record(app: App) -> None:
    options: dict[str, Any] = {
        "version": "7",
        "attempts": 5,
        "priority": 2,
        "group": "g",
        "cost": 3,
        "run_id": "r",
        "write_id": "w",
    }
    job = await app.queue("mail").enqueue("x", id="known", delay="1h", ttl="1d", **options)
    info = await job.get()

    plain = [field for field in JOB_FIELDS if field.kind in ("text", "name", "number", "count", "flag")]
    assert {field.name: getattr(info, field.name) for field in plain} == {
        field.name: field.read(info.raw) for field in plain
    }
    assert options.items() <= info.as_dict().items()
    assert info.as_dict().keys() == {field.name for field in JOB_FIELDS} | {"ref"}
