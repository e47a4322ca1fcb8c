"""docs/coming-from.md is a checklist: every row about the five designs names the test that shows it.

A link's text is the test's name, read as a sentence. ``*to come*``, with what it will link to in a comment, stands
in for a test that is not there yet, and for no longer than that.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

import penstock
from penstock import (
    App,
    ClaimedJob,
    Dedup,
    Execution,
    Exponential,
    JobContext,
    JobHandle,
    Queue,
    Subscription,
    Task,
    Worker,
)
from penstock.client.admin import Settings
from penstock.client.options import PLACEMENT, TASK, TIMES
from penstock.storage import Storage
from penstock.testing import harness
from penstock.worker.options import WorkerOptions

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "coming-from.md"
CHECKED = ("job-queue", "glide-mq", "redis-work-queue", "queasy", "queuectl")
OTHERS = ("Celery", "RQ", "BullMQ")
LINK = re.compile(r"\[([^]]+)\]\(\.\./(tests/[^)]+\.py)\)")
NOT_IN_NAMES = re.compile("[ ']")


class Row(NamedTuple):
    """A line of a table below its head."""

    section: str
    line: int
    cells: tuple[str, ...]


def rows() -> Iterator[Row]:
    section = ""
    lines = PAGE.read_text().splitlines()
    for number, line in enumerate(lines, start=1):
        if line.startswith("## "):
            section = line.removeprefix("## ")
        is_head = number < len(lines) and lines[number].startswith("|---")
        if line.startswith("| ") and not is_head:
            cells = re.split(r"(?<!\\)\|", line.strip("|"))
            yield Row(section, number, tuple(cell.strip() for cell in cells))


ROWS = list(rows())
CHECKLIST = [row for row in ROWS if row.section in CHECKED]


@cache
def names_in(path: str) -> frozenset[str]:
    file = ROOT / path
    return (
        frozenset(re.findall(r"^ *(?:async )?def (test_\w+)", file.read_text(), re.M))
        if file.is_file()
        else frozenset()
    )


def is_there(path: str, sentence: str) -> bool:
    return f"test_{NOT_IN_NAMES.sub('_', sentence)}" in names_in(path)


@pytest.mark.parametrize("section", [*CHECKED, *OTHERS])
def test_every_queue_people_come_from_has_its_tables(section: str) -> None:
    assert sum(row.section == section for row in ROWS) >= 20


@pytest.mark.parametrize("row", CHECKLIST, ids=[f"line {row.line}" for row in CHECKLIST])
def test_every_row_of_the_five_designs_links_to_the_test_that_shows_it(row: Row) -> None:
    assert len(row.cells) == 3, row
    assert all(row.cells), f"line {row.line} has an empty cell"
    links = LINK.findall(row.cells[2])
    assert links, f"line {row.line} links to no test"
    for sentence, path in links:
        assert is_there(path, sentence), f"line {row.line}: no test of that name in {path}"


@pytest.mark.parametrize("section", OTHERS)
def test_rows_of_the_other_tables_name_our_equivalent(section: str) -> None:
    for row in ROWS:
        if row.section == section:
            assert len(row.cells) == 2, row
            assert all(row.cells), row


OBJECTS: dict[str, tuple[type, ...]] = {
    "app": (App,),
    "queue": (Queue,),
    "task": (Task,),
    "worker": (Worker,),
    "context": (JobContext,),
    "job": (JobHandle, ClaimedJob),
    "subscription": (Subscription,),
    "execution": (Execution,),
}


def written(pattern: str) -> set[tuple[str, ...]]:
    """What is found in the code of the column that says what it is here."""
    codes = (code for row in ROWS for code in re.findall(r"`([^`]+)`", row.cells[1]))
    return {match.groups() for code in codes for match in re.finditer(pattern, code)}


def test_what_the_page_calls_is_there() -> None:
    called = {pair for pair in written(r"(?<![.\w])([a-z]+)\.([a-z_]+)") if pair[0] in OBJECTS}
    unknown = {pair for pair in called if not any(hasattr(kind, pair[1]) for kind in OBJECTS[pair[0]])}
    assert len(called) > 80
    assert not unknown, unknown


def parameters(function: Callable[..., object]) -> set[str]:
    try:
        return set(inspect.signature(function).parameters)
    except ValueError:  # an exception without an __init__ of its own
        return set()


def test_the_options_the_page_names_are_there() -> None:
    faces = [*(kind for kinds in OBJECTS.values() for kind in kinds), Dedup, Exponential, Storage]
    functions: list[Callable[..., object]] = [harness]
    functions += [value for name in dir(penstock) if callable(value := getattr(penstock, name))]
    functions += [value for kind in faces for _, value in inspect.getmembers(kind, inspect.isroutine)]
    known = set().union(*(parameters(function) for function in functions))
    known |= TASK | PLACEMENT | WorkerOptions.__annotations__.keys() | Settings.__annotations__.keys()
    known |= TIMES | {"tokens", "usd"}  # what is used has any name
    named = {name for (name,) in written(r"(?<![\w.\"])([a-z_]+)=(?!=)")}
    assert len(named) > 60
    assert not named - known
