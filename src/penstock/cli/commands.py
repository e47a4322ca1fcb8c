"""The table of commands, and the group that imports a command when it is called.

The table has the one-line summaries, so that ``penstock --help`` imports no command.

``penstock completion`` is here too, with the queues and ids that a shell completes. A completion that fails or takes
too long returns nothing: the user only pressed a key.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click

from penstock import __version__
from penstock.cli.parameters import STATES, Family, Flags, command, global_options

if TYPE_CHECKING:
    from penstock.client.app import App


class Row(NamedTuple):
    """The location of a command, its heading in the help, and its summary."""

    target: str
    heading: str
    summary: str


class JobVerb(NamedTuple):
    """A command that applies the verb of its name to jobs, by their ids: all that is special about it.

    ``states`` are those of the ids that shells complete. ``done`` and ``refused`` are the answers of the verb, in words
    that follow the id of a job.
    """

    summary: str
    help: str
    states: tuple[str, ...]
    done: Mapping[str, str]
    refused: Mapping[str, str]


JOB_VERBS: Final = {
    "retry": JobVerb(
        "Run failed or cancelled jobs again.",
        "Run failed or cancelled jobs again, with all their attempts.",
        ("failed", "cancelled"),
        {"retried": "waits again"},
        {"not_failed": "has neither failed nor been cancelled, so there is nothing to retry"},
    ),
    "promote": JobVerb(
        "Run scheduled jobs now.",
        "Run scheduled jobs as soon as a worker is free, before they are due.",
        ("scheduled",),
        {"promoted": "waits now"},
        {
            "not_scheduled": "is not scheduled, or staged by a write that has not committed; see `penstock why`"
        },
    ),
    "remove": JobVerb(
        "Delete jobs.",
        "Delete jobs with their logs and results. Active jobs are refused: cancel them first.",
        tuple(state for state in STATES if state != "active"),
        {"removed": "removed"},
        {"active": "is active: cancel it first, or take it from its worker with `penstock reset`"},
    ),
}

_JOBS, _QUEUES, _WORKERS, _TABLES, _SETUP = "Jobs", "Queues", "Workers", "Tables", "Setup"

COMMANDS: Final[dict[str, Row]] = {
    "enqueue": Row(
        "enqueue:enqueue", _JOBS, "Enqueue a command, a task, or thousands of either from a file."
    ),
    "list": Row("jobs:list_", _JOBS, "List jobs by state."),
    "show": Row("jobs:show", _JOBS, "Show a job and its timeline."),
    "why": Row("jobs:why", _JOBS, "Say why a job is not running, and what to do about it."),
    "logs": Row("jobs:logs", _JOBS, "Print the output of a job; --follow prints it live."),
    "wait": Row("waiting:wait", _JOBS, "Wait for jobs to end; the exit code says how they ended."),
    "search": Row("search:search", _JOBS, "Find jobs by task, time, error or payload."),
    "cancel": Row("operate:cancel", _JOBS, "Cancel jobs, and stop those that run."),
    **{name: Row("operate:BY_ID", _JOBS, verb.summary) for name, verb in JOB_VERBS.items()},
    "reset": Row("operate:reset", _JOBS, "Take active jobs from their workers and run them again."),
    "reset-stale": Row("operate:reset_stale", _JOBS, "Reset jobs that have been active for too long."),
    "signal": Row("operate:signal", _JOBS, "Send a signal to a job that waits for it."),
    "dlq": Row("search:dlq", _JOBS, "List, show, retry or remove jobs that failed permanently."),
    "status": Row(
        "status:status",
        _QUEUES,
        "Show counts by queue and state, rates and workers; --watch for a live view.",
    ),
    "top": Row("status:top", _QUEUES, "Watch queues, workers and jobs on one screen, and act on them."),
    "events": Row("waiting:events", _QUEUES, "Print every change of every job; --follow prints them live."),
    "schedule": Row("schedule:schedule", _QUEUES, "Add, list, run, remove, pause or resume recurring jobs."),
    "limit": Row("limit:limit", _QUEUES, "Set or show limits on concurrency and rate."),
    "budget": Row(
        "limit:budget", _QUEUES, "Set, show or remove budgets: how much the jobs of a queue may use."
    ),
    "pause": Row("queues:pause", _QUEUES, "Stop workers from starting jobs of one queue or of all."),
    "resume": Row("queues:resume", _QUEUES, "End a pause."),
    "drain": Row("queues:drain", _QUEUES, "Remove all waiting jobs."),
    "clean": Row("queues:clean", _QUEUES, "Remove jobs that have ended, by state and age."),
    "clear": Row("queues:clear", _QUEUES, "Remove all jobs in every state."),
    "worker": Row(
        "worker:worker", _WORKERS, "Run jobs, here or in the background: start, stop, restart, status."
    ),
    "workers": Row("status:workers", _WORKERS, "List all workers of the store, on all machines."),
    "spark": Row(
        "spark:spark", _TABLES, "Run a task on every row of a table, and write the results to another."
    ),
    "history": Row(
        "history:history", _TABLES, "Write the events of the queues to tables, and a report page."
    ),
    "archive": Row("history:archive", _TABLES, "Move jobs that have ended to a table."),
    "doctor": Row("doctor:doctor", _SETUP, "Check server, clock, libraries and records; say what to do."),
    "backup": Row("doctor:backup", _SETUP, "Copy the store to a file while workers run."),
    "restore": Row("doctor:restore", _SETUP, "Replace the store with a backup."),
    "config": Row("config:config", _SETUP, "Show and change settings: store, queue, attempts ..."),
    "completion": Row(
        "commands:completion", _SETUP, "Print the script that completes commands in your shell."
    ),
}


class LazyGroup(Family):
    """A group that imports a command when it is called."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, ["--version"] if args == ["version"] else args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        row = COMMANDS.get(cmd_name)
        if row is None:
            return None
        module, _, name = row.target.partition(":")
        found: Any = getattr(import_module(f"penstock.cli.{module}"), name)
        command: click.Command = found[cmd_name] if isinstance(found, dict) else found
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, COMMANDS))
        for heading in dict.fromkeys(row.heading for row in COMMANDS.values()):
            rows = [(name, row.summary) for name, row in COMMANDS.items() if row.heading == heading]
            with formatter.section(heading):
                formatter.write_dl([(name.ljust(width), summary) for name, summary in rows])


