"""The stores that a storm rages on, and the faults each of them can have.

Every write of the Valkey stores is on disk before it is answered, and the planned failovers wait for the replica. So
none of these faults may lose anything, except ``crash``: there a replica takes over from a primary that was killed, and
asynchronous replication may lose writes that were acknowledged.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import cycle
from math import ceil
from pathlib import Path
from typing import Any, Final, Self

import redis

from tests.servers import HOST, Sentinel, SlotMove, ValkeyCluster, ValkeyServer, wait_until
from tests.storm.network import REDIRECTED, BadNetworks
from tests.storm.plan import QUEUES

FAILOVER_TIMEOUT_S = 60.0
AWAY_S = 1.5
NODE_TIMEOUT_MS = 3000
STEPS = 100
STEP_S = 0.03
"""A slot moves in about so many steps with such rests, which takes as long as moving many slots. Not a key per step:
each flow leaves a key, and a queue of thousands of them was out of reach for minutes."""


class Store:
    """A store: ``url`` for the processes of the storm, ``own_url`` for the storm itself.

    ``faults`` are by name; each blocks until it is over and returns what it did. ``environment``: variables that the
    processes of the storm need.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.own_url = url
        self.faults: dict[str, Callable[[], str]] = {}
        self.heal: Callable[[], None] = lambda: None
        self.environment: dict[str, Any] = {}

    def put_behind(self, networks: BadNetworks) -> None:
        """Have processes reach the servers through a bad network. The storm itself bypasses it."""
        self.environment[REDIRECTED] = networks.redirected
        self.faults["network"] = networks.trouble
        self.heal = networks.heal

    def wait_for(self, replicas: int) -> None:
        """Have processes ask for that many replicas of every write."""
        if replicas:
            self.url += f"?replicas={replicas}"


@contextmanager
def sqlite_store(folder: Path, faults: frozenset[str], *, seed: int) -> Iterator[Store]:
    yield Store(f"sqlite:///{folder}/storm.db")


@contextmanager
def server_store(folder: Path, faults: frozenset[str], *, seed: int) -> Iterator[Store]:
    """One server."""
    chance = random.Random(seed)
    with ExitStack() as stack:
        server = stack.enter_context(ValkeyServer(aof=True, directory=_made(folder / "server")))
        store = Store(server.url)
        if "network" in faults:
            store.put_behind(stack.enter_context(BadNetworks([server], seed=seed)))
        store.faults["server"] = lambda: _kill_and_restart(server, chance.uniform(0, AWAY_S))
        yield store


@contextmanager
def sentinel_store(folder: Path, faults: frozenset[str], *, seed: int) -> Iterator[Store]:
    """A primary and two replicas, watched by a Sentinel."""
    with ExitStack() as stack:
        primary = stack.enter_context(ValkeyServer(aof=True, directory=_made(folder / "primary")))
        replicas = [
            stack.enter_context(
                ValkeyServer(aof=True, replica_of=primary, directory=_made(folder / f"replica-{n}"))
            )
            for n in range(2)
        ]
        sentinel = stack.enter_context(Sentinel(primary))
        wait_until(lambda: sentinel.knows_replicas(2), what="the replicas found by Sentinel")
        servers = {server.port: server for server in (primary, *replicas)}
        store = Store(f"valkey+sentinel://{HOST}:{sentinel.port}/{sentinel.service}/0")
        if "network" in faults:
            store.put_behind(stack.enter_context(BadNetworks([*servers.values(), sentinel], seed=seed)))
        store.faults["sentinel"] = lambda: _fail_over(sentinel)
        store.faults["crash"] = lambda: _crash_primary(sentinel, servers)
        yield store


@contextmanager
def cluster_store(folder: Path, faults: frozenset[str], *, seed: int) -> Iterator[Store]:
    """Three primaries, each with a replica."""
    chance = random.Random(seed)
    with ExitStack() as stack:
        cluster = stack.enter_context(_ReplicatedCluster(folder))
        store = Store(f"valkey+cluster://{','.join(f'{HOST}:{node.port}' for node in cluster.nodes)}")
        if "network" in faults:
            store.put_behind(stack.enter_context(BadNetworks(cluster.nodes, seed=seed)))
        store.faults["cluster"] = lambda: _promote_replica(cluster, chance)
        whole = cycle((False, True))
        store.faults["slots"] = lambda: _move_slot(cluster, chance, is_whole=next(whole))
        store.faults["crash"] = lambda: _crash_node(cluster, chance)
        yield store


STORES: Final[Mapping[str, tuple[Any, frozenset[str]]]] = {
    "sqlite": (sqlite_store, frozenset()),
    "server": (server_store, frozenset({"server", "network"})),
    "sentinel": (sentinel_store, frozenset({"sentinel", "network", "crash"})),
    "cluster": (cluster_store, frozenset({"cluster", "slots", "network", "crash"})),
}
"""How each store is made, and the faults that ask for it."""


def _made(directory: Path) -> Path:
    directory.mkdir(parents=True)
    return directory


def _kill_and_restart(server: ValkeyServer, away_s: float) -> str:
    server.kill()
    time.sleep(away_s)
    server.start()
    return f"port {server.port}, away for {away_s:.1f} s"


# Sentinel


