"""The options that users write, and the plain values they become.

There are two kinds. *JobPolicy* (``attempts``, ``timeout`` ...) says how workers treat a job. It is set on the
app, on the task, or by ``task.options(...)``, and becomes a ``core.job.Options`` that many jobs share.
*Placement* (``id``, ``delay``, ``priority`` ...) says where and when one job goes, and becomes fields of its
``NewJob``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Final, Literal, Required, TypeAlias, TypedDict, cast

from msgspec.structs import replace

from penstock.client import parsers
from penstock.client.codec import Serde
from penstock.client.hints import WORKER_OPTIONS, option_hint
from penstock.core.job import (
    EMPTY_EXTRAS,
    Conflict,
    Dedup,
    Dependency,
    Extras,
    Options,
    Policy,
)
from penstock.core.names import check_group, check_id, uuid7
from penstock.core.retry import Backoff, BackoffFunction
from penstock.core.schedule import When
from penstock.core.text import shown
from penstock.core.units import Duration, Size, milliseconds
from penstock.errors import InvalidOption

if TYPE_CHECKING:
    from penstock.client.rules import Unique

OnConflict: TypeAlias = Literal["default", "absent", "redispatch"] | Conflict

ErrorRule: TypeAlias = type[BaseException] | Callable[[Any], bool]
"""An exception class, or a function that takes the error and returns whether the option applies to it."""
RetryOn: TypeAlias = (
    ErrorRule | Sequence[ErrorRule] | Mapping[Any, Backoff | Duration | BackoffFunction | None]
)

# Callers often pass on optional arguments of their own, so None means that the option is not given.
_NONE_IS_UNSET: Final = frozenset(
    {"id", "delay", "run_at", "group", "headers", "hold", "dedup", "after", "deadline"}
)
_ALTERNATIVES: Final = (
    frozenset({"attempts", "max_retries"}),
    frozenset({"delay", "run_at"}),
    frozenset({"cron", "every", "after_completion"}),
    frozenset({"ttl", "deadline"}),
    frozenset({"dedup", "unique"}),
)
"""Sets of options that exclude each other. One that is set for a job replaces the others of its set."""
_DUE_FIELDS: Final = frozenset({"delay_ms", "run_at_ms"})
_EXTRAS: Final = ("group", "cost", "headers", "holds")


class JobPolicy(TypedDict, total=False):
    """The options of a job's runs and results.

    - ``attempts``: the number of failures after which the job fails for good (default: 3).
    - ``max_retries``: ``attempts`` minus 1, because the first run is not a retry. Give one of the two.
    - ``backoff``: the delay between attempts: ``"exponential"`` (default), a duration, a policy, or a function.
    - ``timeout``: the time limit of one run; ``None`` for no limit (default).
    - ``max_stalls``: how often its worker may die before the job fails (default: 3).
    - ``result_ttl``, ``failure_ttl``: how long the result (1 h) or the failure (30 days) is kept; ``None``: forever.
    - ``version``: the version of the task, shown in events.
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
    """The options of a single job. ``None`` stands for the default.

    - ``id``: the job id, which is also its dedup key (default: a new one).
    - ``delay`` or ``run_at``: run after this duration, or at this (aware) time.
    - ``priority``: smaller runs first (default: 0). ``lifo``: run before other jobs of the same priority.
    - ``ttl``: a job that has not finished within this time fails as expired; ``None`` for no limit. ``deadline``: the
      same, as an (aware) time or a duration.
    - ``on_conflict``: what happens if the id is known; see ``Conflict``.
    - ``dedup``: a ``Dedup``, or a key for ``Dedup.simple``. Open jobs with the same key are duplicates.
    - ``unchecked``: promise that the id is new, which saves a lookup.
    - ``group``: the key of jobs that share a limit or an order. ``cost``: the tokens it takes from the group's bucket.
    - ``headers``: names and values that stay with the job, for middleware and handlers.
    - ``hold``: consumers that keep the finished job until they release it, each with a maximum time:
      ``{"ledger": "7d"}``.
    - ``after``: jobs that it waits for: handles, enqueued ``job()``s, or pairs of queue and id.
      ``after_failure``: what happens if one of them fails: ``"fail"`` (default), ``"ignore"`` or ``"wait"``.
    - ``run_id``, ``write_id``: the table run, and the write, that the job belongs to.
    """

    id: str | None
    delay: Duration | None
    run_at: datetime | None
    priority: int
    lifo: bool
    ttl: Duration | None
    deadline: datetime | Duration | None
    on_conflict: OnConflict
    dedup: Dedup | str | None
    unchecked: bool
    group: str | None
    cost: int
    headers: Mapping[str, str] | None
    hold: Mapping[str, Duration] | None
    after: Iterable[Any] | None
    after_failure: Policy
    run_id: str
    write_id: str


