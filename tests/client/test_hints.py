"""Words of other job queues are refused with the word to use here."""

from __future__ import annotations

import re
from typing import Any

import pytest

import penstock
from penstock import (
    App,
    FlowHandle,
    InvalidOption,
    JobContext,
    JobHandle,
    Queue,
    State,
    WorkerInfo,
    chord,
    group,
)
from penstock.client.flow import Whole
from penstock.client.hints import ATTRIBUTES, MODULE, OTHER_WAY, SAME_OPTION, SAME_STATE, Kind
from penstock.client.options import DISPATCH, TASK
from penstock.client.sync import SyncFlowHandle
from penstock.client.task import Task
from penstock.core.job import Lease, Options
from penstock.storage.values import WorkerRecord

app: Any = App("memory://")


@app.task
def send(to: str, copies: int = 1) -> str:
    return to * copies


_lease = Lease("a", 1, 1, 1, 0, 0, b"", Options(), 0, 0, 0)
_link: Any = None
_flow: Any = group([send.job("ada")])
_flow_handle = app.flow("mail/a")
FORMS: dict[Kind, dict[str, Any]] = {
    "task": {
        "task": send,
        "sync task": send.sync,
        "with options": send.options(delay="1h"),
        "sync, with options": send.sync.options(delay="1h"),
    },
    "app": {"app": app, "sync app": app.sync},
    "job": {"handle": app.job("mail/a"), "sync handle": app.sync.job("mail/a")},
    "job context": {"context": JobContext(_lease, "mail", _link)},
    "job spec": {"job": send.job("ada")},
    "queue": {"queue": app.queue("mail"), "sync queue": app.queue("mail").sync},
    "flow": {"flow": _flow, "sync flow": _flow.sync},
    "flow handle": {"flow handle": _flow_handle, "sync flow handle": SyncFlowHandle(_flow_handle)},
    "worker info": {"worker": WorkerInfo(WorkerRecord("a-1", b"", 0, 0))},
}


@pytest.mark.parametrize(
    ("refused", "said"),
    [
        (lambda: send.options(countdown=3), "task 'send' has no option 'countdown'. Use 'delay' instead."),
        (lambda: send.sync.options(eta=3), "task 'send' has no option 'eta'. Use 'run_at' instead."),
        (lambda: send.options(expires=3), "task 'send' has no option 'expires'. Use 'ttl' instead."),
        (lambda: send.options(task_id="a"), "task 'send' has no option 'task_id'. Use 'id' instead."),
        (lambda: app.task(countdown=3), "a task has no option 'countdown'. Use 'delay' instead."),
        (
            lambda: app.task(bind=True),
            "a task has no option 'bind'. Annotate the first parameter with JobContext to get the job.",
        ),
        (
            lambda: app.task(autoretry_for=(OSError,)),
            "a task has no option 'autoretry_for'. Use 'retry_on' instead.",
        ),
        (
            lambda: app.task(concurrency=5),
            "a task has no option 'concurrency'. Use queue.limit(concurrency=...) for all workers, or "
            "app.worker(concurrency=...) for one.",
        ),
        (lambda: send.options(at_front=True), "task 'send' has no option 'at_front'. Use 'lifo' instead."),
        (lambda: app.task(max_tries=5), "a task has no option 'max_tries'. Use 'attempts' instead."),
        (lambda: app.task(keep_result=5), "a task has no option 'keep_result'. Use 'result_ttl' instead."),
        (lambda: app.task(time_limit=30), "a task has no option 'time_limit'. Use 'timeout' instead."),
        (
            lambda: App(broker="redis://h", backend="redis://h"),  # type: ignore[call-arg]
            "an app has no options 'broker', 'backend'. 'broker': One store holds jobs and results: "
            "App('valkey://localhost'). 'backend': One store holds jobs and results: App('valkey://localhost').",
        ),
        (
            lambda: App("memory://", backend="redis://h"),  # type: ignore[call-arg]
            "an app has no option 'backend'. One store holds jobs and results: App('valkey://localhost').",
        ),
        (
            lambda: app.task(retry_backoff=True),
            "a task has no option 'retry_backoff'. Use backoff=Exponential.of(base=1, cap=600, jitter=1).",
        ),
        (
            lambda: send.options(serializer="json"),
            "task 'send' has no option 'serializer'. Use @app.task(serde=...).",
        ),
        (
            lambda: send.options(runner="process"),
            "task 'send' has no option 'runner'. It belongs to the task: @app.task(runner=...).",
        ),
        (
            lambda: App(queue="mail"),  # type: ignore[call-arg]
            "an app has no option 'queue'. It belongs to the task: @app.task(queue=...).",
        ),
        (
            lambda: App(imports=["shop"]),  # type: ignore[call-arg]
            "an app has no option 'imports'. Use 'include' instead.",
        ),
        (
            lambda: App(timezone="UTC"),  # type: ignore[call-arg]
            "an app has no option 'timezone'. Give it to each schedule: @app.scheduled(cron=..., tz=...).",
        ),
        (
            lambda: app.task(id="a"),
            "a task has no option 'id'. It belongs to single jobs: task.options(id=...).",
        ),
        (
            lambda: app.task(cron="* * * * *"),
            "a task has no option 'cron'. Use @app.scheduled(cron=...) above @app.task.",
        ),
        (
            lambda: App(task_time_limit=30),  # type: ignore[call-arg]
            "an app has no option 'task_time_limit'. Use 'timeout' instead.",
        ),
        (
            lambda: App(task_serializer="json"),  # type: ignore[call-arg]
            "an app has no option 'task_serializer'. Use 'serde' instead.",
        ),
        (
            lambda: App(worker_prefetch_multiplier=1),  # type: ignore[call-arg]
            "an app has no option 'worker_prefetch_multiplier'. A worker claims only what it can run: leave it out.",
        ),
        (
            lambda: app.task(bind=True, countdown=3),
            "a task has no options 'bind', 'countdown'. 'bind': Annotate the first parameter with JobContext to get "
            "the job. 'countdown': Use 'delay' instead.",
        ),
        (
            lambda: app.worker(pool="solo"),
            "a worker has no option 'pool'. Each task has its own runner: @app.task(runner='process').",
        ),
        (
            lambda: app.task(name="t", backoff="expo")(lambda: None),
            "backoff='expo' is not valid. Did you mean 'exponential'?",
        ),
        (
            lambda: app.dead_letter(lambda letter: None),
            '@app.dead_letter needs the name of a queue: @app.dead_letter("mail").',
        ),
        (
            lambda: app.scheduled(30),
            "a schedule is given by name, got 30. Use @app.scheduled(every=30), or cron=....",
        ),
        (
            lambda: app.scheduled("*/5 * * * *"),
            "a schedule is given by name, got '*/5 * * * *'. Use @app.scheduled(cron='*/5 * * * *').",
        ),
    ],
)
def test_an_option_of_another_queue_is_refused_with_ours(refused: Any, said: str) -> None:
    with pytest.raises(InvalidOption, match=f"^{re.escape(said)}$"):
        refused()


