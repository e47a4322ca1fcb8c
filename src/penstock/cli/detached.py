"""Workers that run without a terminal: started, stopped and looked at by their pid files."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.cli.errors import CommandLineError, ExitCode, NotFound, WrongState
from penstock.cli.pidfiles import (
    PidRecord,
    Surroundings,
    await_end,
    private,
    read_record,
    running,
    tell_to_end,
)

if TYPE_CHECKING:
    from penstock.cli.settings import Project

__all__ = ["Place", "places", "start_worker", "stop_workers"]

_STARTING_S: Final = 60.0
_LOOK_EVERY_S: Final = 0.05
# Beyond its grace a worker settles what it handed back.
_BEYOND_GRACE_S: Final = 15.0


class Place(NamedTuple):
    """The files of one detached worker."""

    name: str
    pid_file: Path
    log_file: Path

    @classmethod
    def of(cls, project: Project, number: int) -> Place:
        """The place of the worker of that number."""
        folder = project.folder / "workers"
        name = f"worker-{number}"
        return cls(name, folder / f"{name}.pid", folder / f"{name}.log")

    @property
    def record(self) -> PidRecord | None:
        """Of the worker that runs here."""
        return running(self.pid_file)

    @property
    def last_words(self) -> str:
        """The last line of its log."""
        lines = (
            self.log_file.read_text(encoding="utf-8", errors="replace").split("\n")
            if self.log_file.exists()
            else []
        )
        return next((line.strip() for line in reversed(lines) if line.strip()), "")


def places(project: Project) -> list[Place]:
    """Where there is a pid file, in the order of their numbers."""
    found = (project.folder / "workers").glob("worker-*.pid")
    numbers = (path.stem.removeprefix("worker-") for path in found)
    return [
        Place.of(project, number) for number in sorted(int(number) for number in numbers if number.isdigit())
    ]


def start_worker(place: Place, arguments: list[str], surroundings: Surroundings | None = None) -> int:
    """Start ``penstock worker run`` with these arguments, apart from this terminal; its process id, when
    it claims jobs. It finds its store by ``surroundings``, which are ours if none are given.

    Raises ``WrongState`` if one runs here, ``CommandLineError`` with its last words if it does not come up.
    """
    if (record := place.record) is not None:
        raise WrongState(
            f"{place.name} runs already (process {record.pid}). Use `penstock worker restart`, or stop it first."
        )
    surroundings = surroundings or Surroundings.here()
    if not Path(surroundings.folder).is_dir():
        raise NotFound(f"{place.name} did not start: its folder {surroundings.folder} is not there any more.")
    place.log_file.parent.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable,
        "-m",
        "penstock",
        "worker",
        "run",
        *arguments,
        "--pid-file",
        str(place.pid_file.absolute()),
    ]
    with open(place.log_file, "ab", opener=private) as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd=surroundings.folder,
            env=surroundings.environment,
        )
    deadline = time.monotonic() + _STARTING_S
    while process.poll() is None and time.monotonic() < deadline:
        record = read_record(place.pid_file)
        if record is not None and record.pid == process.pid and record.ready:
            return process.pid
        time.sleep(_LOOK_EVERY_S)
    if process.poll() is None:
        process.kill()
        raise CommandLineError(
            f"{place.name} was not ready in {_STARTING_S:.0f} s. Look at {place.log_file}."
        )
    if process.returncode == 0:
        # A burst that was over before we looked.
        return process.pid
    known = [code for code in ExitCode if code == process.returncode]
    words = place.last_words.removeprefix("penstock: ")
    raise CommandLineError(f"{place.name} did not start: {words}", known[0] if known else ExitCode.FAILED)


def stop_workers(
    places: list[Place], *, patience_s: float | None = None
) -> Iterator[tuple[Place, PidRecord, bool]]:
    """End the workers that run at these places: each as it has ended, its record, and whether it went by itself.

    All are told before any is waited for, or one would take up what another hands back. Each has its own grace and
    fifteen seconds, or ``patience_s``.
    """
    told = []
    for place in places:
        if (record := place.record) is None:
            place.pid_file.unlink(missing_ok=True)
            continue
        tell_to_end(record)
        patience = record.grace_ms / 1000 + _BEYOND_GRACE_S if patience_s is None else patience_s
        told.append((place, record, time.monotonic() + patience))
    for place, record, deadline in told:
        yield place, record, await_end(place.pid_file, record, deadline=deadline)
