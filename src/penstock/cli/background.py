"""``penstock worker start``, ``stop``, ``restart``, ``status``: workers in the background of a project."""

from __future__ import annotations

from typing import Any

import click
from click.shell_completion import CompletionItem

from penstock.cli.config import shown_argument
from penstock.cli.detached import Place, places, start_worker, stop_workers
from penstock.cli.errors import CommandLineError, ExitCode, WrongState
from penstock.cli.flags import Flags
from penstock.cli.output import exact, print_json, print_table, when
from penstock.cli.parameters import PlainCommand, command, json_option
from penstock.cli.pidfiles import PidRecord, Surroundings
from penstock.cli.settings import Settings
from penstock.cli.values import duration, whole
from penstock.core.duration import milliseconds

__all__ = ["restart", "start", "status", "stop"]

_timeout_option = click.option(
    "--timeout",
    metavar="DURATION",
    type=duration,
    help="Kill those that have not ended by then. [grace and 15 s]",
)


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
    "-n", "--count", metavar="NUMBER", type=whole(1), help="So many of them. [the key workers, which is 1]"
)
@click.argument("options", metavar="[MODULE:APP] [OPTIONS OF RUN]...", nargs=-1, type=click.UNPROCESSED)
@click.pass_obj
def start(flags: Flags, /, *, count: int | None, options: tuple[str, ...]) -> None:
    """Start workers in the background, with the options of `penstock worker run`.

    \b
      penstock worker start --count 4 myproject.jobs:app -c 8

    Their pid files and logs are in .penstock/workers. Returns when they claim jobs, or says why they do not.
    """
    settings = Settings(flags)
    settings.project.make_folder()
    arguments = [*options, *(f"--{name}={value}" for name, value in flags.given.items())]
    numbers = range(1, (count or settings["workers"]) + 1)
    for place in (Place.of(settings.project, number) for number in numbers):
        _start(place, arguments)


@command("stop", short_help="Stop the workers in the background.")
@_timeout_option
@click.pass_obj
def stop(flags: Flags, /, *, timeout: str | None) -> None:
    """Stop the workers in the background: they let their jobs finish for their grace, and hand back the rest.

    One that has not ended after its grace and fifteen seconds, or --timeout, is killed; its jobs come back.
    """
    settings = Settings(flags)
    if not _stop_all(settings, timeout):
        click.echo("no worker runs in the background", err=True)


@command("restart", short_help="Stop them, and start them again with the options they had.")
@_timeout_option
@click.pass_obj
def restart(flags: Flags, /, *, timeout: str | None) -> None:
    """Stop the workers in the background, and start them again with the options they had.

    They also keep the folder and the PENSTOCK_ variables they were started with, and so their store.
    """
    settings = Settings(flags)
    before = _stop_all(settings, timeout)
    if not before:
        raise WrongState("no worker runs in the background. Start some by `penstock worker start`.")
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
    """The workers in the background of this project. Exits with 3 if none runs. Passwords in URLs are not shown.

    `penstock workers` shows all workers of the store, wherever they run.
    """
    rows: list[tuple[Any, ...]] = []
    for place in places(Settings(flags).project):
        if (record := place.record) is not None:
            rows.append(
                (
                    place.name,
                    record.pid,
                    (exact if as_json else when)(record.started_at_ms),
                    " ".join(map(shown_argument, record.arguments)),
                    place.log_file,
                )
            )
        else:
            rows.append((place.name, None, "died", "", place.log_file))
    names = ("name", "pid", "since", "options", "log")
    if as_json:
        print_json([dict(zip(names, (*row[:4], str(row[4])), strict=True)) for row in rows])
    else:
        print_table(names, rows, empty="no worker runs in the background", spare=("since", "log", "options"))
    if not any(row[1] for row in rows):
        click.get_current_context().exit(ExitCode.NOT_FOUND)


def _start(place: Place, arguments: list[str], surroundings: Surroundings | None = None) -> None:
    pid = start_worker(place, arguments, surroundings)
    click.echo(f"{place.name} runs (process {pid}), log {place.log_file}")


def _stop_all(settings: Settings, timeout: str | None) -> list[tuple[Place, PidRecord]]:
    """End all that run; their places, and what their pid files said."""
    patience_s = None if timeout is None else milliseconds(timeout) / 1000
    ended = []
    for place, record, gracefully in stop_workers(places(settings.project), patience_s=patience_s):
        click.echo(f"{place.name} {'has stopped' if gracefully else 'was killed: it did not stop in time'}")
        ended.append((place, record))
    return ended
