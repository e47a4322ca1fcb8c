"""A server that answers nonsense: an error of ours with a remedy, within a bounded time, and no traceback."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from penstock import App, StorageError
from tests.cli.conftest import Shell
from tests.servers import HOST, free_port

pytestmark = pytest.mark.timeout(120)

PATIENCE_S = 20.0
INFO = b"# Server\r\nredis_version:7.2.4\r\nvalkey_version:8.0.1\r\n"

NOT_RESP = {
    "http": b"HTTP/1.1 400 Bad Request\r\nServer: nginx\r\n\r\n<html>\x1b[2J</html>",
    "ssh": b"SSH-2.0-OpenSSH_9.6\r\n",
    "random": bytes(range(256)) * 4,
    "unfinished": b"$100\r\nabc",
    "long list": b"*100000\r\n",
    "endless list": b"*1000000000\r\n",
    "endless list in a list": b"*1\r\n*1000000000\r\n",
    "endless list behind a reply": b"+OK\r\n*1000000000\r\n",
    "deep": b"*1\r\n" * 10_000,
    "negative": b"*-5\r\n$-7\r\n",
}
WRONG_TYPES = {
    "status": b"+OK\r\n",
    "integer": b":5\r\n",
    "negative integer": b":-1\r\n",
    "null": b"$-1\r\n",
    "text": b"$3\r\nabc\r\n",
    "invalid utf-8": b"$3\r\n\xff\xfe\xfd\r\n",
    "empty list": b"*0\r\n",
    "list of nulls": b"*3\r\n$-1\r\n$-1\r\n$-1\r\n",
    "list of texts": b"*2\r\n$1\r\na\r\n$1\r\nb\r\n",
    "list of lists": b"*2\r\n*1\r\n:1\r\n*0\r\n",
    "numbers as text": b"*2\r\n$1\r\n1\r\n$1\r\n2\r\n",
    "many": b"*40\r\n" + b":7\r\n" * 40,
    "error of its own": b"-WEIRD \x1b[2J something\r\n",
}


async def listed(app: App) -> list[Any]:
    return [job async for job in app.queue("q").list_jobs("waiting", limit=5)]


async def grouped(app: App) -> list[Any]:
    return [group async for group in app.queue("q").groups()]


async def read(app: App) -> list[Any]:
    return [event async for event in app.queue("q").events(follow=False)]


VERBS: dict[str, Callable[[App], Awaitable[Any]]] = {
    "enqueue": lambda app: app.queue("q").enqueue("x"),
    "enqueue_many": lambda app: app.queue("q").enqueue_many(["x", "y"]),
    "call": lambda app: app.queue("q").call("x", wait="2s"),
    "claim": lambda app: app.queue("q").claim_one(wait="100ms"),
    "get": lambda app: app.queue("q").get("a"),
    "list": listed,
    "counts": lambda app: app.queue("q").counts(),
    "metrics": lambda app: app.queue("q").metrics(),
    "workers": lambda app: app.queue("q").workers(),
    "logs": lambda app: app.queue("q").logs("a"),
    "search": lambda app: app.queue("q").search("failed"),
    "errors": lambda app: app.queue("q").errors(),
    "usage": lambda app: app.queue("q").usage(),
    "budgets": lambda app: app.queue("q").budgets(),
    "limits": lambda app: app.queue("q").limits(),
    "limit": lambda app: app.queue("q").limit(concurrency=1),
    "groups": grouped,
    "cancel": lambda app: app.queue("q").cancel("a"),
    "retry": lambda app: app.queue("q").retry("a"),
    "remove": lambda app: app.queue("q").remove("a"),
    "signal": lambda app: app.queue("q").signal("a", "go"),
    "retry_all": lambda app: app.queue("q").retry_all(limit=1),
    "clean": lambda app: app.queue("q").clean("failed", limit=1),
    "settings": lambda app: app.queue("q").settings(),
    "schedulers": lambda app: app.queue("q").schedulers(),
    "schedule": lambda app: app.queue("q").schedule("s", "x", every="1h"),
    "events": read,
    "consumers": lambda app: app.queue("q").consumers(),
    "check": lambda app: app.queue("q").check(),
    "queues": lambda app: app.queues(),
}  # fmt: skip


@contextlib.asynccontextmanager
async def server(answer: Callable[[list[bytes]], bytes]) -> AsyncIterator[str]:
    """A server that answers every command with what ``answer`` makes of it, and nothing more."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readline():
                command = [await _part(reader) for _ in range(int(head[1:]))]
                writer.write(answer(command))
                await writer.drain()
        except (ConnectionError, ValueError, asyncio.IncompleteReadError):
            pass
        finally:  # It may be cancelled when the test ends.
            writer.close()

    port = free_port()
    listening = await asyncio.start_server(serve, HOST, port)
    try:
        yield f"valkey://{HOST}:{port}?connect_timeout=1"
    finally:
        listening.close()


