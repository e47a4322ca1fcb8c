"""Every command is run by some test as users run it: by the script, on a file, and the main ones on a server, too."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from penstock.cli.commands import COMMANDS, penstock
from penstock.cli.errors import ExitCode
from penstock.cli.settings import KEYS
from tests.cli.conftest import ROOT

MANUAL = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
# What the tests of others look after.
ELSEWHERE = {"spark", "history", "archive"}
# These have nothing to do with a store.
LOCAL = {"completion", "config get", "config set", "config list", "config path"}


def paths(command: click.Command | None, *names: str) -> Iterator[str]:
    """``dlq retry`` and its like: commands that are no families."""
    assert command is not None
    if not isinstance(command, click.Group):
        yield " ".join(names)
        return
    for name in command.list_commands(click.Context(command)):
        yield from paths(command.get_command(click.Context(command), name), *names, name)


def said_in_tests(*, on_a_server: bool) -> set[str]:
    """The words that tests hand to the script: ``dlq retry --all``; only of those that run on a server, if asked."""
    said: set[str] = set()
    for file in sorted(Path(__file__).parent.glob("test_*.py")):
        for test in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(test, ast.FunctionDef):
                fixtures = {argument.arg for argument in test.args.args}
                if not on_a_server or fixtures & {"on_both", "failed", "valkey_url"}:
                    said |= set(_words(test))
    return said


def _words(test: ast.FunctionDef) -> Iterator[str]:
    for call in ast.walk(test):
        if isinstance(call, ast.Call):
            given = [arg.value for arg in _flat(call.args) if isinstance(arg, ast.Constant)]
            yield " ".join(word for word in given if isinstance(word, str))


def _flat(arguments: list[ast.expr]) -> Iterator[ast.expr]:
    for argument in arguments:
        if isinstance(argument, ast.Starred) and isinstance(argument.value, ast.Tuple):
            yield from argument.value.elts
        else:
            yield argument


def meant_by(path: str) -> tuple[str, ...]:
    # `penstock worker` is `penstock worker run`.
    return ("worker -", "worker tasks:app") if path == "worker run" else (f"{path} ",)


ANYWHERE, ON_A_SERVER = said_in_tests(on_a_server=False), said_in_tests(on_a_server=True)
ALL = [
    path
    for name in COMMANDS
    if name not in ELSEWHERE
    for path in paths(penstock.get_command(click.Context(penstock), name), name)
]


@pytest.mark.parametrize("path", ALL)
def test_a_test_runs_it(path: str) -> None:
    assert any(f"{words} ".startswith(meant_by(path)) for words in ANYWHERE)


@pytest.mark.parametrize("path", [path for path in ALL if path not in LOCAL])
def test_a_test_runs_it_on_a_server(path: str) -> None:
    assert any(f"{words} ".startswith(meant_by(path)) for words in ON_A_SERVER)


@pytest.mark.parametrize("path", ALL)
def test_the_manual_page_documents_it(path: str) -> None:
    assert f"`{path}" in MANUAL or f"penstock {path}" in MANUAL


def test_the_manual_has_every_key_with_its_type_and_every_exit_code() -> None:
    for key in KEYS.values():
        assert f"| `{key.name}` | {key.type} |" in MANUAL
    for code in ExitCode:
        assert f"| {code.value} |" in MANUAL


def test_the_manual_has_every_option_of_what_is_used_most() -> None:
    for name in ("enqueue", "worker run"):
        head, *rest = name.split()
        command = penstock.get_command(click.Context(penstock), head)
        for part in rest:
            assert isinstance(command, click.Group)
            command = command.get_command(click.Context(command), part)
        assert command is not None
        for parameter in command.params:
            if not isinstance(parameter, click.Option) or parameter.hidden:
                continue
            if parameter.opts[-1] != "--debug":
                assert parameter.opts[-1] in MANUAL, f"{name} {parameter.opts[-1]}"
