"""``penstock enqueue``: put jobs in."""

from __future__ import annotations

import os
import re
import shlex
import sys
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

import click

from penstock.cli.bulk import Totals, enqueue_lines
from penstock.cli.connect import import_app, is_local, open_app, run_app
from penstock.cli.errors import CommandLineError, ExitCode
from penstock.cli.newjobs import NewJobs
from penstock.cli.output import print_json
from penstock.cli.parameters import (
    OPEN,
    Flags,
    PlainCommand,
    command,
    completes_ids,
    json_option,
    queue_option_for,
)
from penstock.cli.settings import Settings
from penstock.cli.synonyms import option_for
from penstock.cli.values import duration, duration_or, instant_or, some_duration
from penstock.cli.waiting import wait_for
from penstock.client.situation import counted

if TYPE_CHECKING:
    from penstock.client.app import App


_UNIT: Final = re.compile(r"(?:sec|second|min|minute|hr|hour|day|week)s?")
_OPERATORS: Final = frozenset({"&&", "||", "|", ";", ">", ">>", "<", "&"})
_EPILOG: Final = """\
A DURATION is 250ms, 30s, 5min, 1h30m, 2d, or a number of seconds. What is not given is as `penstock config list` says:
queue, priority, timeout, attempts, backoff.

Exit codes: 0 put in, or with --wait the code of the command; 2 this is not a job, nothing was put in; 3 --after
an unknown job; 5 the store is away or full; 6 after --wait-timeout.
"""


cwd_option: Final = click.option(
    "--cwd",
    metavar="FOLDER",
    type=click.Path(),
    help="Where the command runs. [here, if the store is a local file; else where the worker is]",
)
env_option: Final = click.option(
    "--env",
    metavar="NAME[=VALUE]",
    multiple=True,
    help="Set a variable; without =VALUE it is copied from here. May be repeated.",
)


