"""The options users write, and the plain values they become.

Two kinds. *Treatment* says how a job is treated once it is in (``attempts``, ``timeout`` ...): it is set on the
app, on the task, or for some jobs by ``task.options(...)``, and becomes a ``core.job.Options`` that all those
jobs share. *Placement* says where one job goes (``id``, ``delay``, ``priority`` ...) and becomes fields of its
``NewJob``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from datetime import datetime
from difflib import get_close_matches
from typing import Any, Final, Literal, Required, TypeAlias, TypedDict

import msgspec

from penstock.core.annex import EMPTY_ANNEX, Annex
from penstock.core.dedup import Dedup
from penstock.core.duration import MAX_MS, Duration, milliseconds
from penstock.core.ids import uuid7
from penstock.core.job import Conflict, Dependency, Options, Policy
from penstock.core.names import check_consumer, check_group, check_id, check_queue
from penstock.core.retry import Backoff, BackoffFunction, parse_backoff
from penstock.core.size import Size
from penstock.core.staging import STAGED_FROM_MS
from penstock.errors import InvalidOption
from penstock.serde import Serde

__all__ = [
    "DEFAULTS",
    "PLACEMENT",
    "TASK",
    "TREATMENT",
    "BatchOptions",
    "CallOptions",
    "DefaultOptions",
    "JobOptions",
    "OnConflict",
    "Placement",
    "TaskOptions",
    "Treatment",
    "epoch_ms",
    "placed",
    "placement",
    "refuse_unknown",
    "treatment",
    "whole_number",
]

OnConflict: TypeAlias = Literal["default", "absent", "redispatch"] | Conflict

_INT32: Final = 2**31 - 1
_LAST_YEAR: Final = 6429
_MOST_HEADERS: Final = 16_384


class _Untimed(TypedDict, total=False):
    """Treatment but for ``timeout``."""

    attempts: int
    backoff: Backoff | Duration | BackoffFunction
    max_stalls: int
    result_ttl: Duration | None
    failure_ttl: Duration | None
    version: str


class Treatment(_Untimed, total=False):
    """How a job is treated.

    - ``attempts``: run at most so many times if it fails (default 3).
    - ``backoff``: the rest between attempts: ``"exponential"`` (default), a duration, a policy, a function.
    - ``timeout``: how long one run may take; ``None`` is no limit (default).
    - ``max_stalls``: how often its worker may vanish before the job counts as failed (default 3).
    - ``result_ttl``, ``failure_ttl``: how long the result (1 h) or the failure (30 days) is kept; ``None``: for ever.
    - ``version``: of the task, shown in events.
    """

    timeout: Duration | None


class Placement(TypedDict, total=False):
    """Where one job goes.

    - ``id``: the dedup key; generated unless given.
    - ``delay`` or ``run_at``: not before that long from now, or that (aware) time.
    - ``priority``: smaller runs first (default 0). ``lifo``: before the others of its priority.
    - ``ttl``: a job not finished that long after its enqueue fails as expired; ``None`` is never.
    - ``on_conflict``: what happens if the id is known, see ``Conflict``.
    - ``dedup``: a ``Dedup``, or a key alone for ``Dedup.simple``: jobs of one key are one, whatever their ids.
    - ``unchecked``: promise that the id is new; saves the look.
    - ``group``: the key of jobs that share a limit or an order. ``cost``: what the job takes from its group's bucket.
    - ``headers``: names and values that travel with the job, for middleware and handlers.
    - ``hold``: consumers that keep the finished job until they release it, each with the longest time after its end:
      ``{"ledger": "7d"}``.
    - ``after``: jobs it waits for: handles, ``job()``s that are in by then, or pairs of queue and id.
      ``after_failure``: what the failure of one of them does: ``"fail"`` (default), ``"ignore"`` or ``"wait"``.
    - ``run_id``, ``write_id``: the table run, and the save, the job belongs to.
    """

    id: str
    delay: Duration
    run_at: datetime
    priority: int
    lifo: bool
    ttl: Duration | None
    on_conflict: OnConflict
    dedup: Dedup | str
    unchecked: bool
    group: str
    cost: int
    headers: Mapping[str, str]
    hold: Mapping[str, Duration]
    after: Iterable[Any]
    after_failure: Policy
    run_id: str
    write_id: str


class JobOptions(Treatment, Placement, total=False):
    """Both kinds in one call, where no function's parameters can be mistaken for them."""


