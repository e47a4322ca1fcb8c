"""Workers that run without a terminal: started, stopped and looked at by their pid files."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click
from click.shell_completion import CompletionItem

from penstock.cli.config import shown_argument
from penstock.cli.errors import CommandLineError, ExitCode, NotFound, WrongState
from penstock.cli.output import exact, print_json, print_table, when
from penstock.cli.parameters import Flags, PlainCommand, command, json_option
from penstock.cli.pidfiles import (
    PidRecord,
    Surroundings,
    await_end,
    private,
    read_record,
    running,
    tell_to_end,
)
from penstock.cli.settings import Settings
from penstock.cli.synonyms import did_you_mean
from penstock.cli.values import duration, whole
from penstock.core.units import milliseconds

if TYPE_CHECKING:
    from penstock.cli.settings import Project


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


# ``penstock worker start``, ``stop``, ``restart``, ``status``: workers in the background of a project.


_timeout_option = click.option(
    "--timeout",
    metavar="DURATION",
    type=duration,
    help="Kill those that have not ended by then. [grace and 15 s]",
)


_names_argument = click.argument("names", metavar="[NAME]...", nargs=-1)


class _WithOptionsOfRun(PlainCommand):
    """Completes the options that are handed on to the workers, besides its own."""

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        own = super().shell_complete(ctx, incomplete)
        from penstock.cli.worker import run

        handed_on = run.shell_complete(ctx, incomplete) if incomplete.startswith("-") else []
        return own + [item for item in handed_on if item.value not in {one.value for one in own}]


@command(
    "start",
    cls=_WithOptionsOfRun,
    short_help="Start workers in the background.",
    context_settings={"ignore_unknown_options": True},
)
@click.option(
    "-n",
    "--count",
    metavar="NUMBER",
    type=whole(1),
    help="Number of workers that are to run, with those that run already. [the key workers, which is 1]",
)
@click.argument("options", metavar="[MODULE:APP] [OPTIONS OF RUN]...", nargs=-1, type=click.UNPROCESSED)
@click.pass_obj
def start(flags: Flags, /, *, count: int | None, options: tuple[str, ...]) -> None:
    """Start workers in the background, with the options of `penstock worker run`.

    \b
      penstock worker start --count 4 myproject.jobs:app -c 8

    Their pid files and logs are in .penstock/workers: they belong to this folder, whatever their store. Returns when
    they claim jobs, or says why they do not. With one running, -n 3 starts two more.
    """
    if options[:1] and options[0].isdigit():
        raise CommandLineError(f"give the number of workers with -n {options[0]}.", ExitCode.USAGE)
    settings = Settings(flags)
    settings.project.make_folder()
    arguments = [*options, *(f"--{name}={value}" for name, value in flags.given.items())]
    wanted = [Place.of(settings.project, n + 1) for n in range(count or settings["workers"])]
    running = [(place, record) for place in wanted if (record := place.record) is not None]
    told = [f"{place.name} runs already (process {record.pid}{_of(record)})" for place, record in running]
    if len(running) == len(wanted):
        raise WrongState(
            f"{'; '.join(told)}. Nothing was started. Give -n {len(wanted) + 1} to start another one. "
            "`penstock worker restart` starts them again as they are; to change their options, stop them first."
        )
    for line in told:
        click.echo(line)
    for place in wanted:
        if place not in [taken for taken, _ in running]:
            _start(place, arguments)


@command("stop", short_help="Stop the workers in the background.")
@_names_argument
@_timeout_option
@click.pass_obj
def stop(flags: Flags, /, *, names: tuple[str, ...], timeout: str | None) -> None:
    """Stop the workers in the background, or those of these NAMEs, such as worker-2: they let their jobs finish for
    their grace, and hand back the rest.

    One that has not ended after its grace and fifteen seconds, or --timeout, is killed; its jobs come back.
    """
    settings = Settings(flags)
    if not _stop(settings, names, timeout):
        click.echo(_none_runs(settings), err=True)


@command("restart", short_help="Stop them, and start them again with the options they had.")
@_names_argument
@_timeout_option
@click.pass_obj
def restart(flags: Flags, /, *, names: tuple[str, ...], timeout: str | None) -> None:
    """Stop the workers in the background, or those of these NAMEs, and start them again with the options they had.

    They also keep the folder and the PENSTOCK_ variables they were started with, and so their store.
    """
    settings = Settings(flags)
    before = _stop(settings, names, timeout)
    if not before:
        raise WrongState(f"{_none_runs(settings)}. Start one with `penstock worker start`.")
    failures: list[CommandLineError] = []
    for place, record in before:
        try:
            _start(place, record.arguments, record.surroundings)
        except CommandLineError as failure:
            failures.append(failure)
    if failures:
        raise CommandLineError(" ".join(map(str, failures)), failures[0].exit_code)


@command("status", short_help="Which workers run in the background of this project.")
@json_option
@click.pass_obj
def status(flags: Flags, /, *, as_json: bool) -> None:
    """The workers that were started in the background of this folder. Exits with 3 if none runs.

    Passwords in URLs are not shown. `penstock workers` shows all workers of the store, wherever they run.
    """
    settings = Settings(flags)
    rows: list[tuple[Any, ...]] = []
    for place in places(settings.project):
        if (record := place.record) is not None:
            rows.append(
                (
                    place.name,
                    record.pid,
                    (exact if as_json else when)(record.started_at_ms),
                    " ".join(map(shown_argument, record.arguments)),
                    record.store,
                    place.log_file,
                )
            )
        else:
            rows.append((place.name, None, "died", "", "", place.log_file))
    names = ("name", "pid", "since", "options", "store", "log")
    if as_json:
        print_json([dict(zip(names, (*row[:5], str(row[5])), strict=True)) for row in rows])
    else:
        print_table(names, rows, empty=_none_runs(settings), spare=("since", "log", "options", "store"))
    if not any(row[1] for row in rows):
        click.get_current_context().exit(ExitCode.NOT_FOUND)


def _start(place: Place, arguments: list[str], surroundings: Surroundings | None = None) -> None:
    pid = start_worker(place, arguments, surroundings)
    store = _of(record) if (record := place.record) is not None else ""
    click.echo(f"{place.name} runs (process {pid}{store}), log {place.log_file}")


def _of(record: PidRecord) -> str:
    return f", store {record.store}" if record.store else ""


def _none_runs(settings: Settings) -> str:
    return f"no worker runs in the background of {settings.project.root}"


def _stop(settings: Settings, names: tuple[str, ...], timeout: str | None) -> list[tuple[Place, PidRecord]]:
    """Stop the workers of these names, or all. Return their places and what their pid files said."""
    patience_s = None if timeout is None else milliseconds(timeout) / 1000
    known = {place.name: place for place in places(settings.project) if place.record is not None}
    for name in names:
        if name not in known:
            meant = did_you_mean(name, list(known), otherwise=_none_runs(settings).capitalize() + ".")
            raise NotFound(f"no worker {name!r} runs here. {meant}")
    chosen = [known[name] for name in dict.fromkeys(names)] or places(settings.project)
    if known and sys.stderr.isatty():
        click.echo("waiting for their jobs; Ctrl-C ends the wait, and they stop all the same", err=True)
    ended = []
    for place, record, gracefully in stop_workers(chosen, patience_s=patience_s):
        click.echo(f"{place.name} {'has stopped' if gracefully else 'was killed: it did not stop in time'}")
        ended.append((place, record))
    return ended
