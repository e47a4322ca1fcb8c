"""Tasks: defining them, putting their calls in, and what is refused at the door."""

from __future__ import annotations

import asyncio
import inspect
import pickle
import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from penstock import (
    App,
    Conflict,
    DispatchOptions,
    Exponential,
    Fixed,
    InvalidInput,
    InvalidName,
    InvalidOption,
    JobSpec,
    PayloadTooLarge,
    SerializationError,
    State,
    UnknownTask,
)
from penstock.core.retry import Custom
from tests.client.spy import Spy

picklable = App("memory://")


@picklable.task
def add(a: int, b: int) -> int:
    return a + b


# Defining


async def test_a_task_can_be_called_as_the_function_it_is(memory_app: App) -> None:
    @memory_app.task
    async def double(n: int) -> int:
        """Twice."""
        return n * 2

    assert await double(21) == 42
    assert add(1, 2) == 3
    assert (double.name, double.queue, double.__doc__) == ("double", "default", "Twice.")


def test_runners_are_chosen_by_the_kind_of_function() -> None:
    app = App("memory://")

    @app.task
    async def on_loop() -> None: ...

    @app.task
    def in_thread() -> None: ...

    @app.task(runner="process")
    def in_process() -> None: ...

    assert [app.tasks[name].runner for name in ("on_loop", "in_thread", "in_process")] == [
        "async",
        "thread",
        "process",
    ]


def test_a_runner_that_does_not_suit_the_function_is_refused() -> None:
    app = App("memory://")

    async def coroutine() -> None: ...

    with pytest.raises(InvalidOption, match="coroutine function"):
        app.task(runner="thread")(coroutine)
    with pytest.raises(InvalidOption, match="got 'fiber'"):
        app.task(runner="fiber")(coroutine)  # type: ignore[call-overload]


def test_options_of_a_task_become_the_policy_of_its_jobs() -> None:
    app = App("memory://", attempts=7, result_ttl="2h")

    @app.task(name="mail.send", backoff="10s", timeout="30s", max_stalls=1, failure_ttl=None, version="2")
    def send() -> None: ...

    assert send.defaults.task == "mail.send"
    assert send.defaults.attempts == 7
    assert send.defaults.backoff == Fixed(10_000)
    assert send.defaults.timeout_ms == 30_000
    assert send.defaults.max_stalls == 1
    assert send.defaults.result_ttl_ms == 7_200_000
    assert send.defaults.failure_ttl_ms > 365 * 86_400_000
    assert send.defaults.version == "2"


def test_a_backoff_function_is_known_to_the_app_by_name() -> None:
    app = App("memory://")

    def rest(failures: int, error: BaseException | None) -> float:
        return failures

    @app.task(backoff=rest)
    def send() -> None: ...

    assert isinstance(send.defaults.backoff, Custom)
    assert app.backoffs[send.defaults.backoff.name] is rest


def test_an_unknown_option_is_refused_with_the_one_that_was_meant() -> None:
    app = App("memory://")

    with pytest.raises(InvalidOption, match="Did you mean 'attempts'"):
        app.task(atempts=3)  # type: ignore[call-overload]
    with pytest.raises(InvalidOption, match="Did you mean 'backoff'"):
        App("memory://", backof="1s")  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "options",
    [
        {"attempts": 0},
        {"attempts": True},
        {"attempts": "3"},
        {"timeout": "soon"},
        {"timeout": -1},
        {"max_stalls": -1},
        {"priority": 1.5},
        {"priority": 2**40},
        {"version": 3},
        {"backoff": "quadratic"},
        {"serde": "pickle"},
    ],
)
def test_a_value_an_option_cannot_have_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption, match=next(iter(options))):
        App("memory://").task(**options)(add.func)


def test_two_tasks_of_one_name_are_refused() -> None:
    app = App("memory://")
    app.task(add.func)

    with pytest.raises(InvalidOption, match="'add' is registered already") as refused:
        app.task(add.func)
    where = rf"in module {__name__} \({__file__}, line \d+\)"
    assert re.search(
        rf"registered already, {where}, .* Give the one {where} another name", str(refused.value)
    )
    assert app.task(name="add2")(add.func).name == "add2"


