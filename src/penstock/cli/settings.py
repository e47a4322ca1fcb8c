"""The settings of the command line: their keys, and the origin of each value.

The first source that has a value counts: a flag, the environment (``PENSTOCK_QUEUE``), the values that ``penstock
config set`` saved (``.penstock/config.toml``), ``.env``, the project file (``penstock.toml``, or ``[tool.penstock]`` in
``pyproject.toml``), the default. The files are those of the *project*: the nearest folder, from here upwards, that has
one. For the store, the code of the app ranks below flags and above all else; see ``chosen_store``.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple

from penstock.cli.errors import CommandLineError, InvalidUsage
from penstock.cli.parameters import Flags
from penstock.cli.pidfiles import private
from penstock.cli.synonyms import KEY_ADVICE, did_you_mean
from penstock.cli.values import with_unit
from penstock.core.names import check_namespace, check_queue
from penstock.core.units import describe, milliseconds
from penstock.errors import InvalidName, InvalidOption

Value = str | int | bool | None


class Key(NamedTuple):
    """A key. ``read`` takes a text or a TOML value, and raises ``ValueError`` with a description of valid values."""

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
    example = without_user(text)
    raise ValueError(f"a URL such as {f'valkey://{example}' if ':' in text else f'sqlite:///{example}'}")


def _name(check: Callable[[str], str], valid: str) -> Callable[[Any], str]:
    def read(value: Any) -> str:
        try:
            return check(value)
        except InvalidName:
            raise ValueError(valid) from None

    return read


def without_user(text: Any) -> Any:
    """Return a text that is not a URL, without the password that it may contain."""
    return f"***@{text.rpartition('@')[2]}" if isinstance(text, str) and "@" in text else text


def _whole(least: int) -> Callable[[Any], int]:
    def read(value: Any) -> int:
        try:
            # repr() refuses True, which int() takes for 1, and 1.5, which int() cuts.
            number = int(value if isinstance(value, str) else repr(value))
        except ValueError:
            raise ValueError("a whole number") from None
        if number < least:
            raise ValueError(f"a whole number of at least {least}")
        return number

    return read


def _duration(value: Any) -> str:
    try:
        return describe(milliseconds(with_unit(value) if isinstance(value, str) else value))
    except InvalidOption:
        raise ValueError('seconds, or a duration such as "30s", "5min", "1h30m"') from None


def _flag(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    match str(value).lower():
        case "true" | "yes" | "on" | "1":
            return True
        case "false" | "no" | "off" | "0":
            return False
        case _:
            raise ValueError("true or false")


def _backoff(value: Any) -> str:
    return "exponential" if value == "exponential" else _duration(value)


def _log_format(value: Any) -> str:
    if value not in ("text", "json"):
        raise ValueError("text or json")
    return str(value)


_ROWS: Final = [
    Key("url", "url", "sqlite:///penstock.db", _url, "the store of the jobs"),
    Key(
        "namespace",
        "text",
        None,
        _name(check_namespace, "a name such as shop"),
        "a separate part of the store",
    ),
    Key("app", "module:app", None, _text, "the app, which has the tasks and names the store"),
    Key(
        "queue",
        "text",
        "default",
        _name(check_queue, "a queue name such as mail or default"),
        "the queue that `enqueue` uses",
    ),
    Key("attempts", "number", 3, _whole(1), "maximum number of attempts of a job"),
    Key("backoff", "duration", "exponential", _backoff, "delay between attempts"),
    Key("timeout", "duration", None, _duration, "maximum duration of a run"),
    Key("priority", "number", 0, _whole(-(2**31)), "smaller runs first"),
    Key("result_ttl", "duration", "1d", _duration, "how long a completed job is kept"),
    Key("failure_ttl", "duration", "30d", _duration, "how long a failed job is kept"),
    Key("concurrency", "number", None, _whole(1), "number of jobs that a worker runs at a time"),
    Key("workers", "number", 1, _whole(1), "number of workers that `worker start` starts"),
    Key("processes", "number", 1, _whole(1), "number of processes of a worker"),
    Key("lease", "duration", "30s", _duration, "how soon the jobs of a dead worker run again"),
    Key("stale_after", "duration", None, _duration, "age of the active jobs that `reset-stale` takes back"),
    Key("grace", "duration", "30s", _duration, "how long a stopping worker lets its jobs finish"),
    Key(
        "stuck_after",
        "duration",
        "5m",
        _duration,
        "how long a worker's event loop may be blocked before it gives up its jobs",
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
    Key("log_format", "text or json", "text", _log_format, "format of a worker's log lines"),
    Key("shell", "path", "/bin/sh", _text, "the shell that runs commands"),
]
KEYS: Final = {key.name: key for key in _ROWS}


def known_key(name: str) -> Key:
    """Return the key with this name. Raise ``CommandLineError`` with a suggestion if it does not exist."""
    name = name.replace("-", "_")
    if name in KEYS:
        return KEYS[name]
    meant = KEY_ADVICE.get(name.lower()) or did_you_mean(name, list(KEYS))
    raise InvalidUsage(f"the key {name!r} does not exist. {meant}")


# Sources of values


_FOLDER: Final = ".penstock"
_SAVED: Final = "config.toml"
_MARKS: Final = (_FOLDER, "penstock.toml", "pyproject.toml", ".env")
_PREFIX: Final = "PENSTOCK_"


class Origin(NamedTuple):
    """The source of a value: its kind, and the file if it is one."""

    kind: str
    place: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.place}".strip()


class Setting(NamedTuple):
    """A key with its current value."""

    key: Key
    value: Value
    origin: Origin


class Project:
    """The folder whose files hold settings."""

    def __init__(self, start: Path | None = None) -> None:
        start = Path.cwd() if start is None else start
        folders = [start, *start.parents]
        self.root = next((folder for folder in folders if any((folder / m).exists() for m in _MARKS)), start)

    @property
    def folder(self) -> Path:
        """Return the folder of saved values, pid files and logs. It may not exist. ``PENSTOCK_HOME`` moves it."""
        home = os.environ.get("PENSTOCK_HOME")
        return Path(home) if home else self.root / _FOLDER

    @property
    def saved_file(self) -> Path:
        return self.folder / _SAVED

    def files(self) -> list[tuple[str, Path]]:
        """Return the files that may hold settings, the most important first."""
        return [
            ("saved", self.saved_file),
            (".env", self.root / ".env"),
            ("project", self.root / "penstock.toml"),
            ("project", self.root / "pyproject.toml"),
        ]

    def save(self, values: Mapping[str, Value]) -> None:
        """Replace the saved values atomically."""
        self.make_folder()

        lines = [f"{name} = {json.dumps(value, ensure_ascii=False)}\n" for name, value in values.items()]
        fresh = self.saved_file.with_suffix(".new")
        fresh.unlink(missing_ok=True)
        with open(fresh, "x", encoding="utf-8", opener=private) as file:
            file.write("# Written by `penstock config set`.\n" + "".join(lines))
        fresh.replace(self.saved_file)

    def make_folder(self) -> Path:
        """Create the folder if it does not exist, keep it out of version control, and return it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        ignore = self.folder / ".gitignore"
        if not ignore.exists():
            ignore.write_text("*\n", encoding="utf-8")
        return self.folder