async def test_it_is_refused_among_the_arguments_and_on_queues_as_well() -> None:
    with pytest.raises(InvalidOption, match=r"send\.options\(delay=\.\.\.\)\.enqueue"):
        await send.enqueue("ada", countdown=3)
    with pytest.raises(InvalidOption, match=r"queue 'mail' has no option 'countdown'. Use 'delay'"):
        await app.queue("mail").enqueue("x", countdown=3)


def test_a_parameter_of_the_function_may_have_such_a_name() -> None:
    def launch(countdown: int, eta: str = "") -> int:
        return countdown

    assert app.task(launch).job(countdown=3).queue == "default"


def test_max_retries_is_an_option_here_too() -> None:
    assert app.task(name="again", max_retries=2)(lambda: None).defaults.attempts == 3


@pytest.mark.parametrize(("kind", "form"), [(kind, form) for kind in FORMS for form in FORMS[kind]])
def test_an_attribute_of_another_queue_is_refused_with_ours(kind: Kind, form: str) -> None:
    for name, hint in ATTRIBUTES[kind].items():
        with pytest.raises(AttributeError, match=re.escape(f"has no attribute {name!r}. {hint}")) as caught:
            getattr(FORMS[kind][form], name)
        assert caught.value.obj is None, "Python would add a similar name to the hint"


@pytest.mark.parametrize(("kind", "form"), [(kind, form) for kind in FORMS for form in FORMS[kind]])
def test_other_attributes_are_missing_as_usual(kind: Kind, form: str) -> None:
    thing = FORMS[kind][form]
    with pytest.raises(AttributeError, match=r"has no attribute 'enqueu'$") as caught:
        _ = thing.enqueu

    assert (caught.value.name, caught.value.obj) == ("enqueu", thing)
    assert not hasattr(thing, "__wrapped_by__")


@pytest.mark.parametrize("name", ["conf", "AsyncResult"])
def test_an_attribute_of_another_queue_is_not_set_either(name: str) -> None:
    with pytest.raises(
        AttributeError, match=re.escape(f"has no attribute {name!r}. {ATTRIBUTES['app'][name]}")
    ):
        setattr(app, name, {})
    app.colour = "red"
    assert app.colour == "red"
    del app.colour


def test_no_word_is_an_option_of_ours_and_every_option_named_is_one() -> None:
    words = SAME_OPTION.keys() | OTHER_WAY.keys()

    assert words.isdisjoint(DISPATCH | TASK | {"name", "queue"})
    assert SAME_OPTION.keys().isdisjoint(OTHER_WAY)
    assert set(SAME_OPTION.values()) <= DISPATCH | TASK | {"queue", "url", "include"}
    for kind, forms in FORMS.items():
        for thing in forms.values():
            assert not any(hasattr(type(thing), name) for name in ATTRIBUTES[kind]), kind
    assert not any(name in vars(penstock)["__all__"] for name in MODULE)


