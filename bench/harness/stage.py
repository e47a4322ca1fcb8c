"""A place to measure in: a scratch directory, a server if one is needed, and the adapter's processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from .install import Installation
from .server import Server
from .systems import System
from .ticks import Ticks

__all__ = ["Failed", "Role", "Stage"]


class Failed(Exception):
    """A measurement went wrong; the message ends with what the process said."""


@dataclass
class Role:
    """A running adapter process."""

    name: str
    process: subprocess.Popen[bytes]
    out: Path
    log: Path
    timeout: float
    stopped: bool = False

    def finish(self) -> dict[str, Any]:
        """Wait for its result. Raises `Failed` if it ends, or takes too long, without one."""
        try:
            self.process.wait(self.timeout)
        except subprocess.TimeoutExpired:
            if not self.out.exists():
                self.fail(f"no end after {self.timeout:.0f} s")
        self.stop()
        if not self.out.exists():
            self.fail(f"exit {self.process.returncode}")
        return json.loads(self.out.read_text())

    def fail(self, why: str) -> None:
        """End it and raise `Failed`."""
        self.stop()
        raise Failed(f"{self.name}: {why}\n{self.tail()}")

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-1500:]

    def stop(self) -> None:
        """End the process and what it started (its process group): first asked, then killed."""
        if self.stopped:
            return
        for sig, patience in ((signal.SIGTERM, 3), (signal.SIGKILL, 10)):
            self._signal(sig)
            try:
                self.process.wait(patience)
                break
            except subprocess.TimeoutExpired:
                continue
        self._signal(signal.SIGKILL)
        self.stopped = True

    close = stop

    def _signal(self, sig: int) -> None:
        try:
            os.killpg(self.process.pid, sig)
        except ProcessLookupError:
            pass


class Stage:
    """Starts adapter processes on one store: a server, or the files of `self.db`."""

    def __init__(self, directory: Path, server: Server | None, *, timeout: float = 120) -> None:
        self.directory, self.server, self.timeout = directory, server, timeout
        self.db = directory / "db"
        self.ticks = Ticks(directory / "ticks")

    def fresh(self) -> None:
        """An empty store."""
        self.remove()
        self.ticks.clear()
        self.db.mkdir(parents=True)
        if self.server:
            self.server.flush()

    def remove(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)

    def start(
        self,
        system: System,
        role: str,
        *,
        workload: str,
        n: int,
        target: int = 0,
        env: dict[str, str] | None = None,
        pipes: bool = False,
    ) -> Role:
        """Start the adapter in a role. With `pipes`, its stdin and stdout are the caller's."""
        install = Installation(system)
        out, log = self.directory / f"out-{role}", self.directory / f"log-{role}"
        out.unlink(missing_ok=True)
        settings = {
            "PEERS_URL": self.server.url if self.server else "",
            "PEERS_PORT": str(self.server.port if self.server else 0),
            "PEERS_DIR": str(self.db),
            "PEERS_N": str(n),
            "PEERS_TARGET": str(target),
            "PEERS_VARIANT": system.variant,
            "PEERS_WORKLOAD": workload,
            "PEERS_TICKS": str(self.ticks.path),
            "PEERS_OUT": str(out),
            "PYTHONPATH": install.python_path(),
            "PYTHONSAFEPATH": "1",
            "NODE_NO_WARNINGS": "1",
            "NODE_ENV": "production",
        }
        environment = os.environ | settings | {k: str(v) for k, v in system.env.items()} | (env or {})
        with open(log, "wb") as said:
            process = subprocess.Popen(
                install.command(role),
                env=environment,
                cwd=self.directory,
                start_new_session=True,
                stdin=subprocess.PIPE if pipes else subprocess.DEVNULL,
                stdout=subprocess.PIPE if pipes else said,
                stderr=said,
            )
        return Role(role, process, out, log, self.timeout)

    def await_ticks(self, worker: Role, target: int) -> None:
        """Wait till the handlers were called `target` times. Raises `Failed` when that stops coming."""
        end = time.monotonic() + self.timeout
        seen, moved = 0, time.monotonic()
        while seen < target:
            time.sleep(0.01)
            ended = worker.process.poll() is not None
            now = self.ticks.total()
            if now > seen:
                seen, moved = now, time.monotonic()
            elif ended:
                worker.fail(
                    f"the worker ended (exit {worker.process.returncode}) after {seen} of {target} jobs"
                )
            elif time.monotonic() > end or time.monotonic() - moved > 40:
                worker.fail(f"stuck at {seen} of {target} jobs")


def lines(stream: IO[bytes] | None) -> IO[bytes]:
    """The stream of a role started with `pipes`."""
    assert stream is not None
    return stream
