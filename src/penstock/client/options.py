"""The options users write, and the plain values they become.

Two kinds. *Treatment* says how a job is treated once it is in (``attempts``, ``timeout`` ...): it is set on the
app, on the task, or for some jobs by ``task.options(...)``, and becomes a ``core.job.Options`` that all those
jobs share. *Placement* says where one job goes (``id``, ``delay``, ``priority`` ...) and becomes fields of its
``NewJob``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from difflib import get_close_matches
from typing import Any, Final, Literal, Required, TypeAlias, TypedDict, cast

import msgspec

from penstock.client.codec import Serde
from penstock.client.hints import WORKER_OPTIONS, option_hint
from penstock.client.optionvalues import PLACEMENT_PARSERS, TREATMENT_PARSERS
from penstock.core.dedup import Dedup
from penstock.core.job import EMPTY_EXTRAS, Conflict, Dependency, Extras, Options, Policy
from penstock.core.names import uuid7
from penstock.core.retry import Backoff, BackoffFunction
from penstock.core.text import shown
from penstock.core.units import Duration, Size
from penstock.errors import InvalidOption

OnConflict: TypeAlias = Literal["default", "absent", "redispatch"] | Conflict

# What people pass on from an optional argument of their own: None is as good as not given.
_NONE_IS_UNSET: Final = frozenset({"id", "delay", "run_at", "group", "headers", "hold", "dedup", "after"})
_ALTERNATIVES: Final = {
    "attempts": "max_retries",
    "max_retries": "attempts",
    "delay": "run_at",
    "run_at": "delay",
}
_TIMES: Final = ("delay_ms", "run_at_ms")
_EXTRAS: Final = ("group", "cost", "headers", "holds")
_UNSAID: Final = {name: getattr(EMPTY_EXTRAS, name) for name in _EXTRAS}


class Treatment(TypedDict, total=False):
    """How a job is treated.

    - ``attempts``: run at most so many times if it fails (default 3).
    - ``max_retries``: another way to give ``attempts``, which is one more: the first run is not a retry.
    - ``backoff``: the rest between attempts: ``"exponential"`` (default), a duration, a policy, a function.
    - ``timeout``: how long one run may take; ``None`` is no limit (default).
    - ``max_stalls``: how often its worker may vanish before the job counts as failed (default 3).
    - ``result_ttl``, ``failure_ttl``: how long the result (1 h) or the failure (30 days) is kept; ``None``: for ever.
    - ``version``: of the task, shown in events.
    """

    attempts: int
    max_retries: int
    backoff: Backoff | Duration | BackoffFunction
    timeout: Duration | None
    max_stalls: int
    result_ttl: Duration | None
    failure_ttl: Duration | None
    version: str


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
    """Both kinds: all options of a job, as ``queue.enqueue(payload, **options)`` takes them."""


class CallOptions(JobOptions, total=False):
    """The options of a call: those of the job, and ``wait``, how long to wait for its end (default: no limit)."""

    wait: Duration | None


class DispatchOptions(CallOptions, total=False):
    """The options of ``task.options(...)``: all options of a job and of a call, and ``queue``."""

    queue: str | None


class DefaultOptions(Treatment, total=False):
    """What an app or a task says of its jobs in advance: their treatment, and ``priority`` and ``ttl``."""

    priority: int
    ttl: Duration | None


class TaskOptions(DefaultOptions, total=False):
    """What ``@app.task`` takes besides the name and the queue.

    ``retry_on``: exception classes. A run that raises another one fails the job for good; timeouts, crashes and
    ``Retry`` are retried all the same. Without it every exception is retried while attempts are left.
    ``runner``: ``"auto"`` runs coroutine functions on the worker's loop and others in threads; ``"process"`` is
    for work that keeps a processor busy; ``"sandbox"`` for work that may crash, hang or leak: each run has a
    process of its own, which may use so much ``memory`` and ``cpu_time``. ``takes_context``: the first parameter
    gets the ``JobContext``, which a parameter with that annotation gets anyway.
    """

    retry_on: type[BaseException] | Sequence[type[BaseException]]
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
DISPATCH: Final = frozenset(DispatchOptions.__annotations__)
TREATMENT: Final = frozenset(Treatment.__annotations__)
PLACEMENT: Final = frozenset(Placement.__annotations__)


def refuse_unknown(given: Iterable[str], known: Collection[str], *, where: str) -> None:
    """Raise ``InvalidOption`` that names all options which are not ``known``, with what to write instead."""
    unknown = [name for name in given if name not in known]
    if not unknown:
        return
    if len(unknown) == 1:
        raise InvalidOption(f"{where} has no option {shown(unknown[0])}. {_instead(unknown[0], known)}")
    remedies = " ".join(f"{shown(name)}: {_instead(name, known)}" for name in unknown)
    raise InvalidOption(f"{where} has no options {', '.join(map(shown, unknown))}. {remedies}")


def _instead(name: str, known: Collection[str]) -> str:
    if "concurrency" in known and (hint := WORKER_OPTIONS.get(name)):
        return hint
    # A search, a schedule or a table has options of its own, which the words of other queues do not mean.
    is_about_jobs = "attempts" in known
    if is_about_jobs and (hint := option_hint(name, known, DISPATCH)):
        return hint
    if is_about_jobs and name in TASK | {"queue"}:
        return f"It belongs to the task: @app.task({name}=...)."
    if is_about_jobs and name in DISPATCH:
        return f"It belongs to single jobs: task.options({name}=...)."
    if close := get_close_matches(name, known, n=1):
        return f"Did you mean {shown(close[0])}?"
    return f"There are: {', '.join(sorted(known))}."


def treatment(base: Options, given: Mapping[str, Any]) -> Options:
    """``base`` with what ``given`` says of treatment; other names in ``given`` are passed over.

    Raises:
        InvalidOption: a value outside its range, or both ``attempts`` and ``max_retries``.
    """
    if "attempts" in given and "max_retries" in given:
        raise InvalidOption(
            f"attempts={shown(given['attempts'])} and max_retries={shown(given['max_retries'])} both say how often "
            "the job may run. Give one of them; attempts is max_retries + 1."
        )
    changes: dict[str, Any] = {}
    for name in TREATMENT & given.keys():
        field, parse = TREATMENT_PARSERS[name]
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
        if name in PLACEMENT_PARSERS and not (value is None and name in _NONE_IS_UNSET):
            field, parse = PLACEMENT_PARSERS[name]
            fields[field] = parse(name, value)
    extras = {name: fields.pop(name) for name in _EXTRAS if name in fields}
    if extras:
        fields["extras"] = Extras(**extras)
    policy = fields.pop("after_failure", "fail")
    if "after" in fields:
        fields["after"] = tuple(Dependency(queue, id, policy) for queue, id in fields["after"])
    return _tied(fields)


def _tied(fields: dict[str, Any]) -> dict[str, Any]:
    """A job that waits for others has a flow to be told by."""
    if fields.get("after"):
        extras = fields.get("extras", EMPTY_EXTRAS)
        fields["extras"] = msgspec.structs.replace(extras, flow=uuid7(), has_dependencies=True)
    return fields


def overridden(given: DispatchOptions, nearer: DispatchOptions) -> DispatchOptions:
    """Return both with the nearer option winning, also where two options say the same thing in different ways."""
    kept = {name: value for name, value in given.items() if _ALTERNATIVES.get(name) not in nearer}
    return cast(DispatchOptions, {**kept, **nearer})


def placed(base: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a ``NewJob`` in ``base``, with what ``given`` asks for; raises as ``placement``."""
    fields = {**base, **placement(given)}
    dedup: Dedup | None = fields.get("dedup")
    if dedup and dedup.mode == "debounce" and dedup.ttl_ms and fields.keys().isdisjoint(_TIMES):
        fields["delay_ms"] = dedup.ttl_ms
    if "extras" in base and fields["extras"] is not base["extras"]:
        said = {
            name: value for name in _EXTRAS if (value := getattr(fields["extras"], name)) != _UNSAID[name]
        }
        fields["extras"] = msgspec.structs.replace(base["extras"], **said)
    return _tied(fields)