class JobOptions(JobPolicy, Placement, total=False):
    """All options of a job, as ``queue.enqueue(payload, **options)`` takes them.

    ``unique`` replaces that of the task, which the app must have; ``False`` turns it off.
    """

    unique: bool | str | Sequence[str] | Unique


class CallOptions(JobOptions, total=False):
    """The options of a call: those of a job, and ``wait``, the longest time to wait for it; ``None``: no limit.

    The default is that of the task or the app, or 30 s.
    """

    wait: Duration | None


class ScheduleOptions(JobOptions, When, total=False):
    """The options of ``queue.schedule(name, payload, **options)``: those of a job, and its times."""


class DispatchOptions(CallOptions, When, total=False):
    """The options of ``task.options(...)``: those of a job and of a call, ``queue``, and the times of ``schedule``."""

    queue: str | None


class SharedOptions(JobPolicy, total=False):
    """The options of a task that its app may have as well: policy, and what several jobs can share."""

    delay: Duration | None
    lifo: bool
    ttl: Duration | None
    on_conflict: OnConflict
    headers: Mapping[str, str] | None
    hold: Mapping[str, Duration] | None
    wait: Duration | None


class RunOptions(SharedOptions, total=False):
    """The options of tasks and handlers about runs and encodings. ``TaskOptions`` explains them."""

    retry_on: RetryOn
    give_up_on: ErrorRule | Sequence[ErrorRule]
    runner: Literal["auto", "async", "thread", "process", "sandbox"]
    memory: Size | None
    cpu_time: Duration | None
    serde: str | Serde
    result_serde: str | Serde
    takes_context: bool


class DefaultOptions(SharedOptions, total=False):
    """The defaults of an app for its jobs and calls. Options of a task win, ``task.options(...)`` over both."""

    priority: int


class TaskOptions(RunOptions, total=False):
    """The options of ``@app.task`` besides the name and the queue.

    - ``group``, ``cost``, ``priority``, ``dedup``, ``deadline``: as for a job, or computed from its arguments: by a
      template such as ``"customer-{customer_id}"``, or by a function whose parameters have names of the task's.
    - ``unique``: one open job per arguments: ``True``, names of arguments, or a ``Unique``.
    - ``retry_on``: the errors to retry on; any other fails the job for good (default: all). Exception classes, or
      functions that take the error; a mapping gives each a backoff of its own. ``give_up_on``: errors that fail the job
      for good. Timeouts, crashes and ``Retry`` are always retried.
    - ``runner``: ``"auto"`` runs coroutine functions on the worker's loop, and other functions in threads.
      ``"process"`` is for work that keeps a processor busy. ``"sandbox"`` is for work that may crash, hang or leak:
      each run has its own process, limited to ``memory`` and ``cpu_time``.
    - ``serde``, ``result_serde``: how arguments and results are encoded (default: as the app does).
    - ``takes_context``: pass the ``JobContext`` as the first argument, even if that parameter has no annotation.
    """

    group: str | Callable[..., str | None] | None
    cost: int | str | Callable[..., int | None]
    priority: int | str | Callable[..., int | None]
    dedup: Dedup | str | Callable[..., Dedup | str | None] | None
    unique: bool | str | Sequence[str] | Unique
    deadline: Duration | Callable[..., datetime | Duration | None] | None


