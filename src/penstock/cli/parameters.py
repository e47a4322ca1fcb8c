"""What was said on the command line itself, wherever on it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import click

from penstock.cli.synonyms import (
    STATES_BY_SYNONYM,
    advice,
    did_you_mean,
    known_command,
    nearest,
    with_known_option,
)
from penstock.cli.values import seconds, whole


class Flags:
    """Keys given by options, as text, not checked yet; and whether errors are to be shown in full."""

    def __init__(self) -> None:
        self.given: dict[str, str] = {}
        self.debug = False


# Options that many commands have, and how help shows them.


F = TypeVar("F", bound=Callable[..., Any])

# Spelled out, so that no help has to wait for the modules that know them.
STATES: Final = ("scheduled", "waiting", "blocked", "active", "completed", "failed", "cancelled")
OPEN: Final = ("scheduled", "waiting", "blocked", "active")
"""The states of jobs that have not ended."""
_GLOBAL: Final = frozenset({"--url", "--namespace", "--app", "--debug", "--help", "--version"})
_EXTRA_WORDS: Final = re.compile(r"Got unexpected extra arguments? \((.*)\)").fullmatch
_SETTINGS: Final = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


class _OptionsApart(click.Command):
    """Shows the options of every command behind those of this one, and knows options by their names elsewhere."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        given = list(args)
        while True:
            try:
                return super().parse_args(ctx, list(given))
            except click.NoSuchOption as error:
                renamed = with_known_option(_path(ctx), given, error.option_name)
                if renamed is None or renamed == given:
                    raise _no_such_option(ctx, error, _names_of_options(self)) from None
                given = renamed
            except click.UsageError as error:
                raise _with_queue_option(ctx, error, _names_of_options(self)) from None

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
    """One of ``states``, or what another tool calls it: ``pending`` is ``waiting``."""

    def __init__(self, states: Sequence[str]) -> None:
        super().__init__(list(states))

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        state = STATES_BY_SYNONYM.get(str(value).lower(), str(value).lower())
        if state in self.choices:
            return state
        meant = did_you_mean(state, self.choices)
        if state == "all" and param is not None and not param.required:
            meant = "Leave it out for jobs of every state, and add --all for all of them."
        elif state in STATES and ctx is not None and ctx.command.name == "clean":
            meant = "`penstock drain` removes jobs that wait; add --scheduled for those that are not due yet."
        elif "--queue" in _names_of_options(ctx.command if ctx is not None else None) and not nearest(
            state, self.choices
        ):
            meant += f" If it is a queue, give -q {value}."
        raise click.UsageError(f"{value!r} is not a state. {meant}", ctx)


class PlainCommand(_OptionsApart):
    """A command that is no family."""


class Family(_OptionsApart, click.Group):
    """Commands under one name: listed as they were added, a wrong name refused with the one that was meant."""

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
            args = [*(known_command(_path(ctx), args[0]) or args[:1]), *args[1:]]
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError:
            raise no_such_command(ctx, args[0], self.list_commands(ctx)) from None


def _path(ctx: click.Context) -> str:
    """Return the words of the command behind ``penstock``."""
    return ctx.command_path.partition(" ")[2]


def no_such_command(ctx: click.Context, name: str, known: list[str]) -> click.UsageError:
    """The error that names the command that may have been meant."""
    meant = advice(_path(ctx), name) or did_you_mean(name, known)
    return click.UsageError(f"there is no command {name!r}. {meant}", ctx)


def _names_of_options(command: click.Command | None) -> list[str]:
    """Return the long names, without those of options that help does not show."""
    shown = [p for p in command.params if isinstance(p, click.Option) and not p.hidden] if command else []
    return [name for p in shown for name in (*p.opts, *p.secondary_opts) if name.startswith("--")]


def _no_such_option(ctx: click.Context, error: click.NoSuchOption, known: list[str]) -> click.UsageError:
    name, path = error.option_name, _path(ctx)
    meant = advice(path, name)
    if meant is None:
        part_of_command = "If it is part of the command, put -- before the command, or quote it."
        otherwise = part_of_command if path == "enqueue" else f"See: {ctx.command_path} --help"
        meant = did_you_mean(name, known if name.startswith("--") else [], otherwise=otherwise)
    return click.UsageError(f"unknown option {name!r}. {meant}", None if "See:" in meant else ctx)


def _with_queue_option(ctx: click.Context, error: click.UsageError, known: list[str]) -> click.UsageError:
    """Return the error, which says how to name a queue if a word too many was given."""
    found = _EXTRA_WORDS(error.message)
    if found is None:
        return error
    words, meant = found[1], ""
    if _path(ctx) == "schedule add":
        meant = " Quote the command."
    elif "--queue" in known and " " not in words:
        meant = f" If it is a queue, give -q {words}."
    return click.UsageError(f"unexpected argument {words!r}.{meant}", ctx)


