"""``penstock worker start``, ``stop``, ``restart``, ``status``: workers in the background of a project."""

from __future__ import annotations

import sys
from typing import Any

import click
from click.shell_completion import CompletionItem

from penstock.cli.config import shown_argument
from penstock.cli.detached import Place, places, start_worker, stop_workers
from penstock.cli.errors import CommandLineError, ExitCode, NotFound, WrongState
from penstock.cli.flags import Flags
from penstock.cli.output import exact, print_json, print_table, when
from penstock.cli.parameters import PlainCommand, command, json_option
from penstock.cli.pidfiles import PidRecord, Surroundings
from penstock.cli.settings import Settings
from penstock.cli.synonyms import did_you_mean
from penstock.cli.values import duration, whole
from penstock.core.duration import milliseconds

__all__ = ["restart", "start", "status", "stop"]

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
