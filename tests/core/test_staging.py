"""The instants of writes: beyond all others, and within what records and datetimes can hold."""

from __future__ import annotations

from datetime import UTC, datetime

from hypothesis import given
from hypothesis import strategies as st

from penstock.core.job import STAGED_FROM_MS
from penstock.core.staging import staged_at_ms
from penstock.core.units import MAX_MS


@given(st.text())
def test_the_instant_of_a_write_is_its_own_and_can_be_kept_and_shown(write_id: str) -> None:
    at_ms = staged_at_ms(write_id)

    assert at_ms == staged_at_ms(write_id)
    assert STAGED_FROM_MS <= at_ms < 2**48
    assert datetime.fromtimestamp(at_ms / 1000, UTC).year < 10_000
    assert at_ms != staged_at_ms(write_id + "x")


def test_no_duration_that_users_may_name_reaches_that_far_in_the_next_thousand_years() -> None:
    assert datetime(3000, 1, 1, tzinfo=UTC).timestamp() * 1000 + MAX_MS < STAGED_FROM_MS
