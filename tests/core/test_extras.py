"""The extras of a job: which of them link it to others, and extras that say nothing."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from penstock.core.job import EMPTY_EXTRAS, Dependent, Extras, pack_extras, unpack_extras

LOOSE: dict[str, Any] = {
    "headers": {"a": "b"},
    "usage": {"tokens": 1},
    "scheduler": "nightly",
    "slot_ms": 1,
    "stage": "pay",
    "awaits": "paid",
    "awaits_until_ms": 1,
    "received": "paid",
    "timed_out": True,
    "kept": 1,
    "staged_delay_ms": 1,
    "unknown_run": 1,
    "has_steps": True,
}
LINKS: dict[str, Any] = {
    "group": "g",
    "cost": 2,
    "dedup": "key",
    "repeats": True,
    "holds": {"reader": 1},
    "flow": "f",
    "dependents": [Dependent("q", "id", "f")],
    "has_later_dependents": True,
    "has_dependencies": True,
    "passes": "1",
}


def test_every_field_is_either_loose_or_a_tie() -> None:
    assert sorted([*LOOSE, *LINKS]) == sorted(Extras.__struct_fields__)


@pytest.mark.parametrize("name", LOOSE)
def test_what_concerns_only_the_job_does_not_bind(name: str) -> None:
    assert not Extras(**{name: LOOSE[name]}).has_links


@pytest.mark.parametrize("name", LINKS)
def test_what_concerns_others_links(name: str) -> None:
    assert Extras(**{name: LINKS[name]}).has_links


def test_extras_that_say_nothing_are_none() -> None:
    assert unpack_extras(pack_extras(EMPTY_EXTRAS)) is None
    extras = msgspec.structs.replace(EMPTY_EXTRAS, **LINKS)
    assert unpack_extras(pack_extras(extras)) == extras
