"""``penstock enqueue``: add one job, or one for each line of a file."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

import click

from penstock.cli.connect import import_app, is_local, note_on_second_store, open_app, run_app
from penstock.cli.errors import ExitCode, InvalidUsage
from penstock.cli.joboptions import JOB_OPTIONS, job_flags
from penstock.cli.jobview import cut, identity, title
from penstock.cli.newjobs import NewJobs, Totals, enqueue_checked, enqueue_lines
from penstock.cli.output import print_json
from penstock.cli.parameters import PlainCommand, command, json_option, option, queue_option_for
from penstock.cli.settings import Settings
from penstock.cli.synonyms import option_for
from penstock.cli.taskworkers import note_on_program, note_on_task
from penstock.cli.waiting import wait_for
from penstock.client.situation import counted
from penstock.core.command import COMMAND_TASK, command_text
from penstock.core.text import visible_in_line

if TYPE_CHECKING:
    from penstock.client.app import App
    from penstock.client.codec import JobCodec
    from penstock.client.handle import JobHandle
    from penstock.core.job import Job, NewJob


_UNIT: Final = re.compile(r"(?:sec|second|min|minute|hr|hour|day|week)s?")
_OPERATORS: Final = frozenset({"&&", "||", "|", ";", ">", ">>", "<", "&"})
_EPILOG: Final = """\
A DURATION is 250ms, 30s, 5min, 1h30m, 2d, or a number of seconds. `penstock config list` shows the defaults of queue,
priority, timeout, attempts and backoff.

Exit codes: 0 enqueued, or with --wait the code of the command; 2 not a valid job, nothing was enqueued; 3 --after an
unknown job; 5 the store is unavailable or full; 6 --wait-timeout passed.
"""


cwd_option: Final = option(
    "--cwd FOLDER",
    "Folder in which the command runs. [this one if the store is a local file, else the worker's]",
    click.Path(),
)
env_option: Final = option(
    "--env NAME[=VALUE]",
    "Set an environment variable; without =VALUE, copy it from this shell. May be repeated.",
    multiple=True,
)


class _Enqueue(PlainCommand):
    """The command ``enqueue``, which refuses its options among the words of a job: the -q of ``grep -q foo file``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        words = list(args)
        rest = super().parse_args(ctx, args)
        if (option := self._between_words(words)) is not None:
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
        is_command, option, rest = False, None, iter(args)
        for word in rest:
            if word == "--":
                return None
            if word.startswith("-") and word != "-":
                option = word if is_command and option is None else option
                known = word if word in takes_value else (option_for("enqueue", word) or "")
                if takes_value.get(known):
                    next(rest, None)
            elif option is not None:
                return option
            else:
                is_command = True
        return None


