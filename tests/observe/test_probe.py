"""The probe: health, readiness and metrics of a worker over HTTP."""

from __future__ import annotations

import asyncio
import socket
from http.client import HTTPConnection
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock import App, Worker
from penstock.errors import InvalidOption
from penstock.observe.probe import read_address
from tests.worker.conftest import until, working


class Answer(NamedTuple):
    status: int
    body: bytes

    def json(self) -> dict[str, object]:
        return dict(msgspec.json.decode(self.body))


async def ask(worker: Worker, path: str, *, method: str = "GET", token: str = "") -> Answer:
    def request() -> Answer:
        connection = HTTPConnection(urlsplit(worker.probe_url or "").netloc, timeout=10)
        try:
            connection.request(method, path, headers={"Authorization": f"Bearer {token}"} if token else {})
            response = connection.getresponse()
            return Answer(response.status, response.read())
        finally:
            connection.close()

    return await asyncio.to_thread(request)


def samples(text: bytes) -> dict[tuple[str, ...], float]:
    """Values by name and the values of the labels."""
    return {
        (sample.name, *(sample.labels[name] for name in sorted(sample.labels))): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


async def test_a_worker_that_consumes_is_ready_and_lives(memory_app: App) -> None:
    async with working(memory_app, probe="0") as worker:
        assert (await ask(worker, "/healthz")).status == 200
        answer = await ask(worker, "/readyz")
        assert (answer.status, answer.json()) == (200, {"ok": True, "state": "running", "reason": ""})


async def test_a_paused_worker_is_not_ready_and_says_why(memory_app: App) -> None:
    async with working(memory_app, probe="0") as worker:
        worker.pause()
        answer = await ask(worker, "/readyz")
        assert answer.status == 503
        assert answer.json()["reason"] == "the worker is paused"
        assert (await ask(worker, "/healthz")).status == 200


async def test_it_answers_while_a_handler_hogs_the_loop(memory_app: App) -> None:
    asked: list[int] = []

    @memory_app.task
    async def hog() -> None:
        # Blocks the loop until the probe has been asked from another thread.
        connection = HTTPConnection(urlsplit(worker.probe_url or "").netloc, timeout=10)
        connection.request("GET", "/healthz")
        asked.append(connection.getresponse().status)
        connection.close()

    async with working(memory_app, probe="0") as worker:
        await (await hog.enqueue()).result(timeout="10s")
    assert asked == [200]


async def test_metrics_tell_what_was_run_and_how_the_queues_stand(memory_app: App) -> None:
    @memory_app.task(queue="mail", attempts=1)
    async def send(fails: bool) -> None:
        if fails:
            raise ValueError("no")

    async with working(memory_app, queues=["mail"], probe="0") as worker:
        for fails in (False, False, True):
            await send.enqueue(fails)
        await send.options(delay="1h").enqueue(False)
        await until(lambda: worker.stats.completed == 2 and worker.stats.failed == 1)
        found = samples((await ask(worker, "/metrics")).body)
    assert found["penstock_worker_runs_total", "completed"] == 2
    assert found["penstock_worker_runs_total", "failed"] == 1
    assert found["penstock_run_seconds_count", "completed", "mail", "send"] == 2
    assert found["penstock_run_seconds_count", "failed", "mail", "send"] == 1
    assert found["penstock_queue_jobs", "mail", "scheduled"] == 1
    assert found["penstock_queue_jobs", "mail", "failed"] == 1
    assert found["penstock_store_up",] == 1
    assert found["penstock_worker_consuming",] == 1


async def test_a_token_is_needed_where_one_is_set(memory_app: App) -> None:
    async with working(memory_app, probe="0", probe_token="open sesame") as worker:
        for path in ("/healthz", "/readyz", "/metrics"):
            assert (await ask(worker, path)).status == 401
            assert (await ask(worker, path, token="guess")).status == 401
            assert (await ask(worker, path, token="open sesame")).status == 200
        assert "sesame" not in repr(worker.options)


async def test_other_paths_and_methods_are_refused(memory_app: App) -> None:
    async with working(memory_app, probe="0") as worker:
        assert (await ask(worker, "/")).status == 404
        assert (await ask(worker, "/healthz", method="POST")).status == 405


async def test_it_stops_listening_with_the_worker(memory_app: App) -> None:
    async with working(memory_app, probe="0") as worker:
        parts = urlsplit(worker.probe_url or "")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((parts.hostname or "", parts.port or 0), timeout=5).close()


async def test_a_port_that_is_taken_keeps_the_worker_from_starting(memory_app: App) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InvalidOption, match=f"cannot listen on 127.0.0.1:{port}"):
            await memory_app.worker(probe=str(port), commands=True).run()


@pytest.mark.parametrize("given", ["", "host", "host:", "127.0.0.1:70000", "1:2:x"])
def test_an_address_without_a_port_is_refused(given: str) -> None:
    with pytest.raises(InvalidOption, match="probe must name a port"):
        read_address(given)


@pytest.mark.parametrize("given", ["0.0.0.0:9100", "192.168.1.5:9100", "[::]:9100", "example.org:9100"])
def test_listening_beyond_the_loopback_needs_a_token(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PENSTOCK_PROBE_TOKEN", raising=False)
    with pytest.raises(InvalidOption, match="without a token"):
        read_address(given)
    assert read_address(given, token="t").port == 9100
    monkeypatch.setenv("PENSTOCK_PROBE_TOKEN", "from the environment")
    assert read_address(given).token == "from the environment"


@pytest.mark.parametrize("given", ["9100", "127.0.0.1:9100", "localhost:9100", "[::1]:9100"])
def test_the_loopback_needs_none(given: str) -> None:
    assert read_address(given).port == 9100


def test_the_processes_of_a_worker_take_the_ports_that_follow() -> None:
    assert read_address("9100").moved(2).port == 9102
    assert read_address("0").moved(2).port == 0
