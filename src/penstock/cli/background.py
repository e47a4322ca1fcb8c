"""``penstock worker start``, ``stop``, ``restart`` and ``status``: the background workers of a project."""

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
from penstock.cli.errors import CommandLineError, ExitCode, InvalidUsage, NotFound, WrongState
from penstock.cli.output import exact, print_json, print_table, when
from penstock.cli.parameters import PlainCommand, command, json_option, option
from penstock.cli.pidfiles import (
    PidRecord,
    Surroundings,
    await_stop,
    private,
    read_record,
    request_stop,
    running,
)
from penstock.cli.settings import Settings
from penstock.cli.synonyms import did_you_mean
from penstock.cli.values import whole
from penstock.core.units import milliseconds

if TYPE_CHECKING:
    from penstock.cli.settings import Project


_STARTING_S: Final = 60.0
_LOOK_EVERY_S: Final = 0.05
# After its grace, a worker hands back its jobs and settles them.
_BEYOND_GRACE_S: Final = 15.0


class BackgroundWorker(NamedTuple):
    """A background worker of a project, known by its files."""

    name: str
    pid_file: Path
    log_file: Path

    @classmethod
    def of(cls, project: Project, number: int) -> BackgroundWorker:
        """Return the worker with this number."""
        folder = project.folder / "workers"
        name = f"worker-{number}"
        return cls(name, folder / f"{name}.pid", folder / f"{name}.log")

    @property
    def record(self) -> PidRecord | None:
        """Return what the pid file says, if the worker runs."""
        return running(self.pid_file)

    @property
    def last_log_line(self) -> str:
        """Return the last line of the log."""
        if not self.log_file.exists():
            return ""
        text = self.log_file.read_text(encoding="utf-8", errors="replace").rstrip()
        return text.rpartition("\n")[2].strip()


def background_workers(project: Project) -> list[BackgroundWorker]:
    """Return the workers that have a pid file, by number."""
    files = (project.folder / "workers").glob("worker-*.pid")
    numbers = (path.stem.removeprefix("worker-") for path in files)
    return [BackgroundWorker.of(project, number) for number in sorted(int(n) for n in numbers if n.isdigit())]


def start_worker(
    worker: BackgroundWorker, arguments: list[str], surroundings: Surroundings | None = None
) -> int:
    """Start ``penstock worker run`` in the background, and return its process id as soon as it claims jobs.

    ``surroundings`` (default: those of this process) lead it to its store. Raise ``WrongState`` if it already runs, and
    ``CommandLineError`` with the last line of its log if the worker does not start.
    """
    if (record := worker.record) is not None:
        raise WrongState(
            f"{worker.name} is already running (process {record.pid}). Use `penstock worker restart`, or stop it first."
        )
    process = _launch(worker, arguments, surroundings or Surroundings.here())
    deadline = time.monotonic() + _STARTING_S
    while process.poll() is None and time.monotonic() < deadline:
        record = read_record(worker.pid_file)
        if record is not None and record.pid == process.pid and record.ready:
            return process.pid
        time.sleep(_LOOK_EVERY_S)
    if process.poll() is None:
        process.kill()
        raise CommandLineError(
            f"{worker.name} was not ready within {_STARTING_S:.0f} s. See {worker.log_file}."
        )
    if process.returncode == 0:
        # A burst that finished before the first look.
        return process.pid
    code = next((code for code in ExitCode if code == process.returncode), ExitCode.FAILED)
    raise CommandLineError(
        f"{worker.name} did not start: {worker.last_log_line.removeprefix('penstock: ')}", code
    )