class _Enqueue(PlainCommand):
    """Refuses an option of ours between the words of a command, such as the -q of ``grep -q foo file``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        given = list(args)
        rest = super().parse_args(ctx, args)
        if (option := self._between_words(given)) is not None:
            raise click.UsageError(
                f"{option!r} stands between the words of the command. If it is part of the command, put -- before the "
                "command, or quote it. If not, put it first.",
                ctx,
            )
        return rest

    def _between_words(self, args: list[str]) -> str | None:
        takes_value = {
            name: not parameter.is_flag
            for parameter in self.params
            if isinstance(parameter, click.Option)
            for name in parameter.opts
        }
        words, between, words_follow = 0, None, iter(args)
        for word in words_follow:
            if word == "--":
                return None
            if word.startswith("-") and word != "-":
                between = word if words and between is None else between
                known = word if word in takes_value else (option_for("enqueue", word) or "")
                if takes_value.get(known):
                    next(words_follow, None)
            elif between is not None:
                return between
            else:
                words += 1
        return None


@command("enqueue", epilog=_EPILOG, cls=_Enqueue)
@click.argument("job", nargs=-1)
@click.option(
    "-f",
    "--file",
    metavar="FILE",
    type=click.Path(allow_dash=True),
    help="Put in a job for each line of FILE; - is standard input.",
)
@click.option(
    "-k", "--keep-going", is_flag=True, help="With --file: report lines that are not jobs, and go on."
)
@click.option(
    "--ids", "print_ids", is_flag=True, help="With --file: print the id of each job, and the total on stderr."
)
@click.option("-t", "--task", metavar="NAME", help="JOB is the JSON arguments of this task, not a command.")
@queue_option_for("Where to put it.")
@click.option(
    "--id",
    metavar="ID",
    help="Its id. If a job of this id is kept, it is enqueued again only after it failed or was cancelled. [a new one]",
)
@click.option("--delay", metavar="DURATION", type=duration, help="Run it that long from now, not before.")
@click.option(
    "--at",
    metavar="TIME",
    type=instant_or("--delay"),
    help="Do not run it before this time: 18:30, 'tomorrow 9:00', '2026-12-01 08:00'; local unless it has a zone.",
)
@click.option("--priority", metavar="NUMBER", type=int, help="Smaller runs first.")
@click.option(
    "--timeout",
    metavar="DURATION",
    type=some_duration,
    help="Kill a run that takes longer; it counts as failed, and is tried again.",
)
@click.option("--attempts", metavar="NUMBER", type=int, help="How often it is run at most, if it fails.")
@click.option(
    "--max-retries",
    metavar="NUMBER",
    type=int,
    help="Retries after the first run: --max-retries 4 is --attempts 5.",
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
    shell_complete=completes_ids(*OPEN),
    help="Run it when this job has completed; QUEUE/ID for another queue's. May be repeated.",
)
@cwd_option
@env_option
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
    print_ids: bool,
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

    Several words make one command; each word is passed on exactly as it is. Quote the whole to use `&&`, `|` or `>`,
    and put -- before a command that has options. Lines of a file are commands, or JSON objects with "command", or
    "task" and "args", and the options below by name: "id", "queue", "delay", "max_stalls" ... Lines that begin with #
    are comments.
    """
    if job == ("-",):
        job, file = (), "-"
    # A task may have no arguments; everything else has to be said, and once.
    if bool(job) == bool(file) and not (task and not file):
        hint = f" If -f is part of the command, put -- before {job[0]!r}." if job else ""
        raise CommandLineError(
            f"give a command, a JSON object, or -f FILE (- is standard input), and one of them only.{hint}",
            ExitCode.USAGE,
        )
    _refuse_split_duration(job, options)
    if options["delay"] is not None and options["at"] is not None:
        raise CommandLineError(
            "--delay and --at both say when the job is due. Give one of them.", ExitCode.USAGE
        )
    wait = wait or wait_timeout is not None
    settings = Settings(flags)
    # Plain commands need no tasks. JSON may name one.
    may_name_task = bool(task or file) or job[0].lstrip().startswith("{")
    target = flags.given.get("app") or (settings["app"] if may_name_task else None)
    app = import_app(settings, target) if target else open_app(settings)
    jobs = NewJobs(app, queue=queue, task=task, given=given_options(options), default_queue=settings["queue"])
    if file:
        if wait or options["id"]:
            raise CommandLineError("--id and --wait are for one job; a file may have many.", ExitCode.USAGE)
        return _enqueue_file(app, jobs, file, keep_going=keep_going, print_ids=print_ids, as_json=as_json)
    _warn(app, job, options)
    text = job[0] if len(job) == 1 else shlex.join(job)
    return run_app(
        app, lambda: _enqueue_one(app, jobs, text, wait=wait, timeout=wait_timeout, as_json=as_json)
    )


def _refuse_split_duration(job: tuple[str, ...], options: dict[str, Any]) -> None:
    """Refuse ``--delay 5 minutes COMMAND``: the unit would become a part of the command."""
    for name in ("delay", "timeout", "backoff", "ttl", "result_ttl", "failure_ttl"):
        given = str(options[name] or "")
        if len(job) > 1 and _UNIT.fullmatch(job[0]) and re.fullmatch(r"[0-9.]+s", given):
            number, flag = given.removesuffix("s"), f"--{name.replace('_', '-')}"
            raise CommandLineError(
                f"{flag} {number} {job[0]}: a duration is one word. Give {flag} '{number} {job[0]}'.",
                ExitCode.USAGE,
            )