class HandlerOptions(RunOptions, total=False):
    """The options of ``@app.handler``: those of an app, and of ``@app.task`` except rules. See ``TaskOptions``."""

    priority: int


class Batches(TypedDict, total=False):
    """The options of a function that takes a list, the items of several jobs. ``BatchOptions`` explains them."""

    batch: Required[int]
    batch_wait: Duration


class BatchHandlerOptions(HandlerOptions, Batches, total=False):
    """The options of an ``@app.handler`` that takes a list of payloads. See ``BatchOptions``."""


class BatchOptions(TaskOptions, Batches, total=False):
    """The options of a task whose function takes a list: the items of up to ``batch`` jobs.

    The function is called at most ``batch_wait`` (default: 100 ms) after the first job is claimed. See ``decorators``.
    """


# Each option with the field of ``core.job`` that it sets, and its parser.

POLICY_PARSERS: Final[Mapping[str, tuple[str, Any]]] = {
    "attempts": ("attempts", parsers.count(1)),
    "max_retries": (
        "attempts",
        lambda name, value: parsers.whole_number(name, value, least=0, most=parsers.INT32 - 1) + 1,
    ),
    "backoff": ("backoff", parsers.backoff),
    "timeout": ("timeout_ms", parsers.limit),
    "max_stalls": ("max_stalls", parsers.count(0)),
    "result_ttl": ("result_ttl_ms", parsers.kept),
    "failure_ttl": ("failure_ttl_ms", parsers.kept),
    "version": ("version", parsers.text),
}
PLACEMENT_PARSERS: Final[Mapping[str, tuple[str, Any]]] = {
    "id": ("id", lambda name, value: check_id(value)),
    "delay": ("delay_ms", lambda name, value: milliseconds(value, what=name)),
    "run_at": ("run_at_ms", parsers.due_ms),
    "priority": ("priority", parsers.count(-parsers.INT32)),
    "lifo": ("lifo", parsers.flag),
    "ttl": ("ttl_ms", parsers.limit),
    "deadline": ("ttl_ms", parsers.deadline),
    "on_conflict": ("conflict", parsers.conflict),
    "dedup": ("dedup", parsers.dedup),
    "unchecked": ("unchecked", parsers.flag),
    "group": ("group", lambda name, value: check_group(value)),
    "cost": ("cost", parsers.count(0)),
    "headers": ("headers", parsers.headers),
    "hold": ("holds", parsers.holds),
    "after": ("after", parsers.places),
    "after_failure": ("after_failure", parsers.policy),
    "run_id": ("run_id", parsers.text),
    "write_id": ("write_id", parsers.text),
}

DEFAULTS: Final = frozenset(DefaultOptions.__annotations__)
TASK: Final = frozenset(BatchOptions.__annotations__)
HANDLER: Final = frozenset(BatchHandlerOptions.__annotations__)
JOB: Final = frozenset(JobOptions.__annotations__)
DISPATCH: Final = frozenset(DispatchOptions.__annotations__)
JOB_POLICY: Final = frozenset(JobPolicy.__annotations__)
PLACEMENT: Final = frozenset(Placement.__annotations__)
RULES: Final = ("group", "cost", "priority", "dedup", "unique", "deadline")
"""The options of a task that may be computed from the arguments of a job."""
TIMES: Final = frozenset(When.__annotations__)
DEFAULT_WAIT: Final = "30s"


def refuse_unknown(given: Iterable[str], known: Collection[str], *, where: str) -> None:
    """Raise ``InvalidOption`` that names all options which are not ``known``, with what to write instead."""
    unknown = [name for name in given if name not in known]
    if not unknown:
        return
    names = ", ".join(map(shown, unknown))
    if len(unknown) == 1:
        raise InvalidOption(f"{where} has no option {names}. {_instead(unknown[0], known)}")
    remedies = " ".join(f"{shown(name)}: {_instead(name, known)}" for name in unknown)
    raise InvalidOption(f"{where} has no options {names}. {remedies}")


