"""What other processes find by the name of a module."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from penstock import App, InvalidOption
from penstock.client.imports import find, locate, task_modules
from penstock.client.task import Task
from tests.spark.fleet_tasks import app, double


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module of the name ``aaa``, which comes before all others."""
    module = ModuleType("aaa")
    monkeypatch.setitem(sys.modules, "aaa", module)
    return module


def test_an_app_and_a_task_are_found_by_module_and_name() -> None:
    assert find("tests.spark.fleet_tasks:app", App) is app
    assert find("tests.spark.fleet_tasks:double", Task) is double


@pytest.mark.parametrize("target", ["nowhere:app", "tests.spark.fleet_tasks:nothing", "no_colon", ":app", ""])
def test_what_is_not_there_is_named_with_what_to_do(target: str) -> None:
    with pytest.raises(InvalidOption, match=f"the app {target!r} cannot be found on .*Give module:name"):
        find(target, App)


def test_what_is_something_else_is_said() -> None:
    with pytest.raises(InvalidOption, match="of type FunctionTask, not an app"):
        find("tests.spark.fleet_tasks:double", App)
    with pytest.raises(InvalidOption, match=r"of type App, not a task, which @app\.task makes"):
        find("tests.spark.fleet_tasks:app", Task)


def test_an_app_is_located_in_the_module_that_has_its_tasks(loaded: ModuleType) -> None:
    loaded.mine = app  # type: ignore[attr-defined]
    assert locate(app, in_script=True) == ("tests.spark.fleet_tasks", "app")
    assert task_modules(app) == ["tests.spark.fleet_tasks"]


def test_an_app_without_tasks_is_located_where_it_stands(loaded: ModuleType) -> None:
    alone = loaded.mine = App("memory://")  # type: ignore[attr-defined]
    assert locate(alone, in_script=False) == ("aaa", "mine")
    assert task_modules(alone) == []


def test_an_app_in_a_script_is_located_only_for_processes_that_load_the_script(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = App("memory://")
    monkeypatch.setattr(sys.modules["__main__"], "script", script, raising=False)
    assert locate(script, in_script=True) == ("__main__", "script")
    with pytest.raises(InvalidOption, match="in the script itself"):
        locate(script, in_script=False)


def test_an_app_made_inside_a_function_is_refused() -> None:
    with pytest.raises(InvalidOption, match="made inside a function"):
        locate(App("memory://"), in_script=True)
