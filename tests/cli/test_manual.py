"""The session that the manual of the command line begins with prints what the manual shows."""

from __future__ import annotations

import re
import shlex

import pytest

from tests.cli.conftest import ROOT, Shell

pytestmark = pytest.mark.timeout(180)

MANUAL = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
# People want to see it happen, tests do not.
FASTER = {"2s": "20ms", "sleep 1": "sleep 0.1"}
CHANGES = [
    (r"^\S+ \S+ (?=INFO|WARNING|ERROR)|^… ", ""),
    (r"worker \S+-\d+-[0-9a-f]{6}", "worker NAME"),
    (r"\b[0-9a-f]{32}\b|^[0-9a-f]{8}\b", "ID"),
    (r"\b[\d.]+m?s ago", "AGO"),
    (r"sqlite:///\S+/penstock.db", "STORE"),
    (r"\s+", " "),
]


def session() -> list[tuple[str, list[str]]]:
    """Return the commands of "In five minutes", each with the lines below it."""
    block = re.search(r"## In five minutes\n\n```console\n(.*?)```", MANUAL, re.DOTALL)
    assert block is not None
    text = re.sub("|".join(rf"\b{slow}\b" for slow in FASTER), lambda found: FASTER[found[0]], block[1])
    commands = [part.splitlines() for part in re.split(r"^\$ ", text, flags=re.MULTILINE) if part]
    return [(lines[0], lines[1:]) for lines in commands]


def plain(line: str) -> str:
    """Return the line without what differs from run to run."""
    for pattern, replacement in CHANGES:
        line = re.sub(pattern, replacement, line)
    return line.strip()


def test_the_first_five_minutes_are_as_the_manual_shows_them(penstock: Shell) -> None:
    for command, expected in session():
        program, *arguments = shlex.split(command, comments=True)
        assert program == "penstock"
        run = penstock(*arguments)
        assert run.returncode == 0, run.stderr
        lines = [*run.stdout.splitlines(), *run.stderr.splitlines()]
        if expected:
            assert [plain(line) for line in lines] == [plain(line) for line in expected]