@pytest.mark.parametrize("name", ["", "send mail", "a/b", "x" * 201])
def test_a_bad_task_name_is_refused(name: str) -> None:
    with pytest.raises(InvalidName, match="task name"):
        App("memory://").task(name=name)(add.func)


def test_a_lambda_needs_a_name_given() -> None:
    with pytest.raises(InvalidName, match="<lambda>"):
        App("memory://").task(lambda: None)


def test_an_unregistered_task_is_an_error_of_its_own() -> None:
    with pytest.raises(UnknownTask, match=r"'send'.*add"):
        picklable.task_named("send")
    assert picklable.task_named("add") is add


def test_a_task_travels_to_another_process_by_name() -> None:
    assert pickle.loads(pickle.dumps(add)) is add


# Enqueueing


async def test_the_first_page_of_the_design_works(app: App) -> None:
    @app.task(queue="mail", attempts=5, backoff="exponential", timeout="30s")
    async def send(to: str, template: str) -> str:
        return f"{template} {to}"

    job = await send.options(id="hello-ada").enqueue("ada@example.org", template="hello")
    again = await send.options(id="hello-ada").enqueue("ada@example.org", template="hello")

    assert (job.id, job.status, job.state, job.queue) == ("hello-ada", "queued", State.WAITING, "mail")
    assert again.status == "duplicate"
    info = await job.get()
    assert info.payload == {"to": "ada@example.org", "template": "hello"}
    assert info.task == "send"
    assert info.raw.options.attempts == 5
    assert info.raw.options.backoff == Exponential()
    assert info.raw.options.timeout_ms == 30_000


async def test_placement_options_reach_the_job(app: App) -> None:
    @app.task(priority=5, ttl="1h")
    def send(n: int) -> None: ...

    tomorrow = datetime.now(UTC) + timedelta(days=1)
    plain = await (await send.enqueue(1)).get()
    placed = await (
        await send.options(priority=-3, lifo=True, ttl=None, run_id="r", write_id="w").enqueue(2)
    ).get()
    later = await (await send.options(delay="10m").enqueue(3)).get()
    dated = await (await send.options(run_at=tomorrow).enqueue(4)).get()

    assert plain.enqueued_at is not None
    assert (plain.priority, plain.expires_at) == (5, plain.enqueued_at + timedelta(hours=1))
    assert (placed.priority, placed.raw.lifo, placed.expires_at) == (-3, True, None)
    assert (placed.raw.run_id, placed.raw.write_id) == ("r", "w")
    assert later.state is State.SCHEDULED
    assert dated.run_at is not None
    assert abs(dated.run_at - tomorrow) < timedelta(milliseconds=2)


async def test_an_option_named_like_a_parameter_goes_to_the_function(app: App) -> None:
    @app.task
    def fetch(id: int, delay: float = 0) -> None: ...

    plain = await fetch.enqueue(id=7, delay=1.5)
    chosen = await fetch.options(id="job-7", delay="1h").enqueue(id=7)

    assert len(plain.id) == 32
    info = await plain.get()
    assert info.payload == {"id": 7, "delay": 1.5}
    assert (chosen.id, chosen.state) == ("job-7", State.SCHEDULED)


async def test_options_make_a_copy_and_leave_the_task_alone(app: App) -> None:
    @app.task(queue="mail", attempts=2)
    def send(to: str) -> None: ...

    urgent = send.options(queue="urgent", attempts=9, backoff="1s", timeout="5s", priority=-1)
    job = await urgent.options(priority=-2).enqueue("ada")
    plain = await (await send.enqueue("bob")).get()

    info = await job.get()
    assert (info.queue, info.priority) == ("urgent", -2)
    assert (info.raw.options.attempts, info.raw.options.timeout_ms) == (9, 5_000)
    assert (plain.queue, plain.raw.options.attempts) == ("mail", 2)


