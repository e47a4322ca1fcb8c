"""A worker's options are checked before anything starts."""

from __future__ import annotations

import os
from typing import Any

import pytest

from penstock import App, InvalidName, InvalidOption


@pytest.fixture
def app() -> App:
    app = App("memory://")

    @app.task(queue="mail")
    async def send() -> None: ...

    @app.task(queue="images")
    def scale() -> None: ...

    return app


def test_the_default_queues_are_those_of_the_tasks(app: App) -> None:
    assert app.worker().options.queues == {"images": 1, "mail": 1}
    assert App("memory://").worker().options.queues == {"default": 1}


def test_queues_may_have_weights(app: App) -> None:
    assert app.worker(queues={"mail": 3, "low": 0.5}).options.queues == {"mail": 3, "low": 0.5}


def test_a_heartbeat_is_a_third_of_the_lease_and_at_most_five_seconds(app: App) -> None:
    assert app.worker(lease="3s").options.heartbeat_ms == 1000
    assert app.worker(lease="10m").options.heartbeat_ms == 5000


def test_an_id_begins_with_the_name_or_host_and_process_and_is_never_shared(app: App) -> None:
    assert f"-{os.getpid()}-" in app.worker().id
    assert app.worker().id != app.worker().id
    assert app.worker(name="mine").id.startswith("mine-")
    assert app.worker(name="mine").id != app.worker(name="mine").id
    assert len(app.worker(name="m" * 200).id) <= 200


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"concurency": 3}, "'concurency'"),
        ({"concurrency": 0}, "concurrency must be .* got 0"),
        ({"concurrency": True}, "concurrency must be .* got True"),
        ({"processes": -1}, "processes must be .* got -1"),
        ({"threads": 0}, "threads must be .* got 0"),
        ({"lease": "5ms"}, "at least 100ms, got '5ms'"),
        ({"lease": "soon"}, "lease='soon'"),
        ({"heartbeat": "20s"}, "at most half the lease"),
        ({"grace": -1}, "negative"),
        ({"queues": "mail"}, "must be a list"),
        ({"queues": []}, "empty"),
        ({"queues": {"mail": 0}}, "weight of queue .* got 0"),
    ],
)
def test_a_bad_option_is_refused_with_its_name(app: App, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidOption, match=message):
        app.worker(**options)


@pytest.mark.parametrize("options", [{"name": "a b"}, {"queues": ["a/b"]}])
def test_a_bad_name_is_refused(app: App, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidName):
        app.worker(**options)


async def test_a_second_handler_of_a_queue_is_refused(app: App) -> None:
    worker = app.worker()
    worker.handler("raw")(print)
    with pytest.raises(InvalidOption, match="already"):
        worker.handler("raw")(print)
