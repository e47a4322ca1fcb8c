"""The tables of options are complete: each is compared with the options that the code takes."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from penstock import App
from penstock.client.options import DEFAULTS, PLACEMENT, TASK, TREATMENT
from penstock.worker.options import WorkerOptions

DOCS = Path(__file__).parents[2] / "docs"


def options_below(page: str, words: str) -> set[str]:
    """Return the names in the first column of the first table below the line with ``words``."""
    text = (DOCS / page).read_text()
    table = text[text.index(words) :].partition("| option |")[2].partition("\n\n")[0]
    cells = re.findall(r"^\| (`[^|]*`) \|", table, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}


@pytest.mark.parametrize(
    ("page", "words", "options"),
    [
        ("guide.md", "**How jobs are treated**", TREATMENT),
        ("guide.md", "**Where one job goes**", PLACEMENT),
        ("guide.md", "On the task only:", TASK - DEFAULTS | {"name", "queue"}),
        ("guide.md", "On the app only:", set(inspect.signature(App).parameters) - {"defaults"}),
        ("workers.md", "resumes by itself", set(WorkerOptions.__annotations__)),
    ],
)
def test_a_table_of_options_has_all_of_them(page: str, words: str, options: set[str]) -> None:
    assert options_below(page, words) == options
