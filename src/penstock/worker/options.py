"""The options of a worker, checked before anything is started."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypedDict, TypeVar, Unpack

import msgspec

from penstock.client.middleware import check_layer
from penstock.client.options import refuse_unknown
from penstock.client.parsers import listed
from penstock.core.limits import Rate, RateLike, parse_rate
from penstock.core.names import check_queue, check_worker, uuid7
from penstock.core.text import shown
from penstock.core.units import Duration, milliseconds
from penstock.errors import InvalidOption
from penstock.observe.probe import ProbeAddress, read_address

if TYPE_CHECKING:
    from penstock.client.app import App
    from penstock.worker.middleware import AfterExecution, Middleware


F = TypeVar("F")
# Not Sequence[str], because a str is one.
Queues = list[str] | tuple[str, ...] | Mapping[str, float]

LONGEST_HEARTBEAT_MS: Final = 5_000
_SHORTEST_LEASE_MS: Final = 100
# The id adds a suffix.
_LONGEST_NAME: Final = 190


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Parsed options. ``queues`` holds weights by name."""

    name: str
    id: str
    queues: dict[str, float]
    concurrency: int
    processes: int
    lease_ms: int
    heartbeat_ms: int
    grace_ms: int
    stuck_after_ms: int
    unknown_after_ms: int
    burst: bool
    sweep: bool
    threads: int
    child_processes: int | None
    middleware: tuple[Any, ...]
    after_execution: tuple[Any, ...]
    probe: ProbeAddress | None
    limit: Rate | None
    limits: dict[str, Rate]
    commands: str | None


class WorkerOptions(TypedDict, total=False):
    """The options of ``app.worker(...)``; ``Worker`` explains them."""

    queues: Queues | None
    concurrency: int
    processes: int
    name: str | None
    lease: Duration
    heartbeat: Duration | None
    grace: Duration
    stuck_after: Duration
    unknown_after: Duration
    burst: bool
    sweep: bool
    threads: int | None
    child_processes: int | None
    middleware: Sequence[Middleware]
    after_execution: Sequence[AfterExecution]
    probe: str | None
    probe_token: str | None
    limit: RateLike | None
    limits: Mapping[str, RateLike]
    commands: bool | str


def read_options(app: App, **options: Unpack[WorkerOptions]) -> WorkerSettings:
    """Check the options of a worker and fill in the defaults.

    Raises:
        InvalidOption: an option is unknown, or its value is invalid.
        InvalidName: a queue or worker name is not allowed.
    """
    refuse_unknown(options, WorkerOptions.__annotations__, where="a worker")
    lease_ms = milliseconds(options.get("lease", "30s"), what="lease")
    if lease_ms < _SHORTEST_LEASE_MS:
        raise InvalidOption(
            f"lease must be at least 100ms, got {shown(options.get('lease'))}: it could not be renewed in time."
        )
    concurrency = _count("concurrency", options.get("concurrency", 100))
    queues, limit = _weights(app, options.get("queues")), options.get("limit")
    threads, children, name = options.get("threads"), options.get("child_processes"), options.get("name")
    name = _default_name() if name is None else check_worker(name)
    return WorkerSettings(
        name=name,
        id=_id_of(name),
        queues=queues,
        concurrency=concurrency,
        processes=_count("processes", options.get("processes", 1)),
        lease_ms=lease_ms,
        heartbeat_ms=_heartbeat_ms(options.get("heartbeat"), lease_ms),
        grace_ms=milliseconds(options.get("grace", "30s"), what="grace"),
        stuck_after_ms=milliseconds(options.get("stuck_after", "5m"), what="stuck_after"),
        unknown_after_ms=_unknown_after_ms(options),
        burst=_flag("burst", options.get("burst", False)),
        sweep=_flag("sweep", options.get("sweep", True)),
        threads=concurrency if threads is None else _count("threads", threads),
        child_processes=None if children is None else _count("child_processes", children),
        middleware=(*app.middlewares, *_functions(options, "middleware", _layer)),
        after_execution=(*app.after_hooks, *_functions(options, "after_execution", _after_hook)),
        probe=_probe(options.get("probe"), options.get("probe_token")),
        limit=None if limit is None else parse_rate(limit, what="limit"),
        limits=_limits(options.get("limits", {}), queues),
        commands=_shell(options.get("commands", False)),
    )


