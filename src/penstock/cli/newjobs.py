"""Jobs from arguments of the command line, or from thousands of lines of a file, a pipe or a terminal.

Each is a command, or a task with its arguments.
"""

from __future__ import annotations

import asyncio
import os
import re
import select
import sys
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from penstock.cli.connect import is_local
from penstock.cli.errors import CommandLineError, InvalidUsage
from penstock.cli.joboptions import JOB_OPTIONS
from penstock.cli.synonyms import did_you_mean, option_for
from penstock.cli.values import read_time
from penstock.client.handle import enqueue_many
from penstock.client.situation import counted
from penstock.core.command import COMMAND_TASK, CommandLine, check_command, encode_command
from penstock.core.flow import UNKNOWN_DEPENDENCY
from penstock.core.names import check_id, uuid7
from penstock.errors import InvalidInput, JobNotFound, StorageError

if TYPE_CHECKING:
    from penstock.client.app import App
    from penstock.client.codec import JobCodec
    from penstock.client.handle import JobHandle
    from penstock.client.task import JobSpec
    from penstock.core.job import NewJob


class JobLine(msgspec.Struct, forbid_unknown_fields=True):
    """A job in JSON: a ``command``, or a ``task`` and its ``args``; and options, the fields of ``_Line``."""

    command: str | UnsetType = UNSET
    task: str | UnsetType = UNSET
    args: dict[str, Any] | list[Any] | UnsetType = UNSET
    queue: str | UnsetType = UNSET
    cwd: str | UnsetType = UNSET
    env: dict[str, str] | UnsetType = UNSET


_Line: Final[Any] = msgspec.defstruct(
    "JobLine",
    [(option.name, option.type | UnsetType, UNSET) for option in JOB_OPTIONS],
    bases=(JobLine,),
    forbid_unknown_fields=True,
)
_ALTERNATIVES: Final = {"attempts": "max_retries", "max_retries": "attempts", "delay": "at", "at": "delay"}
"""Pairs of options with one meaning: in a line, either of a pair replaces the one that is given for all lines."""
_PLAIN: Final = frozenset({"command", "cwd", "env", "id"})
_OPTIONS: Final = frozenset(option.name for option in JOB_OPTIONS)
_decode: Final[Callable[[bytes], JobLine]] = msgspec.json.Decoder(_Line).decode
_decode_any: Final = msgspec.json.Decoder().decode

_UNKNOWN: Final = re.compile(r"Object contains unknown field `(.*)`").match
_WRONG_TYPE: Final = re.compile(r"Expected `([^`]*)`, got `([^`]*)` - at `\$\.([^`]*)`").match
_TYPES: Final = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "array": "a list",
    "object": "an object",
}
_COMMAND_KEYS: Final = {"cmd": "command", "shell": "command", "script": "command", "run": "command"}
_KEYS: Final = f"A job has: {', '.join(_Line.__struct_fields__)}."
_TOO_DEEP: Final = "the JSON is nested too deeply. Flatten the arguments, or pass a reference to the data."


def _in_utf8(text: str | bytes) -> bytes:
    """Encode ``text`` as UTF-8, without the byte order mark that some programs write first."""
    try:
        data = text.encode() if isinstance(text, str) else text
    except UnicodeEncodeError as error:
        # Python decodes bytes of the command line that are not UTF-8 to lone surrogates.
        raise InvalidInput(
            f"{text!r:.80} is not valid UTF-8. Encode it in UTF-8; a script that a command runs may hold other bytes."
        ) from error
    return data.removeprefix(BOM_UTF8)


