"""``penstock config``: what commands go by."""

from __future__ import annotations

import shutil

import click

from penstock.cli.errors import CommandLineError, NotFound
from penstock.cli.output import print_json, print_table
from penstock.cli.parameters import Flags, command_of, family, json_option
from penstock.cli.settings import KEYS, Origin, Setting, Settings, Value, checked_value, known_key
from penstock.core.text import without_password


@family("config")
def config() -> None:
    """Show and set what commands go by.

    \b
      penstock config list                    all keys: value, origin, type, meaning
      penstock config set attempts 5          save a value for this project
      penstock config set attempts ''         take it back
      penstock config get attempts

    The first that has a value counts: a flag, the environment (PENSTOCK_ATTEMPTS ...), what `config set` saved, .env,
    the project file (penstock.toml, or [tool.penstock] in pyproject.toml), the default. Of url and namespace, what the
    code of the app says counts before all but flags.
    """


@command_of(config, "get")
@click.argument(
    "key",
    required=False,
    shell_complete=lambda ctx, param, start: [name for name in KEYS if name.startswith(start)],
)
@json_option
@click.pass_obj
def get(flags: Flags, key: str | None, as_json: bool) -> None:
    """Print the value of KEY that counts here. Exits with 3 if it has none. --json tells its origin, too.

    Without KEY, print all keys as `penstock config list` does.
    """
    if key is None:
        _print_all(flags, as_json=as_json)
        return
    settings = Settings(flags)
    setting = _counting(settings, settings.setting(key))
    if as_json:
        print_json(_row(setting))
    elif setting.value is None:
        raise NotFound(f"{key} is not set, and has no default. Set it by: penstock config set {key} VALUE")
    else:
        click.echo(_text(setting.value))


@command_of(config, "set")
@click.argument(
    "key", shell_complete=lambda ctx, param, start: [name for name in KEYS if name.startswith(start)]
)
@click.argument("value")
@click.pass_obj
def set_(flags: Flags, key: str, value: str) -> None:
    """Save VALUE for KEY, for this project. An empty VALUE takes back what was saved."""
    settings, known = Settings(flags), known_key(key)
    saved = {name: kept for name, kept in settings.saved.items() if name != known.name}
    if value:
        saved[known.name] = checked_value(known, value, "config set")
    settings.project.save(saved)
    if known.name == "shell" and value and shutil.which(value) is None:
        click.echo(f"saved, but there is no program {value} here", err=True)
    elif known.name == "shell":
        click.echo("workers that run take it when they start again: penstock worker restart", err=True)
    counts = Settings(flags).setting(known.name)
    if value and counts.origin.kind != "saved":
        told = _text(_without_password(counts.value))
        click.echo(f"saved, but {counts.origin} says {told!r}, which goes before it", err=True)


@command_of(config, "list")
@json_option
@click.pass_obj
def list_(flags: Flags, as_json: bool) -> None:
    """All keys: value, where it comes from, type and meaning. Passwords in URLs are not shown."""
    _print_all(flags, as_json=as_json)


def _print_all(flags: Flags, *, as_json: bool) -> None:
    settings = Settings(flags)
    counting = [_counting(settings, setting) for setting in settings.all()]
    if as_json:
        print_json([_row(setting) for setting in counting])
        return
    rows = [
        (
            each.key.name,
            _text(_without_password(each.value)),
            str(each.origin),
            each.key.type,
            each.key.meaning,
        )
        for each in counting
    ]
    print_table(("key", "value", "from", "type", "meaning"), rows, spare=("type", "meaning"))


@command_of(config, "path")
@json_option
@click.pass_obj
def path(flags: Flags, as_json: bool) -> None:
    """The files that are looked at, the most important first."""
    files = Settings(flags).project.files()
    if as_json:
        print_json([{"kind": kind, "path": str(file), "exists": file.is_file()} for kind, file in files])
        return
    for kind, file in files:
        click.echo(f"{kind:8} {file}{'' if file.is_file() else '  (not there)'}")


def _counting(settings: Settings, setting: Setting) -> Setting:
    """Return the setting that counts: what the code of the app says of its store goes before all but flags."""
    if setting.key.name not in ("url", "namespace") or setting.origin.kind == "flag":
        return setting
    from penstock.cli.connect import code_names

    try:
        value = getattr(code_names(settings), setting.key.name)
    except CommandLineError:
        # An app that cannot be imported must not keep anyone from looking at the configuration.
        return setting
    return setting if value is None else Setting(setting.key, value, Origin("code", settings["app"]))


def shown_argument(text: str) -> str:
    """``--name=value`` as it may be shown: without the password of a URL."""
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
