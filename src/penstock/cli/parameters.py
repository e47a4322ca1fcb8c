"""The command classes, the options that several commands share, and the hints in errors about arguments."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Final, TypeVar

import click

from penstock.cli.completion import STATES, completes_queues, is_queue
from penstock.cli.synonyms import (
    STATES_BY_SYNONYM,
    advice,
    advice_on_word,
    did_you_mean,
    known_command,
    nearest,
    with_known_option,
)
from penstock.cli.values import duration, is_duration, seconds, whole


class Flags:
    """The values of global options, unchecked, and whether to print tracebacks."""

    def __init__(self) -> None:
        self.given: dict[str, str] = {}
        self.debug = False


F = TypeVar("F", bound=Callable[..., Any])

OPEN: Final = ("scheduled", "waiting", "blocked", "active")
"""The states of jobs that have not ended."""
_GLOBAL: Final = frozenset({"--url", "--namespace", "--app", "--debug", "--help", "--version"})
_EXTRA_WORDS: Final = re.compile(r"Got unexpected extra arguments? \((.*)\)").fullmatch
_CRON: Final = re.compile(r"@[a-z]+|[\d*][\d*/,-]*(?: +[\w*/,#?-]+){4,5}").fullmatch
_SETTINGS: Final = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


class PlainCommand(click.Command):
    """A command that lists global options last, and accepts the option names of other tools."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        words = list(args)
        while True:
            try:
                return super().parse_args(ctx, list(words))
            except click.NoSuchOption as error:
                renamed = with_known_option(_path(ctx), words, error.option_name)
                if renamed is None or renamed == words:
                    raise _no_such_option(ctx, error, _names_of_options(self)) from None
                words = renamed
            except click.UsageError as error:
                raise _with_hint(ctx, error) from None

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        own: list[tuple[str, str]] = []
        everywhere: list[tuple[str, str]] = []
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and isinstance(parameter, click.Option):
                (everywhere if _GLOBAL.intersection(parameter.opts) else own).append(record)
        for heading, records in (("Options", own), ("Options of every command", everywhere)):
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)


class StateName(click.Choice[str]):
    """One of ``states``, or another tool's name for it: ``pending`` is ``waiting``."""

    def __init__(self, states: Sequence[str]) -> None:
        super().__init__(list(states))

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        state = STATES_BY_SYNONYM.get(str(value).lower(), str(value).lower())
        if state in self.choices:
            return state
        command = ctx.command.name if ctx is not None else ""
        if state in STATES and command == "clean":
            raise click.UsageError(self._not_cleaned(state), ctx)
        meant = did_you_mean(state, self.choices)
        if state == "all" and param is not None and not param.required:
            meant = "Leave it out for jobs of every state, and add --all to list all of them."
        elif not nearest(state, self.choices):
            if hint := _queue_hint(ctx, str(value)):
                meant = hint
            elif command == "search":
                meant += f" To find failed jobs by their text, run: penstock dlq list --matching {value}"
        raise click.UsageError(f"{value!r} is not a state. {meant}", ctx)

    def _not_cleaned(self, state: str) -> str:
        error = f"only jobs that have ended can be cleaned: {', '.join(self.choices)}."
        if state == "active":
            return f"{error} `penstock cancel` stops active jobs."
        return f"{error} `penstock drain` removes jobs that wait; add --scheduled for those that are not due yet."


