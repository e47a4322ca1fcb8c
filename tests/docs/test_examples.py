"""The examples of README.md and docs/ are run as they stand, each as a script in an empty folder.

A block that opens with ```` ```python ```` is run; with ```` ```python notest ```` it is only compiled; with
```` ```python pytest ```` pytest runs it; with ```` ```python title="jobs.py" ```` it is a file of the page's
walkthrough, which ``test_quick_start.py`` runs; with ```` ```python spark ```` it is run by
``tests/spark/test_docs.py``, in the session that is there. What a comment
behind ``print(...)`` says is printed: all of it after ``# ->``, else the part before the first colon.
``valkey://localhost``, and ``redis://localhost``, become the URL of a server of the tests' own.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from tests.preloaded import run_script
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
FIRST = {example.where for page in PAGES for example in list(examples(page))[:1]}


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
        "web.md",
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
    # The first of a page is run by a new interpreter: it shows that the page imports what it uses.
    if example.where in FIRST or "spark" in code:
        run = subprocess.run(
            [sys.executable, "-W", "error", script],
            cwd=tmp_path,
            capture_output=True,
            timeout=60 if "spark" not in code else 110,
            check=False,
        )
    else:
        run = run_script(str(script), cwd=tmp_path, env=os.environ, options=("-W", "error"))
    assert run.returncode == 0, run.stderr.decode()
    out, err = run.stdout.decode(), run.stderr.decode()
    printed = iter(out.splitlines())
    for line in example.promised:
        assert line in printed, f"{line!r} was not printed, or not in this order:\n{out}{err}"


NOT_RUN: Final = {
    "README.md": (1, "it needs a table of the reader"),
    "history.md": (1, "DuckDB fetches its extension from the network"),
    "spark.md": (6, "they go on from tables and sessions of the reader"),
}
"""The fragments of each page, and why they cannot be run."""


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_every_python_block_is_run_or_is_a_known_fragment(page: Path) -> None:
    openings = Counter(re.findall(r"^ *```(py.*)$", page.read_text(), re.MULTILINE))
    kinds = {re.sub(r'title="\w+\.py"', "title", opening) for opening in openings}
    assert kinds <= {"python", "python spark", "python pytest", "python title", "python notest"}
    for opening, count in openings.items():
        assert count == len(list(examples(page, opening)))
    fragments, _ = NOT_RUN.get(page.name, (0, ""))
    assert openings["python notest"] == fragments


def test_the_readme_counts_the_examples_that_are_not_run() -> None:
    told = " ".join((ROOT / "README.md").read_text().split())
    assert f"The exceptions are {sum(n for n, _ in NOT_RUN.values())} fragments" in told
    for page, (count, _) in NOT_RUN.items():
        name = page if page == "README.md" else f"docs/{page}"
        assert re.search(rf"`{name}` (has )?{count}\b", told), f"{name} has {count} fragments"


SUITES = [example for page in PAGES for example in examples(page, "python pytest")]


@pytest.mark.parametrize("suite", SUITES, ids=[suite.where for suite in SUITES])
def test_pytest_passes_the_tests_of_an_example(suite: Example, tmp_path: Path) -> None:
    (tmp_path / "test_example.py").write_text(suite.code)
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_example.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"{suite.code.count('def test_')} passed" in run.stdout


FRAGMENTS = [example for page in PAGES for example in examples(page, "python notest")]


@pytest.mark.parametrize("fragment", FRAGMENTS, ids=[fragment.where for fragment in FRAGMENTS])
def test_a_fragment_compiles_and_imports_what_there_is(fragment: Example) -> None:
    compile(fragment.code, fragment.where, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    for node in ast.walk(ast.parse(fragment.code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("penstock"):
            module = pytest.importorskip(str(node.module), exc_type=ImportError)
            for alias in node.names:
                if not hasattr(module, alias.name):
                    import_module(f"{node.module}.{alias.name}")


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_pages_link_to_pages_that_are_there(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).is_file(), f"{page.name} links to {target}"
