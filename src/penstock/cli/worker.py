"""``penstock worker``: run jobs in the foreground, and with ``--reload`` restart when a Python file changes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from penstock.cli.background import restart, start, status, stop
from penstock.cli.completion import completes_queues
from penstock.cli.connect import import_app, is_local, open_app
from penstock.cli.errors import InvalidUsage
from penstock.cli.output import unguarded
from penstock.cli.parameters import Family, Flags, command_of, family, option
from penstock.cli.pidfiles import Surroundings, held
from penstock.cli.settings import Settings
from penstock.cli.synonyms import advice, known_command, nearest
from penstock.client.session import shown_store

if TYPE_CHECKING:
    from penstock.client.app import App
    from penstock.core.text import LogFormat


_LOOK_EVERY_S: Final = 0.3
_SKIPPED: Final = frozenset({"node_modules", "site-packages", "__pycache__"})


def run_reloading(arguments: list[str], folder: Path) -> int:
    """Run ``penstock worker run`` with these arguments until a signal stops it, and return its exit code.

    Every stop is graceful: the jobs of the old worker finish with the old code. A second Ctrl-C hands them back
    immediately. The worker also stops when the terminal is closed or this process dies.
    """
    stopped = False
    seen = _modified_times(folder)
    # Nothing is written to this pipe: the kernel closes our end when this process is gone.
    lifeline, _ = os.pipe()
    worker = _start(arguments, lifeline)

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopped
        # The shell and the kernel both send SIGHUP when a terminal is closed, so a second one is not a second request.
        if stopped and number != signal.SIGHUP:
            worker.terminate()
        stopped = True

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        # Keep ignored signals ignored: nohup relies on it.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, stop)
    while not stopped:
        time.sleep(_LOOK_EVERY_S)
        now = _modified_times(folder)
        if now != seen:
            changed = next(iter({path for path, _ in now.items() ^ seen.items()}))
            click.echo(f"{changed.relative_to(folder)} has changed: restarting", err=True)
            seen = now
            _end(worker)
            worker = _start(arguments, lifeline)
        elif worker.poll() == 0:
            return 0
    return _end(worker)


def end_with_reloader(lifeline: int) -> None:
    """Stop this worker gracefully when the process at the other end of ``lifeline`` is gone."""
    os.set_inheritable(lifeline, False)

    def watch() -> None:
        os.read(lifeline, 1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="penstock-lifeline", daemon=True).start()


def _start(arguments: list[str], lifeline: int) -> subprocess.Popen[bytes]:
    # The worker has its own session, so that Ctrl-C reaches only this process.
    return subprocess.Popen(
        [sys.executable, "-m", "penstock", "worker", "run", f"--lifeline={lifeline}", *arguments],
        pass_fds=[lifeline],
        start_new_session=True,
    )


def _end(worker: subprocess.Popen[bytes]) -> int:
    worker.terminate()
    return worker.wait()


def _modified_times(folder: Path) -> dict[Path, int]:
    """Return when each Python file below ``folder`` last changed, without hidden folders and installed packages."""
    times: dict[Path, int] = {}
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in _SKIPPED]
        for name in files:
            if name.endswith(".py") and not name.startswith("."):
                path = Path(parent, name)
                try:
                    times[path] = path.stat().st_mtime_ns
                except FileNotFoundError:
                    pass
    return times


# Commands


_NOT_REPEATED: Final = frozenset({"pid_file", "reload", "lifeline"})
_COUNT: Final = re.compile("--count(=.*)?").fullmatch


class _WorkerFamily(Family):
    """The family ``worker``, in which ``penstock worker myapp:app`` is short for ``penstock worker run myapp:app``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        # While a shell completes, the last word is missing, and it may become the name of a command.
        if not args and ctx.resilient_parsing:
            return super().parse_args(ctx, args)
        args = self._with_command_first(args)
        # Check this here: the options of `start` are parsed in the worker, after it has been started.
        if args[:1] == ["start"] and "--reload" in args and not ctx.resilient_parsing:
            raise InvalidUsage(
                "--reload is for a worker in the foreground: one in the background is for production. "
                "Leave out `start`, or leave out --reload and use `penstock worker restart` after a change."
            )
        _refuse_order_of_celery(args)
        self._refuse_misspelt(args, ctx)
        if not args or not self._names_command(args[0]):
            args = ["run", *args]
        return super().parse_args(ctx, args)

    def _refuse_misspelt(self, args: list[str], ctx: click.Context) -> None:
        """Raise ``CommandLineError`` for a word that looks like a misspelt command and is not an app."""
        if not args or ":" in args[0] or self._names_command(args[0]) or ctx.resilient_parsing:
            return
        if args[0].isdigit():
            raise InvalidUsage(
                f"unexpected argument {args[0]!r}. For {args[0]} jobs at a time, give -c {args[0]}."
            )
        is_module = Path(args[0]).is_dir() or Path(f"{args[0]}.py").exists()
        if not is_module and (meant := nearest(args[0], list(self.commands))):
            raise InvalidUsage(
                f"{args[0]!r} is neither a command nor an app, as in MODULE:NAME. "
                f"Did you mean `penstock worker {meant[0]}`?"
            )

    def _names_command(self, word: str) -> bool:
        """Return whether ``word`` is a command, or a synonym of one."""
        if word in self.commands or word in ("-h", "--help", "help"):
            return True
        return bool(known_command("worker", word) or advice("worker", word))

    def _with_command_first(self, args: list[str]) -> list[str]:
        """Return ``worker --start --count 2`` as ``worker start --count 2``: only `start` has a count."""
        if args and args[0] in self.commands:
            return args
        for word in args:
            if word.startswith("--") and (meant := known_command("worker", word)):
                return [*meant, *(other for other in args if other != word)]
        return ["start", *args] if any(_COUNT(word) for word in args) else args

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        own = super().shell_complete(ctx, incomplete)
        return own if not incomplete.startswith("-") else self.commands["run"].shell_complete(ctx, incomplete)


