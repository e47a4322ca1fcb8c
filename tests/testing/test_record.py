"""What was enqueued: everything is recorded, and can be asked for by what it was."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from unittest.mock import ANY

import pytest

from penstock import App, InvalidInput, JobContext
from penstock.testing import Harness, harness


@dataclass
class User:
    name: str
    born: datetime | None = None


app = App("memory://")


@app.task(queue="mail")
async def send(context: JobContext, to: str, *, template: str = "hello") -> None: ...


@app.task
async def register(user: User, tags: tuple[str, ...] = ()) -> None:
    await send.enqueue(user.name)


@app.task
async def untyped(*values, **options) -> None: ...


@pytest.fixture
async def h() -> AsyncIterator[Harness]:
    async with harness(app) as h:
        yield h


async def test_a_job_is_found_by_what_it_was_enqueued_with(h: Harness) -> None:
    job = await send.options(delay="1h", priority=-1).enqueue("ada", template="bye")
    await send.enqueue("bob")

    for found in (
        await h.assert_enqueued(send, "ada"),
        await h.assert_enqueued(send, to="ada", template="bye"),
        await h.assert_enqueued(send, template="bye", delay="1h", priority=-1, queue="mail", count=1),
        await h.assert_enqueued(id=job.id),
        await h.assert_enqueued("send", delay="1h"),
    ):
        assert [recorded.id for recorded in found] == [job.id]
    assert len(await h.assert_enqueued(send, ANY, count=2)) == 2
    await h.refute_enqueued(send, "cy")
    await h.refute_enqueued(send, "ada", template="hello")
    await h.refute_enqueued(send, "ada", queue="default")


async def test_a_recorded_job_says_what_it_is(h: Harness) -> None:
    await send.options(delay="90s", id="one").enqueue("ada")

    [recorded] = await h.enqueued()

    assert recorded.arguments == {"to": "ada", "template": "hello"}
    assert (recorded.task, recorded.queue, recorded.state) == ("send", "mail", "scheduled")
    assert recorded.delay == timedelta(seconds=90)
    assert repr(recorded) == "<mail/one: send(to='ada', template='hello')>"


async def test_values_are_compared_in_the_types_of_the_task(h: Harness) -> None:
    born = datetime(1815, 12, 10, tzinfo=UTC)
    await register.enqueue(User("ada", born), tags=("a", "b"))
    await untyped.enqueue((1, 2), colour="red")

    await h.assert_enqueued(register, User("ada", born))
    await h.assert_enqueued(register, tags=("a", "b"))
    await h.refute_enqueued(register, User("bob"))
    await h.assert_enqueued(untyped, (1, 2), colour="red")
    await h.refute_enqueued(untyped, (1, 3))


async def test_what_tasks_enqueue_is_recorded_even_when_it_has_run_and_gone(h: Harness) -> None:
    await register.options(result_ttl=0).enqueue(User("ada"))
    await h.drain()

    assert [job.task for job in await h.enqueued()] == ["register", "send"]
    await h.assert_enqueued(register, User("ada"))
    await h.assert_enqueued(send, "ada")


async def test_duplicates_are_not_recorded_and_new_lives_are(h: Harness) -> None:
    await send.options(id="one").enqueue("ada")
    await send.options(id="one").enqueue("ada")
    await h.assert_enqueued(send, count=1)
    await app.queue("mail").cancel("one")
    await send.options(id="one").enqueue("bob")

    assert [job.arguments["to"] for job in await h.enqueued(id="one")] == ["ada", "bob"]


async def test_payloads_without_a_task_are_found_too(h: Harness) -> None:
    await app.queue("raw").enqueue({"n": 1}, id="one")

    [job] = await h.assert_enqueued(queue="raw", payload={"n": 1})
    assert (job.arguments, repr(job)) == ({}, "<raw/one: {'n': 1}>")
    await h.refute_enqueued(payload={"n": 2})


async def test_a_failed_assertion_says_what_was_enqueued_instead(h: Harness) -> None:
    with pytest.raises(
        AssertionError, match=r"a job of send\('ada'\) .* none was. Enqueued were: no jobs at all"
    ):
        await h.assert_enqueued(send, "ada")
    await send.options(id="one").enqueue("bob")
    with pytest.raises(AssertionError, match=r"none was. Enqueued were: \[<mail/one: send\(to='bob'"):
        await h.assert_enqueued(send, "ada")
    with pytest.raises(AssertionError, match=r"2 jobs of send should .* 1 were"):
        await h.assert_enqueued(send, count=2)
    with pytest.raises(AssertionError, match=r"0 jobs of any task\(queue='mail'\)"):
        await h.refute_enqueued(queue="mail")


async def test_arguments_no_job_could_have_are_refused(h: Harness) -> None:
    with pytest.raises(InvalidInput, match="'send' cannot take these arguments"):
        await h.enqueued(send, "ada", "hello", "more")
    with pytest.raises(InvalidInput, match="templete"):
        await h.enqueued(send, templete="hello")
    with pytest.raises(InvalidInput, match="give the task itself"):
        await h.enqueued("send", "ada")
