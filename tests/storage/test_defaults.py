"""The engines have the parameters and defaults of the contract: a call means the same on each of them."""

from __future__ import annotations

import inspect

import pytest

from penstock.storage.contract import Storage
from penstock.storage.sqlite.engine import SqliteStorage
from penstock.storage.valkey.engine import ValkeyStorage

VERBS = [name for name, _ in inspect.getmembers(Storage, inspect.iscoroutinefunction) if name[0] != "_"]


def defaults_of(engine: type[object], verb: str) -> dict[str, object]:
    """Return the parameters of a verb with their defaults, without the object, unit or view that comes first."""
    first, *parameters = inspect.signature(getattr(engine, verb)).parameters.values()
    assert first.name in ("self", "unit", "view", "at")
    return {parameter.name: parameter.default for parameter in parameters if parameter.name != "queue"}


@pytest.mark.parametrize("engine", [SqliteStorage, ValkeyStorage])
@pytest.mark.parametrize("verb", VERBS)
def test_an_engine_has_the_defaults_of_the_contract(engine: type[object], verb: str) -> None:
    assert defaults_of(engine, verb) == defaults_of(Storage, verb)
