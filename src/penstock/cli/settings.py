"""What commands go by, and where each value comes from.

The store has a rule of its own, ``penstock.opening.chosen_store``: code ranks below flags and above all else. Of
other values the first that has it counts: a flag, the environment (``PENSTOCK_QUEUE``), what ``penstock config set``
saved (``.penstock/config.toml``), ``.env``, the project file (``penstock.toml``, or ``[tool.penstock]`` in
``pyproject.toml``), the default. Files are those of the *project*: the nearest folder, from here upwards, that has one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple

from penstock.cli.errors import CommandLineError, ExitCode
from penstock.cli.flags import Flags
from penstock.cli.keys import KEYS, Key, Value, known_key, without_user

__all__ = ["Origin", "Project", "Setting", "Settings", "checked_value"]

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
