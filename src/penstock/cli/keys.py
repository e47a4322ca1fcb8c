"""The keys of the configuration: what each is for, its type, its default, and how its text is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from penstock.cli.errors import CommandLineError, ExitCode
from penstock.cli.synonyms import KEY_ADVICE, did_you_mean
from penstock.cli.values import with_unit

__all__ = ["KEYS", "Key", "Value", "known_key", "without_user"]

Value = str | int | bool | None


class Key(NamedTuple):
    """``read`` takes a text, or what a TOML file says, and raises ``ValueError`` with what it should have been."""

    name: str
    type: str
    default: Value
    read: Callable[[Any], Value]
    meaning: str


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("a text")
    return value


def _url(value: Any) -> str:
    if "://" in (text := _text(value)):
        return text
    shown = without_user(text)
    raise ValueError(f"a URL such as {f'valkey://{shown}' if ':' in text else f'sqlite:///{shown}'}")


def without_user(text: Any) -> Any:
    """Return what is not a URL without a password that it may hold."""
    return f"***@{text.rpartition('@')[2]}" if isinstance(text, str) and "@" in text else text


def _whole(least: int) -> Callable[[Any], int]:
    def read(value: Any) -> int:
        try:
            # Not of a truth value, which is a number to Python, nor of 1.5, which would be cut.
            number = int(value if isinstance(value, str) else repr(value))
        except ValueError:
            raise ValueError("a whole number") from None
        if number < least:
            raise ValueError(f"a whole number of at least {least}")
        return number

    return read


def _duration(value: Any) -> str:
    from penstock.core.duration import describe, milliseconds
    from penstock.errors import InvalidOption

    try:
        return describe(milliseconds(with_unit(value) if isinstance(value, str) else value))
    except InvalidOption:
        raise ValueError('seconds, or a duration such as "30s", "5min", "1h30m"') from None


def _flag(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    truths = {
        "true": True,
        "yes": True,
        "on": True,
        "1": True,
        "false": False,
        "no": False,
        "off": False,
        "0": False,
    }
    try:
        return truths[str(value).lower()]
    except KeyError:
        raise ValueError("true or false") from None


def _backoff(value: Any) -> str:
    return "exponential" if value == "exponential" else _duration(value)


def _log_format(value: Any) -> str:
    if value not in ("text", "json"):
        raise ValueError("text or json")
    return str(value)


_ROWS: Final = [
    Key("url", "url", "sqlite:///penstock.db", _url, "where jobs are kept"),
    Key("namespace", "text", None, _text, "a part of the store to itself"),
    Key("app", "module:app", None, _text, "where tasks are defined, and which store commands use"),
    Key("queue", "text", "default", _text, "where `enqueue` puts jobs"),
    Key("attempts", "number", 3, _whole(1), "how often a job is run if it fails"),
    Key("backoff", "duration", "exponential", _backoff, "the rest between attempts"),
    Key("timeout", "duration", None, _duration, "how long a run may take"),
    Key("priority", "number", 0, _whole(-(2**31)), "smaller runs first"),
    Key("result_ttl", "duration", "1d", _duration, "how long a completed job is kept"),
    Key("failure_ttl", "duration", "30d", _duration, "how long a failed job is kept"),
    Key("concurrency", "number", None, _whole(1), "how many jobs a worker runs at a time"),
    Key("workers", "number", 1, _whole(1), "how many workers `worker start` starts"),
    Key("processes", "number", 1, _whole(1), "how many processes a worker has"),
    Key("lease", "duration", "30s", _duration, "how soon the jobs of a dead worker come back"),
    Key("stale_after", "duration", None, _duration, "which active jobs `reset-stale` takes back"),
    Key("grace", "duration", "30s", _duration, "how long a stopping worker lets its jobs finish"),
    Key(
        "stuck_after",
        "duration",
        "5m",
        _duration,
        "how long a worker's event loop may stand still before it gives up its jobs",
    ),
    Key(
        "unknown_after",
        "duration",
        None,
        _duration,
        "how long a worker hands back a job of an unknown task before it fails; 1h, or 0s with --burst",
    ),
    Key(
        "commands",
        "flag",
        None,
        _flag,
        "whether workers run shell commands; by default with a local store only",
    ),
    Key("log_format", "text or json", "text", _log_format, "how a worker prints its log lines"),
    Key("shell", "path", "/bin/sh", _text, "what commands are run by"),
]
KEYS: Final = {key.name: key for key in _ROWS}


def known_key(name: str) -> Key:
    """The key of that name; refused with the one that may have been meant."""
    name = name.replace("-", "_")
    if name in KEYS:
        return KEYS[name]
    meant = KEY_ADVICE.get(name.lower()) or did_you_mean(name, list(KEYS))
    raise CommandLineError(f"there is no key {name!r}. {meant}", ExitCode.USAGE)
