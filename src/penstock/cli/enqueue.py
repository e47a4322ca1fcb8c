"""``penstock enqueue``: put jobs in."""

from __future__ import annotations

import os
import shlex
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

import click

from penstock.cli.bulk import Totals, enqueue_lines
from penstock.cli.connect import import_app, open_app, run_app
from penstock.cli.errors import CommandLineError, ExitCode
from penstock.cli.flags import Flags
from penstock.cli.newjobs import NewJobs
from penstock.cli.output import print_json
from penstock.cli.parameters import command, completes_ids, json_option, queue_option_for
from penstock.cli.settings import Settings
from penstock.cli.values import duration, duration_or, instant
from penstock.cli.waiting import wait_for

if TYPE_CHECKING:
    from penstock.app import App

__all__ = ["enqueue"]

_EPILOG: Final = """\
A DURATION is 250ms, 30s, 5min, 1h30m, 2d, or a number of seconds. What is not given is as `penstock config list` says:
queue, priority, timeout, attempts, backoff.

Exit codes: 0 put in, or with --wait the code of the command; 2 no job, nothing was put in; 3 --after an unknown job;
5 the store is away or full; 6 after --wait-timeout.
"""


@command("enqueue", epilog=_EPILOG)
@click.argument("job", nargs=-1)
@click.option(
    "-f",
    "--file",
    metavar="FILE",
    type=click.Path(allow_dash=True),
    help="Put in a job for each line of FILE; - is standard input.",
)
@click.option(
    "-k", "--keep-going", is_flag=True, help="With --file: name lines that are no jobs, and pass over them."
)
@click.option("-t", "--task", metavar="NAME", help="JOB is the JSON arguments of this task, not a command.")
@queue_option_for("Where to put it.")
@click.option("--id", metavar="ID", help="Its id. A known one is not put in twice. [a new one]")
@click.option("--delay", metavar="DURATION", type=duration, help="Run it that long from now, not before.")
@click.option(
    "--at",
    metavar="TIME",
    type=instant,
    help="Do not run it before this time: 18:30, 'tomorrow 9:00', '2026-12-01 08:00'; local unless it has a zone.",
)
@click.option("--priority", metavar="NUMBER", type=int, help="Smaller runs first.")
@click.option(
    "--timeout",
    metavar="DURATION",
    type=duration,
    help="Kill a run that takes longer; it counts as failed, and is tried again.",
)
@click.option("--attempts", metavar="NUMBER", type=int, help="How often it is run at most, if it fails.")
@click.option(
    "--max-retries", metavar="NUMBER", type=int, help="Another way to give --attempts, which is one more."
)
@click.option(
    "--backoff",
    metavar="DURATION",
    type=duration_or("exponential"),
    help="How long to rest between attempts; or 'exponential'.",
)
@click.option(
    "--max-stalls",
    metavar="NUMBER",
    type=int,
    help="How often its worker may die before it counts as failed.",
)
@click.option(
    "--ttl", metavar="DURATION", type=duration, help="If it has not ended by then, it fails as expired."
)
@click.option(
    "--result-ttl", metavar="DURATION", type=duration, help="Keep the job for this long after it completes."
)
@click.option(
    "--failure-ttl", metavar="DURATION", type=duration, help="Keep the job for this long after it fails."
)
@click.option("--group", metavar="KEY", help="Jobs of one KEY share its limits, see `penstock limit`.")
@click.option(
    "--cost", metavar="NUMBER", type=int, help="Tokens that a run takes from the bucket of its group. [1]"
)
@click.option(
    "--after",
    metavar="ID",
    multiple=True,
    shell_complete=completes_ids("scheduled", "waiting", "blocked", "active"),
    help="Run it when this job has completed; QUEUE/ID for another queue's. May be repeated.",
)
@click.option(
    "--cwd",
    metavar="FOLDER",
    type=click.Path(),
    help="Where the command runs. [here, if the store is a local file; else where the worker is]",
)
@click.option(
    "--env",
    metavar="NAME[=VALUE]",
    multiple=True,
    help="Set a variable; without =VALUE it is copied from here. May be repeated.",
)
@click.option(
    "-w", "--wait", is_flag=True, help="Wait for its end, print its output, end with its exit code."
)
@click.option(
    "--wait-timeout",
    metavar="DURATION",
    type=duration,
    help="Wait at most so long, then end with 6; the job goes on.",
)
@json_option
@click.pass_obj
def enqueue(
    flags: Flags,
    /,
    *,
    job: tuple[str, ...],
    file: str | None,
    keep_going: bool,
    task: str | None,
    queue: str | None,
    wait: bool,
    wait_timeout: str | None,
    as_json: bool,
    **options: Any,
) -> int:
    """Put in a JOB: a command for a shell, or a JSON object. Prints its id; `penstock worker` will run it.

    \b
      penstock enqueue 'make report > report.txt'
      penstock enqueue --wait -- pytest -x tests
      penstock enqueue '{"command": "make report", "id": "report-7", "attempts": 5}'
      penstock enqueue --task send '{"to": "ada@example.org"}' --queue mail
      ls *.wav | sed 's/.*/lame "&"/' | penstock enqueue -

    Several words are one command. Lines of a file are commands, or JSON objects with "command", or "task" and "args",
    and the options below by name: "id", "queue", "delay", "max_stalls" ...
    """
    if job == ("-",):
        job, file = (), "-"
    # A task may have no arguments; everything else has to be said, and once.
    if bool(job) == bool(file) and not (task and not file):
        raise CommandLineError(
            "give a command, a JSON object, or -f FILE (- is standard input), and one of them only.",
            ExitCode.USAGE,
        )
    if options["delay"] is not None and options["at"] is not None:
        raise CommandLineError(
            "--delay and --at both say when the job is due. Give one of them.", ExitCode.USAGE
        )
    wait = wait or wait_timeout is not None
    settings = Settings(flags)
    target = flags.given.get("app") or (settings["app"] if task else None)
    app = import_app(settings, target) if target else open_app(settings)
    jobs = NewJobs(app, queue=queue, task=task, given=_given(options), default_queue=settings["queue"])
    if file:
        one_job = wait or bool(options["id"])
        return _enqueue_file(app, jobs, file, one_job=one_job, keep_going=keep_going, as_json=as_json)
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
    if handle.status != "queued":
        click.echo(f"nothing was put in: {handle.id} is there already, {handle.state}", err=True)
    if wait:
        return await wait_for(handle, timeout=timeout, as_json=as_json)
    if as_json:
        told = {"id": handle.id, "ref": handle.ref, "queue": handle.queue}
        print_json({**told, "status": handle.status, "state": handle.state})
    else:
        click.echo(handle.id)
    return 0