class CallOptions(_Untimed, Placement, total=False):
    """The same for calls, whose ``timeout`` is how long to wait."""


class DefaultOptions(Treatment, total=False):
    """What an app or a task says of its jobs in advance: their treatment, and ``priority`` and ``ttl``."""

    priority: int
    ttl: Duration | None


class TaskOptions(DefaultOptions, total=False):
    """What ``@app.task`` takes besides the name and the queue.

    ``runner``: ``"auto"`` runs coroutine functions on the worker's loop and others in threads; ``"process"`` is
    for work that keeps a processor busy; ``"sandbox"`` for work that may crash, hang or leak: each run has a
    process of its own, which may use so much ``memory`` and ``cpu_time``. ``takes_context``: the first parameter
    gets the ``JobContext``, which a parameter with that annotation gets anyway.
    """

    runner: Literal["auto", "async", "thread", "process", "sandbox"]
    memory: Size | None
    cpu_time: Duration | None
    serde: str | Serde
    result_serde: str | Serde
    takes_context: bool


class BatchOptions(TaskOptions, total=False):
    """The same for a task whose function takes the items of up to ``batch`` jobs at once, as a list.

    It is called ``batch_wait`` (default 100 ms) after the first of them came at the latest. See ``batching``.
    """

    batch: Required[int]
    batch_wait: Duration


DEFAULTS: Final = frozenset(DefaultOptions.__annotations__)
TASK: Final = frozenset(BatchOptions.__annotations__)
TREATMENT: Final = frozenset(Treatment.__annotations__)
PLACEMENT: Final = frozenset(Placement.__annotations__)

_CONFLICTS: Final = {
    "default": Conflict(),
    "absent": Conflict(mode="absent"),
    "redispatch": Conflict(mode="redispatch"),
}


def refuse_unknown(given: Iterable[str], known: Collection[str], *, where: str) -> None:
    """Raises ``InvalidOption`` for the first name that is not ``known``, with the name that may have been meant."""
    for name in given:
        if name not in known:
            close = get_close_matches(name, known, n=1)
            meant = f" Did you mean {close[0]!r}?" if close else f" There are: {', '.join(sorted(known))}."
            raise InvalidOption(f"{where} has no option {name!r}.{meant}")


def treatment(base: Options, given: Mapping[str, Any]) -> Options:
    """``base`` with what ``given`` says of treatment; other names in ``given`` are passed over.

    Raises:
        InvalidOption: a value outside its range.
    """
    changes: dict[str, Any] = {}
    for name in TREATMENT & given.keys():
        field, parse = _TREATMENT_PARSERS[name]
        changes[field] = parse(name, given[name])
    return msgspec.structs.replace(base, **changes) if changes else base


