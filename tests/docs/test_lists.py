"""The documents have every verb, state, event and column, and no list of them differs from that of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from penstock.cli import completion, parameters
from penstock.core.event import COLUMNS
from penstock.core.lifecycle import OPEN, TRANSITIONS, EventType, State
from penstock.storage.contract import Storage

DOCS = Path(__file__).parents[2] / "docs"
VERBS = {name for name in dir(Storage) if name[0] != "_"} - {"on_ids", "open", "close"}


def words_of(page: str) -> set[str]:
    """Return the words that a page sets in code or in bold, or names in a heading."""
    text = (DOCS / page).read_text()
    marked = re.findall(r"`([^`\n]+)`|\*\*(.+?)\*\*|^#+ (.+)$", text, re.MULTILINE)
    return {word for parts in marked for part in parts for word in re.findall(r"\w+", part)}


def test_every_verb_is_specified() -> None:
    assert VERBS - words_of("verbs.md") == set()


def test_transitions_belong_to_verbs_of_the_contract() -> None:
    assert {row.verb for row in TRANSITIONS} - VERBS == {"deliver", "fill", "quarantine"}


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("states.md", {state.value for state in State}),
        ("event-format.md", {event.value for event in EventType}),
        ("event-format.md", set(COLUMNS)),
    ],
)
def test_a_page_has_all_names(page: str, names: set[str]) -> None:
    assert names - words_of(page) == set()


def test_the_command_line_knows_every_state() -> None:
    assert set(completion.STATES) == set(State)
    assert set(parameters.OPEN) == OPEN


def test_the_glossary_fits_on_a_page_and_is_sorted() -> None:
    text = (DOCS / "glossary.md").read_text()
    words = re.findall(r"^\| \*\*(.+?)\*\*", text, re.MULTILINE)

    assert len(text.splitlines()) <= 40
    assert words == sorted(words)
