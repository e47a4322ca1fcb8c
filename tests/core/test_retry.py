from __future__ import annotations

from datetime import timedelta
from decimal import Decimal
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.retry import Backoff, Custom, Exponential, Fixed, custom_name, delay_ms, parse_backoff
from penstock.core.units import MAX_MS, Duration
from penstock.errors import InvalidName, InvalidOption


def rest_longer(failures: int, error: BaseException | None) -> Duration:
    return failures * 10


def no_randomness() -> float:
    raise AssertionError("a policy without jitter must not ask for randomness")


shares = st.floats(0, 1)
exponentials = st.builds(
    lambda base, more, factor, jitter: Exponential(
        base_ms=base, cap_ms=min(base + more, MAX_MS), factor=factor, jitter=jitter
    ),
    st.integers(1, MAX_MS),
    st.integers(0, MAX_MS),
    st.floats(1, 1e6),
    shares,
)
policies = exponentials | st.builds(Fixed, st.integers(0, MAX_MS), shares)
failures = st.integers(0, 10_000)


@given(policies, failures, st.floats(0, 1, exclude_max=True))
def test_a_delay_is_never_negative_and_never_above_the_cap(
    policy: Backoff, count: int, chance: float
) -> None:
    cap = policy.cap_ms if isinstance(policy, Exponential) else MAX_MS
    assert 0 <= delay_ms(policy, count, random=lambda: chance) <= cap


@given(exponentials, failures, failures)
def test_before_jitter_delays_never_fall(policy: Exponential, a: int, b: int) -> None:
    exact = msgspec.structs.replace(policy, jitter=0)
    first, second = (delay_ms(exact, count, random=no_randomness) for count in sorted((a, b)))
    assert first <= second


@given(policies, failures, st.floats(0, 1, exclude_max=True))
def test_jitter_takes_away_at_most_its_share(policy: Fixed | Exponential, count: int, chance: float) -> None:
    whole = delay_ms(msgspec.structs.replace(policy, jitter=0), count, random=no_randomness)
    some = delay_ms(policy, count, random=lambda: chance)
    assert whole * (1 - policy.jitter) - 1 <= some <= whole


def test_exponential_grows_from_its_base_to_its_cap() -> None:
    policy = Exponential.of(base="1s", factor=2, cap="10s", jitter=0)
    delays = [delay_ms(policy, count, random=no_randomness) for count in (1, 2, 3, 4, 5, 10_000)]
    assert delays == [1_000, 2_000, 4_000, 8_000, 10_000, 10_000]


def test_full_jitter_may_be_anything_from_nothing_to_the_whole() -> None:
    policy = Fixed.of("10s", jitter=1)
    assert [delay_ms(policy, 1, random=lambda c=c: c) for c in (0.0, 0.5)] == [10_000, 5_000]  # type: ignore[misc]


def test_custom_asks_the_function_for_the_failures_and_the_error() -> None:
    seen: list[Any] = []

    def backoff(count: int, error: BaseException | None) -> Duration:
        seen.append((count, error))
        return "1m"

    error = ValueError("x")
    assert delay_ms(Custom("mine"), 3, random=no_randomness, custom={"mine": backoff}, error=error) == 60_000
    assert seen == [(3, error)]


def test_an_unregistered_custom_backoff_is_named() -> None:
    with pytest.raises(InvalidOption, match="'mine' is not known here"):
        delay_ms(Custom("mine"), 1, random=no_randomness)


@pytest.mark.parametrize("returned", [None, -1, float("nan"), "soon"])
def test_custom_that_returns_no_duration_is_named(returned: Any) -> None:
    with pytest.raises(InvalidOption, match="returned by backoff 'mine'"):
        delay_ms(Custom("mine"), 1, random=no_randomness, custom={"mine": lambda count, error: returned})


@pytest.mark.parametrize(
    ("value", "policy"),
    [
        ("exponential", Exponential()),
        ("10s", Fixed(10_000)),
        (timedelta(minutes=1), Fixed(60_000)),
        (0, Fixed(0)),
        (1.5, Fixed(1_500)),
        (Fixed(5), Fixed(5)),
        (Custom("mine"), Custom("mine")),
        (rest_longer, Custom(f"{__name__}:rest_longer")),
    ],
)
def test_parse_backoff_reads_every_form(value: Any, policy: Backoff) -> None:
    assert parse_backoff(value) == policy


@pytest.mark.parametrize("value", ["", "exponentially", "10", -1, None, [], lambda count, error: 1, object()])
def test_parse_backoff_refuses_the_rest(value: Any) -> None:
    with pytest.raises(InvalidOption, match=r"^backoff="):
        parse_backoff(value)


def test_a_lambda_has_no_name_for_another_process() -> None:
    with pytest.raises(InvalidOption, match="Define it with def"):
        custom_name(lambda count, error: 1)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Fixed(-1),
        lambda: Fixed(MAX_MS + 1),
        lambda: Fixed(1.5),  # type: ignore[arg-type]
        lambda: Fixed(1, jitter=1.1),
        lambda: Fixed(1, jitter=float("nan")),
        lambda: Fixed(1, jitter=True),
        lambda: Fixed(1, jitter="0.5"),  # type: ignore[arg-type]
        lambda: Exponential.of(jitter=True),
        lambda: Exponential.of(jitter=Decimal("0.5")),  # type: ignore[arg-type]
        lambda: Exponential(factor=True),
        lambda: Exponential(factor="2"),  # type: ignore[arg-type]
        lambda: Exponential(factor=10**400),
        lambda: Exponential(base_ms=0),
        lambda: Exponential(factor=0.5),
        lambda: Exponential(factor=float("inf")),
        lambda: Exponential(jitter=-0.1),
        lambda: Exponential.of(base="2h", cap="1h"),
        lambda: Exponential.of(cap="never"),
    ],
)
def test_policies_that_make_no_sense_cannot_be_made(make: Any) -> None:
    with pytest.raises(InvalidOption):
        make()


def test_a_custom_name_is_checked() -> None:
    with pytest.raises(InvalidName):
        Custom("no spaces")


@given(policies | st.just(Custom("a.b:c")))
def test_policies_travel_in_options(policy: Backoff) -> None:
    for codec in (msgspec.json, msgspec.msgpack):
        assert codec.decode(codec.encode(policy), type=Backoff) == policy


def test_the_encoded_form_is_small_and_readable() -> None:
    assert msgspec.json.encode(Exponential()) == b'{"kind":"exponential"}'
    assert msgspec.json.encode(Fixed(10_000)) == b'{"kind":"fixed","delay_ms":10000}'


def test_stored_nonsense_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(b'{"kind":"fixed","delay_ms":-5}', type=Backoff)
