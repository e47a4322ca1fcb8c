"""Backoff: the delay after a job's n-th failure.

A policy is data, and stored with the options of a job. ``delay_ms`` computes the delay; the caller supplies the
randomness. ``parse_backoff`` returns the policy for what users write:

    "exponential"                      1s, 2s, 4s ... up to 1h
    "10s", 10, timedelta(seconds=10)   the same delay every time
    Exponential.of(base="250ms", factor=3, cap="10m", jitter=0.5)
    def rest(failures, error): ...     a custom function, which the worker finds by name

Jitter is the share of the delay that chance may remove: 0 is exact, 1 is anything from zero to the whole delay. It
only shortens, so a cap stays a cap.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Final, NamedTuple, TypeAlias, assert_never

import msgspec

from penstock.core.names import check_task
from penstock.core.text import shown
from penstock.core.units import MAX_MS, Duration, describe, milliseconds
from penstock.errors import InvalidName, InvalidOption

BackoffFunction: TypeAlias = Callable[[int, BaseException | None], Duration]
"""Takes the number of failures (1 after the first) and the last error; returns the delay."""

_DEFAULT_BASE: Final = 1_000
_DEFAULT_CAP: Final = 3_600_000
_MOST_FACTOR: Final = 1_000_000


class _Policy(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="kind", tag=str.lower):
    """Base of the policies. Encoded as ``{"kind": "fixed", "delay_ms": 10000}``."""


class Fixed(_Policy, frozen=True):
    """The same delay after every failure."""

    delay_ms: int
    jitter: float = 0.0

    def __post_init__(self) -> None:
        _check_ms(self.delay_ms, what="delay_ms", least=0)
        _check_jitter(self.jitter)

    @classmethod
    def of(cls, delay: Duration, *, jitter: float = 0.0) -> Fixed:
        """Return a policy such as ``Fixed.of("10s")``. Raise ``InvalidOption`` for an invalid duration."""
        return cls(delay_ms=milliseconds(delay, what="backoff delay"), jitter=jitter)


class Exponential(_Policy, frozen=True):
    """``base_ms`` after the first failure, multiplied by ``factor`` after each further one, up to ``cap_ms``."""

    base_ms: int = _DEFAULT_BASE
    factor: float = 2.0
    cap_ms: int = _DEFAULT_CAP
    jitter: float = 0.1

    def __post_init__(self) -> None:
        _check_ms(self.base_ms, what="base_ms", least=1)
        _check_ms(self.cap_ms, what="cap_ms", least=1)
        if self.cap_ms < self.base_ms:
            raise InvalidOption(
                f"the backoff's cap ({describe(self.cap_ms)}) is below its base ({describe(self.base_ms)}), "
                "so it could never grow. Raise the cap, or use a fixed backoff."
            )
        if not _is_number(self.factor, least=1, most=_MOST_FACTOR):
            raise InvalidOption(
                f"backoff factor must be a number from 1 to {_MOST_FACTOR}, got {shown(self.factor)}. "
                "Each delay is the previous one multiplied by the factor; the default is 2."
            )
        _check_jitter(self.jitter)

    @classmethod
    def of(
        cls,
        base: Duration = timedelta(seconds=1),
        *,
        factor: float = 2.0,
        cap: Duration = timedelta(hours=1),
        jitter: float = 0.1,
    ) -> Exponential:
        """Return a policy such as ``Exponential.of(base="250ms", cap="10m")``. Raise ``InvalidOption`` for invalid
        values."""
        base_ms = milliseconds(base, what="backoff base")
        return cls(
            base_ms=base_ms, factor=factor, cap_ms=milliseconds(cap, what="backoff cap"), jitter=jitter
        )


class Custom(_Policy, frozen=True):
    """A function of the user's. The worker finds it by ``name``."""

    name: str

    def __post_init__(self) -> None:
        check_task(self.name)


Backoff: TypeAlias = Fixed | Exponential | Custom


def parse_backoff(value: Backoff | Duration | BackoffFunction) -> Backoff:
    """Return the policy for ``value``; the module's docstring lists what it may be.

    A function becomes ``Custom(custom_name(function))``; the caller must register it under that name.

    Raises:
        InvalidOption: ``value`` is not a backoff.
    """
    if isinstance(value, _Policy):
        return value
    if value == "exponential":
        return Exponential()
    if callable(value):
        return Custom(custom_name(value))
    try:
        return Fixed.of(value)
    except InvalidOption as error:
        raise InvalidOption(
            f'backoff={shown(value)} is not "exponential", a duration, a policy or a function. {error}'
        ) from error


