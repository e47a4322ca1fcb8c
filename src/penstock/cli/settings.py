"""The keys of the configuration: what each is for, its type, its default, and how its text is read."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple

from penstock.cli.errors import CommandLineError, ExitCode
from penstock.cli.parameters import Flags
from penstock.cli.synonyms import KEY_ADVICE, did_you_mean
from penstock.cli.values import with_unit

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
    from penstock.core.units import describe, milliseconds
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


# What commands go by, and where each value comes from.
#
# The store has a rule of its own, ``chosen_store``: code ranks below flags and above all
# else. Of other values the first that has it counts: a flag, the environment (``PENSTOCK_QUEUE``), what
# ``penstock config set`` saved (``.penstock/config.toml``), ``.env``, the project file
# (``penstock.toml``, or ``[tool.penstock]`` in ``pyproject.toml``), the default. Files are those of the
# *project*: the nearest folder, from here upwards, that has one.


_FOLDER: Final = ".penstock"
_SAVED: Final = "config.toml"
_MARKS: Final = (_FOLDER, "penstock.toml", "pyproject.toml", ".env")
_PREFIX: Final = "PENSTOCK_"


class Origin(NamedTuple):
    """Where a value comes from: the kind of place, and which."""

    kind: str
    place: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.place}".strip()


class Setting(NamedTuple):
    """A key with the value that counts."""

    key: Key
    value: Value
    origin: Origin


class Project:
    """The folder whose files count, and what they say."""

    def __init__(self, start: Path | None = None) -> None:
        start = Path.cwd() if start is None else start
        folders = [start, *start.parents]
        self.root = next((folder for folder in folders if any((folder / m).exists() for m in _MARKS)), start)

    @property
    def folder(self) -> Path:
        """Where saved values, pid files and logs are; it need not be there yet. ``PENSTOCK_HOME`` says otherwise."""
        home = os.environ.get("PENSTOCK_HOME")
        return Path(home) if home else self.root / _FOLDER

    @property
    def saved_file(self) -> Path:
        return self.folder / _SAVED

    def files(self) -> list[tuple[str, Path]]:
        """The files that may say something, the most important first."""
        return [
            ("saved", self.saved_file),
            (".env", self.root / ".env"),
            ("project", self.root / "penstock.toml"),
            ("project", self.root / "pyproject.toml"),
        ]

    def save(self, values: Mapping[str, Value]) -> None:
        """Replace what is saved, in one step."""
        self.make_folder()
        import json

        from penstock.cli.pidfiles import private

        lines = [f"{name} = {json.dumps(value, ensure_ascii=False)}\n" for name, value in values.items()]
        fresh = self.saved_file.with_suffix(".new")
        fresh.unlink(missing_ok=True)
        with open(fresh, "x", encoding="utf-8", opener=private) as file:
            file.write("# Written by `penstock config set`.\n" + "".join(lines))
        fresh.replace(self.saved_file)

    def make_folder(self) -> Path:
        """The folder, made if need be, and kept out of version control."""
        self.folder.mkdir(parents=True, exist_ok=True)
        ignore = self.folder / ".gitignore"
        if not ignore.exists():
            ignore.write_text("*\n", encoding="utf-8")
        return self.folder


class Settings:
    """All keys, read when first asked for. Raises ``CommandLineError`` for a file or a value that cannot be read."""

    def __init__(self, flags: Flags) -> None:
        self.flags = flags

    @cached_property
    def project(self) -> Project:
        return Project()

    def __getitem__(self, name: str) -> Any:
        return self.setting(name).value

    def setting(self, name: str) -> Setting:
        """The value that counts, and where it comes from. Raises if there is no such key."""
        key = known_key(name)
        for origin, values in self._sources():
            if values.get(key.name) is not None:
                return Setting(key, values[key.name], origin)
        return Setting(key, key.default, Origin("default"))

    def below_flags(self) -> list[Mapping[str, Value]]:
        """Return what the environment and the files say, the most important first."""
        return [values for origin, values in self._sources() if origin.kind != "flag"]

    def all(self) -> list[Setting]:
        """Every key, in the order they are documented."""
        return [self.setting(name) for name in KEYS]

    @cached_property
    def saved(self) -> dict[str, Value]:
        """What ``config set`` has saved."""
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
    """Return the values of a file. A relative path of a store starts at the project, wherever the command runs."""
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
        raise CommandLineError(f"{path} cannot be read: {error}", ExitCode.USAGE) from error
    if kind == ".env":
        return _named_values(_variables(text), str(path))
    import tomllib

    try:
        table: Any = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise CommandLineError(f"{path} is not valid TOML: {error}.", ExitCode.USAGE) from error
    if path.name == "pyproject.toml":
        table = table.get("tool", {}).get("penstock", {})
    try:
        keys = {name: known_key(name) for name in table}
    except CommandLineError as error:
        raise CommandLineError(f"{path}: {error}", error.exit_code) from error
    return {key.name: checked_value(key, table[name], str(path)) for name, key in keys.items()}


def _variables(text: str) -> dict[str, str]:
    """``NAME=value`` lines, with or without ``export`` and quotes. Other lines are none of ours."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        name, separator, value = line.strip().removeprefix("export ").partition("=")
        if separator and not name.startswith("#"):
            value = value.strip()
            quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
            found[name.strip()] = value[1:-1] if quoted else value
    return found


def _named_values(variables: Mapping[str, str], where: str) -> dict[str, Value]:
    """Variables that stand for keys; others with the prefix are somebody else's."""
    return {
        name: checked_value(key, text, f"{_PREFIX}{name.upper()} in {where}")
        for name, key in KEYS.items()
        if (text := variables.get(f"{_PREFIX}{name.upper()}"))
    }


def checked_value(key: Key, value: Any, where: str) -> Value:
    """``value`` as the key has it. Raises ``CommandLineError`` if it cannot be; ``where`` is where it stands."""
    try:
        return key.read(value)
    except ValueError as error:
        raise CommandLineError(
            f"{where}: {key.name} cannot be {without_user(value)!r}. Give {error}.", ExitCode.USAGE
        ) from None
