"""The examples of README.md and docs/ are run as they stand, each as a script in an empty folder.

A block that opens with ```` ```python ```` is run; with ```` ```python notest ```` it is not; with
```` ```python spark ```` it is run by ``tests/spark/test_docs.py``, in the session that is there. What a comment
behind ``print(...)`` says is printed: all of it after ``# ->``, else the part before the first colon.
``valkey://localhost``, and ``redis://localhost``, become the URL of a server of the tests' own.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.servers import HOST, ValkeyServer

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LOCAL = re.compile(r"(valkey|redis)://localhost\b")


class Example(NamedTuple):
    """A block of a page, and what it promises to print, in order."""

    where: str
    code: str

    @property
    def promised(self) -> list[str]:
        comments = re.findall(r"^ *print\(.*\)  # (.*)$", self.code, re.MULTILINE)
        return [
            text.removeprefix("->").strip() if text.startswith("->") else text.split(":")[0].strip()
            for text in comments
        ]


def examples(page: Path, opening: str = "python") -> Iterator[Example]:
    text = page.read_text()
    for block in re.finditer(rf"^```{opening}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        line = text.count("\n", 0, block.start()) + 1
        yield Example(f"{page.name}:{line}", block[1])


EXAMPLES = [example for page in PAGES for example in examples(page)]


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyServer]:
    with ValkeyServer() as server:
        yield server


@pytest.mark.parametrize(
    "name",
    [
        "README.md",
        "guide.md",
        "workers.md",
        "steps.md",
        "operate.md",
        "flows.md",
        "own-loop.md",
        "schedulers.md",
        "stores.md",
        "bridges.md",
        "events.md",
        "observe.md",
        "testing.md",
    ],
)
def test_every_page_for_users_has_examples_that_promise_something(name: str) -> None:
    assert any(example.promised for example in EXAMPLES if example.where.startswith(f"{name}:"))


@pytest.mark.parametrize("example", EXAMPLES, ids=[example.where for example in EXAMPLES])
def test_an_example_prints_what_it_says(
    example: Example, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    code = example.code
    if LOCAL.search(code):
        server: ValkeyServer = request.getfixturevalue("server")
        with server.client() as client:
            client.flushall()
        code = LOCAL.sub(rf"\1://{HOST}:{server.port}", code)
    script = tmp_path / "example.py"
    script.write_text(code)
    run = subprocess.run(
        [sys.executable, "-W", "error", script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60 if "spark" not in example.code else 110,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    printed = iter(run.stdout.splitlines())
    for line in example.promised:
        assert line in printed, f"{line!r} was not printed, or not in this order:\n{run.stdout}{run.stderr}"


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_pages_link_to_pages_that_are_there(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).is_file(), f"{page.name} links to {target}"
