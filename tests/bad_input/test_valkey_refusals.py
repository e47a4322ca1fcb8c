"""What a Valkey or Redis server refuses: each a class of its own, nothing half-written, no password told."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import traceback
from collections.abc import AsyncIterator, Iterator

import pytest

from penstock import App, StorageFull, StorageReadOnly, StorageRefused, StorageVersion
from tests.bad_input.conftest import QUEUE, assert_says, picture, refused
from tests.servers import HOST, ValkeyServer, free_port, wait_until

SECRET = "hunter2"
REMEDIES_OF_ACL = "ACL SETUSER"


@contextlib.asynccontextmanager
async def old_server(version: bytes) -> AsyncIterator[str]:
    """Answers INFO like a server of ``version``, and everything else with OK."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        info = b"# Server\r\nredis_version:" + version + b"\r\n"
        try:
            while command := await _read_command(reader):
                name = command[0].upper()
                asked.append(name)
                writer.write(b"$%d\r\n%b\r\n" % (len(info), info) if name == b"INFO" else b"+OK\r\n")
                await writer.drain()
        finally:  # It may be cancelled when the test ends.
            writer.transport.abort()

    asked: list[bytes] = []
    port = free_port()
    async with await asyncio.start_server(serve, HOST, port):
        yield f"valkey://{HOST}:{port}"
    assert b"FCALL" not in asked
    assert b"FUNCTION" not in asked


async def _read_command(reader: asyncio.StreamReader) -> list[bytes]:
    try:
        count = int((await reader.readline())[1:] or 0)
        sizes_and_parts = [(await reader.readline(), await reader.readline()) for _ in range(count)]
    except ConnectionError:
        return []
    return [part.rstrip() for _, part in sizes_and_parts]


@pytest.mark.parametrize("version", [b"6.2.14", b"5.0.0", b"2.8"])
async def test_a_server_that_is_too_old_is_refused_before_anything_is_sent_to_it(version: bytes) -> None:
    async with old_server(version) as url:
        with pytest.raises(StorageVersion) as caught:
            await App(url).connect()
    assert_says(caught.value, f"redis {version.decode()}", "needs Valkey, or Redis 7.0 or newer")


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyServer]:
    with ValkeyServer() as server:
        yield server


async def test_a_full_server_refuses_new_jobs_and_those_inside_can_be_worked_off(
    server: ValkeyServer,
) -> None:
    async with App(server.url, namespace="full") as app:

        @app.task(queue=QUEUE)
        async def pack(item: int) -> int:
            return item

        inside = await pack.enqueue_many([pack.job(item) for item in range(20)])
        with server.client() as admin:
            admin.config_set("maxmemory", "1")
        try:
            words = ("OOM", "maxmemory", "nothing was written")
            async with refused(app, StorageFull, *words):
                await pack.enqueue(1)
            async with refused(app, StorageFull, *words):
                await pack.enqueue_many([pack.job(item) for item in range(3_000)])
            async with refused(app, StorageFull, *words):
                await app.queue("another").enqueue(1)
            await app.worker(queues=[QUEUE], burst=True).run()
        finally:
            with server.client() as admin:
                admin.config_set("maxmemory", "0")
        assert [await job.result() for job in inside] == list(range(20))
        assert (await app.queue(QUEUE).check()).problems == {}
        assert (await pack.enqueue(1)).status == "queued"


async def test_a_replica_refuses_writes_can_be_read_and_names_the_primary_as_the_remedy() -> None:
    with ValkeyServer() as primary, ValkeyServer(replica_of=primary) as replica:
        words = ("READONLY", "replica", "primary")
        with pytest.raises(StorageReadOnly) as caught:  # the function library is not there yet
            await App(replica.url).connect()
        assert_says(caught.value, *words)
        async with App(primary.url) as app, App(replica.url) as reader:
            await app.queue(QUEUE).enqueue("known", id="known")
            before = await picture(app)
            wait_until(lambda: _offsets_agree(primary, replica), what="the replica up to date")
            for call in (
                reader.queue(QUEUE).enqueue(1),
                reader.queue(QUEUE).claim_one(wait=0),
                reader.queue(QUEUE).cancel("known"),
            ):
                with pytest.raises(StorageReadOnly) as caught:
                    await call
                assert_says(caught.value, *words)
            assert await reader.queue(QUEUE).waiting() == 1
            assert await picture(app) == before


