"""``penstock config``: show and set the settings of commands."""

from __future__ import annotations

import shutil
from typing import Final

import click

from penstock.cli.errors import CommandLineError, NotFound
from penstock.cli.output import print_json, print_table
from penstock.cli.parameters import command_of, family, json_option
from penstock.cli.settings import KEYS, Origin, Setting, Settings, Value, checked_value, known_key
from penstock.core.text import without_password
from penstock.storage import open_storage

_RETRIES: Final = ("max_retries", "maxretries", "retries")
"""Names in other tools for one less than the key ``attempts``."""


@family("config")
def config() -> None:
    """Show and set the settings of commands.

    \b
      penstock config list                    all keys: value, origin, type, meaning
      penstock config set attempts 5          save a value for this project
      penstock config set attempts ''         remove it
      penstock config get attempts

    The first of these that has a value counts: a flag, the environment (PENSTOCK_ATTEMPTS ...), a value saved by
    `config set`, .env, the project file (penstock.toml, or [tool.penstock] in pyproject.toml), the default. For url and
    namespace, the code of the app ranks below flags and above all else.
    """


@command_of(config, "get")
@click.argument(
    "key",
    required=False,
    shell_complete=lambda ctx, param, start: [name for name in KEYS if name.startswith(start)],
)
@json_option
def get(settings: Settings, key: str | None, as_json: bool) -> None:
    """Print the value of KEY that counts here. Exits with 3 if it has none. --json includes its origin.

    Without KEY, print all keys as `penstock config list` does.
    """
    if key is None:
        _print_all(settings, as_json=as_json)
        return
    setting = _effective(settings, settings.setting(key))
    if as_json:
        print_json(_row(setting))
    elif setting.value is None:
        raise NotFound(f"{key} is not set and has no default. Set it with: penstock config set {key} VALUE")
    else:
        click.echo(_text(setting.value))


@command_of(config, "set")
@click.argument(
    "key", shell_complete=lambda ctx, param, start: [name for name in KEYS if name.startswith(start)]
)
@click.argument("value")
def set_(settings: Settings, key: str, value: str) -> None:
    """Save VALUE for KEY, for this project. An empty VALUE removes the saved value."""
    if key.lower().replace("-", "_") in _RETRIES:
        key, value = "attempts", _attempts(key, value)
    setting = known_key(key)
    saved = {name: other for name, other in settings.saved.items() if name != setting.name}
    if value:
        saved[setting.name] = checked_value(setting, value, "config set")
        if setting.name == "url":
            open_storage(value)  # Refuse a URL without an engine. This does not connect.
    settings.project.save(saved)
    if setting.name == "shell" and value and shutil.which(value) is None:
        click.echo(f"saved, but the program {value} does not exist here", err=True)
    elif setting.name == "shell":
        click.echo("running workers use it after a restart: penstock worker restart", err=True)
    current = Settings(settings.flags).setting(setting.name)
    if value and current.origin.kind != "saved":
        text = _text(_without_password(current.value))
        click.echo(f"saved, but {current.origin} says {text!r}, which ranks higher", err=True)


def _attempts(key: str, retries: str) -> str:
    """Return the number of attempts for a number of retries, and say so."""
    if not retries.isdigit():
        return retries
    attempts = str(int(retries) + 1)
    click.echo(f"attempts is now {attempts}: the first run, and {key} = {retries} after it", err=True)
    return attempts


@command_of(config, "list")
@json_option
def list_(settings: Settings, as_json: bool) -> None:
    """List all keys with value, origin, type and meaning. Passwords in URLs are not shown."""
    _print_all(settings, as_json=as_json)


def _print_all(settings: Settings, *, as_json: bool) -> None:
    current = [_effective(settings, setting) for setting in settings.all()]
    if as_json:
        print_json([_row(setting) for setting in current])
        return
    rows = [
        (
            setting.key.name,
            _text(_without_password(setting.value)),
            str(setting.origin),
            setting.key.type,
            setting.key.meaning,
        )
        for setting in current
    ]
    print_table(("key", "value", "from", "type", "meaning"), rows, spare=("type", "meaning"))


@command_of(config, "path")
@json_option
def path(settings: Settings, as_json: bool) -> None:
    """List the files that settings are read from, the most important first."""
    files = settings.project.files()
    if as_json:
        print_json([{"kind": kind, "path": str(file), "exists": file.is_file()} for kind, file in files])
        return
    for kind, file in files:
        click.echo(f"{kind:8} {file}{'' if file.is_file() else '  (missing)'}")


def _effective(settings: Settings, setting: Setting) -> Setting:
    """Return the setting that counts: for the store, the code of the app ranks below flags only."""
    if setting.key.name not in ("url", "namespace") or setting.origin.kind == "flag":
        return setting
    from penstock.cli.connect import code_names

    try:
        value = getattr(code_names(settings), setting.key.name)
    except CommandLineError:
        # The configuration must be readable even if the app cannot be imported.
        return setting
    return setting if value is None else Setting(setting.key, value, Origin("code", settings["app"]))


def shown_argument(text: str) -> str:
    """Return an argument ``--name=value`` without the password of a URL."""
    name, equals, value = text.partition("=")
    return f"{name}{equals}{_without_password(value)}"


def _row(setting: Setting) -> dict[str, Value]:
    key = setting.key
    return {
        "key": key.name,
        "value": _without_password(setting.value),
        "origin": str(setting.origin),
        "type": key.type,
        "default": key.default,
        "meaning": key.meaning,
    }


def _text(value: Value) -> str:
    match value:
        case None:
            return ""
        case bool():
            return str(value).lower()
        case _:
            return str(value)


def _without_password(value: Value) -> Value:
    return without_password(value) if isinstance(value, str) else value
