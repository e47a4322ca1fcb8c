"""Where a call goes, and what it survives: lost connections, restarts, failovers, moved slots."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import redis.asyncio
import redis.asyncio.cluster
import redis.crc

from penstock.errors import (
    StorageError,
    StorageFull,
    StorageReadOnly,
    StorageRefused,
    StorageUnavailable,
    StorageVersion,
)
from penstock.storage.valkey.client import ClientRouter
from penstock.storage.valkey.commands import Again, ReplyError, Router
from penstock.storage.valkey.connection import Connection, ConnectionLost, open_connection
from penstock.storage.valkey.endpoint import Endpoint
from penstock.storage.valkey.node import backoff
from penstock.storage.valkey.routers import (
    ClusterRouter,
    SentinelRouter,
    StandaloneRouter,
    router_for,
    slot_of,
)
from tests.servers import HOST, Sentinel, ValkeyCluster, ValkeyServer, free_port, wait_until
from tests.tls_front import TlsFront

LIBRARY = """#!lua name=routertest
redis.register_function('routertest_refuse', function() return redis.error_reply('PENSTOCK lease lost') end)
"""


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyServer]:
    with ValkeyServer() as server:
        yield server


@pytest.fixture(scope="module")
def cluster() -> Iterator[ValkeyCluster]:
    with ValkeyCluster("cluster-node-timeout 1000") as cluster:
        yield cluster


@contextlib.asynccontextmanager
async def routing(url: str, **options: Any) -> AsyncIterator[Router]:
    router = router_for(Endpoint.parse(url), **options)
    try:
        yield router
    finally:
        await router.close()


async def until(check: Callable[[], bool], *, what: str, timeout_s: float = 20.0) -> None:
    await asyncio.to_thread(wait_until, check, what=what, timeout_s=timeout_s)


def blocked(server: ValkeyServer, count: int = 1) -> Callable[[], bool]:
    return lambda: server.info("clients")["blocked_clients"] == count


def connections(server: ValkeyServer) -> int:
    with server.client() as admin:
        return sum(client["name"] == "penstock" for client in admin.client_list())


def kill_clients(server: ValkeyServer) -> None:
    with server.client() as admin:
        admin.execute_command("CLIENT KILL TYPE normal SKIPME yes")


def repeats(*command: str) -> tuple[list[str], Again]:
    """A list that grows with each command built by the second."""
    built: list[str] = []

    def again() -> tuple[str, ...]:
        built.append(command[0])
        return command

    return built, again


async def nothing(_: object) -> None: ...


# Standalone


async def test_a_thousand_concurrent_calls_share_one_connection(server):
    seen: list[object] = []

    async def on_connect(caller: object) -> None:
        seen.append(caller)

    async with routing(server.url, on_connect=on_connect) as router:
        replies = await asyncio.gather(*(router.call("k", "ECHO", number) for number in range(1000)))
    assert replies == [str(number).encode() for number in range(1000)]
    assert len(seen) == 1


async def test_a_call_whose_connection_is_killed_is_repeated_as_a_repeat(server):
    built, again = repeats("ECHO", "repeated")
    async with routing(server.url) as router:
        await router.connect()
        call = asyncio.create_task(router.call("k", "BLPOP", "never", 0, again=again))
        await until(blocked(server), what="the call at the server")
        kill_clients(server)
        assert await call == b"repeated"
        assert built == ["ECHO"]
        assert await router.call("k", "PING", again=again) == b"PONG"
        assert built == ["ECHO"]


async def test_a_call_after_an_idle_connection_was_lost_is_not_a_repeat(server):
    built, again = repeats("PING")
    async with routing(server.url) as router:
        await router.connect()
        assert isinstance(router, StandaloneRouter)
        connection = router._node.connection
        assert connection is not None
        kill_clients(server)
        await until(lambda: connection.lost, what="the loss noticed")
        assert await router.call("k", "ECHO", "first", again=again) == b"first"
    assert built == []


async def test_calls_survive_connections_killed_again_and_again(server):
    async with routing(server.url) as router:
        done = 0

        async def worker(name: int) -> None:
            nonlocal done
            for number in range(200):
                value = f"{name}-{number}"
                assert await router.call("k", "ECHO", value) == value.encode()
                done += 1

        workers = [asyncio.create_task(worker(name)) for name in range(50)]
        while not all(task.done() for task in workers):
            await asyncio.to_thread(kill_clients, server)
            await asyncio.wait(workers, timeout=0.05)
        await asyncio.gather(*workers)
    assert done == 10_000


async def test_calls_survive_a_killed_and_restarted_server_and_share_one_reconnect():
    connects = 0

    async def on_connect(_: object) -> None:
        nonlocal connects
        connects += 1

    with ValkeyServer(aof=True) as server:
        async with routing(server.url, on_connect=on_connect) as router:
            await router.call("k", "SET", "kept", "1")
            server.kill()
            calls = [asyncio.create_task(router.call("k", "GET", "kept")) for _ in range(50)]
            await until(lambda: router._node._failures >= 2, what="failed reconnects")  # type: ignore[attr-defined]
            await asyncio.to_thread(server.start)
            assert await asyncio.gather(*calls) == [b"1"] * 50
    assert connects == 2


async def test_a_server_that_stays_away_is_unavailable_after_retry_for():
    url = f"valkey://:hunter2@{HOST}:{free_port()}"
    async with routing(url, retry_for=0.3) as router:
        started = time.monotonic()
        with pytest.raises(
            StorageUnavailable, match=r"127\.0\.0\.1:\d+.*Gave up .* 0\.3 s\. Check"
        ) as caught:
            await router.call("k", "PING")
        assert 0.3 <= time.monotonic() - started < 20, "less than the default"
        assert "hunter2" not in str(caught.value)
        with pytest.raises(StorageUnavailable, match="cannot connect"):
            await router.connect()


async def test_a_caller_may_give_up_during_an_outage_while_others_go_on():
    with ValkeyServer() as server:
        async with routing(server.url) as router:
            await router.connect()
            server.kill()
            impatient, patient = (asyncio.create_task(router.call("k", "PING")) for _ in range(2))
            await until(lambda: router._node._failures >= 1, what="a failed reconnect")  # type: ignore[attr-defined]
            impatient.cancel()
            await asyncio.to_thread(server.start)
            assert await patient == b"PONG"
            assert impatient.cancelled()


async def test_a_closed_router_refuses_calls_and_ends_those_under_way(server):
    async with routing(server.url) as router:
        calls = [
            asyncio.create_task(router.call("k", "BLPOP", "never", 0)),
            asyncio.create_task(router.call_blocking("k", "BLPOP", "never", 0, timeout=None)),
        ]
        await until(blocked(server, 2), what="both at the server")
        await router.close()
        for call in calls:
            with pytest.raises(StorageError, match="closed"):
                await call
        with pytest.raises(StorageError, match="closed"):
            await router.call("k", "PING")


async def test_closing_during_an_outage_ends_the_calls_with_an_error_not_a_cancellation():
    async with routing(f"valkey://{HOST}:{free_port()}") as router:
        calls = [asyncio.create_task(router.call("k", "PING")) for _ in range(3)]
        await until(lambda: router._node._failures >= 1, what="a failed connect")  # type: ignore[attr-defined]
        await router.close()
        for call in calls:
            with pytest.raises(StorageError, match="closed"):
                await call


async def test_without_retries_a_call_still_connects_first(server):
    async with routing(server.url, retry_for=0) as router:
        assert await router.call("k", "PING") == b"PONG"


@contextlib.asynccontextmanager
async def answering(*replies: bytes) -> AsyncIterator[tuple[str, list[bytes]]]:
    """A server that gives ``replies`` one by one, the last for ever, on one connection after the other."""
    heard: list[bytes] = []
    left = list(replies)
    served: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.add(asyncio.current_task())  # type: ignore[arg-type]
        try:
            while data := await reader.read(1000):
                if b"SETNAME" not in data:
                    heard.append(data)
                reply = b"+OK\r\n" if b"SETNAME" in data else left.pop(0) if len(left) > 1 else left[0]
                writer.write(reply)
        finally:
            writer.transport.abort()

    port = free_port()
    listener = await asyncio.start_server(serve, HOST, port)
    try:
        yield f"{HOST}:{port}", heard
    finally:
        listener.close()
        await asyncio.wait_for(asyncio.gather(*served, return_exceptions=True), 5)


@pytest.mark.parametrize("code", ["LOADING", "TRYAGAIN", "CLUSTERDOWN", "MASTERDOWN", "BUSY", "NOREPLICAS"])
async def test_a_temporary_refusal_is_waited_for_and_does_not_count_as_a_repeat(code):
    built, again = repeats("PING")
    refusal = f"-{code} come back later\r\n".encode()
    async with answering(refusal, refusal, b"+PONG\r\n") as (address, heard):
        async with routing(f"valkey://{address}", on_connect=nothing) as router:
            assert await router.call("k", "ECHO", "x", again=again) == b"PONG"
    assert len(heard) == 3
    assert built == []


@pytest.mark.slow
async def test_a_silent_connection_is_noticed_in_time_for_another_attempt():
    """A proxy or a server that accepts commands and never answers. The next connection works."""
    connections = itertools.count(1)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        is_first = next(connections) == 1
        try:
            while data := await reader.read(1000):
                if b"SETNAME" in data or not is_first:
                    writer.write(b"+OK\r\n")
        finally:
            writer.transport.abort()

    async with await asyncio.start_server(serve, HOST, port := free_port()):
        async with routing(f"valkey://{HOST}:{port}", on_connect=nothing) as router:
            async with asyncio.timeout(25):
                assert await router.call("k", "PING") == b"OK"


async def test_a_refusal_that_does_not_pass_is_unavailable_after_retry_for():
    async with answering(b"-LOADING the dataset\r\n") as (address, _):
        async with routing(f"valkey://{address}", on_connect=nothing, retry_for=0.2) as router:
            with pytest.raises(StorageUnavailable, match=f"{address} says: LOADING"):
                await router.call("k", "PING")


async def test_an_old_server_is_refused_at_connect():
    async with answering(b"$20\r\nredis_version:6.2.14\r\n") as (address, _):
        async with routing(f"valkey://{address}") as router:
            with pytest.raises(StorageVersion, match=r"6\.2\.14"):
                await router.connect()
            with pytest.raises(StorageVersion, match=r"6\.2\.14"):
                await router.call("k", "PING")


async def test_a_wrong_password_is_refused_immediately_and_not_shown():
    with ValkeyServer(password="right") as server:
        async with routing(f"valkey://:wr0ng@{HOST}:{server.port}") as router:
            with pytest.raises(StorageRefused) as caught:
                await router.call("k", "PING")
    assert "wr0ng" not in f"{caught.value!r} {caught.value} {router!r}"


async def test_a_setup_cut_short_does_not_make_the_first_attempt_a_repeat(server):
    built, again = repeats("PING")
    setups = 0

    async def on_connect(caller: Any) -> None:
        nonlocal setups
        setups += 1
        if setups == 1:
            ping = caller.call("PING")
            caller.drop("cut short")
            await ping

    async with routing(server.url, on_connect=on_connect) as router:
        assert await router.call("k", "ECHO", "first", again=again) == b"first"
    assert (setups, built) == (2, [])


async def test_a_full_server_is_full_and_a_replica_is_read_only():
    with ValkeyServer() as primary, ValkeyServer(replica_of=primary) as replica:
        async with routing(primary.url) as router:
            await router.call("k", "CONFIG", "SET", "maxmemory", "1")
            with pytest.raises(StorageFull, match="maxmemory"):
                await router.call("k", "SET", "k", "v")
        async with routing(replica.url) as router:
            with pytest.raises(StorageReadOnly, match=rf"{replica.port} says: READONLY"):
                await router.call("k", "SET", "k", "v")
            assert await router.call("k", "GET", "k") is None


async def test_an_error_of_our_own_functions_passes_through_with_its_code(server):
    async with routing(server.url) as router:
        assert await router.call_every_node("FUNCTION", "LOAD", "REPLACE", LIBRARY) == [b"routertest"]
        with pytest.raises(ReplyError) as caught:
            await router.call("k", "FCALL", "routertest_refuse", 1, "k")
    assert (caught.value.code, caught.value.message) == ("PENSTOCK", "lease lost")


async def test_tls_goes_through_the_router(server):
    with TlsFront(server) as front:
        async with routing(f"{front.url}?ssl_ca_certs={front.ca_file}") as router:
            assert await router.call("k", "ECHO", "safe") == b"safe"


def test_backoff_grows_with_jitter_from_nothing_to_two_seconds():
    assert backoff(0) == 0
    assert all(0.025 <= backoff(1) <= 0.05 for _ in range(100))
    assert all(1 <= backoff(50) <= 2 for _ in range(100))


# Blocking calls


async def test_a_blocking_call_does_not_hold_up_others_and_its_connection_is_used_again(server):
    async with routing(server.url) as router:
        for _ in range(3):
            waiting = asyncio.create_task(router.call_blocking("k", "BLPOP", "wake", 10, timeout=10))
            await until(blocked(server), what="the call at the server")
            assert await router.call("k", "RPUSH", "wake", "up") == 1
            assert await waiting == [b"wake", b"up"]
        # Those of the test before may not have gone yet.
        await until(lambda: connections(server) == 2, what="one connection for calls, one that waits")


async def test_a_cancelled_blocking_call_takes_nothing_and_disturbs_no_other_call(server):
    async with routing(server.url) as router:
        cancelled = asyncio.create_task(router.call_blocking("k", "BLPOP", "poison", 0, timeout=None))
        await until(blocked(server), what="the call at the server")
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        await until(blocked(server, 0), what="the call gone from the server")
        await router.call("k", "RPUSH", "poison", "drop")
        assert await router.call_blocking("k", "BLPOP", "other", 0.01, timeout=0.01) is None
        assert await router.call("k", "LRANGE", "poison", 0, -1) == [b"drop"]


async def test_a_blocking_call_reports_a_lost_connection_and_the_next_one_works(server):
    async with routing(server.url) as router:
        waiting = asyncio.create_task(router.call_blocking("k", "BLPOP", "never", 0, timeout=None))
        await until(blocked(server), what="the call at the server")
        kill_clients(server)
        with pytest.raises(ConnectionLost):
            await waiting
        assert await router.call_blocking("k", "BLPOP", "never", 0.01, timeout=0.01) is None


async def test_a_blocking_call_may_outlast_the_patience_with_silent_servers(server, monkeypatch):
    async def impatient(*args: Any) -> Connection:
        return await open_connection(*args, stall_seconds=0.02)

    monkeypatch.setattr("penstock.storage.valkey.routers.open_connection", impatient)
    async with routing(server.url) as router:
        assert await router.call_blocking("k", "BLPOP", "never", 0.2, timeout=0.2) is None


async def test_a_blocking_call_that_gets_no_answer_in_time_is_given_up(server, monkeypatch):
    monkeypatch.setattr("penstock.storage.valkey.node.BLOCK_GRACE_SECONDS", 0.05)
    async with routing(server.url) as router:
        with pytest.raises(StorageUnavailable, match="in time"):
            await router.call_blocking("k", "BLPOP", "never", 0, timeout=0.01)
        await until(blocked(server, 0), what="the call gone from the server")


# Sentinel


@pytest.mark.slow
async def test_calls_and_blocking_calls_follow_a_sentinel_failover():
    with (
        ValkeyServer() as primary,
        ValkeyServer(replica_of=primary) as replica,
        Sentinel(primary) as sentinel,
    ):
        await until(lambda: sentinel.knows_replicas(1), what="the replica known", timeout_s=30)
        url = f"valkey+sentinel://{HOST}:{free_port()},{HOST}:{sentinel.port}/penstock"
        async with routing(url, retry_for=60) as router:
            assert isinstance(router, SentinelRouter)
            await router.call("k", "SET", "before", "1")
            assert await router.call("k", "WAIT", 1, 5000) == 1
            primary.kill()
            assert await router.call("k", "SET", "after", "2") == b"OK"
            assert (await router.call("k", "CONFIG", "GET", "port"))[1] == str(replica.port).encode()
            assert await router.call("k", "GET", "before") == b"1"
            assert await router.call_blocking("k", "BLPOP", "never", 0.01, timeout=0.01) is None


async def test_a_primary_that_became_a_replica_is_looked_for_anew_and_a_named_replica_is_not_used():
    with ValkeyServer() as first, ValkeyServer(replica_of=first) as second:
        named = first.port

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                while data := await reader.read(1000):
                    port = str(named).encode()
                    pair = b"*2\r\n$9\r\n127.0.0.1\r\n$%d\r\n%s\r\n" % (len(port), port)
                    writer.write(pair if b"GET-MASTER" in data else b"+OK\r\n")
            finally:
                writer.transport.abort()

        sentinel_port = free_port()
        listener = await asyncio.start_server(serve, HOST, sentinel_port)
        async with routing(f"valkey+sentinel://{HOST}:{sentinel_port}/main", retry_for=10) as router:
            await router.call("k", "SET", "x", "1")
            with first.client() as one, second.client() as two:
                two.replicaof("NO", "ONE")
                one.replicaof(HOST, second.port)
            call = asyncio.create_task(router.call("k", "SET", "x", "2"))
            await until(lambda: router._node._failures >= 1, what="the replica rejected")  # type: ignore[attr-defined]
            named = second.port
            assert await call == b"OK"
            assert (await router.call("k", "CONFIG", "GET", "port"))[1] == str(named).encode()
        listener.close()


async def test_a_missing_sentinel_and_an_unknown_service_are_reported():
    with ValkeyServer() as primary, Sentinel(primary) as sentinel:
        async with routing(f"valkey+sentinel://{HOST}:{sentinel.port}/nosuch", retry_for=0.1) as router:
            with pytest.raises(StorageUnavailable, match=r"does not know the service 'nosuch'.*Gave up"):
                await router.call("k", "PING")


# Cluster


def test_the_slot_of_a_key_is_the_one_redis_py_finds():
    for key in ["a", "é", "{tag}x", "{}x", "x{tag", "a{b}{c}", "{{a}}", "{penstock/mail/0}:jobs"]:
        assert slot_of(key) == slot_of(key.encode()) == redis.crc.key_slot(key.encode())


@pytest.mark.cluster
async def test_keys_of_all_nodes_are_reached_and_every_node_is_called(cluster):
    async with routing(cluster.url) as router:
        keys = [f"spread-{number}" for number in range(300)]
        assert await asyncio.gather(*(router.call(key, "SET", key, key) for key in keys)) == [b"OK"] * 300
        assert await router.call_every_node("PING") == [b"PONG"] * 3
        assert sum(await router.call_every_node("DBSIZE")) >= 300
        await router.call_blocking("w", "BLPOP", "w", 0.01, timeout=0.01)


@pytest.mark.cluster
async def test_a_stale_slot_map_is_put_right_by_moved(cluster):
    async with routing(cluster.url) as router:
        await router.connect()
        assert isinstance(router, ClusterRouter)
        right = list(router._slots)
        router._slots = [right[(slot + 8192) % 16384] for slot in range(16384)]
        router._fresh_until = 0.1
        keys = [f"stale-{number}" for number in range(100)]
        assert await asyncio.gather(*(router.call(key, "SET", key, key) for key in keys)) == [b"OK"] * 100
        await router.call_blocking("stale-w", "BLPOP", "stale-w", 0.01, timeout=0.01)
        await until(lambda: router._slots == right, what="the map read again")


@pytest.mark.cluster
async def test_a_slot_under_migration_is_asked_for_and_then_followed(cluster):
    slot = slot_of("{moving}")
    owner = cluster.owner(slot)
    target = next(node for node in cluster.nodes if node is not owner)
    async with routing(cluster.url) as router:
        await router.call("{moving}", "MSET", "{moving}here", "1", "{moving}stays", "1")
        with owner.client() as old, target.client() as new:
            old_id, new_id = old.execute_command("CLUSTER MYID"), new.execute_command("CLUSTER MYID")
            new.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", old_id)
            old.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", new_id)
            assert await router.call("{moving}", "SET", "{moving}new", "2") == b"OK"
            assert await router.call("{moving}", "GET", "{moving}here") == b"1"
            assert await router.call("{moving}", "GET", "{moving}new") == b"2"
            pop = ("BLPOP", "{moving}w", 0.01)
            assert await router.call_blocking("{moving}", *pop, timeout=0.01) is None
            both = asyncio.create_task(router.call("{moving}", "MGET", "{moving}here", "{moving}new"))
            for key in ("{moving}here", "{moving}stays"):
                await asyncio.to_thread(old.migrate, HOST, target.port, key, 0, 5000)
            assert await both == [b"1", b"2"]
            for client in (new, old):
                client.execute_command("CLUSTER SETSLOT", slot, "NODE", new_id)
        assert await router.call("{moving}", "MGET", "{moving}here", "{moving}new") == [b"1", b"2"]
        assert isinstance(router, ClusterRouter)
        assert str(router._slots[slot].name) == f"{HOST}:{target.port}"


@pytest.mark.cluster
async def test_calls_survive_a_node_killed_and_restarted():
    with ValkeyCluster("cluster-node-timeout 1000", aof=True) as cluster:
        async with routing(cluster.url, retry_for=60) as router:
            keys = [f"survive-{number}" for number in range(30)]
            await asyncio.gather(*(router.call(key, "SET", key, key) for key in keys))
            cluster.nodes[1].kill()
            reads = [asyncio.create_task(router.call(key, "GET", key)) for key in keys]
            await asyncio.wait(reads, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.to_thread(cluster.nodes[1].start)
            assert await asyncio.gather(*reads) == [key.encode() for key in keys]


@pytest.mark.slow
@pytest.mark.cluster
async def test_calls_follow_a_cluster_failover():
    timeout = "cluster-node-timeout 1500"
    with ValkeyCluster(timeout) as cluster, ValkeyServer(timeout, cluster=True) as replica:
        doomed = cluster.nodes[1]
        _join_as_replica(replica, doomed)
        async with routing(cluster.url, retry_for=60) as router:
            keys = [f"failover-{number}" for number in range(60)]
            await asyncio.gather(*(router.call(key, "SET", key, key) for key in keys))
            with doomed.client() as client:
                assert await asyncio.to_thread(client.wait, 1, 5000) == 1
            doomed.kill()
            reads = await asyncio.gather(*(router.call(key, "GET", key) for key in keys))
            assert reads == [key.encode() for key in keys]
            assert await router.call_every_node("PING") == [b"PONG"] * 3


def _join_as_replica(replica: ValkeyServer, primary: ValkeyServer) -> None:
    def replicates() -> bool:
        with contextlib.suppress(redis.ResponseError):  # the primary is not known there yet
            return bool(joining.execute_command("CLUSTER REPLICATE", node_id))
        return False

    with replica.client() as joining, primary.client() as old:
        node_id = old.execute_command("CLUSTER MYID")
        old.execute_command("CLUSTER MEET", HOST, replica.port, replica.bus_port)
        wait_until(replicates, what="the replica joined")
    wait_until(
        lambda: replica.info("replication").get("master_link_status") == "up", what="the replica in step"
    )


@pytest.mark.cluster
async def test_mixed_up_cluster_and_standalone_urls_are_reported(cluster, server):
    async with routing(server.url.replace("valkey", "valkey+cluster")) as router:
        with pytest.raises(StorageError, match="use valkey://"):
            await router.connect()
    async with routing(f"valkey://{HOST}:{cluster.nodes[0].port}") as router:
        with pytest.raises(StorageError, match=r"use valkey\+cluster://"):
            await asyncio.gather(*(router.call("k", "GET", f"k{number}") for number in range(50)))


# A client passed in


def clients(server: ValkeyServer) -> Iterator[Any]:
    for decode in (False, True):
        for protocol in (2, 3):
            yield redis.asyncio.Redis(
                host=HOST, port=server.port, decode_responses=decode, protocol=protocol, socket_timeout=0.2
            )
    with contextlib.suppress(ImportError):  # not in the dev group
        yield importlib.import_module("valkey.asyncio").Valkey(host=HOST, port=server.port)


async def test_a_client_passed_in_gives_the_same_replies_and_is_not_closed(server):
    for client in clients(server):
        router: Router = ClientRouter(client)
        await router.connect()
        await router.call("k", "DEL", "stream", "hash")
        await router.call("k", "XADD", "stream", "1-1", "f", "v")
        await router.call("k", "HSET", "hash", "f", "v")
        entries = [[b"stream", [[b"1-1", [b"f", b"v"]]]]]
        assert await router.call("k", "XREAD", "STREAMS", "stream", "0") == entries
        assert await router.call("k", "HGETALL", "hash") == [b"f", b"v"]
        assert await router.call_every_node("PING") == [b"PONG"]
        assert await router.call_blocking("k", "BLPOP", "never", 0.5, timeout=0.5) is None
        with pytest.raises(ReplyError, match="syntax"):
            await router.call("k", "SET", "k", "v", "NOSUCH")
        await router.close()
        assert await client.ping()
        await client.aclose()


async def test_a_client_passed_in_is_retried_with_repeats_and_its_errors_are_ours(server):
    built, again = repeats("ECHO", "repeated")
    client = redis.asyncio.Redis(host=HOST, port=server.port)
    router = ClientRouter(client, retry_for=10)
    await router.call("k", "FUNCTION", "LOAD", "REPLACE", LIBRARY)
    with pytest.raises(ReplyError) as caught:
        await router.call("k", "FCALL", "routertest_refuse", 1, "k")
    assert (caught.value.code, caught.value.message) == ("PENSTOCK", "lease lost")
    call = asyncio.create_task(router.call("k", "BLPOP", "never", 0, again=again))
    await until(blocked(server), what="the call at the server")
    kill_clients(server)
    assert await call == b"repeated"
    assert built == ["ECHO"]
    cancelled = asyncio.create_task(router.call_blocking("k", "BLPOP", "never", 0, timeout=None))
    await until(blocked(server), what="the call at the server")
    cancelled.cancel()
    await until(blocked(server, 0), what="the call gone from the server")
    assert await router.call("k", "ECHO", "mine") == b"mine"
    await client.aclose()


@pytest.mark.cluster
async def test_a_cluster_client_passed_in_is_routed_by_key(cluster):
    client: Any = redis.asyncio.cluster.RedisCluster(host=HOST, port=cluster.nodes[0].port, protocol=3)
    router = ClientRouter(client)
    await router.connect()
    for number in range(30):
        assert await router.call(f"c{number}", "SET", f"c{number}", number) == b"OK"
        assert await router.call(f"c{number}", "GET", f"c{number}") == str(number).encode()
    assert await router.call_every_node("PING") == [b"PONG"] * 3
    assert await router.call_blocking("w", "BLPOP", "w", 0.01, timeout=0.01) is None
    with pytest.raises(ReplyError):
        await router.call("k", "SET", "k", "v", "NOSUCH")
    await router.close()
    assert await client.get("c1") == b"1"
    await client.aclose()
