"""The start of a worker while its store is away for a moment: it waits as it does later."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlsplit

import pytest

from penstock import App, StorageRefused, StorageUnavailable, Worker, uuid7
from penstock.worker import recovery
from tests.servers import HOST, Sentinel, ValkeyServer, free_port
from tests.worker.conftest import until

_NOTICED_S = 0.5
"""When a silent connection is given up."""


class Front:
    """A server in front of another, which spoils its first connections: ``cut``, ``loading`` or ``silent``."""

    def __init__(self, target: str, fault: str, spoilt: int) -> None:
        self._target = urlsplit(target)
        self._fault = fault
        self._spoilt = spoilt
        self.connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with suppress(ConnectionError, asyncio.CancelledError):
            if self.connections <= self._spoilt:
                await self._spoil(reader, writer)
            else:
                await self._pass_on(reader, writer)
        writer.transport.abort()

    async def _spoil(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while self._fault != "cut" and (data := await reader.read(65536)):
            if self._fault == "loading":
                writer.write(b"-LOADING Valkey is loading the dataset in memory\r\n" * data.count(b"*"))

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        theirs, ours = await asyncio.open_connection(self._target.hostname, self._target.port)
        await asyncio.gather(_pump(reader, ours), _pump(theirs, writer))


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
    finally:
        writer.transport.abort()


@asynccontextmanager
async def fronted(target: str, fault: str, *, spoilt: int) -> AsyncIterator[tuple[str, Front]]:
    front = Front(target, fault, spoilt)
    listener = await asyncio.start_server(front.serve, HOST, port := free_port())
    try:
        yield f"valkey://{HOST}:{port}?namespace=start-{uuid7()}&connect_timeout={_NOTICED_S}", front
    finally:
        listener.close()


def _app(url: str) -> App:
    app = App(url)

    @app.task(name="echo")
    async def echo(n: int) -> int:
        return n

    return app


async def _starts_and_works(app: App) -> None:
    worker = app.worker(grace=0)
    run = asyncio.create_task(worker.run())
    try:
        await asyncio.wait_for(worker.ready(), 60)
        assert await app.tasks["echo"].options(wait="20s").call(5) == 5
    finally:
        worker.stop(0)
        await asyncio.wait_for(run, 20)
        await app.close()


@pytest.mark.parametrize("fault", ["cut", "loading", "silent"])
@pytest.mark.parametrize("spoilt", [1, 5])
async def test_a_worker_waits_for_a_store_that_is_not_ready_yet(
    valkey_url: str, fault: str, spoilt: int
) -> None:
    async with fronted(valkey_url, fault, spoilt=spoilt) as (url, front):
        await _starts_and_works(_app(url))
        assert front.connections > spoilt


async def test_a_worker_waits_for_a_server_that_is_started_after_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = ValkeyServer(port=free_port())
    app = _app(f"valkey://{HOST}:{server.port}")
    starting = asyncio.create_task(_starts_and_works(app))
    await until(lambda: "Trying again for" in caplog.text)
    try:
        await asyncio.to_thread(server.start)
        await starting
    finally:
        server.close()


@pytest.mark.slow
async def test_a_worker_that_starts_during_a_failover_waits_for_the_new_primary() -> None:
    with (
        ValkeyServer() as primary,
        ValkeyServer(replica_of=primary),
        Sentinel(primary) as sentinel,
    ):
        await until(lambda: sentinel.knows_replicas(1), seconds=30)
        primary.kill()
        await _starts_and_works(_app(f"valkey+sentinel://{HOST}:{sentinel.port}/penstock"))


async def test_a_worker_that_waits_for_its_store_can_be_stopped(caplog: pytest.LogCaptureFixture) -> None:
    app = _app(f"valkey://{HOST}:{free_port()}")
    worker = app.worker()
    run = asyncio.create_task(worker.run())
    await until(lambda: "Trying again for" in caplog.text)
    worker.stop()
    await asyncio.wait_for(run, 10)
    assert worker.state == "stopped"
    await app.close()


async def test_a_store_that_stays_unreachable_is_reported_after_the_retries_of_a_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert recovery._START_PATIENCE_S == 30
    monkeypatch.setattr(recovery, "_START_PATIENCE_S", 0.3)
    app = _app(f"valkey://{HOST}:{free_port()}")
    with pytest.raises(StorageUnavailable):
        await app.worker().run()
    await app.close()


async def test_a_store_that_stays_silent_is_reported_after_the_retries_of_a_call(
    valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "_START_PATIENCE_S", 2 * _NOTICED_S)
    async with fronted(valkey_url, "silent", spoilt=1_000_000) as (url, front):
        app = _app(url)
        loop = asyncio.get_running_loop()
        began = loop.time()
        with pytest.raises(StorageUnavailable, match=rf"no answer from .* within {_NOTICED_S} s"):
            await app.worker().run()
        # It is tried for the patience, and the last try may take as long as it takes to notice.
        assert loop.time() - began < 10 * _NOTICED_S
        assert front.connections > 1
        await app.close()


async def test_a_store_that_refuses_the_login_is_reported_immediately(valkey_url: str) -> None:
    parts = urlsplit(valkey_url)
    app = _app(f"valkey://nobody:wrong@{parts.hostname}:{parts.port}")
    worker: Worker = app.worker()
    with pytest.raises(StorageRefused):
        await asyncio.wait_for(worker.run(), 20)
    await app.close()


async def test_a_missing_file_is_reported_immediately(tmp_path: object) -> None:
    app = _app(f"sqlite:///{tmp_path}/missing/jobs.db")
    with pytest.raises(StorageUnavailable, match="directory does not exist"):
        await asyncio.wait_for(app.worker().run(), 10)
    await app.close()
