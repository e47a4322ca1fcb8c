"""How busy the machine is, how much of that is others', and how fast a core is just now."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

from .server import Server

__all__ = ["Foreign", "children_cpu", "core_speed", "group_cpu", "tree_cpu", "wait_quiet"]

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


def machine_cpu() -> tuple[float, float]:
    """Busy and total CPU seconds of all cores since boot."""
    fields = [int(x) for x in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    idle = fields[3] + fields[4]
    return (sum(fields) - idle) / TICKS_PER_SECOND, sum(fields) / TICKS_PER_SECOND


def children_cpu() -> float:
    """CPU seconds of this process and of its children that have ended."""
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_CHILDREN, resource.RUSAGE_SELF)]
    return sum(u.ru_utime + u.ru_stime for u in usage)


def group_cpu(group: int) -> float:
    """CPU seconds so far of the living processes of a process group."""
    total = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        if int(fields[2]) == group:
            total += int(fields[11]) + int(fields[12])
    return total / TICKS_PER_SECOND


def tree_cpu(root: int) -> float:
    """CPU seconds so far of a process, of all that it has started, and of those among them that have ended."""
    parents, used = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        pid = int(path.parent.name)
        parents[pid], used[pid] = int(fields[1]), sum(map(int, fields[11:15]))
    family, found = {root}, {root}
    while found:
        found = {pid for pid, parent in parents.items() if parent in found}
        family |= found
    return sum(used.get(pid, 0) for pid in family) / TICKS_PER_SECOND


def wait_quiet(limit_seconds: float) -> None:
    """Wait, up to the limit, for a moment in which the machine is under 25 % busy."""
    end = time.monotonic() + limit_seconds
    while time.monotonic() < end:
        busy0, total0 = machine_cpu()
        time.sleep(0.4)
        busy1, total1 = machine_cpu()
        if total1 > total0 and (busy1 - busy0) / (total1 - total0) < 0.25:
            return


def core_speed() -> float:
    """Millions of turns of a trivial loop per CPU second: throttling and neighbours show in it."""
    start, x = time.process_time(), 0
    for i in range(400_000):
        x += i & 3
    return 0.4 / (time.process_time() - start)


class Foreign:
    """The share of the machine's CPU that went to processes that are not ours, since it was made."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.machine, self.ours = machine_cpu(), self._ours()

    def _ours(self) -> float:
        return children_cpu() + self.server.cpu()

    def share(self) -> float:
        busy, total = (now - then for now, then in zip(machine_cpu(), self.machine, strict=True))
        return max(0.0, (busy - (self._ours() - self.ours)) / total) if total else 0.0
