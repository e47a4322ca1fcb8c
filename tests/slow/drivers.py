"""Spark drivers in processes of their own, with all that they have started, that get killed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from pyspark.sql import SparkSession

from penstock.spark.driver_lease import output_name
from penstock.storage import open_storage
from tests.slow.local_processes import ROOT

__all__ = ["PAST_LEASES_MS", "Driver", "let_leases_end", "say_ready"]

# More than any lease lasts that a killed driver or worker held.
PAST_LEASES_MS = 60_000
PATIENCE_S = 240


class Driver:
    """``python -m MODULE ARGUMENTS``, which says ``ready JVM`` once it has a session (``JVM`` is the process of that)
    and begins at a line from outside. What it prints is in a file."""

    def __init__(self, module: str, *arguments: str, log: Path, **environment: str) -> None:
        self._log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                cwd=ROOT,
                env={**os.environ, **environment},
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def go(self) -> None:
        """Let it begin, as soon as its session is there."""
        self.wait_until(lambda: any(line.startswith("ready ") for line in self.said()))
        assert self._process.stdin is not None
        self._process.stdin.write(b"go\n")
        self._process.stdin.close()

    def said(self) -> list[str]:
        return self._log.read_text().splitlines()

    @property
    def jvm(self) -> int:
        (ready,) = (line for line in self.said() if line.startswith("ready "))
        return int(ready.removeprefix("ready "))

    def wait_until(self, reached: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not reached():
            assert self._process.poll() is None, self.said()[-40:]
            assert time.monotonic() < deadline, self.said()[-40:]
            time.sleep(0.01)

    def kill(self) -> None:
        """SIGKILL to it alone: what it has started finds out by itself."""
        assert self._process.poll() is None, self.said()[-40:]
        self._process.kill()
        self._process.wait()

    def kill_all(self) -> None:
        """SIGKILL to it and to all that it has started, its JVM first of all."""
        assert self._process.poll() is None, self.said()[-40:]
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def finish(self, patience_s: float = PATIENCE_S) -> None:
        """Wait for its end, which is to be a good one."""
        assert self._process.wait(patience_s) == 0, self.said()[-40:]

    def end(self) -> None:
        """Whatever is left of it."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()


def say_ready(spark: SparkSession) -> None:
    """In the driver: it has its session. Returns when it is told to go."""
    gateway = spark.sparkContext._gateway
    assert gateway is not None
    print("ready", gateway.proc.pid, flush=True)
    sys.stdin.readline()


def let_leases_end(url: str, output: Path, *queues: str) -> None:
    """Those that whoever was killed held on the output and on jobs of the queues: now, instead of after a while."""

    async def session() -> None:
        storage = open_storage(url)
        await storage.open()
        for queue in (f"penstock.output.{output_name(str(output))}", *queues):
            await storage.shift_clock(queue, PAST_LEASES_MS)
        await storage.close()

    asyncio.run(session())
