"""How many jobs of a store are unfinished: asked by commands, or of the adapter itself."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import Protocol

import redis

from .stage import Role, Stage, lines
from .systems import System

__all__ = ["Probe", "open_probe"]


class Probe(Protocol):
    def count(self) -> int | None:
        """Unfinished jobs just now; None if the system cannot tell."""

    def close(self) -> None: ...


def open_probe(stage: Stage, system: System) -> Probe:
    """A probe that is warm: its first real question costs no start-up."""
    if system.pending == "adapter":
        return AdapterProbe(stage, system)
    return CommandProbe(stage, system)


class CommandProbe:
    """Adds up commands: any that returns an integer, XPENDING stream group, KEYS pattern, SQL file query."""

    def __init__(self, stage: Stage, system: System) -> None:
        self.stage, self.system = stage, system

    def count(self) -> int | None:
        if not self.system.pending:
            return None
        return sum(self._ask(*command) for command in self.system.pending)

    def _ask(self, verb: str, *args: str) -> int:
        if verb == "SQL":
            with closing(sqlite3.connect(self.stage.db / args[0], timeout=5)) as db:
                return int(db.execute(args[1]).fetchone()[0])
        assert self.stage.server, f"{self.system.name} asks {verb} of a server that it does not have"
        client = self.stage.server.client
        if verb == "KEYS":
            return len(client.keys(args[0]))
        if verb == "XPENDING":
            try:
                return int(client.xpending(*args)["pending"])
            except redis.ResponseError:  # no such stream or group yet
                return 0
        return int(client.execute_command(verb, *args))

    def close(self) -> None:
        """Nothing is held open."""


class AdapterProbe:
    """Asks a process of the adapter (role `pending`) that stays connected: a line in, a number out."""

    def __init__(self, stage: Stage, system: System) -> None:
        self.role: Role = stage.start(system, "pending", workload="pending", n=0, pipes=True)
        self.count()

    def count(self) -> int:
        process = self.role.process
        try:
            lines(process.stdin).write(b"\n")
            lines(process.stdin).flush()
            answer = lines(process.stdout).readline()
        except BrokenPipeError:
            answer = b""
        if not answer:
            self.role.fail("the adapter's pending() did not answer")
        return int(answer)

    def close(self) -> None:
        process = self.role.process
        lines(process.stdin).close()
        self.role.stop()
        lines(process.stdout).close()
