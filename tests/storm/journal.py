"""Append-only files that the processes of a storm write and the checker reads.

Every record is one line and one ``write``, so a SIGKILL loses no record that was written before it. A line that a kill
cut off is ignored. In the folder of a storm:

- ``ledgers/<producer>``: the answer of the store to every enqueue;
- ``calls/<worker>.<pid>``: the begin and the end of every call of a handler in that process;
- ``faults``: every fault the storm caused.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

GATE = "gate"


class Answer(NamedTuple):
    """One answer of the store. ``again``: the producer had an answer for this id already, and asked once more."""

    again: bool
    id: str
    status: str
    answered: str
    result: str


class Call(NamedTuple):
    """One call of a handler. ``ended_ns`` is 0 and ``outcome`` empty if the call did not end before its process did."""

    id: str
    run: int
    token: int
    session: str
    begun_ns: int
    ended_ns: int
    outcome: str


class Session(NamedTuple):
    """The life of one worker process. Another one may have the same pid later."""

    worker: str
    name: str
    pid: int
    begun_ns: int


class Fault(NamedTuple):
    """Something the storm did, or a process did that it must not do."""

    at_ns: int
    kind: str
    name: str
    pid: int
    detail: str


class Appender:
    """Appends lines to a file, from any thread."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(exist_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        size = os.fstat(self._fd).st_size
        if size and os.pread(self._fd, 1, size - 1) != b"\n":
            self.write("")

    def write(self, *lines: str) -> None:
        os.write(self._fd, "".join(f"{line}\n" for line in lines).encode())

    def close(self) -> None:
        os.close(self._fd)


class Calls(Appender):
    """The calls of this process."""

    def __init__(self, folder: Path, *, name: str, worker: str) -> None:
        super().__init__(calls_path(folder, name, os.getpid()))
        self.write(f"session {worker} {time.monotonic_ns()}")

    def begin(self, queue: str, id: str, run: int, token: int) -> None:
        self.write(f"begin {queue} {id} {run} {token} {time.monotonic_ns()}")

    def end(self, queue: str, id: str, run: int, token: int, outcome: str) -> None:
        self.write(f"end {queue} {id} {run} {token} {time.monotonic_ns()} {outcome}")


def calls_path(folder: Path, name: str, pid: int) -> Path:
    return folder / "calls" / f"{name}.{pid}"


def read_answers(path: Path) -> Iterator[Answer]:
    for again, id, status, answered, result in _fields(path, 5):
        yield Answer(again == "again", id, status, answered, result)


def answer_line(answer: Answer) -> str:
    return f"{'again' if answer.again else 'first'} {answer.id} {answer.status} {answer.answered} {answer.result}"


def sessions(folder: Path) -> list[Session]:
    """Every worker process that got as far as its first claim."""
    found = []
    for path in sorted((folder / "calls").glob("*")):
        name, _, pid = path.name.rpartition(".")
        lines = (fields for fields in _fields(path, 3) if fields[0] == "session")
        found += [Session(worker, name, int(pid), int(at)) for _, worker, at in lines]
    return found


def read_calls(folder: Path, queue: str) -> Iterator[Call]:
    """The calls of jobs of a queue, each once it is complete, the incomplete ones of a process at its end."""
    for path in sorted((folder / "calls").glob("*")):
        worker = ""
        open_calls: dict[tuple[str, int], list[Call]] = {}
        for fields in _lines(path):
            if len(fields) == 3 and fields[0] == "session":
                yield from (call for calls in open_calls.values() for call in calls)
                worker, open_calls = fields[1], {}
            elif len(fields) == 6 and fields[:2] == ["begin", queue]:
                call = Call(fields[2], int(fields[3]), int(fields[4]), worker, int(fields[5]), 0, "")
                open_calls.setdefault((call.id, call.token), []).append(call)
            elif len(fields) == 7 and fields[:2] == ["end", queue]:
                call = open_calls[fields[2], int(fields[4])].pop()
                yield call._replace(ended_ns=int(fields[5]), outcome=fields[6])
        yield from (call for calls in open_calls.values() for call in calls)


def fault_line(kind: str, name: str = "-", pid: int = 0, detail: str = "") -> str:
    return f"{time.monotonic_ns()} {kind} {name} {pid} {detail}"


def read_faults(folder: Path) -> Iterator[Fault]:
    path = folder / "faults"
    for line in path.read_text().splitlines() if path.exists() else []:
        at, kind, name, pid, detail = line.split(" ", 4)
        yield Fault(int(at), kind.replace("_", " "), name, int(pid), detail)


def _fields(path: Path, count: int) -> Iterator[list[str]]:
    """The records with that number of fields; others were cut off."""
    return (fields for fields in _lines(path) if len(fields) == count)


def _lines(path: Path) -> Iterator[list[str]]:
    with path.open() as file:
        for line in file:
            if line.endswith("\n"):
                yield line.split()
