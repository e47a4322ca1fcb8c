"""What is refused at the door: options nobody knows, values they cannot have, names that are not allowed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from penstock import App, InvalidInput, InvalidName, InvalidOption, Queue, Task, UnknownTask
from tests.bad_input.conftest import QUEUE, refused

AnyApp: Any = App
"""For what the type checker would not let pass."""

Enqueue = Callable[[Task, Queue], Any]


def any_task(app: App) -> Any:
    return make_task(app)


def make_task(app: App) -> Task:
    @app.task(queue=QUEUE)
    async def pack(item: str = "", *, count: int = 1) -> None: ...

    return pack


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda app: AnyApp(colour="red"), ("an app has no option 'colour'", "There are: attempts")),
        (lambda app: AnyApp(atempts=3), ("Did you mean 'attempts'?",)),
        (lambda app: app.task(retries=3), ("a task has no option 'retries'", "max_retries")),
        (lambda app: app.worker(threds=3), ("a worker has no option 'threds'", "Did you mean 'threads'?")),
        (lambda app: app.task("mail"), ("app.task takes a function, got 'mail'", "queue=")),
        (lambda app: any_task(app).options(prority=1), ("task 'pack' has no option", "'priority'?")),
        (lambda app: App(attempts=0), ("attempts must be an integer", "from 1 to", "got 0")),
        (lambda app: App(timeout=0), ("timeout must be longer than 0", "got 0", "None")),
        (lambda app: App(ttl="0s"), ("ttl must be longer than 0", "got '0s'", "None")),
        (lambda app: App(serde="yaml"), ("serde='yaml'", "json, msgpack, raw")),
        (
            lambda app: App(max_payload="much"),
            ("max_payload must be a number of bytes", "got 'much'", "1MiB"),
        ),
        (lambda app: AnyApp(Path("jobs.db")), ("PosixPath", "sqlite:///")),
        (lambda app: app.worker(concurrency=0), ("concurrency must be", "from 1 to", "got 0")),
        (lambda app: app.worker(queues="mail"), ("queues must be a list, such as ['mail'], got 'mail'.",)),
        (lambda app: app.worker(queues="mail, news"), ("such as ['mail', 'news'], got",)),
        (lambda app: app.worker(lease="1s", heartbeat="1s"), ("heartbeat must be at most half", "got '1s'")),
        (lambda app: app.queue("q").events(after=-1), ("after must be an integer", "from 0 to", "got -1")),
    ],
)
def test_an_option_that_is_unknown_or_has_no_usable_value_is_refused_when_it_is_given(
    call: Callable[[App], Any], words: tuple[str, ...]
) -> None:
    with pytest.raises(InvalidOption) as caught:
        call(App("memory://"))
    assert type(caught.value) is InvalidOption
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda task, _: task.options(colour="red"), ("no option 'colour'", "There are", "priority")),
        (lambda task, _: task.options(dely="1s"), ("Did you mean 'delay'?",)),
        (
            lambda task, _: task.enqueue(dely="1s"),
            ("not a parameter", "pack.options(delay=...).enqueue(...)"),
        ),
        (lambda task, _: task.enqueue(attempts=3), ("not a parameter", "pack.options(attempts=...)")),
        (lambda task, _: task.call(timeout="1s"), ("pack.options(wait=...).call(...)",)),
        (lambda _, queue: queue.enqueue(1, colour="red"), ("queue 'orders' has no option 'colour'",)),
        (lambda _, queue: queue.enqueue_many([1], id="a"), ("id belongs to a single job", "ids=[...]")),
        (lambda _, queue: queue.configure(keep=1), ("no option 'keep'", "keep_failed")),
        (lambda task, _: task.options(delay=-1).enqueue(), ("delay=-1", "negative", '"30s"')),
        (lambda task, _: task.options(delay="soon").enqueue(), ("delay='soon'", "cannot be read", '"30s"')),
        (lambda task, _: task.options(run_at=datetime(2030, 1, 1)).enqueue(), ("no time zone", "UTC")),
        (
            lambda task, _: task.options(run_at=datetime.max.replace(tzinfo=UTC)).enqueue(),
            ("must be before the year 6429", "got 9999"),
        ),
        (
            lambda task, _: task.options(delay=1, run_at=datetime.now().astimezone()).enqueue(),
            ("both", "Give one of them"),
        ),
        (
            lambda task, _: task.options(priority=2**40).enqueue(),
            ("priority must be an integer from", "got 1099511627776"),
        ),
        (
            lambda task, _: task.options(on_conflict="maybe").enqueue(),
            ("on_conflict must be", "'redispatch'", "got 'maybe'"),
        ),
        (lambda _, queue: queue.clean("waiting"), ("'waiting' is not a final state", "completed")),
        (lambda _, queue: queue.clean("done"), ("state='done' is unknown", "completed")),
        (lambda _, queue: queue.claim_many(0), ("count must be an integer", "from 1 to", "got 0")),
        (lambda _, queue: queue.claim_one(lease=0), ("lease must be longer than 0", "got 0")),
        (
            lambda _, queue: queue.change("known", priority="high"),
            ("priority must be an integer", "got 'high'"),
        ),
        (
            lambda _, queue: queue.hold_events("reader", offset=-1),
            ("offset must be an integer", "from 0 to", "got -1"),
        ),
    ],
)
async def test_a_call_with_a_bad_option_is_refused_and_changes_nothing(
    app: App, call: Enqueue, words: tuple[str, ...]
) -> None:
    task = make_task(app)
    async with refused(app, InvalidOption, *words):
        await call(task, app.queue(QUEUE))


@pytest.mark.parametrize(
    "call",
    [
        lambda task: task.enqueue(colour="red"),
        lambda task: task.call(colour="red"),
        lambda task: task.enqueue_many([task.job("a"), task.job(colour=1)]),
    ],
)
async def test_an_argument_the_function_does_not_have_is_refused(
    app: App, call: Callable[[Any], Awaitable[Any]]
) -> None:
    task = make_task(app)
    async with refused(app, InvalidInput, "'colour'", "Its signature is", "pack(item: str"):
        await call(task)


@pytest.mark.parametrize(
    ("id", "cause"),
    [
        ("", "it is empty"),
        ("a" * 201, "201 characters"),
        ("two\nlines", r"'\n'"),
        (" padded", "white space"),
        ("\ud800", r"'\ud800'"),
        (5, "of type int"),
    ],
)
@pytest.mark.parametrize(
    "call",
    [
        lambda task, queue, id: task.options(id=id).enqueue(),
        lambda task, queue, id: queue.enqueue(1, id=id),
        lambda task, queue, id: queue.enqueue_many([1, 2], ids=["fine", id]),
        lambda task, queue, id: queue.get(id),
        lambda task, queue, id: queue.get_many(["known", id]),
        lambda task, queue, id: queue.cancel("known", id),
        lambda task, queue, id: queue.remove("known", id),
        lambda task, queue, id: queue.promote("later", id),
        lambda task, queue, id: queue.change(id, priority=1),
    ],
    ids=["task", "queue", "many", "get", "get_many", "cancel", "remove", "promote", "change"],
)
async def test_a_bad_id_is_refused_with_its_cause_and_nothing_is_touched(
    app: App, call: Callable[[Task, Queue, Any], Any], id: Any, cause: str
) -> None:
    task = make_task(app)
    async with refused(app, InvalidName, "not allowed as id", cause, "1 to 200 printable"):
        await call(task, app.queue(QUEUE), id)


@pytest.mark.parametrize("name", ["", "two words", "a/b", "{tag}", "-dash", "q" * 101, "füller", None, 5])
@pytest.mark.parametrize(
    ("what", "call"),
    [
        ("queue name", lambda app, name: app.queue(name)),
        ("queue name", lambda app, name: app.task(queue=name)),
        ("queue name", lambda app, name: make_task(app).options(queue=name or "")),
        ("queue name", lambda app, name: app.worker(queues=[name])),
        ("namespace", lambda app, name: App("memory://", namespace=name or "")),
    ],
)
def test_a_bad_name_of_a_queue_or_namespace_is_refused(
    what: str, call: Callable[[App, Any], Any], name: Any
) -> None:
    with pytest.raises(InvalidName, match=rf"not allowed as {what}.*Use 1 to 100 letters"):
        call(App("memory://"), name)


@pytest.mark.parametrize("name", ["", "two words", "a/b", "t" * 201])
def test_a_bad_name_of_a_task_or_worker_is_refused(name: str) -> None:
    app = App("memory://")
    with pytest.raises(InvalidName, match=r"not allowed as task name.*Use 1 to 200 letters"):
        app.task(name=name)(print)
    with pytest.raises(InvalidName, match=r"not allowed as worker name.*Use 1 to 200 letters"):
        app.worker(name=name)


@pytest.mark.parametrize("url", ["memory://", "sqlite:///{}/jobs.db", "valkey://localhost"])
async def test_a_bad_namespace_in_a_url_is_refused_before_anything_is_made(url: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidName, match=r"'a/b' is not allowed as namespace"):
        await App(f"{url.format(tmp_path)}?namespace=a/b").connect()
    assert not list(tmp_path.iterdir())


async def test_a_bad_name_of_a_task_or_consumer_is_refused_and_changes_nothing(app: App) -> None:
    queue = app.queue(QUEUE)
    async with refused(app, InvalidName, "task name", "Use 1 to 200"):
        await queue.enqueue(1, task="two words")
    async with refused(app, InvalidName, "consumer name", "Use 1 to 200"):
        await queue.hold_events("two words", offset=0)


async def test_arguments_that_do_not_fit_the_function_are_refused_with_its_signature(app: App) -> None:
    task = make_task(app)
    async with refused(app, InvalidInput, "cannot be called with these arguments", "item"):
        await task.enqueue("a", item="b")


def test_an_unregistered_task_is_reported_with_the_registered_ones() -> None:
    app = App("memory://")
    make_task(app)
    with pytest.raises(UnknownTask, match=r"no task 'wrap' is registered.*has pack\. Import the module"):
        app.task_named("wrap")