def placement(given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a ``NewJob`` that ``given`` asks for; other names in ``given`` are passed over.

    Raises:
        InvalidOption: a value outside its range, or both ``delay`` and ``run_at``.
        InvalidName: an id that is not allowed.
    """
    if given.get("delay") is not None and given.get("run_at") is not None:
        raise InvalidOption("delay and run_at both say when the job is due. Give one of them.")
    fields: dict[str, Any] = {}
    for name, value in given.items():
        if name in _PLACEMENT_PARSERS and not (value is None and name in _NONE_IS_UNSET):
            field, parse = _PLACEMENT_PARSERS[name]
            fields[field] = parse(name, value)
    annex = {name: fields.pop(name) for name in _ANNEX if name in fields}
    if annex:
        fields["annex"] = Annex(**annex)
    policy = fields.pop("after_failure", "fail")
    if "after" in fields:
        fields["after"] = tuple(Dependency(queue, id, policy) for queue, id in fields["after"])
    return _tied(fields)


def _tied(fields: dict[str, Any]) -> dict[str, Any]:
    """A job that waits for others has a flow to be told by."""
    if fields.get("after"):
        annex = fields.get("annex", EMPTY_ANNEX)
        fields["annex"] = msgspec.structs.replace(annex, flow=uuid7(), has_dependencies=True)
    return fields


def placed(base: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a ``NewJob`` in ``base``, with what ``given`` asks for; raises as ``placement``."""
    fields = {**base, **placement(given)}
    dedup: Dedup | None = fields.get("dedup")
    if dedup and dedup.mode == "debounce" and dedup.ttl_ms and fields.keys().isdisjoint(_TIMES):
        fields["delay_ms"] = dedup.ttl_ms
    if "annex" in base and fields["annex"] is not base["annex"]:
        said = {name: value for name in _ANNEX if (value := getattr(fields["annex"], name)) != _UNSAID[name]}
        fields["annex"] = msgspec.structs.replace(base["annex"], **said)
    return _tied(fields)


def whole_number(name: str, value: Any, *, least: int, most: int = _INT32) -> int:
    """``value`` if it is an ``int`` in the range; raises ``InvalidOption``."""
    if type(value) is not int or not least <= value <= most:
        raise InvalidOption(f"{name}={value!r} is not usable. Give a whole number from {least} to {most}.")
    return value


def epoch_ms(name: str, value: Any) -> int:
    """The instant ``value`` names. Raises ``InvalidOption`` for a naive time: whose clock would it be?"""
    if not isinstance(value, datetime):
        raise InvalidOption(
            f"{name}={value!r} is not a time. Give a datetime with a time zone, or use delay."
        )
    if value.utcoffset() is None:
        raise InvalidOption(
            f"{name}={value.isoformat()} has no time zone, so it could mean several instants. "
            "Use datetime.now(UTC) or value.astimezone()."
        )
    return max(round(value.timestamp() * 1000), 0)


def _due_ms(name: str, value: Any) -> int:
    """The instant a job may be due at: what lies beyond is the store's own (``core.staging``)."""
    at_ms = epoch_ms(name, value)
    if at_ms >= STAGED_FROM_MS:
        raise InvalidOption(
            f"{name}={value.isoformat()} is too far away. Give a time before the year {_LAST_YEAR}."
        )
    return at_ms


def _count(least: int) -> Any:
    return lambda name, value: whole_number(name, value, least=least)


def _limit(name: str, value: Any) -> int:
    """A duration, ``None`` for no limit, which is 0 in the store; so a limit of 0 cannot be meant."""
    if value is None:
        return 0
    if (limit := milliseconds(value, what=name)) < 1:
        raise InvalidOption(f"{name}={value!r} leaves no time at all. Give None for no limit.")
    return limit


def _kept(name: str, value: Any) -> int:
    return MAX_MS if value is None else milliseconds(value, what=name)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or len(value) > 200 or not (value.isprintable()):
        raise InvalidOption(
            f"{name}={value!r} is not usable. Give a text of at most 200 printable characters."
        )
    return str(value)


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidOption(f"{name}={value!r} is not usable. Give True or False.")
    return value


def _headers(name: str, value: Any) -> dict[str, str] | None:
    if not isinstance(value, Mapping):
        raise InvalidOption(f"{name}={value!r:.80} is not usable. Give a mapping of names to texts.")
    for key, text in value.items():
        if not isinstance(key, str) or not isinstance(text, str):
            raise InvalidOption(
                f"{name}: {key!r:.80} or its value is no text. Give str to str; encode other values."
            )
    if sum(len(key) + len(text) for key, text in value.items()) > _MOST_HEADERS:
        raise InvalidOption(
            f"{name}: together they have more than {_MOST_HEADERS} characters. What is large belongs into the payload."
        )
    return dict(value) or None


def _dedup(name: str, value: Any) -> Dedup:
    if isinstance(value, str):
        return Dedup.simple(value)
    if isinstance(value, Dedup):
        return value
    raise InvalidOption(
        f"{name}={value!r:.80} is not usable. Give a key, or one of Dedup.simple, Dedup.throttle, Dedup.debounce."
    )


def _holds(name: str, value: Any) -> dict[str, int] | None:
    if not isinstance(value, Mapping):
        raise InvalidOption(
            f'{name}={value!r:.80} is not usable. Give consumers and durations: {{"ledger": "7d"}}.'
        )
    return {check_consumer(who): _hold_ms(name, ttl) for who, ttl in value.items()} or None


def _hold_ms(name: str, ttl: Any) -> int:
    return max(milliseconds(ttl, what=name), 1)


def _places(name: str, value: Any) -> list[tuple[str, str]]:
    """Queue and id of each job: of a handle, a ``job()``, or a pair."""
    places: list[tuple[str, str]] = []
    for one in [value] if hasattr(value, "id") else value:
        pair = one if isinstance(one, tuple) and len(one) == 2 else None
        queue, id = pair or (getattr(one, "queue", None), getattr(one, "id", None))
        if not isinstance(queue, str) or not isinstance(id, str):
            raise InvalidOption(
                f"{name}: {one!r:.80} is no job. Give handles, task.job(...)s, or pairs of queue and id."
            )
        places.append((check_queue(queue), check_id(id)))
    return places


def _policy(name: str, value: Any) -> Policy:
    match value:
        case "fail" | "ignore" | "wait":
            return value  # type: ignore[no-any-return]
        case _:
            raise InvalidOption(f"{name}={value!r} is not usable. Give 'fail', 'ignore' or 'wait'.")


def _conflict(name: str, value: Any) -> Conflict:
    if isinstance(value, Conflict):
        return value
    if isinstance(value, str) and value in _CONFLICTS:
        return _CONFLICTS[value]
    raise InvalidOption(
        f"{name}={value!r} is not usable. Give {', '.join(map(repr, _CONFLICTS))} or a Conflict."
    )


_TREATMENT_PARSERS: Final[Mapping[str, tuple[str, Any]]] = {
    "attempts": ("attempts", _count(1)),
    "backoff": ("backoff", lambda name, value: parse_backoff(value)),
    "timeout": ("timeout_ms", _limit),
    "max_stalls": ("max_stalls", _count(0)),
    "result_ttl": ("result_ttl_ms", _kept),
    "failure_ttl": ("failure_ttl_ms", _kept),
    "version": ("version", _text),
}
_PLACEMENT_PARSERS: Final[Mapping[str, tuple[str, Any]]] = {
    "id": ("id", lambda name, value: check_id(value)),
    "delay": ("delay_ms", lambda name, value: milliseconds(value, what=name)),
    "run_at": ("run_at_ms", _due_ms),
    "priority": ("priority", _count(-_INT32)),
    "lifo": ("lifo", _flag),
    "ttl": ("ttl_ms", _limit),
    "on_conflict": ("conflict", _conflict),
    "dedup": ("dedup", _dedup),
    "unchecked": ("unchecked", _flag),
    "group": ("group", lambda name, value: check_group(value)),
    "cost": ("cost", _count(0)),
    "headers": ("headers", _headers),
    "hold": ("holds", _holds),
    "after": ("after", _places),
    "after_failure": ("after_failure", _policy),
    "run_id": ("run_id", _text),
    "write_id": ("write_id", _text),
}
# What people pass on from an optional argument of their own: None is as good as not given.
_NONE_IS_UNSET: Final = frozenset({"id", "delay", "run_at", "group", "headers", "hold", "dedup", "after"})
_TIMES: Final = ("delay_ms", "run_at_ms")
_ANNEX: Final = ("group", "cost", "headers", "holds")
_UNSAID: Final = {name: getattr(EMPTY_ANNEX, name) for name in _ANNEX}
