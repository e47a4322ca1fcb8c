"""URLs find their engines."""

from __future__ import annotations

from typing import Any, cast

import pytest

from penstock.errors import InvalidOption
from penstock.storage import Storage, open_storage, register_engine
from penstock.storage.sqlite.engine import SqliteStorage


def test_an_unknown_scheme_is_refused_with_those_that_are_known_and_a_guess() -> None:
    with pytest.raises(InvalidOption, match=r"Did you mean sqlite://\?.*memory.*valkey\+cluster"):
        open_storage("sqllite:///penstock.db")


def test_an_invalid_url_is_refused() -> None:
    with pytest.raises(InvalidOption, match="not a URL"):
        open_storage("penstock.db")


def test_an_option_the_engine_does_not_know_is_refused() -> None:
    with pytest.raises(InvalidOption, match="colour"):
        open_storage("memory://", colour="red")


def test_an_option_goes_before_the_one_in_the_url() -> None:
    storage = open_storage("sqlite:///penstock.db?namespace=here", namespace="there")

    assert isinstance(storage, SqliteStorage)
    assert storage._namespace == "there"


def test_a_third_party_serves_a_scheme_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.storage._registered", {})
    seen: list[tuple[str, dict[str, Any]]] = []

    def factory(url: str, **options: Any) -> Storage:
        seen.append((url, options))
        return cast("Storage", SqliteStorage.from_url("memory://"))

    register_engine("cloud", factory)

    open_storage("cloud://somewhere", zone="eu")

    assert seen == [("cloud://somewhere", {"zone": "eu"})]


def test_a_missing_extra_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_hiredis(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}", name="hiredis")

    monkeypatch.setattr("penstock.storage.import_module", no_hiredis)

    with pytest.raises(InvalidOption, match=r"pip install 'penstock\[valkey\]'"):
        open_storage("valkey://localhost")
