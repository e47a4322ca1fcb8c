"""A short storm on every kind of store. ``make test-storm`` runs longer ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.storm.stores import STORES
from tests.storm.storm import OF_PROCESSES, Plan, rage

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.parametrize("store", STORES)
async def test_nothing_is_lost_or_done_twice_in_a_storm(store: str, tmp_path: Path) -> None:
    faults = (OF_PROCESSES | STORES[store][1]) - {"crash"}
    outcome = await rage(Plan(store, jobs=4000, kills=15, seconds=25, faults=faults), tmp_path)
    assert outcome.verdict.violations == {}
    assert outcome.verdict.figures["accepted"] + outcome.verdict.figures["deduplicated"] >= 4000
    assert outcome.verdict.figures["rescued"] > 0
    assert all(outcome.faults[kind] > 0 for kind in faults)
