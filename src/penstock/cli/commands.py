"""The commands there are, and the group that imports one when it is called.

A command is a row of ``COMMANDS``: what the help says of it in one line stands here, so that the help imports nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import Final, NamedTuple

import click

from penstock import __version__
from penstock.cli.parameters import Family, global_options


class Row(NamedTuple):
    """Where a command is, under which heading it is listed, and what it does."""

    target: str
    heading: str
    summary: str


_JOBS, _QUEUES, _WORKERS, _TABLES, _SETUP = "Jobs", "Queues", "Workers", "Tables", "Setup"

COMMANDS: Final[dict[str, Row]] = {
    "enqueue": Row("enqueue:enqueue", _JOBS, "Put in a command, a task, or thousands of either from a file."),
    "list": Row("jobs:list_", _JOBS, "Jobs by state."),
    "show": Row("jobs:show", _JOBS, "One job: what it is, and its life as a timeline."),
    "why": Row("jobs:why", _JOBS, "Why a job does not run, and what to do about it."),
    "logs": Row("jobs:logs", _JOBS, "What a job has printed; --follow shows it live."),
    "wait": Row("waiting:wait", _JOBS, "Wait until jobs have ended; the exit code says how."),
    "search": Row("search:search", _JOBS, "Jobs by task, time, error or payload."),
    "cancel": Row("operate:cancel", _JOBS, "Cancel jobs: those that wait end, those that run are stopped."),
    "retry": Row("operate:retry", _JOBS, "Have failed or cancelled jobs run again."),
    "promote": Row("operate:promote", _JOBS, "Have scheduled jobs run now."),
    "remove": Row("operate:remove", _JOBS, "Delete jobs."),
    "reset": Row("operate:reset", _JOBS, "Take active jobs from their workers, to run again."),
    "reset-stale": Row("operate:reset_stale", _JOBS, "The same for jobs that have been active for too long."),
    "signal": Row("operate:signal", _JOBS, "Send a signal to a job that waits for it."),
    "dlq": Row("dlq:dlq", _JOBS, "Jobs that failed for good: list, show, retry, clear."),
    "status": Row(
        "status:status", _QUEUES, "Counts by queue and state, rates, workers; --watch shows it live."
    ),
    "top": Row("top:top", _QUEUES, "All of it live on one screen, with keys to act."),
    "events": Row("events:events", _QUEUES, "What happened to every job; --follow shows it live."),
    "schedule": Row(
        "schedule:schedule", _QUEUES, "Jobs that come again: add, list, run, remove, pause, resume."
    ),
    "limit": Row("limit:limit", _QUEUES, "How many at a time, how many in a stretch of time: set, show."),
    "budget": Row("limit:budget", _QUEUES, "How much the jobs of a queue may use: set, show, remove."),
    "pause": Row("queues:pause", _QUEUES, "Give workers no further jobs, of one queue or of all."),
    "resume": Row("queues:resume", _QUEUES, "The end of a pause."),
    "drain": Row("queues:drain", _QUEUES, "Remove all jobs that wait."),
    "clean": Row("queues:clean", _QUEUES, "Remove jobs that ended, by state and age."),
    "clear": Row("queues:clear", _QUEUES, "Remove all jobs, whatever their state."),
    "worker": Row(
        "worker:worker", _WORKERS, "Run jobs, here or in the background: start, stop, restart, status."
    ),
    "workers": Row("status:workers", _WORKERS, "All workers of the store, wherever they run."),
    "spark": Row("spark:spark", _TABLES, "A task on every row of a table; the results are rows of another."),
    "history": Row("history:history", _TABLES, "What happened in the queues, as tables and as a page."),
    "archive": Row("history:archive", _TABLES, "Move jobs that have ended into a table."),
    "doctor": Row("doctor:doctor", _SETUP, "Check server, clock, libraries and records; say what to do."),
    "backup": Row("doctor:backup", _SETUP, "Write a copy of the store to a file while workers run."),
    "restore": Row("doctor:restore", _SETUP, "Replace the store by a backup."),
    "config": Row("config:config", _SETUP, "Show and set what commands go by: store, queue, attempts ..."),
    "completion": Row(
        "completion:completion", _SETUP, "Print the script that completes commands in your shell."
    ),
}


class LazyGroup(Family):
    """Knows its commands by name, and imports one when it is called."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, ["--version"] if args == ["version"] else args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        row = COMMANDS.get(cmd_name)
        if row is None:
            return None
        module, _, name = row.target.partition(":")
        command: click.Command = getattr(import_module(f"penstock.cli.{module}"), name)
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
    """A durable job queue, run from a shell.

    \b
      penstock enqueue 'make report'        put a command in; prints its id
      penstock worker                       run what is in, until Ctrl-C
      penstock status                       how many wait, run, have failed
      penstock logs ID                      what a command printed
      penstock dlq retry --all              have those that failed run again

    Jobs are kept in penstock.db in this folder, unless --url, PENSTOCK_URL or `penstock config set url` says
    otherwise: sqlite:///path for one machine, valkey://host for many. `penstock COMMAND --help` has more of each.
    """