def _launch(
    worker: BackgroundWorker, arguments: list[str], surroundings: Surroundings
) -> subprocess.Popen[bytes]:
    """Start the process of a worker, with its log file as output."""
    if not Path(surroundings.folder).is_dir():
        raise NotFound(f"{worker.name} did not start: its folder {surroundings.folder} no longer exists.")
    worker.log_file.parent.mkdir(parents=True, exist_ok=True)
    run = [sys.executable, "-m", "penstock", "worker", "run"]
    with open(worker.log_file, "ab", opener=private) as log:
        return subprocess.Popen(
            [*run, *arguments, "--pid-file", str(worker.pid_file.absolute())],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd=surroundings.folder,
            env=surroundings.environment,
        )


def stop_workers(
    workers: list[BackgroundWorker], *, patience_s: float | None = None
) -> Iterator[tuple[BackgroundWorker, PidRecord, bool]]:
    """Stop these workers. Yield each as it exits, with its record and whether it exited by itself.

    All workers get the signal before the first wait; otherwise one would take the jobs that another hands back. Each
    has its own grace and fifteen seconds, or ``patience_s``.
    """
    stopping = []
    for worker in workers:
        if (record := worker.record) is None:
            worker.pid_file.unlink(missing_ok=True)
            continue
        request_stop(record)
        patience = record.grace_ms / 1000 + _BEYOND_GRACE_S if patience_s is None else patience_s
        stopping.append((worker, record, time.monotonic() + patience))
    for worker, record, deadline in stopping:
        yield worker, record, await_stop(worker.pid_file, record, deadline=deadline)


# Commands


_timeout_option = option("--timeout DURATION", "Kill workers that have not exited by then. [grace and 15 s]")

_names_argument = click.argument("names", metavar="[NAME]...", nargs=-1)


class _WithOptionsOfRun(PlainCommand):
    """The command ``start``, which also completes the options of ``run``."""

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        own = super().shell_complete(ctx, incomplete)
        from penstock.cli.worker import run

        of_run = run.shell_complete(ctx, incomplete) if incomplete.startswith("-") else []
        return own + [item for item in of_run if item.value not in {item.value for item in own}]


@command(
    "start",
    cls=_WithOptionsOfRun,
    short_help="Start workers in the background.",
    context_settings={"ignore_unknown_options": True},
)
@option(
    "-n, --count NUMBER",
    "Total number of workers to run, including those already running. [the key workers, which is 1]",
    whole(1),
)
@click.argument("options", metavar="[MODULE:APP] [OPTIONS OF RUN]...", nargs=-1, type=click.UNPROCESSED)
def start(settings: Settings, *, count: int | None, options: tuple[str, ...]) -> None:
    """Start workers in the background, with the options of `penstock worker run`.

    \b
      penstock worker start --count 4 myproject.jobs:app -c 8

    Their pid files and logs are in .penstock/workers: they belong to this folder, whatever their store. The command
    returns when they claim jobs, or prints why they do not. With one running, -n 3 starts two more.
    """
    if options[:1] and options[0].isdigit():
        raise InvalidUsage(f"give the number of workers with -n {options[0]}.")
    settings.project.make_folder()
    arguments = [*options, *(f"--{name}={value}" for name, value in settings.flags.given.items())]
    targets = [BackgroundWorker.of(settings.project, n + 1) for n in range(count or settings["workers"])]
    running = {worker: record for worker in targets if (record := worker.record) is not None}
    lines = [
        f"{worker.name} is already running (process {record.pid}{_of(record)})"
        for worker, record in running.items()
    ]
    if len(running) == len(targets):
        raise WrongState(
            f"{'; '.join(lines)}. Nothing was started. Give -n {len(targets) + 1} to start another one. "
            "`penstock worker restart` restarts them with the same options; to change their options, stop them first."
        )
    for line in lines:
        click.echo(line)
    for worker in targets:
        if worker not in running:
            _start(worker, arguments)


@command("stop", short_help="Stop the workers in the background.")
@_names_argument
@_timeout_option
def stop(settings: Settings, *, names: tuple[str, ...], timeout: str | None) -> None:
    """Stop the workers in the background, or those with these NAMEs, such as worker-2. Within their grace they finish
    their jobs; then they hand back the rest.

    A worker that has not exited after its grace and fifteen seconds, or --timeout, is killed; its jobs run again.
    """
    if not _stop(settings, names, timeout):
        click.echo(_none_runs(settings), err=True)


