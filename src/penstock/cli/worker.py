"""``penstock worker``: run jobs, here or detached."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from penstock.cli.connect import import_app, is_local
from penstock.cli.detached import Place, places, start_worker, stop_worker
from penstock.cli.errors import CommandLineError, ExitCode, WrongState
from penstock.cli.flags import Flags
from penstock.cli.output import print_json, print_table, when
from penstock.cli.parameters import command_of, json_option
from penstock.cli.pidfiles import held
from penstock.cli.settings import Settings

if TYPE_CHECKING:
    from penstock.app import App

__all__ = ["worker"]

_FORCED_S: Final = 60.0


class _RunUnlessNamed(click.Group):
    """``penstock worker myapp:app`` is ``penstock worker run myapp:app``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0] not in ("-h", "--help")):
            args = ["run", *args]
        return super().parse_args(ctx, args)


@click.group("worker", cls=_RunUnlessNamed, context_settings={"help_option_names": ["-h", "--help"]})
def worker() -> None:
    """Run jobs: `penstock worker` here, `penstock worker start` in the background.

    \b
      penstock worker                                shell commands, on a local store
      penstock worker myproject.jobs:app             the tasks of an app
      penstock worker -q mail -q reports=3 --burst   these queues, until they are empty
      penstock worker start --count 4                four in the background
      penstock worker stop

    `penstock worker run --help` has all options.
    """


@command_of(worker, "run")
@click.argument("target", metavar="[MODULE:APP]", required=False)
@click.option(
    "-q", "--queues", metavar="NAME[=WEIGHT]", multiple=True, help="Work on this queue; may be repeated."
)
@click.option("-c", "--concurrency", type=int, help="So many jobs at a time.")
@click.option("-p", "--processes", type=int, help="So many processes like this one.")
@click.option("--burst", is_flag=True, help="End when the queues are empty, or paused.")
@click.option("--reload", is_flag=True, help="Start again when a Python file here has changed.")
@click.option(
    "--commands/--no-commands", default=None, help="Run shell commands; by default with a local store only."
)
@click.option("--lease", metavar="DURATION", help="How soon its jobs come back if it dies.")
@click.option("--grace", metavar="DURATION", help="How long it lets its jobs finish when it is stopped.")
@click.option("--limit", metavar="RATE", help='Start at most so many, such as "100/s".')
@click.option("--name", help="What its id begins with.")
@click.option("--probe", metavar="PORT", help="Serve health and metrics there, on the loopback.")
@click.option(
    "--pid-file", type=click.Path(dir_okay=False, path_type=Path), help="Refuse to run twice with one file."
)
@click.option("--live/--no-live", default=True, help="The live view, at a terminal.")
@click.option("-v", "--verbose", is_flag=True, help="Log jobs that completed, too.")
@click.pass_context
def run(
    ctx: click.Context,
    /,
    *,
    target: str | None,
    pid_file: Path | None,
    live: bool,
    verbose: bool,
    reload: bool,
    **options: Any,
) -> int:
    """Run jobs here, until Ctrl-C: running jobs finish first; a second Ctrl-C hands them back at once.

    MODULE:APP is where tasks are defined. Without it, and without `app` in the configuration, it runs shell commands.
    """
    settings = Settings(ctx.find_object(Flags) or Flags())
    target = target or settings["app"]
    arguments = _arguments(ctx, target)
    if reload:
        from penstock.cli.reloading import run_reloading

        return run_reloading(arguments, Path.cwd())
    app = import_app(settings, target) if target else _plain_app(settings)
    _check_url_reaches_processes(settings, target, options["processes"])
    from penstock.cli.workerview import shown

    made = app.worker(**_options(settings, app, target, options))
    with ExitStack() as stack:
        if pid_file is not None:
            mine = stack.enter_context(held(pid_file.absolute(), arguments))
            made.on("ready", lambda event: mine.tell_ready())
        stack.enter_context(shown(made, live=live, verbose=verbose))
        made.run_sync()
    return 0


@command_of(worker, "start", context_settings={"ignore_unknown_options": True})
@click.option(
    "-n", "--count", type=click.IntRange(1, 1000), default=1, show_default=True, help="So many of them."
)
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
@click.pass_obj
def start(flags: Flags, /, *, count: int, options: tuple[str, ...]) -> None:
    """Start workers in the background, with the OPTIONS of `penstock worker run`.

    Their pid files and logs are in .penstock/workers. Returns when they claim jobs.
    """
    settings = Settings(flags)
    settings.project.make_folder()
    arguments = [*options, *(f"--{name}={value}" for name, value in flags.given.items())]
    for place in (Place.of(settings.project, number) for number in range(1, count + 1)):
        record = start_worker(place, arguments)
        click.echo(f"{place.name} runs (process {record.pid}), log {place.log_file}")


@command_of(worker, "stop")
@click.option(
    "--timeout", metavar="SECONDS", type=float, help="Kill those that have not ended by then. [grace + 15]"
)
@click.pass_obj
def stop(flags: Flags, /, *, timeout: float | None) -> None:
    """Stop the workers in the background: they let their jobs finish for their grace, and hand back the rest."""
    settings = Settings(flags)
    if not _stop_all(settings, timeout):
        click.echo("no worker runs in the background", err=True)