def _warn(app: App, job: tuple[str, ...], options: dict[str, Any]) -> None:
    """Say on stderr what is allowed, and most likely not meant."""
    operators = [word for word in job if word in _OPERATORS] if len(job) > 1 else []
    if operators:
        whole = f"'{' '.join(job)}'" if "'" not in "".join(job) else f'"{" ".join(job)}"'
        click.echo(
            f"{operators[0]!r} is an argument of {job[0]} here, not read by the shell. If it should be, quote the "
            f"whole command: penstock enqueue {whole}",
            err=True,
        )
    at: datetime | None = options["at"]
    if at is not None and at < datetime.now(at.tzinfo):
        click.echo(f"--at {at:%Y-%m-%d %H:%M:%S} is in the past, so the job is due now", err=True)
    cwd = options["cwd"]
    if cwd is not None and is_local(app.url) and not Path(cwd).is_dir():
        click.echo(
            f"the folder {os.path.abspath(cwd)} does not exist: the command fails until it does", err=True
        )


async def _enqueue_one(
    app: App, jobs: NewJobs, text: str, *, wait: bool, timeout: str | None, as_json: bool
) -> int:
    from penstock.client.bulk import enqueue_many

    source, new = jobs.from_text(text)
    [handle] = await enqueue_many(source, [new])
    if handle.status != "queued":
        click.echo(f"nothing was enqueued: {handle.id} is there already, {handle.state}", err=True)
    if wait:
        return await wait_for(handle, timeout=timeout, as_json=as_json)
    if as_json:
        told = {"id": handle.id, "ref": handle.ref, "queue": handle.queue}
        print_json({**told, "status": handle.status, "state": handle.state})
    else:
        click.echo(handle.id)
    return 0


def _enqueue_file(
    app: App, jobs: NewJobs, file: str, *, keep_going: bool, print_ids: bool, as_json: bool
) -> int:
    if file == "-" and sys.stdin.isatty():
        click.echo("a job on each line; Ctrl-D ends", err=True)
    with _opened(file) as stream:
        descriptor = stream.fileno()
        totals = run_app(
            app, lambda: enqueue_lines(descriptor, jobs, keep_going=keep_going, print_ids=print_ids)
        )
    if as_json and not print_ids:
        print_json({"lines": totals.lines, "jobs": totals.jobs, "refused": totals.refused, **totals.answers})
    else:
        click.echo(_told(totals), err=print_ids)
    return ExitCode.USAGE if totals.refused else ExitCode.DONE


def _told(totals: Totals) -> str:
    answers = ", ".join(_answer(status, count) for status, count in totals.answers.items())
    told = f"{counted(totals.jobs, 'job')}: {answers}" if totals.jobs else "no jobs: no line describes a job"
    refused = f"{counted(totals.refused, 'line')} {'is not a job' if totals.refused == 1 else 'are not jobs'}"
    return f"{told}; {refused}" if totals.refused else told


def _answer(status: str, count: int) -> str:
    """Return how many jobs were queued, or were there already."""
    if status == "queued":
        return f"{count} queued"
    state = "" if status == "duplicate" else f" ({status})"
    return f"{count} {'was' if count == 1 else 'were'} there already{state}"


def _opened(file: str) -> AbstractContextManager[IO[bytes]]:
    if file == "-":
        # Not to be closed: it is not ours.
        return nullcontext(sys.stdin.buffer)
    try:
        return Path(file).open("rb", buffering=0)
    except OSError as error:
        raise CommandLineError(f"{file} cannot be read: {error.strerror}.", ExitCode.USAGE) from error


def given_options(options: dict[str, Any]) -> dict[str, Any]:
    """The options that were given, as ``NewJobs`` takes them."""
    given = {name: value for name, value in options.items() if value not in (None, ())}
    if "env" in given:
        given["env"] = dict(map(_variable, given["env"]))
    if "after" in given:
        given["after"] = list(given["after"])
    return given


def _variable(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not re.fullmatch(r"[^\W\d]\w*", name):
        raise CommandLineError(
            f"--env {text}: {name!r} is not the name of a variable. Give NAME=VALUE.", ExitCode.USAGE
        )
    if not separator and name not in os.environ:
        raise CommandLineError(
            f"--env {name}: there is no such variable here. Give {name}=VALUE.", ExitCode.USAGE
        )
    return name, value if separator else os.environ[name]
