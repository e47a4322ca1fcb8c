"""``penstock top``: queues, workers and jobs on one screen."""

from __future__ import annotations

import sys
from typing import Final

import click

from penstock.cli.connect import run_with_app
from penstock.cli.errors import CommandLineError, ExitCode
from penstock.cli.output import at_terminal
from penstock.cli.parameters import Flags, command, every_option
from penstock.cli.settings import Settings

_SUMMARY: Final = "Show queues, workers and jobs on one screen, with keys to act on them."
KEYS: Final = """\
up, down       choose a job
left, right    show the jobs of another state
enter          show the job: its facts, timeline and log
r              retry it
c              cancel it
x              remove it
p              pause or resume its queue
P              pause or resume all queues
tab            move to the queues; enter shows one of them
esc            go back to all jobs
?              show these keys
q              quit"""


@command("top", help=f"{_SUMMARY}\n\n\b\n{KEYS}")
@every_option
@click.pass_obj
def top(flags: Flags, /, *, every: float) -> None:
    """Open the screen until the user quits."""
    if not at_terminal() or not sys.stdin.isatty():
        raise CommandLineError(
            "top needs a terminal. In a pipe, use: penstock status --watch", ExitCode.USAGE
        )
    settings = Settings(flags)

    # Imported here, so that other commands start without textual.
    from penstock.cli.topscreen import TopScreen

    run_with_app(settings, lambda app: TopScreen(app, every=every).run_async())