def _fail_over(sentinel: Sentinel) -> str:
    """A planned failover: the primary waits for the replica, so nothing is lost."""
    before = sentinel.primary_port()
    deadline = time.monotonic() + FAILOVER_TIMEOUT_S
    with sentinel.client() as client:
        while True:
            try:
                client.execute_command("SENTINEL FAILOVER", sentinel.service, "COORDINATED")
                break
            except redis.ResponseError:  # the one before is not over, or no replica is fit yet
                assert time.monotonic() < deadline, "Sentinel does not fail over"
                time.sleep(0.2)
    _wait_for_change(sentinel, before)
    return f"{before} -> {sentinel.primary_port()}"


def _crash_primary(sentinel: Sentinel, servers: Mapping[int, ValkeyServer]) -> str:
    """Kill the primary and leave it dead until a replica has taken over."""
    before = sentinel.primary_port()
    servers[before].kill()
    _wait_for_change(sentinel, before)
    servers[before].replica_of = None  # Sentinel decides which one it follows from now on
    servers[before].start()
    return f"{before} killed -> {sentinel.primary_port()}"


def _wait_for_change(sentinel: Sentinel, before: int) -> None:
    wait_until(
        lambda: sentinel.primary_port() != before, what="another primary", timeout_s=FAILOVER_TIMEOUT_S
    )


# Cluster


class _ReplicatedCluster(ValkeyCluster):
    """Three primaries, then a replica of each."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self.nodes = [self._node(n) for n in range(3)]

    def start(self) -> Self:
        super().start()
        for primary in list(self.nodes):
            replica = self._node(len(self.nodes)).start()
            self.nodes.append(replica)
            with primary.client() as client:
                client.execute_command("CLUSTER MEET", HOST, replica.port, replica.bus_port)
            self.wait_until_whole()
            with replica.client() as client:
                client.execute_command("CLUSTER REPLICATE", primary.node_id)
        self.wait_until_replicated()
        return self

    def wait_until_replicated(self) -> None:
        wait_until(lambda: all(map(_is_in_sync, self.nodes)), what="every replica in sync", timeout_s=60)

    def _node(self, number: int) -> ValkeyServer:
        config = f"cluster-node-timeout {NODE_TIMEOUT_MS}"
        return ValkeyServer(config, aof=True, cluster=True, directory=_made(self._folder / f"node-{number}"))


def _is_in_sync(node: ValkeyServer) -> bool:
    replication = node.info("replication")
    return bool(replication["role"] == "master" or replication["master_link_status"] == "up")


def _promote_replica(cluster: _ReplicatedCluster, chance: random.Random) -> str:
    """A planned failover of one shard: the primary waits for its replica, so nothing is lost."""
    replica = chance.choice([node for node in cluster.nodes if _role(node) == "slave"])
    cluster.wait_until_replicated()
    with replica.client() as client:
        client.execute_command("CLUSTER FAILOVER")
    wait_until(lambda: _role(replica) == "master", what="the replica promoted", timeout_s=FAILOVER_TIMEOUT_S)
    cluster.wait_until_replicated()
    return f"to port {replica.port}"


def _crash_node(cluster: _ReplicatedCluster, chance: random.Random) -> str:
    """Kill a primary and leave it dead until its replica has taken over."""
    primary = chance.choice(_primaries(cluster))
    others = [node for node in cluster.nodes if node is not primary]
    before = {node.port for node in others if _role(node) == "master"}
    primary.kill()
    wait_until(
        lambda: {node.port for node in others if _role(node) == "master"} > before,
        what="a replica promoted",
        timeout_s=FAILOVER_TIMEOUT_S,
    )
    primary.start()
    cluster.wait_until_whole()
    cluster.wait_until_replicated()
    return f"port {primary.port} killed"


def _move_slot(cluster: _ReplicatedCluster, chance: random.Random, *, is_whole: bool) -> str:
    """Move the slot of a queue to another primary: key by key, as older tools do, or as a whole."""
    queue = chance.choice(QUEUES)
    with cluster.nodes[0].client() as client:
        slot = int(client.execute_command("CLUSTER KEYSLOT", f"{{default/{queue}/0}}"))
    source = cluster.owner(slot)
    target = chance.choice([node for node in _primaries(cluster) if node is not source])
    if is_whole:
        cluster.move_slot(slot, target)
    else:
        _move_by_key(SlotMove(cluster, slot, target))
    how = "as a whole" if is_whole else "key by key"
    return f"{queue}, slot {slot} from {source.port} to {target.port} {how}"


def _move_by_key(move: SlotMove) -> None:
    move.begin()
    while keys := move.keys():
        at_once = ceil(len(keys) / STEPS)
        for first in range(0, len(keys), at_once):
            move.move_key(*keys[first : first + at_once])
            time.sleep(STEP_S)
    for node in (move.target, move.source):  # the replicas learn it from these
        with node.client() as client:
            client.execute_command("CLUSTER SETSLOT", move.slot, "NODE", move.target.node_id)


def _primaries(cluster: ValkeyCluster) -> list[ValkeyServer]:
    return [node for node in cluster.nodes if _role(node) == "master"]


def _role(node: ValkeyServer) -> str:
    return str(node.info("replication")["role"])
