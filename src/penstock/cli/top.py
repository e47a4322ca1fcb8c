"""``penstock top``: queues, workers and jobs on one screen, with keys to act."""

from __future__ import annotations

import sys

import click

from penstock.cli.connect import run_with_app
from penstock.cli.errors import CommandLineError, ExitCode
from penstock.cli.flags import Flags
from penstock.cli.output import at_terminal
from penstock.cli.parameters import command, every_option
from penstock.cli.settings import Settings

__all__ = ["top"]


@command("top")
@every_option
@click.pass_obj
def top(flags: Flags, /, *, every: float) -> None:
    """Show queues, workers and jobs on one screen, and act on them with keys.

    \b
      up, down       choose a job
      left, right    show the jobs of another state
      enter          show the job: its facts, timeline, log and traceback
      r              retry it
      c              cancel it
      x              remove it
      p              pause or resume its queue
      P              pause or resume all queues
      tab            move to the queues; enter there shows the jobs of one queue
      q              quit
    """
    if not at_terminal() or not sys.stdin.isatty():
        raise CommandLineError(
            "top needs a terminal. In a pipe, use: penstock status --watch", ExitCode.USAGE
        )
    settings = Settings(flags)

    # Imported here: no other command needs it, and `penstock --help` stays quick.
    from penstock.cli.topscreen import TopScreen

    run_with_app(settings, lambda app: TopScreen(app, settings["queue"], every=every).run_async())
