"""One call of ``context.step``: its name, its function and arguments, its policy, and the type of its result."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypedDict, get_args, get_type_hints

import msgspec

from penstock.client.codec import Json, Raw, Serde
from penstock.client.execution import resolve_retries
from penstock.client.middleware import SyncMiddleware, around
from penstock.client.options import RetryOn, refuse_unknown
from penstock.core.names import check_signal, plain_model, step_name
from penstock.core.retry import Backoff, BackoffFunction, RetryRules, custom_name, parse_backoff
from penstock.core.text import shown
from penstock.core.units import Duration, milliseconds
from penstock.errors import InvalidOption

if TYPE_CHECKING:
    from penstock.client.task import Task

OnDivergence = Literal["fail", "warn", "rerun"]
"""The reaction to a recorded step whose arguments have changed."""

_json: Final = Json()


class SyncStepOptions(TypedDict, total=False):
    """The options of ``context.sync.step``."""

    key: str | int | None
    attempts: int | None
    backoff: Backoff | Duration | BackoffFunction | None
    retry_on: RetryOn | None
    on_divergence: OnDivergence


class StepOptions(SyncStepOptions, total=False):
    """The options of ``context.step``. ``None`` stands for that of the job, or for no limit."""

    timeout: Duration | None


class StepPolicy(NamedTuple):
    """The parsed options of a step. ``None`` stands for those of the job."""

    attempts: int | None = None
    backoff: Backoff | None = None
    custom: dict[str, BackoffFunction] | None = None
    timeout_ms: int | None = None
    retries: RetryRules | None = None
    on_divergence: OnDivergence = "fail"


DEFAULT_POLICY: Final = StepPolicy()


def step_policy(name: str, options: Mapping[str, Any], kind: type = StepOptions) -> StepPolicy:
    """Return the parsed options of the step with this name. Raise ``InvalidOption``; ``kind`` has those it may have."""
    if not options or options.keys() == {"key"}:
        return DEFAULT_POLICY
    refuse_unknown(options, kind.__annotations__, where=f"step {shown(name)}")
    attempts, backoff, timeout = options.get("attempts"), options.get("backoff"), options.get("timeout")
    if attempts is not None and (type(attempts) is not int or attempts < 1):
        raise InvalidOption(f"attempts must be an integer >= 1, got {shown(attempts)}.")
    on_divergence = options.get("on_divergence", "fail")
    if on_divergence not in get_args(OnDivergence):
        raise InvalidOption(f"on_divergence must be 'fail', 'warn' or 'rerun', got {shown(on_divergence)}.")
    return StepPolicy(
        attempts,
        None if backoff is None else parse_backoff(backoff),
        {custom_name(backoff): backoff} if callable(backoff) else None,
        None if timeout is None else milliseconds(timeout, what="timeout"),
        resolve_retries(f"step {shown(name)}", options.get("retry_on")),
        on_divergence,
    )


class StepCall(NamedTuple):
    """One call of ``context.step``."""

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    digest: bytes
    policy: StepPolicy
    facts: Facts


def wait_name(signal: str, key: str | int | None) -> str:
    """Return the name of the step that waits for a signal."""
    return step_name(f"wait:{check_signal(signal)}", key)


def timeout_of(timeout: Duration | None) -> int:
    """Return a timeout in milliseconds; 0 for none."""
    return 0 if timeout is None else max(milliseconds(timeout, what="timeout"), 1)


class Facts(NamedTuple):
    """Facts about a function: whether it is async, and the annotated type of its result, or ``Any``."""

    is_async: bool
    result_type: Any


def facts_of(function: Callable[..., Any]) -> Facts:
    """Return the facts of a function, a task or a partial."""
    while isinstance(function, partial):
        function = function.func
    plain = getattr(function, "func", function)  # of a task
    code = getattr(plain, "__code__", None)
    facts = _facts.get(code)
    if facts is None:
        facts = Facts(_is_async(plain), _annotated(plain))
        if code is not None:
            if len(_facts) >= _MOST_FACTS:
                _facts.clear()
            _facts[code] = facts
    return facts


_MOST_FACTS: Final = 1024
_facts: Final[dict[CodeType | None, Facts]] = {}
"""By code, because a nested function is a new object whenever it is defined."""


def _is_async(function: Callable[..., Any]) -> bool:
    if isinstance(function, FunctionType | MethodType | BuiltinFunctionType):
        return inspect.iscoroutinefunction(function)
    return inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _annotated(function: Callable[..., Any]) -> Any:
    try:
        return get_type_hints(function, include_extras=True).get("return", Any)
    except Exception:
        return Any


async def called_in_thread(
    function: Callable[..., Any], args: tuple[Any, ...], layers: Sequence[SyncMiddleware]
) -> Any:
    """Call a function that is not async in a thread, inside ``layers`` of middleware."""
    value = await asyncio.to_thread(around, layers, partial(function, *args))
    return await value if inspect.isawaitable(value) else value


def result_serde(definition: Task[..., Any] | None) -> Serde:
    """Return the encoding of the results of steps: that of the job's results, unless it takes only bytes."""
    serde = _json if definition is None else definition.result_serde
    return _json if isinstance(serde, Raw) else serde


def digest_of(args: tuple[Any, ...]) -> bytes:
    """Return a digest of arguments; empty if they cannot be compared."""
    try:
        return blake2b(_encode_arguments(args), digest_size=8).digest()
    except Exception:
        return b""


def _stand_in(value: Any) -> Any:
    """Return what stands for an argument that has no encoding, such as a connection: its type."""
    try:
        return plain_model(value)
    except Exception:
        return f"{type(value).__module__}.{type(value).__qualname__}"


_encode_arguments: Final = msgspec.json.Encoder(enc_hook=_stand_in, order="deterministic").encode
