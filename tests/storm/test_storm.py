"""The parts of a storm that the checker relies on."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.storage.valkey.routers import slot_of
from tests.servers import SlotMove, ValkeyCluster, ValkeyServer, free_port
from tests.slow.local_processes import ROOT
from tests.storm import stores
from tests.storm.journal import read_faults
from tests.storm.network import REDIRECTED, BadNetworks
from tests.storm.roles import AWAY
from tests.storm.stores import Store
from tests.storm.storm import MOST_FAILED_STARTS, Plan, Storm


class FailingProcesses:
    """Worker 0 cannot start ``failures`` times in a row, then runs."""

    def __init__(self, failures: int) -> None:
        self.left = failures
        self.is_over = asyncio.Event()

    def names(self, role: str) -> list[str]:
        return ["worker-0"] if role == "worker" else []

    def exit_status(self, name: str) -> int | None:
        return AWAY if self.left else None

    def start_again(self, name: str) -> None:
        self.left -= 1
        if not self.left:
            self.is_over.set()

    def pid(self, name: str) -> int:
        return 1

    def log_of(self, name: str) -> str:
        return "no server"


@pytest.mark.parametrize(
    ("failures", "noted"), [(MOST_FAILED_STARTS, []), (MOST_FAILED_STARTS + 1, ["cannot start"])]
)
async def test_a_worker_that_keeps_failing_to_start_is_noted(
    tmp_path: Path, failures: int, noted: list[str]
) -> None:
    plan = Plan("sqlite", jobs=1, kills=0, seconds=1, faults=frozenset())
    storm, processes = Storm(plan, Store("memory://"), tmp_path), FailingProcesses(failures)
    storm._processes = processes  # type: ignore[assignment]
    supervision = asyncio.create_task(storm._supervise())
    async with asyncio.timeout(10):
        await processes.is_over.wait()
    supervision.cancel()
    assert [fault.kind for fault in read_faults(tmp_path)] == noted
    assert storm.done["starts repeated"] == failures


def test_a_redirected_process_connects_through_the_bad_network() -> None:
    dead_port = free_port()
    ping = (
        f"import redis; from tests.storm.network import *; redirect(); redis.Redis(HOST, {dead_port}).ping()"
    )
    with ValkeyServer() as server, BadNetworks([server], seed=1) as networks:
        front_port = networks.redirected.partition(":")[2]
        environment = os.environ | {REDIRECTED: f"{dead_port}:{front_port}"}
        subprocess.run([sys.executable, "-c", ping], env=environment, cwd=ROOT, check=True, timeout=30)


@pytest.mark.timeout(120)
def test_a_slot_of_many_keys_is_on_its_way_for_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    rests: list[float] = []
    monkeypatch.setattr(stores, "time", SimpleNamespace(sleep=rests.append))
    with ValkeyCluster() as cluster:
        keys = [f"{{queue}}:deps:{n}" for n in range(3_000)]
        slot = slot_of(keys[0])
        source = cluster.owner(slot)
        target = next(node for node in cluster.nodes if node is not source)
        with source.client() as client:
            client.mset(dict.fromkeys(keys, "dependencies"))
        move = SlotMove(cluster, slot, target)
        stores._move_by_key(move)
        with target.client() as client:
            assert client.execute_command("CLUSTER COUNTKEYSINSLOT", slot) == len(keys)
        assert (move.keys(), target.owns(slot)) == ([], True)
    assert sum(rests) < 5
