from __future__ import annotations

import re
import subprocess
import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

import pytest

import penstock

NAMES: list[str] = vars(penstock)["__all__"]


def test_all_is_sorted_and_names_nothing_twice() -> None:
    assert sorted(set(NAMES)) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_name_in_all_can_be_had(name: str) -> None:
    assert getattr(penstock, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nothing_of_that_name"):
        _ = penstock.nothing_of_that_name


def test_every_error_of_the_tree_is_public() -> None:
    errors = vars(import_module("penstock.errors")).values()
    tree = {each for each in errors if isinstance(each, type) and issubclass(each, penstock.PenstockError)}

    assert len(tree) > 30
    assert {each.__name__ for each in tree} <= set(NAMES)


def test_the_version_is_the_installed_one() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", penstock.__version__)
    try:
        assert version("penstock") == penstock.__version__
    except PackageNotFoundError:
        pytest.skip("run from the source tree")


def test_enqueueing_needs_neither_the_worker_nor_an_engine() -> None:
    script = (
        "import sys, penstock; penstock.App; print(*(n for n in sys.modules if n.startswith('penstock.')))"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    loaded = run.stdout.split()
    assert "penstock.client.app" in loaded
    assert not [name for name in loaded if ".worker" in name or ".sqlite" in name or ".valkey" in name]


def test_names_are_imported_from_where_they_are_defined_when_they_are_first_used() -> None:
    script = "import sys, penstock; print(*(name for name in sys.modules if name.startswith('penstock.')))"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert run.stdout.split() == []
    assert set(penstock._HOMES) | {"__version__"} == set(NAMES)


def test_modules_can_be_had_by_their_names() -> None:
    script = "import penstock; print(penstock.errors.JobFailed is penstock.JobFailed)"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert run.stdout.split() == ["True"]
