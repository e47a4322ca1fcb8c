"""Parsers of option values: durations, times, numbers."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from datetime import datetime, time, timedelta, tzinfo
from typing import Final
from zoneinfo import ZoneInfo

import click

from penstock.core.units import milliseconds
from penstock.errors import InvalidOption

_LEAST_S, _MOST_S = 0.1, 86_400
_BARE_NUMBER: Final = re.compile(r"\s*[0-9]+(\.[0-9]+)?\s*")
_DAYS: Final = {"today": 0, "tomorrow": 1}
_CLOCK: Final = re.compile(r"([0-9]{1,2})(:[0-9]{2}(?::[0-9]{2})?)")
"""A time of day, whose hour may have one digit."""
_FROM_NOW: Final = re.compile(r"(?:now *\+|in) *(.+)")
_TIMES: Final = (
    "Give one such as 18:30, 'tomorrow 9:00', 'now + 5min', 2026-12-01, '2026-12-01 08:00' or "
    "2026-12-01T08:00Z."
)


def with_unit(text: str) -> str:
    """Read a bare number as seconds, as ``sleep`` and ``timeout`` do."""
    return f"{text.strip()}s" if _BARE_NUMBER.fullmatch(text) else text


def duration(text: str) -> str:
    """Read a duration: ``30s``, ``1h30m``, or seconds."""
    try:
        milliseconds(with_unit(text))
    except InvalidOption:
        raise click.BadParameter(
            f"{text!r} is not a duration. Give seconds, or 250ms, 30s, 5min, 1h30m, 2d."
        ) from None
    return with_unit(text)


def nonzero_duration(text: str) -> str:
    """Read a duration that is longer than zero."""
    value = duration(text)
    if not milliseconds(value):
        raise click.BadParameter(f"{text!r} leaves no time at all. Leave the option out for no limit.")
    return value


def duration_or(word: str) -> Callable[[str], str]:
    """Return a parser of a duration or ``word``."""
    return lambda text: text if text == word else duration(text)


def nonempty_text(text: str) -> str:
    """Refuse an empty text: it is probably an unset variable, and must not select everything."""
    if not text:
        raise click.BadParameter("it is empty. Give a text, or leave the option out.")
    return text


def whole(least: int) -> Callable[[str], int]:
    """Return a parser of an integer of at least ``least``."""

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise click.BadParameter(f"{text!r} is not an integer.") from None
        if number < least:
            raise click.BadParameter(f"must be {least} or more, got {number}.")
        return number

    return read


def seconds(text: str) -> float:
    """Read the refresh interval of a live view."""
    try:
        number = float(text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a number of seconds.") from None
    if not _LEAST_S <= number <= _MOST_S:
        raise click.BadParameter(f"must be {_LEAST_S} to {_MOST_S} seconds, got {text}.")
    return number


def instant_or(duration_option: str) -> Callable[[str], datetime]:
    """Return a parser of times, in local time unless they name a zone.

    Its error about a duration names ``duration_option``, which takes durations.
    """

    def read(text: str) -> datetime:
        try:
            return read_time(text, for_duration=f"{duration_option} {text}")
        except InvalidOption as error:
            raise click.BadParameter(str(error)) from None

    return read


def read_time(text: str, zone: tzinfo | None = None, *, for_duration: str = "") -> datetime:
    """Read a time, in ``zone`` or local time unless ``text`` names a zone.

    A time of day without a date is the next one. Raises ``InvalidOption``; its error about a duration suggests
    ``for_duration``.
    """
    now = datetime.now(zone)
    if re.fullmatch("[0-9]{9,13}", text):
        at = datetime.fromtimestamp(int(text[:10]), zone)
        raise InvalidOption(f"{text!r} looks like seconds since 1970. Give {at:%Y-%m-%dT%H:%M:%S}.")
    try:
        named = _named_time(text.strip().lower(), now.replace(tzinfo=None))
        return named.replace(tzinfo=zone) if zone and named.tzinfo is None else named.astimezone()
    except (ValueError, OverflowError):
        if for_duration and is_duration(text):
            raise InvalidOption(
                f"{text!r} is a duration. Give {for_duration}, or a time such as 18:30."
            ) from None
        raise InvalidOption(f"{text!r} is not a time. {_TIMES}") from None


def is_duration(text: str) -> bool:
    """Return whether ``text`` is a duration longer than zero."""
    try:
        return milliseconds(with_unit(text)) > 0
    except InvalidOption:
        return False


def local_zone() -> str:
    """Return the IANA name of the local time zone. Raises ``InvalidOption`` if it has none."""
    link = os.path.realpath("/etc/localtime").partition("zoneinfo/")[2]
    name = os.environ.get("TZ", "").removeprefix(":") or link or "UTC"
    try:
        ZoneInfo(name)
    except (KeyError, ValueError):
        raise InvalidOption(
            f"the local time zone {name!r} is not an IANA name. Give --tz, such as --tz Europe/Berlin."
        ) from None
    return "UTC" if name == "Etc/UTC" else name


def _named_time(text: str, now: datetime) -> datetime:
    today = now.replace(hour=0, minute=0, second=0, microsecond=0)
    day, _, clock = text.partition(" ")
    if day in _DAYS:
        return today + timedelta(days=_DAYS[day]) + (_since_midnight(clock.strip()) if clock else timedelta())
    if text == "now":
        return now
    if after := _FROM_NOW.fullmatch(text):
        return now + timedelta(milliseconds=_milliseconds(after[1]))
    if _CLOCK.fullmatch(text):
        at = today + _since_midnight(text)
        return at if at > now else at + timedelta(days=1)
    return datetime.fromisoformat(text.upper())


def _milliseconds(text: str) -> int:
    try:
        return milliseconds(with_unit(text))
    except InvalidOption as error:
        raise ValueError(text) from error


def _since_midnight(clock: str) -> timedelta:
    match = _CLOCK.fullmatch(clock)
    if match is None:
        raise ValueError(clock)
    at = time.fromisoformat(f"{int(match[1]):02}{match[2]}")
    return timedelta(hours=at.hour, minutes=at.minute, seconds=at.second)
