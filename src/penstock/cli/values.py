"""How the texts of options become values, each with its own way to refuse."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

import click

__all__ = ["duration", "duration_or", "seconds", "some_text", "whole", "with_unit"]

_SOONEST_S, _LATEST_S = 0.1, 86_400
_BARE_NUMBER: Final = re.compile(r"\s*[0-9]+(\.[0-9]+)?\s*")


def with_unit(text: str) -> str:
    """A bare number means seconds in a shell, as to ``sleep`` and ``timeout``."""
    return f"{text.strip()}s" if _BARE_NUMBER.fullmatch(text) else text


def duration(text: str) -> str:
    """``30s``, ``1h30m``, or seconds."""
    from penstock.core.duration import milliseconds
    from penstock.errors import InvalidOption

    try:
        milliseconds(with_unit(text))
    except InvalidOption:
        raise click.BadParameter(
            f"{text!r} is not a duration. Give seconds, or 250ms, 30s, 5min, 1h30m, 2d."
        ) from None
    return with_unit(text)


def duration_or(word: str) -> Callable[[str], str]:
    """The same, or this word."""
    return lambda text: text if text == word else duration(text)


def some_text(text: str) -> str:
    """Any text but none: that is most likely a variable that is not set, and must not mean everything."""
    if not text:
        raise click.BadParameter("it is empty. Give a text, or leave the option out.")
    return text


def whole(least: int) -> Callable[[str], int]:
    """A whole number of at least ``least``."""

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise click.BadParameter(f"{text!r} is no whole number.") from None
        if number < least:
            raise click.BadParameter(f"{number} is too small. Give {least} or more.")
        return number

    return read


def seconds(text: str) -> float:
    """How often a view looks."""
    try:
        number = float(text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is no number of seconds.") from None
    if not _SOONEST_S <= number <= _LATEST_S:
        raise click.BadParameter(f"give {_SOONEST_S} to {_LATEST_S} seconds.")
    return number