def _refuse_order_of_celery(args: list[str]) -> None:
    """Raise ``InvalidUsage`` for ``penstock worker -A shop worker``, as in ``celery -A shop worker``."""
    match args:
        case ["-A" | "--app", app, "worker", *_]:
            target = app if ":" in app else f"{app}:app"
            raise InvalidUsage(f"unexpected argument 'worker'. Use `penstock worker {target}`.")
        case _:
            pass


@family("worker", cls=_WorkerFamily)
def worker() -> None:
    """Run jobs: `penstock worker` here, `penstock worker start` in the background.

    \b
      penstock worker                                shell commands, on a local store
      penstock worker myproject.jobs:app             the tasks of an app
      penstock worker myproject.jobs:app -i mail     also the tasks of module mail
      penstock worker -q mail -q reports=3 --burst   these queues, until they are empty
      penstock worker myproject.jobs:app --reload    restart when a Python file changes
      penstock worker start --count 4 -c 8           four workers in the background
      penstock worker status
      penstock worker stop

    `penstock worker` without a command is `penstock worker run`: see `penstock worker run --help` for all its options.
    """


@command_of(worker, "run", short_help="Run jobs here, until Ctrl-C.")
@click.argument("target", metavar="[MODULE:APP]", required=False)
@option(
    "-i, --include MODULE",
    "Import this module, which defines tasks of the app. May be repeated. [those of App(include=...)]",
    multiple=True,
)
@option(
    "-q, --queues NAME[=WEIGHT]",
    "Work on this queue, or several: a,b. May be repeated. [those of the app's tasks; without one the key queue]",
    multiple=True,
    shell_complete=completes_queues,
)
@option(
    "-c, --concurrency NUMBER", "Number of jobs that run at a time. [100 with an app, else one per processor]"
)
@option("-p, --processes NUMBER", "Number of processes, each with that concurrency. [1]")
@option(
    "--burst",
    "End when no jobs are left, or only paused ones. Waits for delayed jobs, retries, and timed pauses.",
)
@option("--reload", "Restart when a Python file here changes.")
@option(
    "--commands/--no-commands",
    "Run shell commands: anyone who can write to the store can then run anything here. "
    "[only with a local store]",
    default=None,
)
@option("--lease DURATION", "How soon its jobs run again if it dies. [30s]")
@option("--grace DURATION", "How long it lets its jobs finish when it is stopped. [30s]")
@option("--stuck-after DURATION", "Give up its jobs when its event loop has been blocked for this long. [5m]")
@option(
    "--unknown-after DURATION",
    "Fail a job of an unknown task after handing it back for this long. [1h; 0s with --burst]",
)
@option("--limit RATE", 'Maximum rate of starts, such as "100/s".')
@option("--name NAME", "Prefix of its id. [host and process]")
@option("--probe PORT", "Serve health and metrics on this port of the loopback.")
@option(
    "--pid-file FILE",
    "Write the process id to FILE, and refuse to run if another worker holds it.",
    click.Path(dir_okay=False, path_type=Path),
)
@option("--lifeline DESCRIPTOR", "", int, hidden=True)
@option("--live/--no-live", "At a terminal, show a live view, or log lines. [live]", default=True)
@option(
    "--log-format FORMAT",
    "Print log lines as text or JSON. JSON turns the live view off. [text]",
    click.Choice(["text", "json"]),
)
@option("-v, --verbose", "Also log completed jobs.")
def run(
    settings: Settings,
    *,
    target: str | None,
    pid_file: Path | None,
    lifeline: int | None,
    live: bool,
    log_format: LogFormat | None,
    verbose: bool,
    reload: bool,
    include: tuple[str, ...],
    **options: Any,
) -> int:
    """Run jobs here, until Ctrl-C: running jobs finish first; a second Ctrl-C hands them back immediately.

    MODULE:APP names the app that defines the tasks, such as myproject.jobs:app. Without it, and without the key `app`,
    the worker only runs shell commands.
    """
    if lifeline is not None:
        end_with_reloader(lifeline)
    target = target or settings["app"]
    _check_combination(target, include, pid_file, reload=reload)
    arguments = _arguments(click.get_current_context(), settings, target)
    surroundings = Surroundings.here()
    pid_file = pid_file and pid_file.absolute()
    if reload:
        return run_reloading(arguments, Path.cwd())
    from penstock.cli.workerview import shown

    with ExitStack() as stack:
        stack.enter_context(unguarded())
        app = import_app(settings, target, include=include) if target else _plain_app(settings)
        job_worker = app.worker(**_options(settings, app, target, options))
        if pid_file is not None:
            pid_record = stack.enter_context(
                held(
                    pid_file,
                    arguments,
                    grace_ms=job_worker.options.grace_ms,
                    surroundings=surroundings,
                    store=shown_store(app.url, app.namespace),
                )
            )
            job_worker.on("ready", lambda event: pid_record.tell_ready())
        log_format = log_format or settings["log_format"]
        stack.enter_context(shown(job_worker, live=live, log_format=log_format, verbose=verbose))
        job_worker.run_sync()
    return 0