async def test_conflicts_are_settled_as_asked(app: App) -> None:
    @app.task
    def send(n: int) -> None: ...

    await send.options(id="a", delay="1h").enqueue(1)

    assert (await send.options(id="a", on_conflict="absent").enqueue(2)).status == "duplicate"
    assert (await send.options(id="a", on_conflict="redispatch").enqueue(2)).status == "updated"
    kept = await send.options(
        id="a", on_conflict=Conflict("redispatch", payload="keep", run_at="never")
    ).enqueue(3)
    assert kept.status == "updated"
    info = await kept.get()
    assert info.payload == {"n": 2}
    assert (await send.options(id="fresh", unchecked=True).enqueue(9)).status == "queued"


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"id": ""}, InvalidName),
        ({"id": "line\nend"}, InvalidName),
        ({"id": 7}, InvalidName),
        ({"delay": "tomorrow"}, InvalidOption),
        ({"delay": "1s", "run_at": datetime.now(UTC)}, InvalidOption),
        ({"run_at": datetime(2030, 1, 1)}, InvalidOption),
        ({"run_at": "2030-01-01"}, InvalidOption),
        ({"priority": "high"}, InvalidOption),
        ({"lifo": 1}, InvalidOption),
        ({"ttl": -5}, InvalidOption),
        ({"on_conflict": "replace"}, InvalidOption),
        ({"unchecked": "yes"}, InvalidOption),
        ({"prioritty": 1}, InvalidOption),
        ({"attempts": 0}, InvalidOption),
        ({"wait": "soon"}, InvalidOption),
        ({"m": 5}, InvalidOption),
    ],
)
async def test_bad_options_are_refused_and_nothing_is_written(
    memory_app: App, options: dict[str, Any], error: type[Exception]
) -> None:
    @memory_app.task
    def send(n: int) -> None: ...

    with pytest.raises(error):
        await send.options(**options).enqueue(1)
    assert await memory_app.queue("default").open() == 0


async def test_a_refusal_says_what_was_meant(memory_app: App) -> None:
    @memory_app.task
    def send(n: int) -> None: ...

    with pytest.raises(InvalidOption, match="Did you mean 'priority'"):
        send.options(prioritty=1)  # type: ignore[call-arg]
    with pytest.raises(InvalidInput, match="send cannot be called with these arguments"):
        await send.enqueue()  # type: ignore[call-arg]
    with pytest.raises(InvalidOption, match="time zone"):
        await send.options(run_at=datetime(2030, 1, 1)).enqueue(1)


async def test_a_payload_over_the_limit_is_refused_with_both_sizes() -> None:
    async with App("memory://", max_payload="1KiB") as app:

        @app.task
        def send(text: str) -> None: ...

        await send.enqueue("x" * 1000)
        with pytest.raises(PayloadTooLarge, match=r"2\.0 KiB.*limit of 1\.0 KiB.*max_payload"):
            await send.enqueue("x" * 2000)
        with pytest.raises(PayloadTooLarge):
            await app.queue("default").enqueue("x" * 2000)
        assert await app.queue("default").open() == 1


async def test_what_cannot_be_encoded_is_refused(memory_app: App) -> None:
    @memory_app.task
    def send(what: Any) -> None: ...

    with pytest.raises(SerializationError, match=r"\['x'\]"):
        await send.enqueue({"x": object()})
    assert await memory_app.queue("default").open() == 0


# Many


@pytest.mark.parametrize(
    ("method", "wrong", "remedy"),
    [
        ("enqueue", "id", "send.options(id=...).enqueue(...)"),
        ("enqueue", "attempts", "send.options(attempts=...).enqueue(...)"),
        ("enqueue", "queue", "send.options(queue=...).enqueue(...)"),
        ("enqueue", "prioritty", "send.options(priority=...).enqueue(...)"),
        ("call", "delay", "send.options(delay=...).call(...)"),
        ("call", "timeout", "send.options(wait=...).call(...)"),
        ("job", "group", "send.options(group=...).job(...)"),
        ("partial", "cost", "send.options(cost=...).partial(...)"),
    ],
)
async def test_an_option_among_the_arguments_is_refused_with_the_place_it_goes_to(
    memory_app: App, method: str, wrong: str, remedy: str
) -> None:
    @memory_app.task(name="send")
    def send(n: int, m: int = 0) -> None: ...

    async def attempt() -> None:
        made = getattr(send, method)(1, **{wrong: "x"})
        if inspect.isawaitable(made):
            await made

    with pytest.raises(InvalidOption, match=re.escape(remedy)):
        await attempt()
    assert await memory_app.queue("default").open() == 0