def _offsets_agree(primary: ValkeyServer, replica: ValkeyServer) -> bool:
    there = replica.info("replication")["slave_repl_offset"]
    return bool(primary.info("replication")["master_repl_offset"] == there)


@pytest.fixture(scope="module")
def guarded() -> Iterator[ValkeyServer]:
    users = (
        f"reader on >{SECRET} ~* -@all +info +function|list +function|load +fcall_ro",
        f"stranger on >{SECRET} ~* -@all",
        f"elsewhere on >{SECRET} ~other:* +@all",
        f"half on >{SECRET} ~* +@all -xadd",
    )
    with ValkeyServer(password=SECRET, users=users) as server:
        yield server


@pytest.mark.parametrize(
    ("login", "words"),
    [
        (":wr0ng-hunter2", ("WRONGPASS", "Check user and password")),
        ("nobody:wr0ng-hunter2", ("WRONGPASS", "Check user and password")),
        ("", ("NOAUTH", "Check user and password")),
        (f"stranger:{SECRET}", ("NOPERM", "info", REMEDIES_OF_ACL)),
    ],
    ids=["wrong password", "unknown user", "no password", "no right at all"],
)
async def test_a_refused_login_is_reported_without_the_password(
    guarded: ValkeyServer, login: str, words: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    app = App(f"valkey://{login}@{HOST}:{guarded.port}")
    for call in (app.connect, app.queue(QUEUE).waiting, app.worker(queues=[QUEUE], commands=True).run):
        with pytest.raises(StorageRefused) as caught:
            await call()
        assert_says(caught.value, str(guarded.port), *words)
        told = (
            "".join(traceback.format_exception(caught.value)) + repr(caught.value) + repr(app) + caplog.text
        )
        assert SECRET not in told


@pytest.mark.parametrize("user", ["reader", "elsewhere"])
async def test_a_missing_permission_is_reported_and_nothing_is_written(
    guarded: ValkeyServer, user: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with (
        App(guarded.url, namespace=user) as owner,
        App(f"valkey://{user}:{SECRET}@{HOST}:{guarded.port}", namespace=user) as app,
    ):
        await owner.queue(QUEUE).enqueue("known", id="known")
        async with refused(owner, StorageRefused, "NOPERM", REMEDIES_OF_ACL) as caught:
            await app.queue(QUEUE).enqueue(1)
        assert (
            SECRET
            not in str(caught.value) + caplog.text + repr(await app.connect()) + (await app.connect()).url
        )


@pytest.mark.parametrize("verb", ["enqueue", "claim"])
async def test_a_right_that_only_the_functions_need_is_missed_before_they_write(
    guarded: ValkeyServer, verb: str
) -> None:
    async with (
        App(guarded.url, namespace=f"half-{verb}") as owner,
        App(f"valkey://half:{SECRET}@{HOST}:{guarded.port}", namespace=f"half-{verb}") as app,
    ):
        await owner.queue(QUEUE).enqueue("known", id="known")
        async with refused(owner, StorageRefused, "XADD", "Nothing was written", "docs/stores.md"):
            if verb == "enqueue":
                await app.queue(QUEUE).enqueue(1)
            else:
                await app.queue(QUEUE).claim_one(wait="1s")


async def test_a_database_that_the_server_does_not_have_is_refused(server: ValkeyServer) -> None:
    with pytest.raises(StorageRefused) as caught:
        await App(f"valkey://{HOST}:{server.port}/99").connect()
    assert_says(caught.value, "DB index is out of range", "Choose a database")