@click.group(
    cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(__version__, prog_name="penstock", message="%(prog)s %(version)s")
@global_options
def penstock() -> None:
    """A durable job queue for the shell.

    \b
      penstock enqueue 'make report'        add a command; prints the id of its job
      penstock worker                       run jobs until Ctrl-C
      penstock status                       count jobs that wait, run or have failed
      penstock logs ID                      print the output of a job
      penstock dlq retry --all              run all failed jobs again

    Jobs are stored in penstock.db in this folder. --url, PENSTOCK_URL or `penstock config set url` choose another
    store: sqlite:///path for one machine, valkey://host for many. `penstock COMMAND --help` explains a command.
    """


_PATIENCE_S: Final = 1.0
_MOST_OFFERED: Final = 50
_MOST_SCANNED: Final = 1_000
_INSTALL: Final = {
    "bash": '~/.bashrc:  eval "$(penstock completion bash)"',
    "zsh": '~/.zshrc, after compinit:  eval "$(penstock completion zsh)"',
    "fish": "~/.config/fish/completions/penstock.fish:  penstock completion fish | source",
}

Completer = Callable[[click.Context, click.Parameter, str], list[str]]


@command(
    "completion", epilog="\b\nTo enable it in every shell, add a line to\n" + "\n".join(_INSTALL.values())
)
@click.argument("shell", metavar="SHELL", type=click.Choice(sorted(_INSTALL)))
def completion(shell: str) -> None:
    """Print the script that completes commands, options, queues and ids in SHELL: bash, zsh or fish.

    \b
      eval "$(penstock completion bash)"      enable it in this shell
    """
    from click.shell_completion import get_completion_class

    script = get_completion_class(shell)
    assert script is not None
    click.echo(script(penstock, {}, "penstock", "_PENSTOCK_COMPLETE").source())


def queue_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return the queues whose names begin with ``incomplete``."""

    async def read(app: App) -> AsyncIterator[str]:
        for name in await app.queues():
            if name.startswith(incomplete):
                yield name

    return _first(ctx, read)


def is_queue(ctx: click.Context, name: str) -> bool:
    """Return whether the store has a queue ``name``; false if the store does not answer soon."""

    async def read(app: App) -> AsyncIterator[str]:
        if name in await app.queues():
            yield name

    return bool(_first(ctx, read))


def ids_in(*states: str) -> Completer:
    """Return a completer of the ids of jobs in these states."""

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
        async def read(app: App) -> AsyncIterator[str]:
            for name in await app.queues():
                for state in states:
                    async for job in app.queue(name).list_jobs(state, limit=_MOST_SCANNED):
                        if job.id.startswith(incomplete) or _is_short_id(job.id, incomplete):
                            yield job.id
                        elif "/" in incomplete and job.ref.startswith(incomplete):
                            yield job.ref

        return _first(ctx, read)

    return complete


def _is_short_id(id: str, incomplete: str) -> bool:
    """Return whether ``incomplete`` is the end of the id, as tables show it. Some shells complete beginnings only."""
    from penstock.cli.jobview import SHORTEST

    return len(incomplete) >= SHORTEST and id.endswith(incomplete)


def _first(ctx: click.Context, read: Callable[[App], AsyncIterator[str]]) -> list[str]:
    """Return the first names that ``read`` yields in time."""
    from penstock.cli.connect import run_with_app
    from penstock.cli.settings import Settings

    names: list[str] = []

    async def collect(app: App) -> None:
        async for name in read(app):
            names.append(name)
            if len(names) >= _MOST_OFFERED:
                return

    try:
        run_with_app(Settings(ctx.find_object(Flags) or Flags()), collect, patience_s=_PATIENCE_S)
    except Exception:
        # The command itself will report the error.
        pass
    return names