class Settings:
    """All keys, read at first use. A file or a value that cannot be read raises ``CommandLineError``."""

    def __init__(self, flags: Flags) -> None:
        self.flags = flags

    @cached_property
    def project(self) -> Project:
        return Project()

    def __getitem__(self, name: str) -> Any:
        return self.setting(name).value

    def setting(self, name: str) -> Setting:
        """Return the current value of a key and its origin. Raise ``CommandLineError`` if the key does not exist."""
        key = known_key(name)
        for origin, values in self._sources():
            if values.get(key.name) is not None:
                return Setting(key, values[key.name], origin)
        return Setting(key, key.default, Origin("default"))

    def below_flags(self) -> list[Mapping[str, Value]]:
        """Return the values of the environment and the files, the most important first."""
        return [values for origin, values in self._sources() if origin.kind != "flag"]

    def all(self) -> list[Setting]:
        """Return every key, in documented order."""
        return [self.setting(name) for name in KEYS]

    @cached_property
    def saved(self) -> dict[str, Value]:
        """Return the values that ``config set`` has saved."""
        return _read(*self.project.files()[0])

    @cached_property
    def _files(self) -> list[tuple[Origin, dict[str, Value]]]:
        files = self.project.files()[1:]
        return [(Origin(kind, str(path)), _read(kind, path)) for kind, path in files if path.is_file()]

    @cached_property
    def _given(self) -> dict[str, Value]:
        return {name: checked_value(KEYS[name], text, f"--{name}") for name, text in self.flags.given.items()}

    def _sources(self) -> Iterator[tuple[Origin, Mapping[str, Value]]]:
        yield Origin("flag"), self._given
        yield Origin("environment"), _named_values(os.environ, "the environment")
        root = self.project.root
        yield Origin("saved", str(self.project.saved_file)), _anchored(self.saved, root)
        for origin, values in self._files:
            yield origin, _anchored(values, root)


def _anchored(values: Mapping[str, Value], root: Path) -> Mapping[str, Value]:
    """Return the values of a file, with the relative path of a store resolved against the project."""
    start, _, path = str(values.get("url", "")).partition(":///")
    if start != "sqlite" or path.startswith("/") or root == Path.cwd():
        return values
    return {**values, "url": f"sqlite:///{root}/{path}"}


def _read(kind: str, path: Path) -> dict[str, Value]:
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidUsage(f"{path} cannot be read: {error}") from error
    if kind == ".env":
        return _named_values(_variables(text), str(path))

    try:
        table: Any = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidUsage(f"{path} is not valid TOML: {error}.") from error
    if path.name == "pyproject.toml":
        table = table.get("tool", {}).get("penstock", {})
    try:
        keys = {name: known_key(name) for name in table}
    except CommandLineError as error:
        raise CommandLineError(f"{path}: {error}", error.exit_code) from error
    return {key.name: checked_value(key, table[name], str(path)) for name, key in keys.items()}


def _variables(text: str) -> dict[str, str]:
    """Return the ``NAME=value`` lines, with or without ``export`` and quotes. Ignore other lines."""
    variables: dict[str, str] = {}
    for line in text.splitlines():
        name, separator, value = line.strip().removeprefix("export ").partition("=")
        if separator and not name.startswith("#"):
            value = value.strip()
            is_quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
            variables[name.strip()] = value[1:-1] if is_quoted else value
    return variables


def _named_values(variables: Mapping[str, str], where: str) -> dict[str, Value]:
    """Return the values of the variables that name keys. Ignore others with the prefix."""
    return {
        name: checked_value(key, text, f"{_PREFIX}{name.upper()} in {where}")
        for name, key in KEYS.items()
        if (text := variables.get(f"{_PREFIX}{name.upper()}"))
    }


def checked_value(key: Key, value: Any, where: str) -> Value:
    """Return ``value`` as the type of the key. Raise ``CommandLineError`` with ``where`` if it is not valid."""
    try:
        return key.read(value)
    except ValueError as error:
        raise InvalidUsage(f"{where}: {key.name} cannot be {without_user(value)!r}. Give {error}.") from None