class Family(PlainCommand, click.Group):
    """A group of commands, listed in the order in which they were added."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args[:1] == ["help"]:
            args = [*args[1:], "--help"]
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        self.format_commands(ctx, formatter)
        super().format_options(ctx, formatter)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [(name, self.commands[name].get_short_help_str(100)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if self.get_command(ctx, args[0]) is None:
            args = _with_known_command(_path(ctx), args)
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError:
            raise no_such_command(ctx, args[0], self.list_commands(ctx)) from None


def _with_known_command(path: str, args: list[str]) -> list[str]:
    """Return ``args`` with the command of another tool, one or two words, replaced by that of ``path``."""
    for count in (2, 1):
        if meant := known_command(path, " ".join(args[:count])):
            return [*meant, *args[count:]]
    return args


def _path(ctx: click.Context) -> str:
    """Return the words of the command after ``penstock``."""
    return ctx.command_path.partition(" ")[2]


def no_such_command(ctx: click.Context, name: str, known: list[str]) -> click.UsageError:
    """Return the error about an unknown command, with the command that was probably meant."""
    meant = advice(_path(ctx), name) or did_you_mean(name, known, label="Commands")
    return click.UsageError(f"unknown command {name!r}. {meant}", ctx)


def _names_of_options(command: click.Command) -> list[str]:
    """Return the long names of the options that help shows."""
    shown = [p for p in command.params if isinstance(p, click.Option) and not p.hidden]
    return [name for p in shown for name in (*p.opts, *p.secondary_opts) if name.startswith("--")]


def _no_such_option(ctx: click.Context, error: click.NoSuchOption, known: list[str]) -> click.UsageError:
    name, path = error.option_name, _path(ctx)
    meant = advice(path, name)
    if meant is None:
        part_of_command = "If it is part of the command, put -- before the command, or quote it."
        otherwise = part_of_command if path == "enqueue" else f"See: {ctx.command_path} --help"
        meant = did_you_mean(name, known if name.startswith("--") else [], otherwise=otherwise)
    return click.UsageError(f"unknown option {name!r}. {meant}", None if "See:" in meant else ctx)


def _with_hint(ctx: click.Context, error: click.UsageError) -> click.UsageError:
    """Return the error with a hint, if it is about an argument too many."""
    extra = _EXTRA_WORDS(error.message)
    if extra is None:
        return error
    hint = _hint_at_extra(ctx, extra[1])
    return click.UsageError(f"unexpected argument {extra[1]!r}.{f' {hint}' if hint else ''}", ctx)


def _hint_at_extra(ctx: click.Context, words: str) -> str:
    path = _path(ctx)
    if path == "schedule add":
        times = str(ctx.params.get("job", ""))
        return f"Give the times with --cron {times!r}." if _CRON(times) else "Quote the command."
    if path == "clean" and is_duration(words):
        return f"Did you mean --older-than {words}?"
    if path == "limit set" and words[:1].isdigit():
        return f"Did you mean --{'rate' if '/' in words else 'concurrency'} {words}?"
    return advice_on_word(path, words) or _queue_hint(ctx, words)


def _queue_hint(ctx: click.Context | None, word: str) -> str:
    """Return how to name the queue ``word``, or an empty string if there is no such queue."""
    if ctx is None or "--queue" not in _names_of_options(ctx.command):
        return ""
    return f"For that queue, give -q {word}." if is_queue(ctx, word) else ""


# Options that several commands share.


_TYPES: Final = {"DURATION": duration, "NUMBER": int}


def option(
    spec: str, help: str, type: Any = None, *, name: str | None = None, **more: Any
) -> Callable[[F], F]:
    """Add the option that help shows as ``-n, --limit NUMBER``. Without a metavar and a type, it is a flag.

    A DURATION and a NUMBER are checked unless ``type`` says otherwise. ``name`` is the parameter of the function, if it
    differs.
    """
    *short, last = spec.split(", ")
    flag, _, metavar = last.partition(" ")
    if metavar:
        more |= {"metavar": metavar, "type": type or _TYPES.get(metavar)}
    elif type is not None:
        more["type"] = type
    elif "/" not in flag:
        more["is_flag"] = True
    return click.option(*short, flag, *filter(None, [name]), help=help, **more)


def all_options(*options: Callable[[Any], Any]) -> Callable[[F], F]:
    """Return a decorator that adds these options, in this order."""

    def decorate(function: F) -> F:
        for add in reversed(options):
            function = add(function)
        return function

    return decorate


def _remember(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
    """Keep a global option, which may stand before or after the command; the last one wins."""
    if value is not None and param.name is not None:
        ctx.ensure_object(Flags).given[param.name] = value
    return value


def _debug(ctx: click.Context, param: click.Parameter, value: bool) -> bool:
    if value:
        ctx.ensure_object(Flags).debug = True
    return value


global_options = all_options(
    option(
        "--url URL",
        "The store: sqlite:///path, valkey://host. [the app's, PENSTOCK_URL, or penstock.db in this folder]",
        expose_value=False,
        callback=_remember,
    ),
    option(
        "--namespace NAME",
        "A separate part of the store. [PENSTOCK_NAMESPACE]",
        expose_value=False,
        callback=_remember,
    ),
    option(
        "--app MODULE:APP",
        "The app whose store and tasks to use, such as myproject.jobs:app. [PENSTOCK_APP]",
        expose_value=False,
        callback=_remember,
    ),
    option("--debug", "Print the traceback of an error.", expose_value=False, callback=_debug),
)
"""The options of every command: where the store is, and whether to print tracebacks."""


def command(name: str, **attributes: Any) -> Callable[[Callable[..., Any]], click.Command]:
    """Make a function a command with the global options. It gets the ``Settings``, and the values of its options."""
    cls: type[click.Command] = attributes.pop("cls", PlainCommand)
    context_settings = _SETTINGS | attributes.pop("context_settings", {})

    def decorate(function: Callable[..., Any]) -> click.Command:
        @wraps(function)
        def with_settings(**arguments: Any) -> Any:
            from penstock.cli.settings import Settings

            return function(Settings(click.get_current_context().ensure_object(Flags)), **arguments)

        make = click.command(name, cls=cls, context_settings=context_settings, **attributes)
        made: click.Command = make(global_options(with_settings))
        return made

    return decorate


def family(name: str, *, cls: type[Family] = Family) -> Callable[[Callable[..., Any]], Family]:
    """Make a function a group of commands."""

    def decorate(function: Callable[..., Any]) -> Family:
        return click.command(name, cls=cls, context_settings=_SETTINGS)(global_options(function))

    return decorate


def command_of(
    group: click.Group, name: str, **attributes: Any
) -> Callable[[Callable[..., Any]], click.Command]:
    """Make a function a command of ``group``."""

    def decorate(function: Callable[..., Any]) -> click.Command:
        made = command(name, **attributes)(function)
        group.add_command(made)
        return made

    return decorate


def queue_option_for(help: str) -> Callable[[F], F]:
    """Add ``--queue`` with its own help."""
    return option(
        "-q, --queue NAME", help, multiple=True, callback=_one_queue, shell_complete=completes_queues
    )


def _one_queue(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> str | None:
    """Refuse a second queue, which click would ignore silently, and the empty name of an unset variable."""
    if len(set(value)) > 1:
        raise click.UsageError(f"-q takes one queue here, got {' and '.join(value)}.", ctx)
    if value and not value[0]:
        raise click.UsageError("-q is empty. Give the name of a queue, or leave it out.", ctx)
    return value[0] if value else None


queue_option = queue_option_for("Only this queue. [all queues]")
queue_of_id = queue_option_for("The queue of the job, if several queues have this id.")
queue_of_ids = queue_option_for("The queue of the jobs, if several queues have these ids.")
queue_of_name = queue_option_for("The queue of the scheduler, if several queues have this name.")
queue_or_default = queue_option_for("The queue. [the configured queue]")
queue_argument = click.argument("name", metavar="[QUEUE]", required=False, shell_complete=completes_queues)
json_option = option("--json", "Print JSON.", name="as_json")
every_option = option("--every SECONDS", "Refresh interval: 0.1 or more. [1]", seconds, default=1.0)
yes_option = option("-y, --yes", "Do not ask for confirmation.")


def one_queue(name: str | None, queue: str | None) -> str | None:
    """Return the queue of the argument or of ``--queue``. Raise ``UsageError`` if they differ."""
    if name and queue and name != queue:
        raise click.UsageError(f"give one queue, got {name} and {queue}.")
    return name or queue


def limit_option(default: int) -> Callable[[F], F]:
    """Add ``--limit``, the largest number of jobs to show."""
    return option("-n, --limit NUMBER", f"Maximum number of jobs. [{default}]", whole(1), default=default)