async def test_a_function_that_takes_any_name_gets_names_of_options_too(memory_app: App) -> None:
    @memory_app.task
    def fetch(**params: str) -> None: ...

    info = await (await fetch.enqueue(id="7", delay="1h")).get()
    assert info is not None
    assert info.payload == {"params": {"id": "7", "delay": "1h"}}


async def test_a_missing_argument_of_a_job_points_to_partial(memory_app: App) -> None:
    @memory_app.task
    def add(x: int, y: int) -> None: ...

    with pytest.raises(InvalidInput, match="Missing required argument 'y'") as refusal:
        add.job(1)  # type: ignore[call-arg]
    assert "add.partial(...)" in refusal.value.__notes__[0]


async def test_many_jobs_are_enqueued_together(app: App) -> None:
    @app.task(queue="mail")
    def send(to: str, template: str = "hello") -> None: ...

    spec = send.options(id="c", priority=-1).job("cyd")
    handles = await send.enqueue_many(
        [send.job("ada"), send.options(id="b").job(to="bob", template="bye"), spec]
    )

    assert isinstance(spec, JobSpec)
    assert [handle.id for handle in handles][1:] == ["b", "c"]
    assert [handle.status for handle in handles] == ["queued"] * 3
    payloads = [info.payload async for info in app.queue("mail").list_jobs("waiting")]
    assert payloads == [{"to": "cyd"}, {"to": "ada"}, {"to": "bob", "template": "bye"}]
    assert [handle.status for handle in await send.enqueue_many([spec])] == ["duplicate"]
    later = await send.options(delay="1h").enqueue_many([send.job("dot"), send.job(to="eve")])
    assert [handle.state for handle in later] == [State.SCHEDULED] * 2


async def test_options_for_many_apply_to_each_job_whose_own_options_win(app: App) -> None:
    @app.task(queue="mail", priority=5)
    def send(to: str) -> None: ...

    urgent = send.options(queue="urgent", priority=-1, delay="1h")
    spec = send.job("ada")
    own = send.options(id="b", priority=-9, headers={"a": "b"}).job("bob")
    handles = await urgent.enqueue_many([spec, own, urgent.job("cyd")])

    infos = [await handle.get() for handle in handles]
    assert [info.payload for info in infos] == [{"to": "ada"}, {"to": "bob"}, {"to": "cyd"}]
    assert [info.id for info in infos][:2] == [spec.id, "b"]
    assert [info.priority for info in infos] == [-1, -9, -1]
    assert [(info.queue, info.state) for info in infos] == [("urgent", State.SCHEDULED)] * 3
    assert infos[1].headers == {"a": "b"}


async def test_of_two_options_for_one_thing_the_nearer_wins(app: App) -> None:
    @app.task
    def send(to: str) -> None: ...

    tomorrow = datetime.now(UTC) + timedelta(days=1)
    later = send.options(delay="1h", attempts=9)
    dated = later.options(run_at=tomorrow, max_retries=1)
    handles = [await dated.enqueue("ada"), *await later.enqueue_many([dated.job("bob")])]

    for info in [await handle.get() for handle in handles]:
        assert info.run_at is not None
        assert abs(info.run_at - tomorrow) < timedelta(milliseconds=2)
        assert info.raw.options.attempts == 2


async def test_one_id_for_many_jobs_is_refused(memory_app: App) -> None:
    @memory_app.task
    def send(to: str) -> None: ...

    with pytest.raises(InvalidOption, match=r"send.options\(id=...\).job\(...\)"):
        await send.options(id="a").enqueue_many([send.job("ada"), send.job("bob")])
    assert await memory_app.queue("default").open() == 0


async def test_enqueue_many_without_jobs_returns_no_handles(memory_app: App) -> None:
    @memory_app.task
    def send() -> None: ...

    assert await send.enqueue_many([]) == []


@pytest.mark.parametrize("bad", [{"to": "x"}, ("x",), "text", 7])
async def test_one_bad_item_among_many_means_that_nothing_is_written(memory_app: App, bad: Any) -> None:
    @memory_app.task
    def send(to: Any) -> None: ...

    with pytest.raises(InvalidInput, match=r"send.job\(...\)") as refusal:
        await send.enqueue_many([send.job("ok"), send.job("ok"), bad])
    assert "item 2 of the list" in refusal.value.__notes__[0]
    assert await memory_app.queue("default").open() == 0