def _instead(name: str, known: Collection[str]) -> str:
    if "concurrency" in known and (hint := WORKER_OPTIONS.get(name)):
        return hint
    # The hints are about jobs. They do not apply to the options of a search, a step, a schedule or a table.
    is_about_jobs = "result_ttl" in known
    if is_about_jobs and (hint := option_hint(name, known, DISPATCH)):
        return hint
    if is_about_jobs and name in TIMES:
        if "runner" in known:
            return f"Use @app.scheduled({name}=...) above @app.task."
        return f"It belongs to schedules: task.options({name}=...).schedule(...), queue.schedule(..., {name}=...)."
    if is_about_jobs and name == "wait":
        return "It limits how long a call waits: task.options(wait=...).call(), or queue.call(payload, wait=...)."
    if is_about_jobs and name in TASK | {"queue"}:
        return f"It belongs to the task: @app.task({name}=...)."
    if is_about_jobs and name in DISPATCH:
        return f"It belongs to single jobs: task.options({name}=...)."
    if close := get_close_matches(name, known, n=1):
        return f"Did you mean {shown(close[0])}?"
    return f"There are: {', '.join(sorted(known))}."


def with_policy(base: Options, given: Mapping[str, Any]) -> Options:
    """Return ``base`` with the policy options in ``given``. Ignore other names.

    Raises:
        InvalidOption: a value outside its range, or both ``attempts`` and ``max_retries``.
    """
    if "attempts" in given and "max_retries" in given:
        raise InvalidOption(
            f"attempts={shown(given['attempts'])} and max_retries={shown(given['max_retries'])} both say how often "
            "the job may run. Give one of them; attempts is max_retries + 1."
        )
    changes: dict[str, Any] = {}
    for name in JOB_POLICY & given.keys():
        field, parse = POLICY_PARSERS[name]
        changes[field] = parse(name, given[name])
    return replace(base, **changes) if changes else base


def placement(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a ``NewJob`` for the placement options in ``given``. Ignore other names.

    Raises:
        InvalidOption: a value outside its range, or both ``delay`` and ``run_at``.
        InvalidName: an id that is not allowed.
    """
    if given.get("delay") is not None and given.get("run_at") is not None:
        raise InvalidOption("delay and run_at both say when the job is due. Give one of them.")
    if given.get("ttl") is not None and given.get("deadline") is not None:
        raise InvalidOption("ttl and deadline both say when the job expires. Give one of them.")
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
    return _in_flow(fields)


def _in_flow(fields: dict[str, Any]) -> dict[str, Any]:
    """Give a job that waits for others a flow: the id under which they notify it when they end."""
    if fields.get("after"):
        extras = fields.get("extras", EMPTY_EXTRAS)
        fields["extras"] = replace(extras, flow=uuid7(), has_dependencies=True)
    return fields


def overridden(given: DispatchOptions, changes: DispatchOptions) -> DispatchOptions:
    """Return ``given`` updated with ``changes``, without the options that those exclude."""
    replaced = frozenset().union(*(names for names in _ALTERNATIVES if not names.isdisjoint(changes)))
    rest = {name: value for name, value in given.items() if name not in replaced}
    return cast(DispatchOptions, {**rest, **changes})


def placed(base: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``base`` with the placement options in ``given``. Raise as ``placement`` does."""
    own = placement(given)
    if not _DUE_FIELDS.isdisjoint(own):
        base = {name: value for name, value in base.items() if name not in _DUE_FIELDS}
    fields = {**base, **own}
    dedup: Dedup | None = fields.get("dedup")
    if dedup and dedup.mode == "debounce" and dedup.ttl_ms and fields.keys().isdisjoint(_DUE_FIELDS):
        fields["delay_ms"] = dedup.ttl_ms
    if "extras" in base and fields["extras"] is not base["extras"]:
        given_extras = {name: getattr(fields["extras"], name) for name in _EXTRAS}
        changes = {
            name: value for name, value in given_extras.items() if value != getattr(EMPTY_EXTRAS, name)
        }
        fields["extras"] = replace(base["extras"], **changes)
    return _in_flow(fields)