def custom_name(function: BackoffFunction) -> str:
    """Return the name of a backoff function in every process that imports it: ``module:qualified.name``.

    Raises:
        InvalidOption: a lambda, or a callable without a name: another process could not find it.
    """
    name = f"{getattr(function, '__module__', '')}:{getattr(function, '__qualname__', '')}"
    try:
        return check_task(name.replace(".<locals>.", "."))
    except InvalidName as error:
        raise InvalidOption(
            f"backoff={shown(function)} has no name by which a worker could find it. "
            "Define it with def, in a module that workers import: def rest(failures, error): return ..."
        ) from error


def delay_ms(
    policy: Backoff,
    failures: int,
    *,
    random: Callable[[], float],
    custom: Mapping[str, BackoffFunction] | None = None,
    error: BaseException | None = None,
) -> int:
    """Return the delay after failure number ``failures`` (1 is the first), from 0 to ``MAX_MS``.

    ``random`` returns a number from 0 up to, not including, 1. It is called only if the policy has jitter. Without
    jitter the delay never falls as ``failures`` rises.

    Raises:
        InvalidOption: ``custom`` lacks the policy's function, or the function did not return a valid duration.
            Exceptions of the function itself pass through.
    """
    match policy:
        case Fixed():
            return _shortened(policy.delay_ms, policy.jitter, random)
        case Exponential():
            return _shortened(_grown(policy, failures), policy.jitter, random)
        case Custom(name=name):
            function = (custom or {}).get(name)
            if function is None:
                raise InvalidOption(
                    f"backoff {shown(name)} is not known here: no task or app that this worker has loaded uses "
                    "that function. Load one that does: @app.task(backoff=...)."
                )
            return milliseconds(function(failures, error), what=f"delay returned by backoff {shown(name)}")
        case _ as never:
            assert_never(never)


class RetryRule(NamedTuple):
    """Errors that are retried, and their backoff; ``None`` for that of the job."""

    matches: Callable[[BaseException], bool]
    backoff: Backoff | BackoffFunction | None = None


class RetryRules(NamedTuple):
    """The errors of a task that are retried (``None``: all), and those that fail the job for good, which come first."""

    retry_on: tuple[RetryRule, ...] | None = None
    give_up_on: tuple[RetryRule, ...] = ()

    def gives_up_on(self, error: BaseException) -> bool:
        """Return whether the rules name this error as one that fails the job for good."""
        return any(rule.matches(error) for rule in self.give_up_on)

    def rule_for(self, error: BaseException) -> RetryRule | None:
        """Return the rule by which the error is retried; ``None`` if it fails the job for good."""
        if self.gives_up_on(error):
            return None
        if self.retry_on is None:
            return EVERY_ERROR
        return next((rule for rule in self.retry_on if rule.matches(error)), None)


EVERY_ERROR: Final = RetryRule(lambda error: True)


def _grown(policy: Exponential, failures: int) -> int:
    try:
        grown = policy.base_ms * float(policy.factor) ** max(failures - 1, 0)
    except OverflowError:
        return policy.cap_ms
    return policy.cap_ms if grown >= policy.cap_ms else round(grown)


def _shortened(rest_ms: int, jitter: float, random: Callable[[], float]) -> int:
    return round(rest_ms * (1 - jitter * random())) if jitter else rest_ms


def _check_ms(value: int, *, what: str, least: int) -> None:
    if type(value) is not int or not least <= value <= MAX_MS:
        raise InvalidOption(
            f"backoff {what} must be an integer from {least} to {MAX_MS} (milliseconds), got {shown(value)}. "
            'Use the policy\'s of(), which takes durations such as "10s".'
        )


def _check_jitter(jitter: float) -> None:
    if not _is_number(jitter, least=0, most=1):
        raise InvalidOption(
            f"backoff jitter must be a number from 0 to 1, got {shown(jitter)}. It is the share of the delay that "
            "chance may remove: 0 for none, 1 for anything up to all of it."
        )


def _is_number(value: object, *, least: int, most: int) -> bool:
    """Return whether ``value`` is an int or a float in that range. A bool could not be read back from the store."""
    return type(value) in (int, float) and least <= value <= most  # type: ignore[operator]
