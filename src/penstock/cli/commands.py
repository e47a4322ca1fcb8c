"""The commands there are, and the group that imports one when it is called.

A command is a row of ``COMMANDS``: what the help says of it in one line stands here, so that the help imports nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import Final, NamedTuple

import click

from penstock import __version__
from penstock.cli.parameters import global_options

__all__ = ["COMMANDS", "LazyGroup", "penstock"]


class Row(NamedTuple):
    """Where a command is, under which heading it is listed, and what it does."""

    target: str
    heading: str
    summary: str


_JOBS, _QUEUES, _WORKERS, _SETUP = "Jobs", "Queues", "Workers", "Setup"

COMMANDS: Final[dict[str, Row]] = {
    "config": Row("config:config", _SETUP, "Show and set what commands go by: store, queue, attempts ..."),
    "completion": Row(
        "completion:completion", _SETUP, "Print the script that completes commands in your shell."
    ),
}


class LazyGroup(click.Group):
    """Knows its commands by name, and imports one when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        row = COMMANDS.get(cmd_name)
        if row is None:
            return None
        module, _, name = row.target.partition(":")
        command: click.Command = getattr(import_module(f"penstock.cli.{module}"), name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError:
            from difflib import get_close_matches

            close = get_close_matches(args[0], COMMANDS, n=1)
            meant = f"Did you mean {close[0]!r}?" if close else "See penstock --help for those there are."
            raise click.UsageError(f"there is no command {args[0]!r}. {meant}", ctx) from None

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
      penstock enqueue 'make report'        put a command in
      penstock worker                       run what is in, until Ctrl-C
      penstock status                       see how it goes

    Jobs are kept in penstock.db in this folder, unless --url, PENSTOCK_URL or `penstock config set url` says
    otherwise: sqlite:///path for one machine, valkey://host for many.
    """
