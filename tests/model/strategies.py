"""What the state machine draws: few ids and few values, so that calls meet each other.

Every time is a whole number of units, and a unit is longer than any test runs. Between two calls the clock
moves by at least a millisecond. So the order of all instants is the same in the engine, whose clock runs, and
in the model, whose clock counts calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec
from hypothesis import strategies as st

from penstock.core.job import Conflict, Dedup, Dependency, Extras, NewJob, Options
from penstock.core.lifecycle import TERMINAL, State
from penstock.core.limits import Bucket, Limit, Rate
from penstock.core.outcome import (
    Await,
    Cancel,
    Complete,
    Fail,
    Failure,
    Limited,
    Outcome,
    Release,
    Snooze,
    Suspend,
)
from penstock.storage.values import Change, NewScheduler, QueueSettings, Take

__all__ = [
    "CLOCKS",
    "CONSUMERS",
    "GROUPS",
    "IDS",
    "KEYS",
    "UNIT",
    "WRITES",
    "after",
    "changes",
    "instants",
    "limits",
    "lines",
    "listeners",
    "new_jobs",
    "new_payloads",
    "outcomes",
    "outcomes_of_flows",
    "progress",
    "queue_limits",
    "redispatches",
    "schedulers",
    "settings",
    "signals",
    "staged_jobs",
    "takes",
    "terminal_states",
    "units",
]

UNIT: Final = 1_000_000
IDS: Final = ("a", "b", "c", "ü", "🚰")
KEYS: Final = ("key", "schlüssel")
CLOCKS: Final = ("clock", "uhr ü")

WRITES: Final = ("write", "write", "other ü")

CONSUMERS: Final = ("ledger", "audit")

listeners = st.sampled_from(["ear", "eye"])
signals = st.sampled_from(["go", "stop"])
payloads = st.sampled_from([b"", b"one", b"\x00\xff"])
new_payloads = st.none() | payloads
progress = st.sampled_from([None, b"0.5"])
lines = st.sampled_from([(), ("line",)])


def units(*counts: int) -> st.SearchStrategy[int]:
    return st.sampled_from([count * UNIT for count in counts])


options = st.builds(
    Options,
    task=st.sampled_from(["", "send"]),
    attempts=st.sampled_from([1, 2, 3]),
    max_stalls=st.sampled_from([0, 1]),
    result_ttl_ms=units(0, 2, 5),
    failure_ttl_ms=units(0, 3, 5),
)

redispatch = st.builds(
    Conflict,
    mode=st.just("redispatch"),
    payload=st.sampled_from(["replace", "keep"]),
    run_at=st.sampled_from(["always", "never", "if_earlier", "if_later"]),
    options=st.sampled_from(["replace", "keep"]),
    reset_counts=st.booleans(),
)
conflicts = st.one_of(st.just(Conflict()), st.just(Conflict(mode="absent")), redispatch)


dedups = st.one_of(
    *[st.none()] * 4,
    st.builds(Dedup, st.sampled_from(KEYS), st.just("simple"), units(0, 1, 3)),
    st.builds(Dedup, st.sampled_from(KEYS), st.just("throttle"), units(1, 3)),
    st.builds(Dedup, st.sampled_from(KEYS), st.just("debounce"), units(0, 1)),
    st.builds(
        Dedup,
        st.sampled_from(KEYS),
        st.just("simple"),
        units(1, 3),
        st.lists(st.sampled_from(list(State)), min_size=1, max_size=4, unique=True).map(tuple),
    ),
    st.builds(Dedup, st.sampled_from(KEYS), st.just("debounce"), st.just(0), st.just((State.ACTIVE,))),
)

GROUPS: Final = ("g", "ĝ")
grouped = [Extras(group=key, cost=cost) for key in GROUPS for cost in (1, 1, 2)]
extrases = st.sampled_from(
    [
        *(None, None, None, Extras(headers={"a": "b"})),
        Extras(holds={"ledger": 3 * UNIT}),
        Extras(holds={"ledger": 3 * UNIT}, headers={"a": "b"}),
        Extras(holds={"ledger": UNIT, "audit": 6 * UNIT}, group=GROUPS[0]),
        *grouped,
    ]
)
limits = st.none() | st.builds(
    Limit,
    st.sampled_from([None, 1, 1, 2]),
    st.sampled_from([None, None, Rate(1, UNIT), Rate(2, 2 * UNIT)]),
    st.sampled_from([None, None, Bucket(2, 1, UNIT), Bucket(3, 2, 2 * UNIT)]),
)
queue_limits = st.none() | st.builds(
    Limit, st.sampled_from([None, 1, 2]), st.sampled_from([None, None, Rate(1, UNIT), Rate(3, 2 * UNIT)])
)


# An instant counts from the machine's first moment; 1 is long ago, 0 never.
instants = st.sampled_from([0, 1, 1, UNIT, 3 * UNIT])


@st.composite
def new_jobs(draw: Callable) -> NewJob:
    """``run_at_ms`` counts from the machine's first moment: whoever makes the call adds that."""
    delayed = st.tuples(units(0, 0, 0, 0, 0, 1, 2), st.none())
    delay_ms, run_at_ms = draw(delayed | st.tuples(st.just(0), units(0, 0, 2, 4)))
    return NewJob(
        draw(st.sampled_from(IDS)),
        draw(payloads),
        draw(options),
        delay_ms=delay_ms,
        run_at_ms=run_at_ms,
        priority=draw(st.sampled_from([0, 0, -1, 5])),
        lifo=draw(st.booleans()),
        ttl_ms=draw(units(0, 0, 0, 1, 3)),
        conflict=draw(conflicts),
        run_id=draw(st.sampled_from(["", "run", "other run"])),
        write_id=draw(st.sampled_from(["", "", *WRITES])),
        notify=draw(st.sampled_from(["", "ear", "eye"])),
        extras=draw(extrases),
        dedup=draw(dedups),
    )


