"""The table of transitions holds together: no engine is needed to see that."""

from __future__ import annotations

import pytest

from penstock.core.lifecycle import OPEN, TERMINAL, TRANSITIONS, EventType, State, sources


def test_every_state_is_either_open_or_terminal() -> None:
    assert frozenset(State) == OPEN | TERMINAL
    assert not OPEN & TERMINAL


def test_no_transition_is_listed_twice() -> None:
    assert len(set(TRANSITIONS)) == len(TRANSITIONS)


@pytest.mark.parametrize("state", list(State))
def test_every_state_can_be_reached_from_nothing(state: State) -> None:
    reached: set[State | None] = {None}
    for _ in State:
        reached |= {row.target for row in TRANSITIONS if row.source in reached}

    assert state in reached


@pytest.mark.parametrize("state", sorted(OPEN))
def test_every_open_state_leads_to_an_end(state: State) -> None:
    reached: set[State | None] = {state}
    for _ in State:
        reached |= {row.target for row in TRANSITIONS if row.source in reached}

    assert reached & TERMINAL


def test_a_finished_job_leaves_its_state_only_by_an_operator_or_retention() -> None:
    verbs = {row.verb for row in TRANSITIONS if row.source in TERMINAL and row.target is not row.source}

    assert verbs - {"quarantine"} == {
        "enqueue", "sweep", "retry", "remove", "remove_unchanged", "clean", "obliterate",
    }  # fmt: skip


def test_only_a_claim_makes_a_job_active() -> None:
    rows = [row for row in TRANSITIONS if row.target is State.ACTIVE and row.source is not State.ACTIVE]

    assert {row.verb for row in rows} == {"claim"}
    assert {row.source for row in rows} == {State.WAITING}


def test_an_active_job_is_only_touched_by_its_holder_the_sweeper_and_the_operator() -> None:
    leaving = {
        row.verb for row in TRANSITIONS if row.source is State.ACTIVE and row.target is not State.ACTIVE
    }

    assert leaving == {"settle", "sweep", "obliterate", "quarantine"}


def test_every_change_of_state_is_logged_except_retention_and_obliteration() -> None:
    silent = {row.verb for row in TRANSITIONS if row.event is None}

    assert silent == {"sweep", "obliterate"}
    assert all(row.target is None for row in TRANSITIONS if row.event is None)


def test_every_event_about_a_job_s_state_is_in_the_table() -> None:
    told = {row.event for row in TRANSITIONS} - {None}
    about_queues = {EventType.PAUSED, EventType.RESUMED, EventType.CONFIGURED, EventType.OBLITERATED}

    assert set(EventType) - told == about_queues | {EventType.PROGRESSED, EventType.RECORDED, EventType.USED}


def test_sources_are_the_states_a_verb_may_start_from() -> None:
    assert sources("promote") == {State.SCHEDULED}
    assert sources("retry") == {State.FAILED, State.CANCELLED}
    assert sources("claim") == {State.SCHEDULED, State.WAITING}
    assert None in sources("enqueue")
    assert sources("unheard of") == frozenset()