def test_what_the_hints_say_is_there() -> None:
    said = [
        *OTHER_WAY.values(),
        *MODULE.values(),
        *(hint for of in ATTRIBUTES.values() for hint in of.values()),
    ]
    kinds = {"task": Task, "app": App, "queue": Queue, "job": JobHandle}
    for kind, method in set(re.findall(r"\b(task|app|queue|job)\.(?:sync\.)?(\w+)\(", " ".join(said))):
        assert hasattr(kinds[kind], method), (kind, method)
    for method in set(re.findall(r"\bflow\.(\w+)\(", " ".join(said))):
        assert hasattr(FlowHandle, method) or hasattr(Whole, method), method


def test_signals_and_loggers_of_celery_are_among_these_names() -> None:
    assert {"task_failure", "task_prerun", "worker_ready", "get_task_logger"} <= MODULE.keys()


@pytest.mark.parametrize("name", MODULE)
def test_a_name_of_another_queue_is_not_imported(name: str) -> None:
    with pytest.raises(ImportError, match=re.escape(MODULE[name])):
        exec(f"from penstock import {name}")
    with pytest.raises(AttributeError, match="has no attribute 'enqueu'"):
        _ = penstock.enqueu


@pytest.mark.parametrize(
    ("refused", "said"),
    [
        (lambda: send.job("a") | send.job("b"), "Use chain(first.job(...), next.partial())."),
        (lambda: _flow | send.job("b"), "Use chain(first, next)."),
        (_flow, "Use flow.enqueue()"),
        (
            lambda: chord([send.job("a")])(send.partial()),  # type: ignore[call-arg,operator]
            "chord takes its body as an argument: chord([...], task.partial()).",
        ),
        (lambda: send.signature("ada"), "Use task.job(...), or task.partial(...)"),
    ],
)
def test_operators_of_another_queue_are_refused_with_ours(refused: Any, said: str) -> None:
    with pytest.raises(TypeError, match=re.escape(said)):
        refused()


async def test_arguments_of_another_queue_are_refused_with_ours() -> None:
    job: Any = app.job("mail/a")
    with pytest.raises(TypeError, match=r"job\.get\(\) takes no argument 'timeout'.*job\.result\(timeout="):
        await job.get(timeout=3)
    with pytest.raises(TypeError, match=r"job\.cancel\(\) takes no argument 'terminate'.*is stopped"):
        await job.cancel(terminate=True)
    with pytest.raises(TypeError, match=r"takes no argument 'now'\.$"):
        await job.cancel(now=True)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("shop", "An app has no name"),
        ("sqlite://penstock.db", "Use three slashes for a relative path (sqlite:///penstock.db)"),
        ("amqp://guest@host//", "Penstock keeps jobs in SQLite or on a Valkey or Redis server"),
        ("redis+socket:///run/redis.sock", "Use redis+unix:///path/of/the/socket"),
    ],
)
def test_a_store_of_another_queue_is_refused_when_the_app_is_made(url: str, said: str) -> None:
    with pytest.raises(InvalidOption, match=re.escape(said)):
        App(url)


@pytest.mark.parametrize(
    ("word", "state"), [("SUCCESS", "completed"), ("pending", "waiting"), ("REVOKED", "cancelled")]
)
async def test_a_state_of_another_queue_is_refused_with_ours(word: str, state: str) -> None:
    with pytest.raises(InvalidOption, match=f"Did you mean '{state}'"):
        _ = [job async for job in app.queue("mail").list_jobs(word)]


def test_every_state_named_is_one() -> None:
    assert set(SAME_STATE.values()) <= set(State)
    assert SAME_STATE.keys().isdisjoint(State)


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ({"countdown": 1}, "Retry takes no argument 'countdown'. Use delay=...."),
        ({"eta": 1}, "Retry takes no argument 'eta'. Use at=...."),
        ({"exc": OSError()}, "Retry takes no argument 'exc'. Give the error first: Retry(error, delay=...)."),
        ({"wait": 1}, "Retry takes no argument 'wait'. Use delay=... or at=...."),
    ],
)
def test_arguments_of_self_retry_are_refused_with_ours(argument: dict[str, Any], said: str) -> None:
    with pytest.raises(TypeError) as refused:
        penstock.Retry("busy", **argument)
    assert str(refused.value) == said


def test_retry_takes_one_argument_by_position() -> None:
    retry: Any = penstock.Retry
    with pytest.raises(
        TypeError, match=r"Retry takes one message, got 2 arguments.*Retry\('busy', delay='5s'\)"
    ):
        retry("5s", "busy")


async def test_an_interval_is_given_to_schedule_by_name() -> None:
    with pytest.raises(InvalidOption, match=r"Use app\.schedule\(name, job, every=30\)"):
        await app.schedule("often", send.job("ada"), 30)


def test_a_first_parameter_self_without_an_annotation_is_refused() -> None:
    def greet(self, to: str) -> None: ...

    with pytest.raises(
        InvalidOption, match=r"the first parameter of .*greet is 'self'.*\(self: JobContext\)"
    ):
        app.task(greet)
