"""The servers that other tests stand on really start, stop, die, come back and join up."""

from __future__ import annotations

import gc
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from tests import servers
from tests.front import Front
from tests.processes import is_alive
from tests.servers import HOST, Sentinel, ServerDied, ValkeyCluster, ValkeyServer, free_port, wait_until
from tests.tls_front import TlsFront


@pytest.fixture
def server() -> Iterator[ValkeyServer]:
    with ValkeyServer() as server:
        yield server


@pytest.fixture(scope="module")
def cluster() -> Iterator[ValkeyCluster]:
    with ValkeyCluster() as cluster:
        yield cluster


def test_a_started_server_answers(server: ValkeyServer) -> None:
    with server.client() as client:
        assert client.ping()
    assert server.url == f"valkey://127.0.0.1:{server.port}"


def test_a_closed_server_leaves_nothing_behind() -> None:
    with ValkeyServer() as server:
        pid = server.pid
    assert not is_alive(pid)
    assert not server.directory.exists()


def test_a_server_that_cannot_start_says_why() -> None:
    server = ValkeyServer("no-such-setting 1")
    with pytest.raises(ServerDied, match="no-such-setting"), server:
        pass
    assert not server.directory.exists()


def test_test_processes_never_choose_the_same_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "_given", set())
    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", "2")
    ports: list[int] = []
    for process in ("gw0", "gw1"):
        monkeypatch.setenv("PYTEST_XDIST_WORKER", process)
        ports += [free_port() for _ in range(500)]
        servers._given.clear()
    first, second = set(ports[:500]), set(ports[500:])
    assert (len(first), len(second), first & second) == (500, 500, set())


def test_a_port_in_use_is_not_mistaken_for_ours(server: ValkeyServer) -> None:
    with pytest.raises(ServerDied, match="in use"), ValkeyServer(port=server.port):
        pass


def test_a_killed_server_with_aof_comes_back_on_its_port_with_its_data() -> None:
    with ValkeyServer(aof=True) as server:
        with server.client() as client:
            client.set("key", "kept")
        port, pid = server.port, server.pid
        server.kill()
        assert not server.running
        server.start()
        assert (server.port, server.pid != pid) == (port, True)
        with server.client() as client:
            assert client.get("key") == "kept"


def test_a_restarted_server_without_aof_is_empty(server: ValkeyServer) -> None:
    with server.client() as client:
        client.set("key", "lost")
    server.restart()
    with server.client() as client:
        assert client.get("key") is None


def test_a_given_directory_is_kept(tmp_path: Path) -> None:
    for _ in range(2):
        with ValkeyServer(aof=True, directory=tmp_path) as server, server.client() as client:
            runs = client.incr("runs")
    assert runs == 2


START_AND_WAIT = """
import pathlib, sys
from tests.servers import ValkeyServer
print(ValkeyServer(directory=pathlib.Path(sys.argv[1])).start().pid, flush=True)
input()
"""


