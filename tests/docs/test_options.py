"""The lists of options agree: those of the documents, the command line and the client."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from penstock import App
from penstock.cli.joboptions import JOB_OPTIONS
from penstock.client.options import DEFAULTS, JOB_POLICY, PLACEMENT, PLACEMENT_PARSERS, POLICY_PARSERS, TASK
from penstock.core.job import Extras, NewJob, Options
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
        ("guide.md", "**How jobs are treated**", JOB_POLICY),
        ("guide.md", "**Where one job goes**", PLACEMENT),
        ("guide.md", "On the task only:", TASK - DEFAULTS | {"name", "queue"}),
        ("guide.md", "On the app only:", set(inspect.signature(App).parameters) - {"defaults"}),
        ("workers.md", "resumes by itself", set(WorkerOptions.__annotations__)),
    ],
)
def test_a_table_of_options_has_all_of_them(page: str, words: str, options: set[str]) -> None:
    assert options_below(page, words) == options


def test_every_option_of_a_job_has_a_parser_and_a_field() -> None:
    assert POLICY_PARSERS.keys() == JOB_POLICY
    assert PLACEMENT_PARSERS.keys() == PLACEMENT
    assert {field for field, _ in POLICY_PARSERS.values()} <= set(Options.__struct_fields__)
    fields = {*NewJob.__struct_fields__, *Extras.__struct_fields__, "after_failure"}
    assert {field for field, _ in PLACEMENT_PARSERS.values()} <= fields


def test_the_command_line_has_every_option_of_a_job_but_a_few() -> None:
    only_in_code = {
        *("lifo", "on_conflict", "dedup", "unchecked", "headers", "hold", "after_failure"),
        *("run_id", "write_id", "version", "deadline"),
    }
    names = {"run_at" if option.name == "at" else option.name for option in JOB_OPTIONS}

    assert names == (JOB_POLICY | PLACEMENT) - only_in_code
