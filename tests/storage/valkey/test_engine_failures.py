"""Calls that the Valkey engine cannot carry out: they leave nothing behind, and no number comes back."""

from __future__ import annotations

import re
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from importlib import resources
from typing import Any

import pytest

from penstock.core.job import NewJob, Options
from penstock.core.outcome import Complete, Fail, Failure
from penstock.errors import StorageError, StorageFull
from penstock.storage.valkey.engine import ValkeyStorage
from penstock.storage.values import Settlement, Take
from tests.servers import ValkeyServer

QUEUE = "mail"
TAKE = Take("worker", 2, 60_000)

_LISTED = (resources.files("penstock.storage.valkey") / "lua" / "parts.lua").read_text()
PARTS = dict(re.findall(r"([a-z_]+) = '(hash|zset|list|set|stream)'", _LISTED))


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyServer]:
    with ValkeyServer() as running:
        yield running


@pytest.fixture
async def storage(server: ValkeyServer) -> AsyncIterator[ValkeyStorage]:
    store = ValkeyStorage.from_url(server.url, namespace=f"t{uuid.uuid4().hex[:12]}", retry_for=1)
    await store.open()
    yield store
    await store.close()


class Bench:
    """A queue with jobs in several states, and what its keys hold."""

    def __init__(self, storage: ValkeyStorage) -> None:
        self.storage = storage
        self.prefix = storage._calls.keys.of(QUEUE)
        self.leases: list[Any] = []
        self.tokens: list[int] = []

    async def prepare(self) -> None:
        await self.storage.enqueue(QUEUE, [NewJob(f"{i}", b"x") for i in range(12)])
        self.leases = (await self.storage.claim(QUEUE, Take("worker", 6, 60_000))).leases
        self.tokens = [lease.token for lease in self.leases]

    async def run(self, *command: Any) -> Any:
        return await self.storage._calls.plain(self.prefix, *command)

    async def contents(self) -> dict[bytes, Any]:
        """All keys as they are, but for the counters: a number may be skipped, and the clock goes on."""
        keys = sorted(await self.run("KEYS", self.prefix.replace(b"{", b"\\{") + b":*"))
        dumps = {key: await self.run("DUMP", key) for key in keys}
        fields = await self.run("HGETALL", self.prefix + b":meta")
        meta = dict(zip(fields[::2], fields[1::2], strict=True))
        del meta[b"counters"]
        dumps[self.prefix + b":meta"] = meta
        return dumps

    def settle(self, outcome: Any, *, take: Take | None = None) -> Awaitable[Any]:
        lease = self.leases[0]
        return self.storage.settle(QUEUE, [Settlement(lease.id, lease.token, outcome)], take=take)

    def calls(self) -> dict[str, Callable[[], Awaitable[Any]]]:
        store = self.storage
        failure = Fail(Failure("ValueError", "no", ""), retry_in_ms=0, final=True)
        return {
            "enqueue": lambda: store.enqueue(QUEUE, [NewJob("new")]),
            "enqueue many": lambda: store.enqueue(QUEUE, [NewJob(f"new-{i}") for i in range(3)]),
            "enqueue later": lambda: store.enqueue(QUEUE, [NewJob("later", delay_ms=5000, ttl_ms=9000)]),
            "claim": lambda: store.claim(QUEUE, TAKE),
            "complete": lambda: self.settle(Complete(b"ok")),
            "complete and take": lambda: self.settle(Complete(b"ok"), take=TAKE),
            "complete with a long result": lambda: self.settle(Complete(b"x" * 5000), take=TAKE),
            "fail": lambda: self.settle(failure, take=TAKE),
            "cancel": lambda: store.cancel(QUEUE, ["11"]),
            "sweep": lambda: store.sweep(QUEUE),
            "remove": lambda: store.remove(QUEUE, ["10"]),
        }


@pytest.fixture
async def bench(storage: ValkeyStorage) -> Bench:
    made = Bench(storage)
    await made.prepare()
    return made


