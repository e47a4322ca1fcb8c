"""Words of other tools work, or the error names ours. Each row of the lists is checked."""

from __future__ import annotations

import re
from contextvars import copy_context
from pathlib import Path

import click
import pytest

from penstock.cli import main
from penstock.cli.commands import COMMANDS, penstock
from penstock.cli.completion import STATES
from penstock.cli.parameters import Flags
from penstock.cli.settings import KEYS
from penstock.cli.synonyms import INSTEAD, KEY_ADVICE, SAME, STATES_BY_SYNONYM
from tests.cli.conftest import Shell


def found(words: list[str]) -> tuple[click.Command, list[str]]:
    """The command that the words name, and the words behind it."""
    command: click.Command = penstock
    while isinstance(command, click.Group) and words:
        inner = command.get_command(click.Context(command), words[0])
        if inner is None:
            break
        command, words = inner, words[1:]
    return command, words


def options_of(command: click.Command) -> set[str]:
    return {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}


def split(row: str) -> tuple[str, str]:
    """The command of a row, and the option at its end."""
    *words, last = row.split()
    return (" ".join(words), last) if last.startswith("-") and words else (row, "")


COMMAND_ROWS = [row for row in SAME if not split(row)[1]]
OPTION_ROWS = [row for row in SAME if split(row)[1] and row.split()[:2] != ["worker", split(row)[1]]]
ACTIONS = [row for row in SAME if row.startswith("worker --")]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PENSTOCK_URL", raising=False)


@pytest.mark.parametrize("row", COMMAND_ROWS + ACTIONS)
def test_a_command_has_the_help_of_the_one_it_stands_for(
    row: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _, rest = found(row.split())
    assert rest, f"{row} is a command of ours: the row is never used"
    words = [word for word in SAME[row].split() if word not in STATES and word not in STATES_BY_SYNONYM]
    assert main.run([*row.split(), "--help"]) == 0
    theirs = capsys.readouterr().out
    assert main.run([*words, "--help"]) == 0
    assert theirs == capsys.readouterr().out
    assert "Usage:" in theirs


@pytest.mark.parametrize("row", OPTION_ROWS)
def test_an_option_stands_for_one_of_ours(row: str) -> None:
    path, option = split(row)
    command, rest = found((path if path != "*" else "list").split())
    assert not rest, f"there is no command {path}"
    assert option not in options_of(command), "it is ours already: the row is never used"
    meant, ours = split(SAME[row])
    assert meant == path
    assert not ours or ours in options_of(command)
    try:
        # A hint may open the store: what it sets must not reach other tests.
        copy_context().run(command.make_context, f"penstock {path}", [f"{option}=1"], obj=Flags())
    except click.NoSuchOption:
        raise
    except click.UsageError:
        pass  # our option does not take this value, or an argument is missing


@pytest.mark.parametrize("row", INSTEAD)
def test_the_error_says_what_to_do_instead(row: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = row.replace("*", "list").split()
    path, option = split(" ".join(words))
    command, rest = found(path.split())
    assert rest if not option else option not in options_of(command), "it is ours: the row is never used"
    assert main.run(words) == 2
    said = capsys.readouterr().err
    assert INSTEAD[row] in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("row", INSTEAD)
def test_the_commands_that_an_error_names_exist(row: str) -> None:
    for named in re.findall(r"`penstock ([^`|]+)", INSTEAD[row]):
        words = named.replace("'0 3 * * *'", "CRON").split()
        command, rest = found(words)
        assert not isinstance(command, click.Group) or command.name == "worker", f"{named}: {rest}"
        assert {word for word in rest if word.startswith("-")} <= options_of(command), named


@pytest.mark.parametrize("word", STATES_BY_SYNONYM)
def test_a_state_has_other_names(word: str) -> None:
    assert word not in STATES
    assert STATES_BY_SYNONYM[word] in STATES


@pytest.mark.parametrize("name", KEY_ADVICE)
def test_the_error_about_a_key_names_ours(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert name not in KEYS
    assert re.findall(r"'(\w+)'", KEY_ADVICE[name])[0] in KEYS
    assert main.run(["config", "get", name]) == 2
    assert KEY_ADVICE[name] in capsys.readouterr().err


@pytest.mark.parametrize("words", [["help"], ["help", "list"], ["dlq", "help"], ["help", "worker", "stop"]])
def test_help_is_a_command_everywhere(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(words) == 0
    said = capsys.readouterr().out
    assert main.run([*(word for word in words if word != "help"), "--help"]) == 0
    assert said == capsys.readouterr().out


def test_version_is_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["version"]) == 0
    assert capsys.readouterr().out.startswith("penstock ")


def test_no_synonym_hides_a_command() -> None:
    assert not COMMANDS.keys() & (SAME.keys() | INSTEAD.keys())


def test_familiar_words_do_what_ours_do(penstock: Shell) -> None:
    penstock.ok("add", "true", "--job-id=a", "--retries", "4", "--countdown", "1 hour")
    penstock.ok("push", "true", "--id", "b")
    assert penstock.json("describe", "a")["attempts"] == 5
    assert [job["id"] for job in penstock.json("ls", "pending")] == ["b"]
    assert [job["id"] for job in penstock.json("list", "--status", "queued")] == ["b"]
    assert {job["id"] for job in penstock.json("list", "-n", "1", "--all")} == {"a", "b"}
    assert "default" in penstock.ok("queues")
    penstock.ok("rm", "b")
    assert penstock.json("ls", "waiting") == []
    keys = {row["key"] for row in penstock.json("config", "get")}
    assert keys == set(KEYS)


def test_workers_are_started_and_stopped_by_flags(penstock: Shell) -> None:
    penstock.ok("enqueue", "true", "-q", "mail")
    try:
        said = penstock.ok("worker", "--start", "--count", "2", "--queue", "mail,reports=3")
        assert said.count("runs (process") == 2
        [first, _] = penstock.json("workers")
        assert sorted(first["queues"]) == ["mail", "reports"]
    finally:
        assert penstock.ok("worker", "--stop").count("has stopped") == 2
    assert "no worker runs" in penstock("worker", "--status").stderr


def test_a_count_of_workers_starts_them(penstock: Shell) -> None:
    try:
        assert penstock.ok("worker", "--count=1").count("runs (process") == 1
    finally:
        penstock.ok("worker", "stop")


def test_an_app_can_be_named_as_in_celery(penstock: Shell, tmp_path: Path) -> None:
    lines = ["from penstock import App", "app = App()", "@app.task", "def f() -> int:", "    return 1"]
    (tmp_path / "tasks.py").write_text("\n".join(lines))
    penstock.ok("enqueue", "--task", "f", "--id", "a")
    penstock.ok("worker", "-A", "tasks:app", "--once")
    assert penstock.json("show", "a")["state"] == "completed"