@st.composite
def staged_jobs(draw: Callable) -> NewJob:
    new: NewJob = draw(new_jobs())
    return msgspec.structs.replace(
        new,
        staged=True,
        write_id=draw(st.sampled_from(WRITES)),
        run_at_ms=None,
        dedup=None,
        conflict=draw(st.sampled_from([Conflict(), Conflict(mode="absent")])),
    )


after = st.lists(
    st.builds(
        Dependency, st.just(""), st.sampled_from(IDS), st.sampled_from(["fail", "fail", "ignore", "wait"])
    ),
    min_size=1,
    max_size=3,
)


@st.composite
def redispatches(draw: Callable, ids: list[str]) -> NewJob:
    """A job that is there, dispatched once more."""
    new: NewJob = draw(new_jobs())
    return msgspec.structs.replace(new, id=draw(st.sampled_from(ids)), conflict=draw(redispatch))


schedulers = st.builds(
    NewScheduler,
    name=st.sampled_from(CLOCKS),
    spec=st.sampled_from([b"", b"spec", b"\x00\xff"]),
    next_ms=instants,
    keep_next=st.booleans(),
    limit=st.sampled_from([0, 0, 0, 1, 3]),
    end_ms=st.sampled_from([0, 0, 6 * UNIT]),
    repeat_ms=st.none() | units(0, 1, 2),
)

takes = st.builds(
    Take,
    worker=st.sampled_from(["ada", "bob"]),
    count=st.sampled_from([1, 1, 2, 10]),
    lease_ms=units(1, 3),
)

outcomes: st.SearchStrategy[Outcome] = st.one_of(
    st.builds(Complete, payloads),
    st.builds(Complete, payloads, units(0, 1, 4)),
    st.builds(
        Fail,
        st.just(Failure("Boom", "it went", "off")),
        units(0, 1, 2),
        final=st.booleans(),
        ttl_ms=st.none() | units(0, 1, 4),
    ),
    st.builds(Snooze, units(0, 1), st.sampled_from([None, "", "next"]), st.booleans()),
    st.builds(Suspend, signals, units(0, 1, 2), st.sampled_from([None, "later"])),
    st.just(Release()),
    st.builds(Limited, units(0, 1), st.sampled_from(["group", "group", "queue"])),
    st.just(Await()),
    st.just(Cancel("asked")),
)

outcomes_of_flows: st.SearchStrategy[Outcome] = st.one_of(
    st.builds(Complete, payloads),
    st.builds(Complete, payloads),
    st.builds(Fail, st.just(Failure("Boom", "it went", "off")), units(0, 1), final=st.booleans()),
    st.just(Await()),
    st.just(Release()),
)

terminal_states = st.sampled_from(sorted(TERMINAL))

changes = st.builds(
    Change,
    payload=st.none() | payloads,
    priority=st.none() | st.sampled_from([-2, 0, 7]),
    delay_ms=st.none() | units(0, 1, 3),
    result_ttl_ms=st.none() | units(0, 1, 4),
    failure_ttl_ms=st.none() | units(0, 1, 4),
).filter(lambda change: change != Change())

settings = st.builds(
    QueueSettings, keep_completed=st.sampled_from([None, 0, 1]), keep_failed=st.sampled_from([None, 0, 1])
)

STEPS = ("load", "charge[1]")
STATUSES: Final[tuple[Any, ...]] = (
    "completed",
    "completed",
    "failed",
    "retrying",
    "waiting",
    "started",
    "unused",
)
steps: st.SearchStrategy[tuple[str, Any, bytes, bytes]] = st.tuples(
    st.sampled_from(STEPS),
    st.sampled_from(STATUSES),
    st.sampled_from([b"", b"digest"]),
    st.sampled_from([b"", b"1", b"x" * 2000]),
)