def _enqueue_file(
    app: App, jobs: NewJobs, file: str, *, one_job: bool, keep_going: bool, as_json: bool
) -> int:
    if one_job:
        raise CommandLineError("--id and --wait are for one job; a file may have many.", ExitCode.USAGE)
    if file == "-" and sys.stdin.isatty():
        click.echo("a job on each line; Ctrl-D ends", err=True)
    with _opened(file) as stream:
        totals = run_app(app, lambda: enqueue_lines(stream.fileno(), jobs, keep_going=keep_going))
    if as_json:
        print_json({"lines": totals.lines, "jobs": totals.jobs, "refused": totals.refused, **totals.answers})
    else:
        click.echo(_told(totals))
    return ExitCode.USAGE if totals.refused else ExitCode.DONE


def _told(totals: Totals) -> str:
    answers = ", ".join(f"{count} {status}" for status, count in totals.answers.items())
    told = f"{totals.jobs} jobs: {answers}" if totals.jobs else "no jobs: there was no line that is one"
    return f"{told}; {totals.refused} lines are no jobs" if totals.refused else told


def _opened(file: str) -> AbstractContextManager[IO[bytes]]:
    if file == "-":
        # Not to be closed: it is not ours.
        return nullcontext(sys.stdin.buffer)
    try:
        return Path(file).open("rb", buffering=0)
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