@command("enqueue", epilog=_EPILOG, cls=_Enqueue)
@click.argument("job", nargs=-1)
@option("-f, --file FILE", "Enqueue a job for each line of FILE; - is stdin.", click.Path(allow_dash=True))
@option("-k, --keep-going", "With --file: report lines that are not valid jobs, and go on.")
@option("--ids", "With --file: print the id of each job, and the total on stderr.", name="print_ids")
@option("-t, --task NAME", "Read JOB as the JSON arguments of this task.")
@queue_option_for("The queue of the job.")
@job_flags()
@cwd_option
@env_option
@option(
    "-w, --wait",
    "Wait for the job to end, print its output, and exit with its code. "
    "Prints the first 2000 characters of a line, and the newest 1000 lines of fast output.",
)
@option("--wait-timeout DURATION", "Wait at most this long, then exit with 6. The job keeps going.")
@json_option
def enqueue(
    settings: Settings,
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
    """Enqueue a JOB: a shell command, or a JSON object. Prints its id. `penstock worker` runs it.

    \b
      penstock enqueue 'make report > report.txt'
      penstock enqueue --wait -- pytest -x tests
      penstock enqueue '{"command": "make report", "id": "report-7", "attempts": 5}'
      penstock enqueue --task send '{"to": "ada@example.org"}' --queue mail
      ls *.wav | sed 's/.*/lame "&"/' | penstock enqueue -

    Several words make one command; each word is passed on exactly as it is. Quote the whole command to use `&&`, `|`
    or `>`, and put -- before a command that has options. Lines of a file are commands, or JSON objects with "command",
    or "task" and "args", and the options below by name: "id", "queue", "delay", "max_stalls" ... Lines that begin with
    # are comments.
    """
    if job == ("-",):
        job, file = (), "-"
    wait = wait or wait_timeout is not None
    _check_usage(job, file, task, options, wait=wait)
    # JSON may name a task of the app.
    may_name_task = bool(task or file) or job[0].lstrip().startswith("{")
    target = settings.flags.given.get("app") or (settings["app"] if may_name_task else None)
    app = import_app(settings, target) if target else open_app(settings)
    jobs = NewJobs(app, queue=queue, task=task, given=given_options(options), default_queue=settings["queue"])
    if file:
        return _enqueue_file(app, jobs, file, keep_going=keep_going, print_ids=print_ids, as_json=as_json)
    _warn(app, job, options)
    text = job[0] if len(job) == 1 else shlex.join(job)
    # Before the store is opened, because that creates the file of a new one.
    source, new = jobs.from_text(text)
    note = note_on_second_store(app.url)

    async def note_on_job() -> str:
        if new.options.task == COMMAND_TASK:
            return await note_on_program(app, command_text(new.payload), settings)
        return await note_on_task(app, source.queue, new.options.task)

    return run_app(
        app,
        lambda: _enqueue_one(
            source, new, note=note, note_on_job=note_on_job, wait=wait, timeout=wait_timeout, as_json=as_json
        ),
    )


def _check_usage(
    job: tuple[str, ...], file: str | None, task: str | None, options: dict[str, Any], *, wait: bool
) -> None:
    """Raise ``InvalidUsage`` for arguments that exclude each other, or that the shell split in another way."""
    # Only a task may have no arguments.
    if bool(job) == bool(file) and not (task and not file):
        hint = f" If -f is part of the command, put -- before {job[0]!r}." if job else ""
        raise InvalidUsage(f"give exactly one of: a command, a JSON object, -f FILE (- is stdin).{hint}")
    if options["delay"] is not None and options["at"] is not None:
        raise InvalidUsage("give either --delay or --at, not both.")
    if file and (wait or options["id"]):
        raise InvalidUsage("--id and --wait are for one job, not for a file.")
    _refuse_split_duration(job, options)
    if task is None:
        _refuse_several_commands(job)


def _refuse_split_duration(job: tuple[str, ...], options: dict[str, Any]) -> None:
    """Refuse ``--delay 5 minutes COMMAND``: the unit would become part of the command."""
    for each in JOB_OPTIONS:
        value = str(options[each.name] or "") if each.metavar == "DURATION" else ""
        if len(job) > 1 and _UNIT.fullmatch(job[0]) and re.fullmatch(r"[0-9.]+s", value):
            number, flag = value.removesuffix("s"), each.flag
            raise InvalidUsage(
                f"{flag} {number} {job[0]}: a duration is one word. Give {flag} '{number} {job[0]}'."
            )


def _refuse_several_commands(job: tuple[str, ...]) -> None:
    """Refuse ``'echo 1' 'echo 2'``: several words are one command, whose program is the first word."""
    if len(job) > 1 and len(job[0].split()) > 1 and shutil.which(job[0]) is None:
        raise InvalidUsage(
            f"the program {job[0]!r} does not exist: several words are one command. To enqueue one job for each, run "
            f"`printf '%s\\n' {shlex.join(job)} | penstock enqueue -`. For one job, quote the whole command."
        )


def _warn(app: App, job: tuple[str, ...], options: dict[str, Any]) -> None:
    """Print a note on stderr about arguments that are valid, but look like a mistake."""
    if len(job) == 1 and Path(job[0]).is_file() and not os.access(job[0], os.X_OK):
        click.echo(
            f"{job[0]} is a file, not a program. For a job on each of its lines: penstock enqueue -f {job[0]}",
            err=True,
        )
    operators = [word for word in job if word in _OPERATORS] if len(job) > 1 else []
    if operators:
        whole = f"'{' '.join(job)}'" if "'" not in "".join(job) else f'"{" ".join(job)}"'
        click.echo(
            f"{operators[0]!r} is an argument of {job[0]} here. For the shell to read it, quote the whole command: "
            f"penstock enqueue {whole}",
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
    source: JobCodec,
    new: NewJob,
    *,
    note: str,
    note_on_job: Callable[[], Awaitable[str]],
    wait: bool,
    timeout: str | None,
    as_json: bool,
) -> int:

    [handle] = await enqueue_checked(source, [new])
    for text in filter(None, (note, await note_on_job())):
        click.echo(text, err=True)
    if handle.status != "queued":
        other = await _other_job(handle, new)
        click.echo(
            visible_in_line(f"nothing was enqueued: {handle.id} is there already, {handle.state}{other}"),
            err=True,
        )
    if wait:
        return await wait_for(handle, timeout=timeout, as_json=as_json)
    if as_json:
        print_json({**identity(handle), "status": handle.status, "state": handle.state})
    else:
        click.echo(handle.id)
    return 0


async def _other_job(handle: JobHandle[Any], new: NewJob) -> str:
    """Return a note on the known job if it does something else than the new one; else an empty string."""
    # The folder and the variables of a command do not count: they depend on where it was enqueued.
    known = await handle.get_or_none()
    if known is None or _action(known.raw) == _action(new):
        return ""
    return f", and is another job: {cut(title(known))}"


def _action(job: Job | NewJob) -> tuple[str, str | bytes]:
    """Return the task of a job with its arguments, or with its command."""
    task = job.options.task
    return task, command_text(job.payload) if task == COMMAND_TASK else job.payload


def _enqueue_file(
    app: App, jobs: NewJobs, file: str, *, keep_going: bool, print_ids: bool, as_json: bool
) -> int:
    if file == "-" and sys.stdin.isatty():
        click.echo("type a job on each line; Ctrl-D ends the input", err=True)
    with _opened(file) as stream:
        descriptor = stream.fileno()
        note = note_on_second_store(app.url)
        # A server must answer before the input is read; a file is created with the first job.
        totals = run_app(
            app,
            lambda: enqueue_lines(descriptor, jobs, keep_going=keep_going, print_ids=print_ids),
            connect=not is_local(app.url),
        )
    if note and totals.jobs:
        click.echo(note, err=True)
    if as_json and not print_ids:
        print_json({"lines": totals.lines, "jobs": totals.jobs, "refused": totals.refused, **totals.answers})
    else:
        click.echo(_summary(totals), err=print_ids)
    return ExitCode.USAGE if totals.refused else ExitCode.DONE


def _summary(totals: Totals) -> str:
    answers = ", ".join(_answer(status, count) for status, count in totals.answers.items())
    jobs = f"{counted(totals.jobs, 'job')}: {answers}" if totals.jobs else "no jobs: no line describes a job"
    refused = f"{counted(totals.refused, 'line')} {'is not a job' if totals.refused == 1 else 'are not jobs'}"
    return f"{jobs}; {refused}" if totals.refused else jobs


def _answer(status: str, count: int) -> str:
    """Return the number of jobs with this status, in words."""
    if status == "queued":
        return f"{count} queued"
    state = "" if status == "duplicate" else f" ({status})"
    return f"{count} {'was' if count == 1 else 'were'} there already{state}"


def _opened(file: str) -> AbstractContextManager[IO[bytes]]:
    if file == "-":
        return nullcontext(sys.stdin.buffer)
    try:
        return Path(file).open("rb", buffering=0)
    except OSError as error:
        raise InvalidUsage(f"{file} cannot be read: {error.strerror}.") from error


def given_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that were given, as ``NewJobs`` takes them."""
    values = {name: value for name, value in options.items() if value not in (None, ())}
    if "env" in values:
        values["env"] = dict(map(_variable, values["env"]))
    if "after" in values:
        values["after"] = list(values["after"])
    return values


def _variable(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not re.fullmatch(r"[^\W\d]\w*", name):
        raise InvalidUsage(f"--env {text}: {name!r} is not the name of a variable. Give NAME=VALUE.")
    if not separator and name not in os.environ:
        raise InvalidUsage(f"--env {name}: {name} is not set here. Give {name}=VALUE.")
    return name, value if separator else os.environ[name]
