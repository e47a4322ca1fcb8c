"""Flat cost: what a job costs to add and to work off while 10,000, or 1,000,000, others wait.

A `Backlog` is one store filled to a size and kept there: each round adds K jobs and works K off.
Two of them, in stores of their own, are measured in turn.
"""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path

from .measure import Sample
from .probe import open_probe
from .server import Server
from .stage import Stage
from .systems import System
from .ticks import Tick

__all__ = ["Backlog"]

LOAD_AT_ONCE = 100_000
"""Jobs one loading process adds: its payloads are all in memory."""
SETTLING = 0.1
"""The first part of a drain, not counted in the worker's CPU: imports, connecting, the first claims."""


class Backlog:
    """A store of one system that holds `size` waiting jobs."""

    def __init__(self, system: System, size: int, directory: Path, *, timeout: float) -> None:
        self.system, self.size = system, size
        self.server = Server() if system.kind == "redis" else None
        self.stage = Stage(directory, self.server, timeout=timeout)

    def fill(self) -> None:
        """Bring a fresh store to its size."""
        self.stage.fresh()
        for start in range(0, self.size, LOAD_AT_ONCE):
            n = min(LOAD_AT_ONCE, self.size - start)
            self.stage.start(self.system, "bulk", workload="bulk", n=n).finish()
            print(
                f"# {self.system.name}: {start + n:,} of {self.size:,} jobs loaded",
                file=sys.stderr,
                flush=True,
            )

    def enqueue(self, k: int) -> Sample:
        """Add k jobs in bulk: CPU of producer and server, and commands, per job."""
        meter = Meter(self.server)
        out = self.stage.start(self.system, "bulk", workload="bulk", n=k).finish()
        rate = k / (out["t1"] - out["t0"]) * 1e9
        return meter.per_job(k) | {"jobs": k, "client_us": out["cpu_ns"] / k / 1e3, "rate": rate}

    def drain(self, k: int) -> Sample:
        """Work k jobs off, and the few more that are in flight then: the same figures for the worker."""
        with closing(open_probe(self.stage, self.system)) as probe:
            before = probe.count() or 0
            meter = Meter(self.server)
            self._work(k)
            sample = meter.per_job(1)
            jobs = before - (probe.count() or 0)
        ticks = self.stage.ticks.read()
        handled = sum(t.jobs for t in ticks)
        # More than a few apart: a probe that counts wrongly, or a worker that did not settle its jobs.
        if abs(jobs - handled) > k * 0.1:
            raise RuntimeError(f"{jobs} jobs left the store, but the handlers were called {handled} times")
        sample = {key: value / jobs for key, value in sample.items()}
        return sample | {"jobs": jobs} | steady(ticks, k)

    def statements(self, k: int) -> Sample:
        """SQL statements per job, in a round of its own since counting them costs time."""
        counts = {}
        for phase, go in (("enqueue", self._produce), ("drain", self._work)):
            path = self.stage.directory / f"statements-{phase}"
            path.unlink(missing_ok=True)
            go(k, {"PEERS_STATEMENTS": str(path)})
            if path.exists():
                counts[phase] = int(path.read_text()) / k
        return counts

    def _produce(self, k: int, env: dict[str, str] | None = None) -> None:
        self.stage.start(self.system, "bulk", workload="bulk", n=k, env=env).finish()

    def _work(self, k: int, env: dict[str, str] | None = None) -> None:
        """A worker that ends itself, by SIGTERM, when its handlers were called k times."""
        self.stage.ticks.clear()
        settings = {"PEERS_STOP": "1"} | (env or {})
        with closing(
            self.stage.start(self.system, "worker", workload="drain", n=k, target=k, env=settings)
        ) as worker:
            self.stage.await_ticks(worker, k)
            worker.process.wait(30)

    def close(self) -> None:
        if self.server:
            self.server.stop()
        self.stage.remove()


class Meter:
    """What the server has used since this was made; nothing, for a system without one."""

    def __init__(self, server: Server | None) -> None:
        self.server = server
        if server:
            self.cpu, self.commands = server.cpu(), server.commands()

    def per_job(self, jobs: int) -> Sample:
        if not self.server:
            return {}
        return {
            "server_us": (self.server.cpu() - self.cpu) / jobs * 1e6,
            "commands": (self.server.commands() - self.commands) / jobs,
        }


def steady(ticks: list[Tick], k: int) -> Sample:
    """CPU per job and rate of the worker, from its own records, once it runs steadily."""
    handled, first = 0, ticks[0]
    for tick in ticks:
        handled += tick.jobs
        if handled >= k * SETTLING:
            first = tick
            break
    last = max(ticks, key=lambda t: t.at_ns)
    jobs = max(sum(t.jobs for t in ticks) - handled, 1)
    return {
        "client_us": (last.value_ns - first.value_ns) / jobs / 1e3,
        "rate": jobs / max(last.at_ns - first.at_ns, 1) * 1e9,
    }
