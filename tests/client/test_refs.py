"""A job by one string: ``job.ref`` is ``queue/id``, and ``app.job(ref)`` accepts it."""

from __future__ import annotations

import pytest

from penstock import App, InvalidName
from penstock.core.names import ref_of, split_ref
from penstock.worker.context import JobContext

ODD_IDS = ("plain", "a/b", "mail/1", "/leading", "with space", "ü:{x}")


@pytest.mark.parametrize("id", ODD_IDS)
async def test_a_ref_leads_back_to_its_job(app: App, id: str) -> None:
    job = await app.queue("mail").enqueue("x", id=id)

    assert job.ref == f"mail/{id}"
    again = app.job(job.ref)
    assert (again.queue, again.id, again.ref) == ("mail", id, job.ref)
    assert (await again.get()).ref == job.ref


async def test_whatever_names_a_job_has_its_ref(app: App) -> None:
    seen: list[str] = []

    @app.task(queue="sums")
    async def add(context: JobContext, numbers: list[int]) -> int:
        seen.append(context.ref)
        seen.extend(child.ref for child in await context.children())
        return sum(numbers)

    from penstock import chord

    @app.task(queue="numbers")
    def number(n: int) -> int:
        return n

    flow = await app.enqueue_flow(chord([number.options(id="one").job(1)], add.options(id="total").partial()))
    assert flow.ref == "sums/total"
    assert [node.ref for node in (await app.flow(flow.ref).tree()).walk()] == ["sums/total", "numbers/one"]
    await app.worker(burst=True).run()

    assert await app.flow("sums/total").result(timeout="10s") == 1
    assert seen == ["sums/total", "numbers/one"]
    events = [event async for event in app.events("sums", follow=False)]
    assert {event.ref for event in events if event.id} == {"sums/total"}
    assert {event.ref for event in events if not event.id} <= {""}


async def test_a_claimed_job_has_its_ref(app: App) -> None:
    queue = app.queue("mail")
    await queue.enqueue("x", id="1")

    async with queue.claim() as job:
        assert job.ref == "mail/1"


def test_sync_code_has_refs_too() -> None:
    app = App("memory://")

    @app.task(queue="mail")
    def send(to: str) -> None: ...

    try:
        job = send.sync.options(id="1").enqueue("ada")
        assert job.ref == app.sync.job(job.ref).ref == "mail/1"
        with app.queue("mail").sync.claim() as claimed:
            assert claimed.ref == "mail/1"
        flow = app.sync.enqueue_flow(send.options(id="2").job("bob"))
        assert flow.ref == app.sync.flow("mail/2").ref == "mail/2"
    finally:
        app.sync.close()


@pytest.mark.parametrize("ref", ["01a2", "", "mail/", "/id", "two words/1", "a{b}/1", None, 5, ("mail", "1")])
def test_what_is_not_a_ref_is_refused(ref: object) -> None:
    app = App("memory://")
    for make in (app.job, app.flow, app.sync.job, app.sync.flow):
        with pytest.raises(InvalidName):
            make(ref)  # type: ignore[arg-type]


def test_a_ref_without_a_queue_says_what_to_give() -> None:
    with pytest.raises(
        InvalidName, match=r"'01a2' is not a job's ref.*queue/id.*app\.queue\(name\)\.job\(id\)"
    ):
        App("memory://").job("01a2")


def test_a_ref_is_split_at_its_first_slash() -> None:
    assert split_ref(ref_of("mail", "a/b")) == ("mail", "a/b")