def test_servers_die_with_a_killed_session(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", START_AND_WAIT, str(tmp_path)],
        cwd=Path(__file__).parents[1],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as session:
        assert session.stdout is not None
        pid = int(session.stdout.readline())
        assert is_alive(pid)
        session.kill()
    wait_until(lambda: not is_alive(pid), what="the server dead")


def test_a_server_outlives_the_thread_that_started_it() -> None:
    server = ValkeyServer()
    thread = threading.Thread(target=server.start)
    thread.start()
    thread.join()
    try:
        with server.client() as client:
            assert client.ping()
    finally:
        server.close()


def test_a_password_is_asked_for() -> None:
    with ValkeyServer(password="secret") as server:
        assert server.url == f"valkey://:secret@127.0.0.1:{server.port}"
        with server.client(password=None) as client, pytest.raises(redis.AuthenticationError):
            client.ping()


def test_an_acl_user_may_do_only_what_the_rule_allows() -> None:
    rule = "ada on >secret ~mine:* +@all"
    with ValkeyServer(users=(rule,)) as server, server.client(username="ada", password="secret") as client:
        assert client.set("mine:1", "x")
        with pytest.raises(redis.exceptions.NoPermissionError):
            client.set("other", "x")


def test_a_unix_socket_answers() -> None:
    with ValkeyServer(unix_socket=True) as server:
        with redis.Redis(unix_socket_path=str(server.socket_path)) as client:
            assert client.ping()


def test_a_full_server_refuses_writes() -> None:
    with ValkeyServer(maxmemory="1kb") as server, server.client() as client:
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            client.set("key", "x")


def test_a_front_closes_connections_that_end_as_it_does(server: ValkeyServer) -> None:
    for _ in range(100):
        with Front(server) as front, socket.create_connection((HOST, front.port)) as client:
            client.sendall(b"PING\r\n")
            assert client.recv(100)
    gc.collect()  # pytest reports what was not closed


def test_tls_hangs_up_when_the_server_dies(server: ValkeyServer) -> None:
    with (
        TlsFront(server) as front,
        server.client(port=front.port, ssl=True, ssl_ca_certs=str(front.ca_file)) as client,
    ):
        assert client.ping()
        server.kill()
        with pytest.raises(redis.ConnectionError):
            client.ping()
        server.start()
        assert client.ping()


def test_tls_is_spoken_and_checked(server: ValkeyServer) -> None:
    with TlsFront(server) as front:
        assert front.url == f"valkeys://127.0.0.1:{front.port}"
        with server.client(port=front.port, ssl=True, ssl_ca_certs=str(front.ca_file)) as client:
            assert client.set("key", "x" * 200_000)
            assert len(client.get("key") or "") == 200_000
        with server.client(port=front.port, ssl=True) as client:
            with pytest.raises(redis.ConnectionError, match="CERTIFICATE_VERIFY_FAILED"):
                client.ping()


def test_a_replica_follows_and_refuses_writes() -> None:
    with ValkeyServer(password="secret") as primary, ValkeyServer(replica_of=primary) as replica:
        with primary.client() as client:
            client.set("key", "copied")
            assert client.wait(1, 5000) == 1
        with replica.client() as client:
            assert client.get("key") == "copied"
            with pytest.raises(redis.ReadOnlyError):
                client.set("key", "changed")


def test_sentinel_names_the_primary(server: ValkeyServer) -> None:
    with Sentinel(server) as sentinel:
        assert sentinel.primary_port() == server.port


@pytest.mark.slow
def test_sentinel_promotes_the_replica_of_a_killed_primary(server: ValkeyServer) -> None:
    with ValkeyServer(replica_of=server) as replica, Sentinel(server) as sentinel:
        wait_until(lambda: sentinel.knows_replicas(1), what="the replica found", timeout_s=30)
        server.kill()
        wait_until(lambda: sentinel.primary_port() == replica.port, what="the replica promoted", timeout_s=60)
        wait_until(lambda: replica.info("replication")["role"] == "master", what="the replica writable")


@pytest.mark.cluster
def test_a_cluster_serves_every_slot(cluster: ValkeyCluster) -> None:
    with cluster.client() as client:
        for n in range(100):
            client.set(f"key{n}", str(n))
        sizes = [node.info("keyspace")["db0"]["keys"] for node in cluster.nodes]
    assert sum(sizes) == 100
    assert len(sizes) == 3


@pytest.mark.cluster
def test_a_killed_cluster_node_comes_back_with_its_slots(cluster: ValkeyCluster) -> None:
    cluster.nodes[1].kill()
    cluster.nodes[1].start()
    cluster.wait_until_whole()
    with cluster.client() as client:
        assert client.set("{a}", "x")


def test_the_session_has_a_server(valkey_url: str) -> None:
    with redis.Redis.from_url(valkey_url.replace("valkey://", "redis://")) as client:
        assert client.ping()


@pytest.mark.cluster
def test_the_session_has_a_cluster(cluster_url: str) -> None:
    with redis.Redis.from_url(cluster_url.replace("valkey+cluster://", "redis://")) as client:
        assert client.execute_command("CLUSTER INFO")["cluster_state"] == "ok"