def _unknown_after_ms(options: WorkerOptions) -> int:
    """Return ``unknown_after``. A burst worker must finish, so by default it does not wait for other workers."""
    default = "0s" if options.get("burst") else "1h"
    return milliseconds(options.get("unknown_after", default), what="unknown_after")


def _shell(commands: Any) -> str | None:
    """Return the shell that runs commands, or ``None``."""
    if isinstance(commands, bool):
        return "/bin/sh" if commands else None
    if not isinstance(commands, str) or not os.path.isabs(commands) or not commands.isprintable():
        raise InvalidOption(
            f"commands must be True, False or the absolute path of a shell, got {shown(commands)}."
        )
    return commands


def _probe(address: Any, token: str | None) -> ProbeAddress | None:
    if address is None:
        return None
    # A port may be a number.
    address = str(address) if type(address) is int and 0 <= address <= 65_535 else address
    return read_address(address, token=token)


def _default_name() -> str:
    host = re.sub(r"[^A-Za-z0-9_.\-]", "-", platform.node())[:100] or "host"
    return f"{host}-{os.getpid()}"


def _id_of(name: str) -> str:
    """Return the name with a random suffix.

    A worker renews or hands back every lease under its id, so no two workers may share one, not even a dead worker
    and its successor.
    """
    return f"{name[:_LONGEST_NAME]}-{uuid7()[-6:]}"


def _weights(app: App, queues: Queues | None) -> dict[str, float]:
    if queues is None:
        of_tasks = {task.queue for task in (*app.tasks.values(), *app.handlers.values())}
        queues = sorted(of_tasks | app.served) or ["default"]
    if isinstance(queues, str):
        proposed = [shown(name.strip()) for name in queues[:100].split(",") if name.strip()] or ["'mail'"]
        raise InvalidOption(f"queues must be a list, such as [{', '.join(proposed)}], got {shown(queues)}.")
    names = queues if isinstance(queues, Mapping) else listed("queues", queues, of="names")
    weights = {check_queue(name): names[name] if isinstance(names, Mapping) else 1.0 for name in names}
    if not weights:
        raise InvalidOption("queues must not be empty: name at least one queue to work on.")
    for name, weight in weights.items():
        if type(weight) not in (int, float) or not 0 < weight < 1e6:
            raise InvalidOption(
                f"the weight of queue {shown(name)} must be a number above 0, such as 1 or 3, got {shown(weight)}."
            )
    return weights


def _limits(limits: Mapping[str, RateLike], queues: Mapping[str, float]) -> dict[str, Rate]:
    if not isinstance(limits, Mapping):
        raise InvalidOption(
            f'limits must be a mapping of rates by queue, such as {{"mail": "10/s"}}, got {shown(limits)}.'
        )
    for name in limits:
        if name not in queues:
            raise InvalidOption(
                f"limits names {shown(name)}, which is not a queue of this worker. Use one of: {', '.join(queues)}."
            )
    return {name: parse_rate(rate, what=f"limits[{shown(name)}]") for name, rate in limits.items()}


def _count(what: str, value: int) -> int:
    if type(value) is not int or not 1 <= value <= 100_000:
        raise InvalidOption(f"{what} must be an integer from 1 to 100000, got {shown(value)}.")
    return value


def _flag(what: str, value: bool) -> bool:
    if not isinstance(value, bool):
        raise InvalidOption(f"{what} must be True or False, got {shown(value)}.")
    return value


def _functions(options: Mapping[str, Any], what: str, check: Callable[[Any], F]) -> list[F]:
    return [check(value) for value in listed(what, options.get(what, ()), of="functions")]


def _layer(value: Middleware) -> Middleware:
    check_layer(value, what="middleware", form="async def f(context, call_next)")
    return value


def _after_hook(value: AfterExecution) -> AfterExecution:
    if not callable(value):
        raise InvalidOption(
            f"after_execution must contain functions, got {shown(value)}. Use async def f(execution)."
        )
    return value


def _heartbeat_ms(heartbeat: Duration | None, lease_ms: int) -> int:
    if heartbeat is None:
        return max(1, min(lease_ms // 3, LONGEST_HEARTBEAT_MS))
    heartbeat_ms = milliseconds(heartbeat, what="heartbeat")
    if not 0 < heartbeat_ms <= lease_ms // 2:
        raise InvalidOption(
            f"heartbeat must be at most half the lease ({lease_ms} ms), got {shown(heartbeat)}."
        )
    return heartbeat_ms
