"""The setting PENSTOCK, and what is checked of it."""

from __future__ import annotations

from typing import Any

import pytest

from penstock import App
from tests.integrations.django import own_app


@pytest.mark.parametrize(
    ("given", "id", "message"),
    [
        (["x"], "E001", r"PENSTOCK must be a dictionary, got \['x'\]"),
        ({"Url": "memory://"}, "E002", "unknown key 'Url'"),
        ({"URL": 5}, "E003", r"PENSTOCK\['URL'\] must be a text, got 5"),
        ({"URL": "postgres://x"}, "E003", r"PENSTOCK\['URL'\] is not valid: .*postgres"),
        ({"OPTIONS": 5}, "E004", r"PENSTOCK\['OPTIONS'\] must be a dictionary"),
        ({"OPTIONS": {"attemps": 3}}, "E004", r"PENSTOCK\['OPTIONS'\] is not valid: .*'attemps'.*'attempts'"),
        ({"OPTIONS": {"url": "memory://"}}, "E004", "has the key 'url'"),
        ({"APP": "own_app:app", "OPTIONS": {"attempts": 3}}, "E004", "OPTIONS.*and an APP of yours"),
        ({"APP": App}, "E005", r"PENSTOCK\['APP'\] must be a text"),
        ({"APP": "nowhere:app"}, "E005", r"PENSTOCK\['APP'\] is not valid: .*nowhere"),
        ({"APP": "tests.integrations.django.own_app:App"}, "E005", "not an app"),
    ],
)
def test_a_problem_of_the_settings_has_an_id_and_a_remedy(given: Any, id: str, message: str) -> None:
    from django.core.exceptions import ImproperlyConfigured
    from django.test import override_settings

    from penstock.integrations.django.apps import check_settings
    from penstock.integrations.django.configuration import get_app

    with override_settings(PENSTOCK=given):
        found = check_settings()
        assert f"penstock.{id}" in [error.id for error in found]
        assert all(error.hint for error in found)
        with pytest.raises(ImproperlyConfigured, match=message):
            get_app()


def test_all_problems_are_told_at_once() -> None:
    from django.test import override_settings

    from penstock.integrations.django.apps import check_settings

    with override_settings(PENSTOCK={"URL": 5, "OPTIONS": 5, "APP": 5}):
        assert [error.id for error in check_settings()] == ["penstock.E003", "penstock.E004", "penstock.E005"]


def test_your_own_app_moves_to_the_store_of_the_settings_and_keeps_fresh_connections() -> None:
    from django.test import override_settings

    from penstock.integrations.django.configuration import PROJECT, get_app

    given = {"URL": "memory://own", "APP": "tests.integrations.django.own_app:app"}
    for _ in range(2):
        with override_settings(PENSTOCK=given):
            assert get_app() is own_app.app
    assert own_app.app.url == "memory://own"
    assert own_app.app.named.url == "memory://own"
    assert own_app.app.preloaded == (PROJECT,)
    assert len(own_app.app.sync_middlewares) == 1


def test_without_settings_the_app_is_that_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    from django.conf import settings
    from django.test import override_settings

    from penstock.integrations.django.configuration import get_app

    monkeypatch.setenv("PENSTOCK_URL", "memory://environment")
    with override_settings(PENSTOCK={}):
        del settings.PENSTOCK
        assert get_app().url == "memory://environment"


def test_a_name_that_the_package_does_not_have_is_an_attribute_error() -> None:
    import penstock.integrations.django as package

    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = package.nothing