@command("restart", short_help="Stop them, and start them again with the same options.")
@_names_argument
@_timeout_option
def restart(settings: Settings, *, names: tuple[str, ...], timeout: str | None) -> None:
    """Stop the workers in the background, or those with these NAMEs, and start them again with the same options.

    They also keep the folder and the PENSTOCK_ variables that they were started with, and so their store.
    """
    before = _stop(settings, names, timeout)
    if not before:
        raise WrongState(f"{_none_runs(settings)}. Start one with `penstock worker start`.")
    failures: list[CommandLineError] = []
    for worker, record in before:
        try:
            _start(worker, record.arguments, record.surroundings)
        except CommandLineError as failure:
            failures.append(failure)
    if failures:
        raise CommandLineError(" ".join(map(str, failures)), failures[0].exit_code)


@command("status", short_help="List the background workers of this project.")
@json_option
def status(settings: Settings, *, as_json: bool) -> None:
    """List the workers that were started in the background of this folder. Exits with 3 if none runs.

    Passwords in URLs are not shown. `penstock workers` lists all workers of the store, on all machines.
    """
    rows: list[tuple[Any, ...]] = []
    for worker in background_workers(settings.project):
        if (record := worker.record) is not None:
            rows.append(
                (
                    worker.name,
                    record.pid,
                    (exact if as_json else when)(record.started_at_ms),
                    " ".join(map(shown_argument, record.arguments)),
                    record.store,
                    worker.log_file,
                )
            )
        else:
            rows.append((worker.name, None, "died", "", "", worker.log_file))
    names = ("name", "pid", "since", "options", "store", "log")
    if as_json:
        print_json([dict(zip(names, (*row[:5], str(row[5])), strict=True)) for row in rows])
    else:
        print_table(names, rows, empty=_none_runs(settings), spare=("since", "log", "options", "store"))
    if not any(row[1] for row in rows):
        click.get_current_context().exit(ExitCode.NOT_FOUND)


def _start(worker: BackgroundWorker, arguments: list[str], surroundings: Surroundings | None = None) -> None:
    pid = start_worker(worker, arguments, surroundings)
    store = _of(record) if (record := worker.record) is not None else ""
    click.echo(f"{worker.name} runs (process {pid}{store}), log {worker.log_file}")


def _of(record: PidRecord) -> str:
    return f", store {record.store}" if record.store else ""


def _none_runs(settings: Settings) -> str:
    return f"no worker runs in the background of {settings.project.root}"


def _stop(
    settings: Settings, names: tuple[str, ...], timeout: str | None
) -> list[tuple[BackgroundWorker, PidRecord]]:
    """Stop the workers with these names, or all. Return them with their records."""
    patience_s = None if timeout is None else milliseconds(timeout) / 1000
    running = {
        worker.name: worker for worker in background_workers(settings.project) if worker.record is not None
    }
    for name in names:
        if name not in running:
            rest = f"Running: {', '.join(running)}." if running else f"{_none_runs(settings).capitalize()}."
            raise NotFound(
                f"no worker {name!r} runs here. {did_you_mean(name, list(running), otherwise=rest)}"
            )
    chosen = [running[name] for name in dict.fromkeys(names)] or background_workers(settings.project)
    if running and sys.stderr.isatty():
        click.echo("waiting for their jobs; Ctrl-C stops waiting, but not their shutdown", err=True)
    stopped = []
    for worker, record, is_graceful in stop_workers(chosen, patience_s=patience_s):
        click.echo(f"{worker.name} {'has stopped' if is_graceful else 'was killed: it did not stop in time'}")
        stopped.append((worker, record))
    return stopped