@command_of(worker, "restart")
@click.option(
    "--timeout", metavar="SECONDS", type=float, help="Kill those that have not ended by then. [grace + 15]"
)
@click.pass_obj
def restart(flags: Flags, /, *, timeout: float | None) -> None:
    """Stop the workers in the background, and start them again with the options they had."""
    settings = Settings(flags)
    before = _stop_all(settings, timeout)
    if not before:
        raise WrongState("no worker runs in the background. Start some by `penstock worker start`.")
    for place, arguments in before:
        record = start_worker(place, arguments)
        click.echo(f"{place.name} runs (process {record.pid}), log {place.log_file}")


@command_of(worker, "status")
@json_option
@click.pass_obj
def status(flags: Flags, /, *, as_json: bool) -> None:
    """The workers in the background of this project. Exits with 3 if none runs.

    `penstock workers` shows all workers of the store, wherever they run.
    """
    rows: list[tuple[Any, ...]] = []
    for place in places(Settings(flags).project):
        if (record := place.record) is not None:
            rows.append(
                (
                    place.name,
                    record.pid,
                    when(record.started_at_ms),
                    " ".join(record.arguments),
                    place.log_file,
                )
            )
        else:
            rows.append((place.name, None, "died", "", place.log_file))
    names = ("name", "pid", "since", "options", "log")
    if as_json:
        print_json([dict(zip(names, (*row[:4], str(row[4])), strict=True)) for row in rows])
    else:
        print_table(names, rows, empty="no worker runs in the background")
    if not any(row[1] for row in rows):
        click.get_current_context().exit(ExitCode.NOT_FOUND)


def _stop_all(settings: Settings, timeout: float | None) -> list[tuple[Place, list[str]]]:
    """End all that run; their places, and what they were started with."""
    patience_s = _patience_s(settings) if timeout is None else timeout
    ended = []
    for place in places(settings.project):
        stopped = stop_worker(place, patience_s=patience_s)
        if stopped is not None:
            record, gracefully = stopped
            click.echo(
                f"{place.name} {'has stopped' if gracefully else 'was killed: it did not stop in time'}"
            )
            ended.append((place, _without_pid_file(record.arguments)))
    return ended


def _patience_s(settings: Settings) -> float:
    from penstock.core.duration import milliseconds

    return milliseconds(settings["grace"]) / 1000 + 15


def _plain_app(settings: Settings) -> App:
    """An app that the processes of the worker can import; they find the settings in the environment."""
    for key in ("url", "namespace"):
        if settings[key] is not None:
            os.environ[f"PENSTOCK_{key.upper()}"] = settings[key]
    from penstock.cli.plainapp import app

    return app


def _check_url_reaches_processes(settings: Settings, target: str | None, processes: int | None) -> None:
    given = settings.setting("url").origin.kind == "flag"
    if target and given and (processes or settings["processes"]) > 1:
        raise CommandLineError(
            "--url does not reach the further processes of an app that names its store. Leave the URL out of the code "
            "(App()) and use PENSTOCK_URL, or start several workers.",
            ExitCode.USAGE,
        )


def _options(settings: Settings, app: App, target: str | None, given: dict[str, Any]) -> dict[str, Any]:
    """What ``app.worker`` takes: flags first, then settings."""
    options = {name: value for name, value in given.items() if value not in (None, ())}
    for name in ("lease", "grace", "processes"):
        options.setdefault(name, settings[name])
    concurrency = settings["concurrency"] or (100 if target else os.cpu_count() or 1)
    options.setdefault("concurrency", concurrency)
    if "queues" in options:
        options["queues"] = dict(map(_weighted, options["queues"]))
    elif not app.tasks:
        options["queues"] = [settings["queue"]]
    commands = given["commands"] if given["commands"] is not None else settings["commands"]
    options["commands"] = (
        settings["shell"] if (is_local(app.url) if commands is None else commands) else False
    )
    return options


def _weighted(text: str) -> tuple[str, float]:
    name, _, weight = text.partition("=")
    try:
        return name, float(weight or 1)
    except ValueError:
        raise CommandLineError(
            f"--queues {text}: {weight!r} is no weight. Give a number.", ExitCode.USAGE
        ) from None


def _arguments(ctx: click.Context, target: str | None) -> list[str]:
    """The options of this command as they can be given again, without those that say how it is started."""
    arguments = [target] if target else []
    for parameter in ctx.command.params:
        value = ctx.params.get(parameter.name or "")
        if not isinstance(parameter, click.Option) or parameter.name in ("pid_file", "reload"):
            continue
        if isinstance(value, bool):
            arguments += (parameter.opts if value else parameter.secondary_opts)[-1:]
        elif value is not None:
            values = value if isinstance(value, tuple) else (value,)
            arguments += [f"{parameter.opts[-1]}={one}" for one in values]
    given = (ctx.find_object(Flags) or Flags()).given
    return arguments + [f"--{name}={value}" for name, value in given.items()]


def _without_pid_file(arguments: list[str]) -> list[str]:
    return [text for text in arguments if not text.startswith("--pid-file")]
