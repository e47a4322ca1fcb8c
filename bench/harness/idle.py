"""A worker with nothing to do: what it costs, and how soon it wakes for a job from another process."""

from __future__ import annotations

import time
from contextlib import closing

from .machine import group_cpu
from .measure import Sample
from .stage import Stage
from .systems import System

__all__ = ["idle_cost", "wake_latency"]

STARTING_SECONDS = 4


def idle_cost(stage: Stage, system: System, seconds: float) -> Sample:
    """Share of one core that an idle worker (all its processes) and its server take."""
    stage.fresh()
    with closing(stage.start(system, "worker", workload="idle", n=0)) as worker:
        time.sleep(STARTING_SECONDS)
        group = worker.process.pid
        cpu, start = group_cpu(group), time.monotonic()
        server = stage.server.cpu() if stage.server else 0.0
        time.sleep(seconds)
        if worker.process.poll() is not None:
            worker.fail(f"the idle worker ended (exit {worker.process.returncode})")
        passed = time.monotonic() - start
        sample = {"seconds": passed, "worker_share": (group_cpu(group) - cpu) / passed}
        if stage.server:
            sample["server_share"] = (stage.server.cpu() - server) / passed
        return sample


def wake_latency(stage: Stage, system: System, n: int) -> Sample:
    """From just before the enqueue in one process to the handler's start in another, CLOCK_MONOTONIC."""
    stage.fresh()
    with closing(stage.start(system, "worker", workload="wake", n=n)) as worker:
        time.sleep(STARTING_SECONDS / 2)
        stage.start(system, "wake", workload="wake", n=n).finish()
        stage.await_ticks(worker, n)
    waits = sorted(t.value_ns / 1e6 for t in stage.ticks.read())
    return {
        "n": len(waits),
        "p50": waits[len(waits) // 2],
        "p99": waits[int(0.99 * len(waits))],
        "max": waits[-1],
    }
