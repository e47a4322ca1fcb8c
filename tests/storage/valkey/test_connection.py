"""One connection: order, loss, backpressure, login, TLS, and what each error reply becomes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Iterator

import pytest

from penstock.errors import (
    StorageError,
    StorageFull,
    StorageReadOnly,
    StorageRefused,
    StorageUnavailable,
    StorageVersion,
)
from penstock.storage.valkey.commands import ReplyError, check_server, storage_error
from penstock.storage.valkey.connection import Connection, ConnectionLost, open_connection
from penstock.storage.valkey.endpoint import Endpoint
from tests.servers import HOST, ValkeyServer, free_port
from tests.tls_front import TlsFront


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyServer]:
    with ValkeyServer(unix_socket=True) as server:
        yield server


@pytest.fixture(scope="module")
def guarded() -> Iterator[ValkeyServer]:
    with ValkeyServer(
        password="hunter2", users=("ada on >hunter3 ~* +@all -@admin", "bob on >b ~* +get")
    ) as it:
        yield it


@contextlib.asynccontextmanager
async def opened(url: str, **options: float) -> AsyncIterator[Connection]:
    endpoint = Endpoint.parse(url)
    connection = await open_connection(endpoint.addresses[0], endpoint, **options)
    try:
        yield connection
    finally:
        await connection.close()


@contextlib.asynccontextmanager
async def fake_server(replies: bytes | None) -> AsyncIterator[str]:
    """A server that answers the first bytes it gets with ``replies``, and then nothing; None hangs up."""

    served: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.add(asyncio.current_task())  # type: ignore[arg-type]
        try:
            await reader.read(1000)
            if replies is not None:
                writer.write(replies)
                await release.wait()
        finally:
            writer.transport.abort()

    port, release = free_port(), asyncio.Event()
    listener = await asyncio.start_server(serve, HOST, port)
    try:
        yield f"valkey://{HOST}:{port}"
    finally:
        listener.close()
        release.set()
        await asyncio.gather(*served)


async def test_a_thousand_concurrent_calls_get_their_own_replies_in_order(server):
    async with opened(server.url) as connection:
        order: list[int] = []

        async def echo(number: int) -> None:
            assert await connection.call("ECHO", number) == str(number).encode()
            order.append(number)

        await asyncio.gather(*(echo(number) for number in range(1000)))
    assert order == list(range(1000))


async def test_replies_are_bytes_ints_none_and_lists_and_arguments_may_be_any_of_the_kinds(server):
    async with opened(server.url) as connection:
        assert await connection.call("SET", "kinds", memoryview(b"\x00\xff")) == b"OK"
        assert await connection.call("MGET", b"kinds", "none") == [b"\x00\xff", None]
        assert await connection.call("RPUSH", "kinds-list", 1, 2.5, "é") == 3
        assert await connection.call("LRANGE", "kinds-list", 0, -1) == [b"1", b"2.5", "é".encode()]


async def test_an_error_reply_is_raised_and_the_next_reply_is_not_disturbed(server):
    async with opened(server.url) as connection:
        first, second = connection.call("NOSUCH"), connection.call("PING")
        with pytest.raises(ReplyError) as caught:
            await first
        assert caught.value.code == "ERR"
        assert caught.value.message.startswith("unknown command")
        assert await second == b"PONG"


async def test_an_argument_that_cannot_be_sent_leaves_the_connection_in_step(server):
    async with opened(server.url) as connection:
        with pytest.raises(TypeError):
            connection.call("ECHO", None)  # type: ignore[arg-type]
        assert await connection.call("ECHO", "in step") == b"in step"


async def test_the_reply_of_a_cancelled_call_is_thrown_away(server):
    async with opened(server.url) as connection:
        first, second = connection.call("ECHO", "a"), connection.call("ECHO", "b")
        first.cancel()
        assert await second == b"b"


async def test_a_loss_reaches_every_pending_call_and_says_which_had_been_written(server):
    async with opened(server.url) as connection:
        written = connection.call("BLPOP", "nothing-comes", 0)
        unwritten = connection.call("PING")
        connection.drop("pulled the plug")
        results = await asyncio.gather(written, unwritten, return_exceptions=True)
        assert [type(result) for result in results] == [ConnectionLost, ConnectionLost]
        assert [result.sent for result in results if isinstance(result, ConnectionLost)] == [True, False]
        assert "pulled the plug" in str(results[0])
        assert str(server.port) in str(results[0])
        with pytest.raises(ConnectionLost) as caught:
            connection.call("PING")
        assert not caught.value.sent


async def test_writing_waits_while_the_server_does_not_read():
    async with fake_server(b"+OK\r\n") as url, opened(url) as connection:
        big = b"x" * (1 << 20)
        calls = [connection.call("SET", "k", big)]
        for _ in itertools.takewhile(lambda _: connection.ready, range(100)):
            calls.append(connection.call("SET", "k", big))
            await asyncio.sleep(0)
        assert not connection.ready
        waiting = asyncio.create_task(connection.writable())
        await asyncio.sleep(0)
        assert not waiting.done()
        connection.drop("enough")
        await waiting
        await asyncio.gather(*calls, return_exceptions=True)


async def test_a_server_that_stops_answering_is_given_up():
    async with fake_server(b"+OK\r\n") as url, opened(url, stall_seconds=0.05) as connection:
        with pytest.raises(ConnectionLost, match=r"no reply for 0\.05 s"):
            await connection.call("PING")


@pytest.mark.parametrize(
    ("replies", "message"),
    [(b"HTTP/1.1 400 Bad Request\r\n", "does not speak"), (b"+OK\r\n+MORE\r\n", "no call waits for")],
)
async def test_a_server_out_of_protocol_is_dropped(replies, message):
    async with fake_server(replies) as url:
        with pytest.raises(StorageUnavailable, match=message):
            async with opened(url) as connection:
                await connection.call("PING")


async def test_nobody_listening_a_server_that_hangs_up_and_one_that_is_silent_are_unavailable():
    with pytest.raises(StorageUnavailable, match="cannot connect to 127"):
        async with opened(f"valkey://{HOST}:{free_port()}"):
            pass
    async with fake_server(None) as url:
        with pytest.raises(StorageUnavailable, match="closed by the server"):
            async with opened(url):
                pass
    async with fake_server(b"") as url:
        with pytest.raises(StorageUnavailable, match="connect_timeout"):
            async with opened(url + "?connect_timeout=0.05"):
                pass


async def test_the_unix_socket_and_the_database_are_used(server):
    async with opened(f"valkey+unix://{server.socket_path}?db=3") as connection:
        info = await connection.call("CLIENT", "INFO")
    assert b" db=3 " in info
    assert b" name=penstock " in info


async def test_user_and_password_are_used(guarded):
    async with opened(guarded.url) as connection:
        assert await connection.call("ACL", "WHOAMI") == b"default"
    async with opened(f"valkey://ada:hunter3@{HOST}:{guarded.port}") as connection:
        with pytest.raises(ReplyError) as caught:
            await connection.call("CONFIG", "GET", "port")
    assert isinstance(storage_error(caught.value, "x"), StorageRefused)


async def test_a_user_without_the_right_to_name_connections_is_served(guarded):
    async with opened(f"valkey://bob:b@{HOST}:{guarded.port}") as connection:
        assert await connection.call("GET", "k") is None


@pytest.mark.parametrize("login", [":wr0ng", "ada:wr0ng", "nobody:wr0ng", ""])
async def test_a_wrong_login_is_refused_without_showing_the_password(guarded, login):
    with pytest.raises(StorageRefused) as caught:
        async with opened(f"valkey://{login}@{HOST}:{guarded.port}"):
            pass
    assert "wr0ng" not in str(caught.value)
    assert str(guarded.port) in str(caught.value)


async def test_a_password_echoed_by_the_server_is_not_shown():
    reply = b"-ERR unknown command 'AUTH', with args beginning with: 'hunter2' \r\n+OK\r\n"
    async with fake_server(reply) as url:
        with pytest.raises(StorageVersion) as caught:
            async with opened(url.replace("//", "//:hunter2@")):
                pass
    assert "hunter2" not in str(caught.value)


async def test_tls_is_spoken_and_the_certificate_is_checked(server):
    with TlsFront(server) as front:
        async with opened(f"{front.url}?ssl_ca_certs={front.ca_file}") as connection:
            big = b"x" * 3_000_000
            assert await connection.call("ECHO", big) == big
        with pytest.raises(StorageRefused, match="ssl_ca_certs"):
            async with opened(front.url):
                pass
        with pytest.raises(StorageUnavailable):
            async with opened(front.url.replace("valkeys", "valkey") + "?connect_timeout=2"):
                pass


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("OOM command not allowed when used memory > 'maxmemory'.", StorageFull),
        ("READONLY You can't write against a read only replica.", StorageReadOnly),
        ("MISCONF Errors writing to the AOF file: No space left on device", StorageFull),
        ("MISCONF Valkey is configured to save RDB snapshots, but", StorageReadOnly),
        ("NOAUTH Authentication required.", StorageRefused),
        ("WRONGPASS invalid username-password pair", StorageRefused),
        ("NOPERM User x has no permissions", StorageRefused),
        ("ERR AUTH <password> called without any password configured", StorageRefused),
        ("ERR max number of clients reached", StorageUnavailable),
        ("ERR unknown command 'FCALL', with args beginning with: 'x'", StorageVersion),
        ("LOADING Valkey is loading the dataset in memory", StorageUnavailable),
        ("MOVED 1 127.0.0.1:1", StorageError),
        ("ERR syntax error", ReplyError),
        ("PENSTOCK lease lost", ReplyError),
    ],
)
def test_each_error_reply_becomes_the_error_its_reader_can_act_on(text, kind):
    error = storage_error(ReplyError(text), "h:1")
    assert type(error) is kind
    if kind is ReplyError:
        assert f"{error.code} {error.message}" == text  # type: ignore[attr-defined]
    else:
        assert str(error).startswith("h:1 says: ")


class Told:
    """Answers INFO with a text."""

    def __init__(self, info: bytes) -> None:
        self.info = info

    async def call(self, *_: object) -> bytes:
        return self.info


async def test_the_server_is_checked(server):
    async with opened(server.url) as connection:
        told = await check_server(connection)
    assert told.name == "valkey"
    assert told.version >= (9,)
    assert (await check_server(Told(b"# Server\r\nredis_version:7.0.0\r\n"))).version == (7, 0, 0)
    for info in (b"redis_version:6.2.14\r\n", b""):
        with pytest.raises(StorageVersion, match=r"7\.0"):
            await check_server(Told(info))


HUGE = b"*1000000000\r\n"


class Listening:
    """A connection that has asked three things, and is told what a server says."""

    def __init__(self) -> None:
        self.connection = Connection(Endpoint.parse(f"valkey://{HOST}:1").addresses[0])
        self.connection._write = lambda _: None
        self.replies = [self.connection.call("GET", "a") for _ in range(3)]

    def say(self, said: bytes, *, at_once: int) -> None:
        for at in range(0, len(said), at_once):
            if not self.connection.lost:
                self.connection.data_received(said[at : at + at_once])


@pytest.mark.parametrize("at_once", [1, 2, 7, 1000])
@pytest.mark.parametrize("before", [b"", b"+OK\r\n", b"*2\r\n$2\r\n**\r\n", b"*2\r\n*1\r\n:1\r\n"])
async def test_an_endless_list_is_noticed_wherever_it_begins(before: bytes, at_once: int) -> None:
    listening = Listening()
    listening.say(before + HUGE, at_once=at_once)
    assert listening.connection._reason.startswith("it announced a list of 1000000000 elements")


@pytest.mark.parametrize("at_once", [1, 2, 7, 19, 1000])
async def test_a_text_may_say_what_it_likes_about_lists(at_once: int) -> None:
    listening = Listening()
    texts = [HUGE * 20, b"*1000000000", b"*\r\n*123"]
    for text in texts:
        listening.say(b"$%d\r\n%b\r\n" % (len(text), text), at_once=at_once)
    assert not listening.connection.lost
    assert [reply.result() for reply in listening.replies] == texts