@pytest.mark.parametrize("part", sorted(PARTS))
async def test_a_call_that_meets_a_key_of_another_type_is_whole_or_leaves_nothing(
    bench: Bench, part: str
) -> None:
    key = bench.prefix + b":" + part.encode()
    for name in bench.calls():
        whole = await bench.contents()
        await bench.run("SET", key, "damaged")
        before = await bench.contents()
        refusal = ""
        try:
            await bench.calls()[name]()
        except StorageError as error:
            refusal = str(error)
        if refusal:
            assert await bench.contents() == before, name
            assert part in refusal, name
        await bench.run("DEL", key)
        if key in whole:
            await bench.run("RESTORE", key, 0, whole[key])
        # A call that was carried out has not touched the key: now it is as it was, and the next one begins anew.
        await bench.storage.obliterate(QUEUE, force=True)
        last = max(bench.tokens)
        await bench.prepare()
        assert min(bench.tokens) > last, name
    assert (await bench.storage.check(QUEUE)).problems == {}


@pytest.mark.parametrize(
    "name", ["enqueue", "enqueue many", "claim", "complete", "complete and take", "fail", "sweep"]
)
async def test_a_log_that_is_ahead_of_the_counters_is_gone_on_with_in_a_new_epoch(
    bench: Bench, name: str
) -> None:
    events = bench.prefix + b":events"
    epoch = (await bench.storage.read_events(QUEUE, after=0)).epoch
    await bench.run("XADD", events, "1000-0", "e", b"\x90")
    await bench.calls()[name]()
    page = await bench.storage.read_entries(QUEUE, after=1000)
    assert page.last >= 1000
    assert page.epoch != epoch
    [lease] = (await bench.storage.claim(QUEUE, Take("worker", 1, 60_000))).leases
    assert lease.token > max(bench.tokens) + 1_000_000


async def test_a_log_whose_last_entries_are_gone_does_not_stop_its_queue(bench: Bench) -> None:
    events = bench.prefix + b":events"
    await bench.run("XADD", events, "1000-0", "e", b"\x90")
    await bench.run("XDEL", events, "1000-0")
    seen = list(bench.tokens)
    for _ in range(3):
        try:
            claimed = await bench.storage.claim(QUEUE, TAKE)
        except StorageError:  # within a second of the last look at all keys
            continue
        assert min(lease.token for lease in claimed.leases) > max(seen)
        seen += [lease.token for lease in claimed.leases]
    assert len(seen) >= len(bench.tokens) + 4
    assert (await bench.storage.read_events(QUEUE, after=1000)).last > 1000


async def test_numbers_do_not_come_back_after_a_call_that_was_repeated(bench: Bench) -> None:
    """The call meets a named key of a wrong type. The client drops the key and repeats the call."""
    await bench.storage.enqueue(QUEUE, [NewJob("a", options=Options(task="t"))])
    await bench.run("RPUSH", bench.prefix + b":error:ValueError", "damaged")
    failure = Fail(Failure("ValueError", "no", ""), retry_in_ms=0, final=True)
    leases = (await bench.settle(failure, take=TAKE)).claimed.leases
    assert min(lease.token for lease in leases) > max(bench.tokens)
    assert (await bench.storage.check(QUEUE)).problems == {}


async def test_a_server_that_becomes_full_during_a_call_lets_it_finish() -> None:
    with ValkeyServer(maxmemory="100mb") as server:
        store = ValkeyStorage.from_url(server.url, retry_for=1)
        await store.open()
        await store.enqueue(QUEUE, [NewJob("first")])
        jobs = [
            NewJob(f"{i}", delay_ms=3_600_000) for i in range(10_000)
        ]  # they take more room than their arguments
        used = server.info("memory")["used_memory"]
        for room in range(500_000, 10_000_000, 100_000):
            with server.client() as client:
                client.config_set("maxmemory", used + room)
            try:
                answers = await store.enqueue(QUEUE, jobs)
                break
            except StorageFull:  # the arguments alone are too much
                assert (await store.counts(QUEUE)).scheduled == 0
        assert {answer.status for answer in answers} == {"queued"}
        assert server.info("memory")["used_memory"] > used + room
        with pytest.raises(StorageFull):
            await store.enqueue(QUEUE, [NewJob("late")])
        assert (await store.get(QUEUE, ["late"])) == [None]
        assert (await store.counts(QUEUE)).scheduled == 10_000
        with server.client() as client:
            client.config_set("maxmemory", 0)
        assert (await store.check(QUEUE)).problems == {}
        await store.close()