for _command in (start, stop, restart, status):
    worker.add_command(_command)


def _check_combination(
    target: str | None, include: tuple[str, ...], pid_file: Path | None, *, reload: bool
) -> None:
    """Raise ``CommandLineError`` for options that exclude each other, or need another one."""
    if reload and pid_file is not None:
        raise InvalidUsage(
            "--reload and --pid-file cannot be combined: a pid file is for a worker in the background, --reload for "
            "one in the foreground. Leave out one of them."
        )
    if include and not target:
        raise InvalidUsage(
            "--include needs the app of these tasks. Give MODULE:APP, or set the key app: "
            "penstock config set app myproject.jobs:app"
        )


def _plain_app(settings: Settings) -> App:
    """Return an app that the worker's processes can import; the environment gives them the settings."""
    for key in ("url", "namespace"):
        if settings[key] is not None:
            os.environ[f"PENSTOCK_{key.upper()}"] = settings[key]
    app: App = __getattr__("plain_app")
    return app


def __getattr__(name: str) -> Any:
    """Make ``plain_app`` at its first use: an app without tasks on the configured store."""
    if name != "plain_app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    app = globals()[name] = open_app(Settings(Flags()))
    return app


def _options(settings: Settings, app: App, target: str | None, given: dict[str, Any]) -> dict[str, Any]:
    """Return the options of ``app.worker``: flags first, then settings."""
    options = {name: value for name, value in given.items() if value not in (None, ())}
    for name in ("lease", "grace", "processes", "stuck_after", "unknown_after"):
        if settings[name] is not None:
            options.setdefault(name, settings[name])
    concurrency = settings["concurrency"] or (100 if target else os.cpu_count() or 1)
    options.setdefault("concurrency", concurrency)
    if "queues" in options:
        options["queues"] = dict(map(_weighted, ",".join(options["queues"]).split(",")))
    elif not app.tasks and not app.handlers:
        options["queues"] = [settings["queue"]]
    commands = given["commands"] if given["commands"] is not None else settings["commands"]
    if commands is None:
        # An app without tasks is a mistake to report, not a reason to run commands.
        commands = is_local(app.url) and (target is None or bool(app.tasks or app.handlers))
    options["commands"] = settings["shell"] if commands else False
    if target is None and not commands:
        raise InvalidUsage(
            "this worker has nothing to run: it has no app, and it runs commands of a server only with --commands. "
            "Give MODULE:APP, or --commands."
        )
    return options


def _weighted(text: str) -> tuple[str, float]:
    name, _, weight = text.partition("=")
    try:
        return name, float(weight or 1)
    except ValueError:
        raise InvalidUsage(f"--queues {text}: {weight!r} is not a weight. Give a number.") from None


def _arguments(ctx: click.Context, settings: Settings, target: str | None) -> list[str]:
    """Return the arguments that repeat this command, without the options that say how it is started."""
    arguments = [target] if target else []
    for parameter in ctx.command.params:
        value = ctx.params.get(parameter.name or "")
        if not isinstance(parameter, click.Option) or parameter.name in _NOT_REPEATED:
            continue
        if ctx.get_parameter_source(parameter.name or "") is not ParameterSource.COMMANDLINE:
            continue
        if isinstance(value, bool):
            arguments += (parameter.opts if value else parameter.secondary_opts)[-1:]
        elif value is not None:
            values = value if isinstance(value, tuple) else (value,)
            arguments += [f"{parameter.opts[-1]}={item}" for item in values]
    return arguments + [f"--{name}={value}" for name, value in settings.flags.given.items()]