def read_line(text: str | bytes) -> JobLine:
    """Read a JSON object, or else a command. Raise ``InvalidInput`` for an object that is not a job."""
    data = _in_utf8(text)
    if not data.lstrip().startswith(b"{"):
        try:
            return JobLine(command=data.decode().strip())
        except UnicodeDecodeError as error:
            raise InvalidInput(f"the command is not valid UTF-8: {error}.") from error
    try:
        line = _decode(data)
    except msgspec.ValidationError as error:
        raise InvalidInput(_unknown_key(str(error)) or _wrong_type(str(error), data)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidInput(
            f"that is not valid JSON: {error}. A job that begins with {{ is JSON; write ( … ) for a shell group."
        ) from error
    except RecursionError as error:
        raise InvalidInput(_TOO_DEEP) from error
    if line.command is UNSET and line.task is UNSET:
        raise InvalidInput('a job needs a "command" or a "task". Give one of them.')
    return line


def _unknown_key(error: str) -> str:
    """Return the error about a key that jobs do not have; empty if ``error`` is about something else."""
    unknown = _UNKNOWN(error)
    if unknown is None:
        return ""
    name = _COMMAND_KEYS.get(unknown[1], unknown[1]).replace("-", "_")
    option = option_for("enqueue", f"--{name.replace('_', '-')}")
    meant = option.strip("-").replace("-", "_") if option else name
    hint = did_you_mean(meant, _Line.__struct_fields__, otherwise=_KEYS)
    return f"a job has no key {unknown[1]!r}. {hint}"


def _wrong_type(error: str, data: bytes) -> str:
    """Return the error about a value of the wrong type, with the value if it is short."""
    wrong = _WRONG_TYPE(error)
    if wrong is None:
        return f"{error}."
    expected, actual, key = wrong.groups()
    types = " or ".join(_TYPES.get(name, name) for name in expected.split(" | "))
    try:
        value = _decode_any(data).get(key)
    except (msgspec.DecodeError, RecursionError):  # What is behind the value is not valid JSON either.
        value = None
    got = repr(value) if isinstance(value, str | int | float) else _TYPES.get(actual, actual)
    return f"{key} must be {types}, got {got:.80}."


class NewJobs:
    """Makes jobs for ``app``. The options in ``given`` are for all jobs; those of a line take precedence."""

    def __init__(
        self, app: App, *, queue: str | None, task: str | None, given: Mapping[str, Any], default_queue: str
    ) -> None:
        self._app = app
        self._queue = queue
        self._default_queue = default_queue
        self._task = task
        self._env = given.get("env", {})
        self._given = {name: value for name, value in given.items() if name not in ("cwd", "env")}
        # The workers of a shared store may be on machines without this folder.
        self._cwd = (
            os.path.abspath(given["cwd"]) if "cwd" in given else os.getcwd() if is_local(app.url) else ""
        )
        self._template: tuple[JobCodec, NewJob] | None = None

    def from_text(self, text: str | bytes) -> tuple[JobCodec, NewJob]:
        """Return the job of a line: arguments if all jobs have one task, else a command or a JSON object."""
        if self._task is None:
            return self.make(read_line(text))
        return self.make(JobLine(task=self._task, args=_arguments(text)))

    def spec(self, text: str) -> JobSpec[Any]:
        """Return the job of a text as a ``JobSpec``, for a scheduler."""
        line = read_line(text) if self._task is None else JobLine(task=self._task, args=_arguments(text))
        return self._spec(
            line, {name: v for name in _OPTIONS if (v := getattr(line, name, UNSET)) is not UNSET}
        )

    def make(self, line: JobLine) -> tuple[JobCodec, NewJob]:
        """Return the job of a parsed line. Raise ``InvalidInput`` for an invalid job."""
        keys = {name for name in line.__struct_fields__ if getattr(line, name) is not UNSET}
        if keys <= _PLAIN and self._template is not None:
            # Thousands of plain commands differ in id and payload only.
            source, template = self._template
            job_id = getattr(line, "id", UNSET)
            job_id = uuid7() if job_id is UNSET else check_id(job_id)
            return source, replace(template, id=job_id, payload=encode_command(self._command(line)))
        spec = self._spec(line, {name: getattr(line, name) for name in keys & _OPTIONS})
        if keys <= _PLAIN:
            self._template = spec.source, spec.job
        return spec.source, spec.job

    def _spec(self, line: JobLine, line_options: dict[str, Any]) -> JobSpec[Any]:
        given = {
            name: value for name, value in self._given.items() if _ALTERNATIVES.get(name) not in line_options
        }
        options = {**given, **line_options}
        if "at" in options:
            at = options.pop("at")
            options["run_at"] = (
                read_time(at, for_duration="delay instead of at") if isinstance(at, str) else at
            )
        queue = self._queue if line.queue is UNSET else line.queue
        if "after" in options:
            options["after"] = _parents(options["after"], queue or self._queue_of_task(line))
        if line.command is not UNSET:
            if line.task is not UNSET:
                raise InvalidInput("a job has either a command or a task, not both.")
            named = self._app.queue(queue or self._default_queue)
            return named.prepare(self._command(line), task=COMMAND_TASK, **options)
        assert line.task is not UNSET
        args = {} if line.args is UNSET else line.args
        return self._task_spec(line.task, args, queue, options)

    def _queue_of_task(self, line: JobLine) -> str:
        """Return the queue of a job that names none."""
        task = None if line.task is UNSET else self._app.tasks.get(line.task)
        return self._default_queue if task is None else task.queue

    def _task_spec(self, name: str, args: Any, queue: str | None, options: dict[str, Any]) -> JobSpec[Any]:
        task = self._app.tasks.get(name)
        if task is not None:
            dispatch = task.options(queue=queue, **options)
            return dispatch.job(*args) if isinstance(args, list) else dispatch.job(**args)
        if self._app.tasks:
            self._app.task_named(name)
        if isinstance(args, list):
            raise InvalidInput(
                f"the arguments of {name!r} are a list, but its parameters are unknown here. "
                "Give an object of arguments by name, or --app module:app."
            )
        return self._app.queue(queue or self._default_queue).prepare(args, task=name, **options)

    def _command(self, line: JobLine) -> CommandLine:
        assert line.command is not UNSET
        env = self._env if line.env is UNSET else {**self._env, **line.env}
        cwd = self._cwd if line.cwd is UNSET else os.path.join(self._cwd, line.cwd)
        return check_command(CommandLine(line.command, cwd, env))


def _arguments(text: str | bytes) -> dict[str, Any] | list[Any]:
    data = _in_utf8(text)
    if not data.strip():
        return {}
    try:
        args = _decode_any(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidInput(
            f'the arguments are not valid JSON: {error}. Give an object, such as {{"to": "ada"}}.'
        ) from error
    except RecursionError as error:
        raise InvalidInput(_TOO_DEEP) from error
    if not isinstance(args, dict | list):
        raise InvalidInput('the arguments must be an object or a list. Give them by name: {"to": "ada"}.')
    return args


def _parents(after: str | list[str], queue: str) -> list[tuple[str, str]]:
    """Return the queue and the id of each job in ``after``: ``ID``, or ``QUEUE/ID`` for a job of another queue."""
    parents = []
    for text in [after] if isinstance(after, str) else after:
        other, slash, id = text.partition("/")
        parents.append((other, id) if slash else (queue, text))
    return parents


async def enqueue_checked(source: JobCodec, jobs: Sequence[NewJob]) -> list[JobHandle[Any]]:
    """Enqueue ``jobs``. Raise ``JobNotFound`` if one of them is to run after an unknown job.

    The store itself looks only at jobs of the same queue: other queues learn of the dependency later.
    """
    for queue, id in dict.fromkeys(parent[:2] for job in jobs for parent in job.after):
        if queue != source.queue and await source.app.queue(queue).get_or_none(id) is None:
            raise JobNotFound.in_queue(queue, id, UNKNOWN_DEPENDENCY)
    return await enqueue_many(source, jobs)


_MOST_BYTES: Final = 512 * 1024
"""Bytes per read: a few thousand lines."""

_ByQueue = dict[str, tuple["JobCodec", list["NewJob"]]]


async def read_lines(descriptor: int) -> AsyncIterator[list[bytes]]:
    """Yield all whole lines that are available; the last line may lack its newline. Can be cancelled at any time."""
    source = _Source(descriptor)
    partial: list[bytes] = []
    while chunk := await source.chunk():
        *lines, rest = chunk.split(b"\n")
        if lines:
            lines[0] = b"".join([*partial, lines[0]])
            partial.clear()
            yield lines
        partial.append(rest)
    if last := b"".join(partial):
        yield [last]


class _Source:
    """A file, pipe or terminal, read without a thread: a thread that waits for input cannot be stopped."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._has_ended = False

    async def chunk(self) -> bytes:
        """Return the bytes that are available, at least one; nothing at the end."""
        if self._has_ended:
            return b""
        await self._until_readable()
        chunks = [os.read(self._descriptor, _MOST_BYTES)]
        while chunks[-1] and sum(map(len, chunks)) < _MOST_BYTES and self._is_readable():
            chunks.append(os.read(self._descriptor, _MOST_BYTES))
        # A terminal reports its end only once.
        self._has_ended = not chunks[-1]
        return b"".join(chunks)

    def _is_readable(self) -> bool:
        return bool(select.select([self._descriptor], [], [], 0)[0])

    async def _until_readable(self) -> None:
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        try:
            loop.add_reader(self._descriptor, readable.set)
        except PermissionError:
            # A file on a disk is always readable.
            return
        try:
            await readable.wait()
        finally:
            loop.remove_reader(self._descriptor)


class Totals:
    """The number of lines read, of lines refused, and of jobs by the answer of the store."""

    def __init__(self) -> None:
        self.lines = 0
        self.refused = 0
        self.answers: Counter[str] = Counter()

    @property
    def jobs(self) -> int:
        return self.answers.total()


async def enqueue_lines(
    descriptor: int, jobs: NewJobs, *, keep_going: bool = False, print_ids: bool = False
) -> Totals:
    """Enqueue a job for each line that is neither empty nor a comment, a few thousand at a time.

    Raise ``CommandLineError`` at a line that is not a job: it, and the lines read with it, are not enqueued. With
    ``keep_going``, report the line on stderr and go on. With ``print_ids``, print each id once its job is stored.
    """
    totals = Totals()
    with _progress(totals) as show:
        writer = _Writer(totals, show, print_ids=print_ids)
        try:
            async for lines in read_lines(descriptor):
                await writer.put(_jobs_of(lines, jobs, totals, keep_going=keep_going))
                totals.lines += len(lines)
            await writer.settle()
        except (asyncio.CancelledError, CommandLineError) as stop:
            # Finish the batch that is being written, so that the message counts it.
            await writer.settle()
            if isinstance(stop, asyncio.CancelledError):
                click.echo(f"{counted(totals.jobs, 'job')} enqueued", err=True)
            raise
        except (StorageError, JobNotFound) as error:
            if totals.jobs:
                error.add_note(f"{counted(totals.jobs, 'job')} of earlier lines were enqueued.")
            raise
    return totals


class _Writer:
    """Writes one batch while the next lines are read and checked."""

    def __init__(self, totals: Totals, show: Callable[[], None], *, print_ids: bool) -> None:
        self._totals = totals
        self._print_ids = print_ids
        self._show = show
        self._writing: asyncio.Task[None] | None = None

    async def put(self, batch: _ByQueue) -> None:
        await self.settle()
        self._writing = asyncio.create_task(self._write(batch))

    async def settle(self) -> None:
        """Wait until the batch is stored. Can be cancelled, and called again."""
        if self._writing is not None:
            await asyncio.shield(self._writing)
            self._writing = None
            self._show()

    async def _write(self, batch: _ByQueue) -> None:
        for source, jobs in batch.values():
            handles = await enqueue_checked(source, jobs)
            self._totals.answers.update(str(handle.status) for handle in handles)
            if self._print_ids:
                click.echo("".join(f"{handle.id}\n" for handle in handles), nl=False)


def _jobs_of(lines: list[bytes], jobs: NewJobs, totals: Totals, *, keep_going: bool) -> _ByQueue:
    """Return the jobs of these lines by queue, all of them checked."""
    batch: _ByQueue = {}
    for number, text in enumerate(lines, totals.lines + 1):
        if not text.strip() or text.lstrip().startswith(b"#"):
            continue
        try:
            source, job = jobs.from_text(text)
        except InvalidInput as error:
            if not keep_going:
                raise _refused(number, error, totals) from error
            totals.refused += 1
            click.echo(f"penstock: line {number}: {error}", err=True)
        else:
            batch.setdefault(source.queue, (source, []))[1].append(job)
    return batch


def _refused(number: int, error: InvalidInput, totals: Totals) -> CommandLineError:
    before = f"The lines up to {totals.lines} were enqueued" if totals.lines else "Nothing was enqueued"
    return InvalidUsage(
        f"line {number}: {error} {before}. Fix the line, or skip bad lines with --keep-going."
    )


def _progress(totals: Totals) -> AbstractContextManager[Callable[[], None]]:
    """Count the jobs on a terminal, unless the user types them there."""
    is_visible = sys.stderr.isatty() and not sys.stdin.isatty()
    return _Counting(totals) if is_visible else nullcontext(lambda: None)


class _Counting:
    def __init__(self, totals: Totals) -> None:
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        from penstock.cli.output import console

        self._totals = totals
        columns = (SpinnerColumn(), TextColumn("{task.completed} jobs enqueued"), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console(stderr=True), transient=True)
        self._task = self._progress.add_task("", total=None)

    def __enter__(self) -> Callable[[], None]:
        self._progress.start()
        return lambda: self._progress.update(self._task, completed=self._totals.jobs)

    def __exit__(self, *error: object) -> None:
        self._progress.stop()