async def _part(reader: asyncio.StreamReader) -> bytes:
    size = int((await reader.readline())[1:])
    return (await reader.readexactly(size + 2))[:-2]


def familiar_but_for(garbage: bytes) -> Callable[[list[bytes]], bytes]:
    """Who it is and that it has the library, as a server says it; garbage for all else."""

    def answer(command: list[bytes]) -> bytes:
        match command[0].upper():
            case b"INFO":
                return b"$%d\r\n%b\r\n" % (len(INFO), INFO)
            case b"CLIENT" | b"SELECT" | b"AUTH":
                return b"+OK\r\n"
            case b"FUNCTION":
                return b"*1\r\n$8\r\npenstock\r\n"
            case _:
                return garbage

    return answer


def check(error: StorageError) -> None:
    text = str(error)
    assert len(text) < 1000
    assert text.isprintable(), text


@pytest.mark.parametrize("kind", [*NOT_RESP, *WRONG_TYPES])
async def test_another_kind_of_server_is_refused_when_connecting(kind: str) -> None:
    garbage = (NOT_RESP | WRONG_TYPES)[kind]
    async with server(lambda _: garbage) as url:
        app = App(url)
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(StorageError) as caught:
                await app.connect()
            await app.close()
    check(caught.value)


@pytest.mark.parametrize("before", [b"", b"*3\r\n$3\r\nabc\r\n*2\r\n:1\r\n"])
async def test_a_list_of_a_billion_elements_does_not_hold_up_the_loop(before: bytes) -> None:
    """The parser would make the list at once, and take ten seconds to give it up."""
    loop = asyncio.get_running_loop()
    turned, longest = loop.time(), 0.0

    async def turn() -> None:
        nonlocal turned, longest
        while True:
            await asyncio.sleep(0.01)
            longest, turned = max(longest, loop.time() - turned), loop.time()

    async with server(lambda _: before + b"*1000000000\r\n") as url:
        turning = asyncio.create_task(turn())
        app = App(url)
        with pytest.raises(StorageError, match="1000000000 elements"):
            await app.connect()
        await app.close()
        await asyncio.sleep(0.1)
        turning.cancel()
    assert longest < 5


@pytest.mark.parametrize("kind", WRONG_TYPES)
async def test_answers_of_the_wrong_shape_are_errors_of_ours(kind: str) -> None:
    failures = []
    async with server(familiar_but_for(WRONG_TYPES[kind])) as url, App(url) as app:
        for name, verb in VERBS.items():
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await verb(app)
            except StorageError as error:
                check(error)
            except BaseException as error:
                failures.append(f"{name}: {type(error).__name__}: {error}")
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("kind", ["http", "unfinished", "deep", "null", "invalid utf-8", "list of texts"])
@pytest.mark.parametrize("familiar", [False, True])
async def test_the_command_line_says_it_in_one_line(tmp_path: Path, kind: str, familiar: bool) -> None:
    garbage = (NOT_RESP | WRONG_TYPES)[kind]
    if familiar and kind in NOT_RESP:
        pytest.skip("a connection that turns into nonsense is retried for half a minute")
    async with server(familiar_but_for(garbage) if familiar else lambda _: garbage) as url:
        shell = Shell(tmp_path, url)
        done: subprocess.CompletedProcess[str] = await asyncio.to_thread(shell, "show", "a")
    assert done.returncode == 5, done
    # Warnings of the log may come before it.
    *warnings, said = done.stderr.splitlines()
    assert said.startswith("penstock: ")
    assert all(line.isprintable() and "Traceback" not in line for line in (*warnings, said))
