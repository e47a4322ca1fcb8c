"""The five workloads. Each takes a system and gives one sample: a flat dict of figures."""

from __future__ import annotations

import time
from contextlib import closing
from typing import Any

from .machine import children_cpu
from .probe import Probe, open_probe
from .server import Server
from .stage import Failed, Role, Stage
from .systems import System

__all__ = ["Bench", "Sample"]

Sample = dict[str, Any]
WARM = 20
"""Jobs handled before the clock of `e2e` starts (the adapters' PEERS_WARM)."""


class Bench:
    """Measures on one stage, one workload at a time; `drain` works off what `bulk` left behind."""

    def __init__(self, stage: Stage, server: Server, scale: float) -> None:
        self.stage, self.server, self.scale = stage, server, scale

    def measure(self, system: System, workload: str) -> Sample:
        """Raises `Failed` if the adapter does not do its part."""
        n = system.jobs(workload, self.scale)
        match workload:
            case "one" | "bulk":
                return self.enqueue(system, workload, n)
            case "drain":
                return self.drain(system, n)
            case "e2e":
                return self.both(system, n)
            case "latency":
                return self.latency(system, n)
        raise ValueError(f"unknown workload {workload}")

    def enqueue(self, system: System, role: str, n: int) -> Sample:
        self.stage.fresh()
        memory, used = self.server.memory(), Used(self.server)
        out = self.stage.start(system, role, workload=role, n=n).finish()
        sample = used.per_job(n) | {
            "n": n,
            "rate": n / (out["t1"] - out["t0"]) * 1e9,
            "client_us": out["cpu_ns"] / n / 1e3,
        }
        if system.kind == "redis":
            time.sleep(0.3)  # the server gives the client's buffers back
            sample["bytes"] = (self.server.memory() - memory) / n
        else:
            sample["bytes"] = sum(p.stat().st_size for p in self.stage.db.rglob("*") if p.is_file()) / n
        return sample

    def drain(self, system: System, n: int) -> Sample:
        """From the first handler call to the moment when the store holds no unfinished job."""
        if system.jobs("bulk", self.scale) != n:
            self.enqueue(system, "bulk", n)
        self.stage.ticks.clear()
        with closing(open_probe(self.stage, system)) as probe:
            used = Used(self.server)
            with closing(self.stage.start(system, "worker", workload="drain", n=n, target=n)) as worker:
                return self._worked_off(worker, probe, used, n=n, target=n)

    def both(self, system: System, n: int) -> Sample:
        """A warm worker waits; from the producer's first add to the last job finished."""
        self.stage.fresh()
        target = n + WARM
        with (
            closing(open_probe(self.stage, system)) as probe,
            closing(self.stage.start(system, "worker", workload="e2e", n=n, target=target)) as worker,
        ):
            time.sleep(0.3)
            used = Used(self.server)
            out = self._beside(worker, self.stage.start(system, "e2e", workload="e2e", n=n))
            return self._worked_off(worker, probe, used, n=n, target=target, start_ns=out["t0"])

    def latency(self, system: System, n: int) -> Sample:
        """Add one job, wait for its result, again and again on an idle system."""
        self.stage.fresh()
        with closing(self.stage.start(system, "worker", workload="latency", n=n, target=10**9)) as worker:
            time.sleep(0.5)
            out = self._beside(worker, self.stage.start(system, "latency", workload="latency", n=n))
        waits = sorted(ns / 1e6 for ns in out["lat_ns"])
        return {
            "n": n,
            "p50": waits[len(waits) // 2],
            "p99": waits[min(len(waits) - 1, int(0.99 * len(waits)))],
        }

    def _beside(self, worker: Role, producer: Role) -> dict[str, Any]:
        """The producer's result; if it fails, the worker's last words are told too."""
        try:
            return producer.finish()
        except Failed as e:
            worker.stop()
            raise Failed(f"{e}\n-- the worker said:\n{worker.tail()}") from None

    def _worked_off(
        self, worker: Role, probe: Probe, used: Used, *, n: int, target: int, start_ns: int | None = None
    ) -> Sample:
        self.stage.await_ticks(worker, target)
        settled_ns, left = await_settled(probe)
        sample = used.per_job(n)
        ticks = self.stage.ticks.read()
        handled = sum(t.jobs for t in ticks)
        start, last = start_ns or min(t.at_ns for t in ticks), max(t.at_ns for t in ticks)
        end = last if left is None else max(settled_ns, last)
        worker.stop()
        one_process = len({t.pid for t in ticks}) == 1
        if one_process:
            cpu = [t.value_ns for t in ticks]
            sample["client_us"] = (max(cpu) - min(cpu)) / handled / 1e3
        else:  # the whole tree, start-up included
            sample["client_us"] = used.children() / n * 1e6
        if left:
            sample["warning"] = f"{left} jobs still unfinished 10 s after the last handler call"
        elif handled != target:
            sample["warning"] = f"{handled} handler calls for {target} jobs"
        return sample | {"n": n, "rate": n / (end - start) * 1e9, "handled": handled, "left": left}


class Used:
    """What the server, and our ended children, have used since this was made."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.cpu, self.commands, self.child = server.cpu(), server.commands(), children_cpu()

    def per_job(self, n: int) -> Sample:
        return {
            "server_us": (self.server.cpu() - self.cpu) / n * 1e6,
            "commands": (self.server.commands() - self.commands) / n,
        }

    def children(self) -> float:
        return children_cpu() - self.child


def await_settled(probe: Probe) -> tuple[int, int | None]:
    """Wait, up to 10 s, till every job is acknowledged: (monotonic ns, jobs left, None: cannot tell)."""
    end = time.monotonic() + 10
    while True:
        left = probe.count()
        now = time.monotonic_ns()
        if not left or time.monotonic() > end:
            return now, left
        time.sleep(0.003)