def _remember(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
    """Global options may stand before or behind the command; the last one given counts."""
    if value is not None and param.name is not None:
        ctx.ensure_object(Flags).given[param.name] = value
    return value


def _debug(ctx: click.Context, param: click.Parameter, value: bool) -> bool:
    if value:
        ctx.ensure_object(Flags).debug = True
    return value


def global_options(function: F) -> F:
    """What every command has: where the store is, and whether errors are shown in full."""
    options = [
        click.option(
            "--url",
            metavar="URL",
            expose_value=False,
            callback=_remember,
            help="Where jobs are kept: sqlite:///path, valkey://host. [the app's, PENSTOCK_URL, or penstock.db here]",
        ),
        click.option(
            "--namespace",
            metavar="NAME",
            expose_value=False,
            callback=_remember,
            help="A part of the store that is kept apart. [PENSTOCK_NAMESPACE]",
        ),
        click.option(
            "--app",
            metavar="MODULE:APP",
            expose_value=False,
            callback=_remember,
            help="The app whose store and tasks to use, such as myproject.jobs:app. [PENSTOCK_APP]",
        ),
        click.option(
            "--debug",
            is_flag=True,
            expose_value=False,
            callback=_debug,
            help="Show errors with their traceback.",
        ),
    ]
    for option in reversed(options):
        function = option(function)
    return function


def command(name: str, **attributes: Any) -> Callable[[Callable[..., Any]], click.Command]:
    """Make a function a command with the global options."""
    kind: type[click.Command] = attributes.pop("cls", PlainCommand)
    given = attributes.pop("context_settings", {})

    def decorate(function: Callable[..., Any]) -> click.Command:
        make = click.command(name, cls=kind, context_settings=_SETTINGS | given, **attributes)
        made: click.Command = make(global_options(function))
        return made

    return decorate


def family(name: str, *, cls: type[Family] = Family) -> Callable[[Callable[..., Any]], Family]:
    """Make a function a family of commands."""

    def decorate(function: Callable[..., Any]) -> Family:
        return click.command(name, cls=cls, context_settings=_SETTINGS)(global_options(function))

    return decorate


def command_of(
    group: click.Group, name: str, **attributes: Any
) -> Callable[[Callable[..., Any]], click.Command]:
    """A command of a family."""

    def decorate(function: Callable[..., Any]) -> click.Command:
        made = command(name, **attributes)(function)
        group.add_command(made)
        return made

    return decorate


def json_option(function: F) -> F:
    """``--json``: for programs, without tables."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")(function)


def completes_queues(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Has a shell complete the names of queues."""
    from penstock.cli.completion import queue_names

    return queue_names(ctx, param, incomplete)


def completes_ids(*states: str) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    """Has a shell complete the ids of jobs in these states, or in any."""

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
        from penstock.cli.completion import ids_in

        return ids_in(*states or STATES)(ctx, param, incomplete)

    return complete


def queue_option(function: F) -> F:
    """``--queue``: ``None`` if it is not given."""
    return queue_option_for("Of this queue only.")(function)


def queue_option_for(help: str) -> Callable[[F], F]:
    """The same, where it means something else."""
    return click.option(
        "-q",
        "--queue",
        metavar="NAME",
        multiple=True,
        callback=_one_queue,
        shell_complete=completes_queues,
        help=help,
    )


def _one_queue(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> str | None:
    """Refuse a second queue, of which click would take the last, and the empty name of an unset variable."""
    if len(set(value)) > 1:
        raise click.UsageError(f"-q takes one queue here, got {' and '.join(value)}.", ctx)
    if value and not value[0]:
        raise click.UsageError("-q is empty. Give the name of a queue, or leave it out.", ctx)
    return value[0] if value else None


def limit_option(default: int) -> Callable[[F], F]:
    """``--limit``: how many at most."""
    return click.option(
        "-n",
        "--limit",
        metavar="NUMBER",
        type=whole(1),
        default=default,
        help=f"Maximum number. [{default}]",
    )


def every_option(function: F) -> F:
    """``--every``: how often a live view looks."""
    return click.option(
        "--every",
        metavar="SECONDS",
        type=seconds,
        default=1.0,
        help="How often to look: 0.1 or more. [1]",
    )(function)


def yes_option(function: F) -> F:
    """``--yes``: do not ask."""
    return click.option("-y", "--yes", is_flag=True, help="Do not ask first.")(function)
