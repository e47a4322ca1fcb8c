"""The table of commands, and the group that imports a command when it is called.

The table has the one-line summaries, so that ``penstock --help`` imports no command.

``penstock completion`` is here too, because it needs the group.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click

from penstock import __version__
from penstock.cli.completion import STATES
from penstock.cli.parameters import Family, command, global_options

if TYPE_CHECKING:
    from penstock.cli.settings import Settings


class Row(NamedTuple):
    """The location of a command, and its summary in the help."""

    target: str
    summary: str


class JobVerb(NamedTuple):
    """The particulars of a command that applies the verb of its name to jobs by their ids.

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

_BY_HEADING: Final[dict[str, dict[str, Row]]] = {
    "Jobs": {
        "enqueue": Row("enqueue:enqueue", "Enqueue a command, a task, or thousands of either from a file."),
        "list": Row("jobs:list_", "List jobs by state."),
        "show": Row("jobs:show", "Show a job and its timeline."),
        "why": Row("jobs:why", "Say why a job is not running, and what to do about it."),
        "logs": Row("jobs:logs", "Print the output of a job; --follow prints it live."),
        "wait": Row("waiting:wait", "Wait for jobs to end; the exit code says how they ended."),
        "search": Row("search:search", "Find jobs by task, time, error or payload."),
        "cancel": Row("operate:cancel", "Cancel jobs, and stop those that run."),
        **{name: Row("operate:BY_ID", verb.summary) for name, verb in JOB_VERBS.items()},
        "reset": Row("operate:reset", "Take active jobs from their workers and run them again."),
        "reset-stale": Row("operate:reset_stale", "Reset jobs that have been active for too long."),
        "signal": Row("operate:signal", "Send a signal to a job that waits for it."),
        "dlq": Row("search:dlq", "List, show, retry or remove jobs that failed permanently."),
    },
    "Queues": {
        "status": Row(
            "status:status", "Show counts by queue and state, rates and workers; --watch for a live view."
        ),
        "top": Row("status:top", "Watch queues, workers and jobs on one screen, and act on them."),
        "events": Row("waiting:events", "Print every change of every job; --follow prints them live."),
        "schedule": Row("schedule:schedule", "Add, list, run, remove, pause or resume recurring jobs."),
        "limit": Row("limit:limit", "Set or show limits on concurrency and rate."),
        "budget": Row("limit:budget", "Set, show or remove budgets: how much the jobs of a queue may use."),
        "pause": Row("queues:pause", "Stop workers from starting jobs of one queue or of all."),
        "resume": Row("queues:resume", "End a pause."),
        "drain": Row("queues:drain", "Remove all waiting jobs."),
        "clean": Row("queues:clean", "Remove jobs that have ended, by state and age."),
        "clear": Row("queues:clear", "Remove all jobs in every state."),
    },
    "Workers": {
        "worker": Row("worker:worker", "Run jobs, here or in the background: start, stop, restart, status."),
        "workers": Row("workers:workers", "List all workers of the store, on all machines."),
    },
    "Tables": {
        "spark": Row("spark:spark", "Run a task on every row of a table, and write the results to another."),
        "history": Row("history:history", "Write the events of the queues to tables, and a report page."),
        "archive": Row("history:archive", "Move jobs that have ended to a table."),
    },
    "Setup": {
        "doctor": Row("doctor:doctor", "Check server, clock, libraries and records; say what to do."),
        "backup": Row("doctor:backup", "Copy the store to a file while workers run."),
        "restore": Row("doctor:restore", "Replace the store with a backup."),
        "config": Row("config:config", "Show and change settings: store, queue, attempts ..."),
        "completion": Row("commands:completion", "Print the script that completes commands in your shell."),
    },
}
COMMANDS: Final = {name: row for rows in _BY_HEADING.values() for name, row in rows.items()}


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
        for heading, rows in _BY_HEADING.items():
            with formatter.section(heading):
                formatter.write_dl([(name.ljust(width), row.summary) for name, row in rows.items()])


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


_INSTALL: Final = {
    "bash": '~/.bashrc:  eval "$(penstock completion bash)"',
    "zsh": '~/.zshrc, after compinit:  eval "$(penstock completion zsh)"',
    "fish": "~/.config/fish/completions/penstock.fish:  penstock completion fish | source",
}


@command(
    "completion", epilog="\b\nTo enable it in every shell, add a line to\n" + "\n".join(_INSTALL.values())
)
@click.argument("shell", metavar="SHELL", type=click.Choice(sorted(_INSTALL)))
def completion(_: Settings, *, shell: str) -> None:
    """Print the script that completes commands, options, queues and ids in SHELL: bash, zsh or fish.

    \b
      eval "$(penstock completion bash)"      enable it in this shell
    """
    from click.shell_completion import get_completion_class

    script = get_completion_class(shell)
    assert script is not None
    click.echo(script(penstock, {}, "penstock", "_PENSTOCK_COMPLETE").source())
