"""Options that many commands have, and the checks of their values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from penstock.cli.flags import Flags

__all__ = [
    "command",
    "command_of",
    "global_options",
    "json_option",
    "limit_option",
    "queue_option",
    "yes_option",
]

F = TypeVar("F", bound=Callable[..., Any])


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
        click.option("--url", metavar="URL", expose_value=False, callback=_remember, help="The store."),
        click.option(
            "--namespace", metavar="NAME", expose_value=False, callback=_remember, help="A part of the store."
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
    settings = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
    given = attributes.get("context_settings", {})

    def decorate(function: Callable[..., Any]) -> click.Command:
        attributes["context_settings"] = settings | given
        made: click.Command = click.command(name, cls=click.Command, **attributes)(global_options(function))
        return made

    return decorate


def command_of(
    group: click.Group, name: str, **attributes: Any
) -> Callable[[Callable[..., Any]], click.Command]:
    """The same for a command of a group."""

    def decorate(function: Callable[..., Any]) -> click.Command:
        made = command(name, **attributes)(function)
        group.add_command(made)
        return made

    return decorate


def json_option(function: F) -> F:
    """``--json``: for programs, without tables."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(function)


def queue_option(function: F) -> F:
    """``--queue``: ``None`` if it is not given."""
    return click.option("-q", "--queue", metavar="NAME", help="Of this queue only.")(function)


def limit_option(default: int) -> Callable[[F], F]:
    """``--limit``: how many at most."""
    return click.option(
        "-n", "--limit", type=click.IntRange(1), default=default, show_default=True, help="At most so many."
    )


def yes_option(function: F) -> F:
    """``--yes``: do not ask."""
    return click.option("-y", "--yes", is_flag=True, help="Do not ask first.")(function)