async def test_a_job_of_another_queue_is_refused(memory_app: App) -> None:
    @memory_app.task(queue="a")
    def one() -> None: ...

    with pytest.raises(InvalidInput, match="a job of queue 'b', and this call enqueues jobs of queue 'a'"):
        await one.enqueue_many([one.options(queue="b").job()])


@pytest.mark.parametrize("options", [{}, {"priority": 1}])
async def test_a_job_of_another_task_is_refused(memory_app: App, options: DispatchOptions) -> None:
    @memory_app.task
    def one(x: int) -> int:
        return x

    @memory_app.task
    def other(x: int) -> int:
        return x

    for stray in (other.job(1), memory_app.queue("default").prepare({"x": 1})):
        with pytest.raises(InvalidInput, match=r"of one\.job\(\.\.\.\).*Use group\(\[\.\.\.\]\)") as refusal:
            await one.options(**options).enqueue_many([one.job(1), stray])
        assert "item 1 of the list" in refusal.value.__notes__[0]
    assert await memory_app.queue("default").open() == 0


async def test_many_travel_in_bounded_chunks_a_few_at_a_time(spy: Spy) -> None:
    app = App(spy)

    @app.task
    def send(n: int) -> None: ...

    handles = await send.enqueue_many([send.job(n) for n in range(4_500)])

    assert [len(batch) for batch in spy.enqueues] == [1000, 1000, 1000, 1000, 500]
    assert spy.most_at_once == 3
    assert len({handle.id for handle in handles}) == 4_500
    infos = [info async for info in app.queue("default").list_jobs("waiting", limit=3)]
    assert [info.payload["n"] for info in infos] == [0, 1, 2]


async def test_large_payloads_make_smaller_chunks(spy: Spy) -> None:
    app = App(spy)

    @app.task
    def send(text: str) -> None: ...

    await send.enqueue_many([send.job("x" * 900_000) for _ in range(6)])

    assert [len(batch) for batch in spy.enqueues] == [4, 2]


async def test_an_error_amid_many_says_how_far_it_got(spy: Spy) -> None:
    app = App(spy)

    @app.task
    def send(n: int) -> None: ...

    spy.fail_enqueue_number = 4
    with pytest.raises(Exception, match="no room") as failure:
        await send.enqueue_many([send.job(n) for n in range(9_000)])

    written = await app.queue("default").open()
    assert failure.value.__notes__ == [f"{written} of 9000 jobs had been written"]
    assert 3_000 <= written <= 6_000


# Concurrent calls


async def test_concurrent_enqueues_travel_together_and_each_gets_its_answer(spy: Spy) -> None:
    app = App(spy)

    @app.task
    def send(n: int) -> None: ...

    handles = await asyncio.gather(*(send.options(id=f"job-{n % 50}").enqueue(n) for n in range(100)))

    assert [handle.id for handle in handles] == [f"job-{n % 50}" for n in range(100)]
    assert [handle.status for handle in handles] == ["queued"] * 50 + ["duplicate"] * 50
    assert [len(batch) for batch in spy.enqueues] == [1, 99]


async def test_an_error_of_a_batch_reaches_every_caller_of_it(spy: Spy) -> None:
    app = App(spy)

    @app.task
    def send(n: int) -> None: ...

    spy.fail_enqueue_number = 2
    results = await asyncio.gather(*(send.enqueue(n) for n in range(10)), return_exceptions=True)

    assert [type(result).__name__ for result in results] == ["JobHandle"] + ["StorageFull"] * 9
    assert await app.queue("default").open() == 1


def test_a_task_may_be_made_without_the_decorator_syntax(memory_app: App) -> None:
    async def send(to: str) -> None: ...

    make: Any = memory_app.task
    task = make(send, name="mail", queue="letters", attempts=7)
    assert (task.name, task.queue, task.defaults.attempts) == ("mail", "letters", 7)
    assert make(send).name == "send"
    with pytest.raises(InvalidOption, match="a task has no option 'atempts'"):
        make(send, atempts=7)
