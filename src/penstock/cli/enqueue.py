"""``penstock enqueue``: put jobs in."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click

from penstock.cli.bulk import enqueue_lines
from penstock.cli.connect import import_app, open_app, run_app
from penstock.cli.errors import CommandLineError, ExitCode
from penstock.cli.flags import Flags
from penstock.cli.newjobs import NewJobs
from penstock.cli.output import print_json
from penstock.cli.parameters import command, json_option
from penstock.cli.settings import Settings
from penstock.cli.waiting import wait_for

if TYPE_CHECKING:
    from penstock.app import App

__all__ = ["enqueue"]


@command("enqueue", short_help="Put in a command, a task, or thousands of either from a file.")
@click.argument("job", nargs=-1)
@click.option("-f", "--file", metavar="FILE", help="A job on each line; - is standard input.")
@click.option("-t", "--task", metavar="NAME", help="JOB is the JSON arguments of this task, not a command.")
@click.option(
    "--app", "target", metavar="MODULE:APP", help="Where the task is defined: arguments are checked by it."
)
@click.option("-q", "--queue", metavar="NAME", help="Where to put it.")
@click.option("--id", help="The id, which is the dedup key as well; a new one unless given.")
@click.option("--delay", metavar="DURATION", help="Not before that long from now.")
@click.option("--priority", type=int, help="Smaller runs first.")
@click.option(
    "--timeout", metavar="DURATION", help="How long a run may take: then it is killed, and retried."
)
@click.option("--attempts", type=int, help="How often it is run if it fails.")
@click.option("--backoff", metavar="DURATION", help="The rest between attempts; or 'exponential'.")
@click.option("--max-stalls", type=int, help="How often its worker may die before it counts as failed.")
@click.option("--ttl", metavar="DURATION", help="Not finished that long after now, it fails as expired.")
@click.option("--group", metavar="KEY", help="Jobs of one key share its limits, see `penstock limit`.")
@click.option(
    "--after", metavar="ID", multiple=True, help="Wait for this job first; QUEUE/ID for another queue's."
)
@click.option("--cwd", metavar="FOLDER", help="Where the command runs; here, if the store is local.")
@click.option(
    "--env", metavar="NAME[=VALUE]", multiple=True, help="Set a variable; without a value, as it is here."
)
@click.option(
    "-w", "--wait", is_flag=True, help="Wait for its end, print its output, end with its exit code."
)
@click.option("--wait-timeout", metavar="DURATION", help="Wait at most so long; the job goes on.")
@json_option
@click.pass_obj
def enqueue(
    flags: Flags,
    /,
    *,
    job: tuple[str, ...],
    file: str | None,
    task: str | None,
    target: str | None,
    queue: str | None,
    wait: bool,
    wait_timeout: str | None,
    as_json: bool,
    **options: Any,
) -> int:
    """Put in JOB: a command for a shell, or a JSON object. Prints its id.

    \b
      penstock enqueue 'make report'
      penstock enqueue --wait -- pytest -x tests
      penstock enqueue '{"command": "make report", "id": "report-7", "attempts": 5}'
      penstock enqueue --task send '{"to": "ada@example.org"}'
      seq 100000 | sed 's/.*/{"command": "echo &"}/' | penstock enqueue -

    Several words are one command. Lines of a file are commands, or JSON objects with "command", or "task" and "args",
    and options by name.
    """
    if job == ("-",):
        job, file = (), "-"
    # A task may have no arguments; everything else has to be said, and once.
    if bool(job) == bool(file) and not (task and not file):
        raise CommandLineError(
            "give a command, a JSON object, or -f FILE (- is standard input).", ExitCode.USAGE
        )
    settings = Settings(flags)
    target = target or (settings["app"] if task else None)
    app = import_app(settings, target) if target else open_app(settings)
    jobs = NewJobs(app, queue=queue, task=task, given=_given(options), default_queue=settings["queue"])
    if file:
        one_job = wait or bool(options["id"])
        return _enqueue_file(app, jobs, file, one_job=one_job, as_json=as_json)
    text = job[0] if len(job) == 1 else shlex.join(job)
    return run_app(
        app, lambda: _enqueue_one(app, jobs, text, wait=wait, timeout=wait_timeout, as_json=as_json)
    )


async def _enqueue_one(
    app: App, jobs: NewJobs, text: str, *, wait: bool, timeout: str | None, as_json: bool
) -> int:
    from penstock.bulk import enqueue_many

    source, new = jobs.from_text(text)
    [handle] = await enqueue_many(source, [new])
    if wait:
        return await wait_for(handle, timeout=timeout, as_json=as_json)
    if as_json:
        print_json({"id": handle.id, "queue": handle.queue, "status": handle.status, "state": handle.state})
    else:
        click.echo(handle.id)
        if handle.status != "queued":
            click.echo(f"nothing was put in: {handle.id} is there already, {handle.state}", err=True)
    return 0


def _enqueue_file(app: App, jobs: NewJobs, file: str, *, one_job: bool, as_json: bool) -> int:
    if one_job:
        raise CommandLineError("--id and --wait are for one job; a file may have many.", ExitCode.USAGE)
    with _opened(file) as stream:
        totals = run_app(app, lambda: enqueue_lines(stream, jobs))
    if as_json:
        print_json({"lines": totals.lines, "jobs": totals.jobs, **totals.answers})
    else:
        told = ", ".join(f"{count} {status}" for status, count in totals.answers.items())
        click.echo(
            f"{totals.jobs} jobs: {told}" if totals.jobs else "no jobs: there was no line that is not empty"
        )
    return 0


def _opened(file: str) -> IO[bytes]:
    if file == "-":
        return sys.stdin.buffer
    try:
        return Path(file).open("rb")
    except OSError as error:
        raise CommandLineError(f"{file} cannot be read: {error.strerror}.", ExitCode.USAGE) from error


def _given(options: dict[str, Any]) -> dict[str, Any]:
    """The options that were given, as ``NewJobs`` takes them."""
    given = {name: value for name, value in options.items() if value not in (None, ())}
    if "env" in given:
        given["env"] = dict(map(_variable, given["env"]))
    if "after" in given:
        given["after"] = list(given["after"])
    return given


def _variable(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator and name not in os.environ:
        raise CommandLineError(
            f"--env {name}: there is no such variable here. Give {name}=VALUE.", ExitCode.USAGE
        )
    return name, value if separator else os.environ[name]
