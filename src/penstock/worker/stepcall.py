"""One call of ``context.step``: its name, its function and arguments, its policy, and the type of its result."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from functools import partial
from hashlib import blake2b
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, get_type_hints

import msgspec

from penstock.client.codec import JobCodec, Json, Raw
from penstock.core.names import check_signal, plain_model, step_name
from penstock.core.retry import Backoff, BackoffFunction, custom_name, parse_backoff
from penstock.core.text import shown
from penstock.core.units import Duration, milliseconds
from penstock.errors import InvalidOption

if TYPE_CHECKING:
    from penstock.client.app import App

OnDivergence = Literal["fail", "warn", "rerun"]
"""What to do if the arguments of a recorded step have changed."""

_json: Final = Json()


class StepPolicy(NamedTuple):
    """The options of a step. ``None`` stands for those of the job."""

    attempts: int | None = None
    backoff: Backoff | None = None
    custom: dict[str, BackoffFunction] | None = None
    timeout_ms: int | None = None
    retry_on: tuple[type[BaseException], ...] | None = None
    on_divergence: OnDivergence = "fail"


DEFAULT_POLICY: Final = StepPolicy()


def step_policy(
    *,
    attempts: int | None,
    backoff: Backoff | Duration | BackoffFunction | None,
    timeout: Duration | None,
    retry_on: type[BaseException] | tuple[type[BaseException], ...] | None,
    on_divergence: OnDivergence,
) -> StepPolicy:
    """Return the checked options of a step. Raise ``InvalidOption``."""
    if (attempts, backoff, timeout, retry_on, on_divergence) == (None, None, None, None, "fail"):
        return DEFAULT_POLICY
    if attempts is not None and (type(attempts) is not int or attempts < 1):
        raise InvalidOption(f"attempts must be an integer >= 1, got {shown(attempts)}.")
    if on_divergence not in ("fail", "warn", "rerun"):
        raise InvalidOption(f"on_divergence must be 'fail', 'warn' or 'rerun', got {shown(on_divergence)}.")
    custom = {custom_name(backoff): backoff} if callable(backoff) else None
    return StepPolicy(
        attempts,
        None if backoff is None else parse_backoff(backoff),
        custom,
        None if timeout is None else milliseconds(timeout, what="timeout"),
        (retry_on,) if isinstance(retry_on, type) else retry_on,
        on_divergence,
    )


class StepCall(NamedTuple):
    """One call of ``context.step``."""

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    digest: bytes
    policy: StepPolicy

    @classmethod
    def of(
        cls, name: str, function: Callable[..., Any], args: tuple[Any, ...], policy: StepPolicy
    ) -> StepCall:
        return cls(name, function, args, _digest(args), policy)

    def codec(self, app: App, queue: str, task_name: str) -> JobCodec:
        """Return the encoding of the result: that of the task's results, with the type that the function returns."""
        task = app.tasks.get(task_name)
        serde = _json if task is None or isinstance(task.result_serde, Raw) else task.result_serde
        return JobCodec(app, queue, serde=serde, result_serde=serde, result_type=_returned(self.function))


def wait_name(signal: str, key: str | int | None) -> str:
    """Return the name of the step that waits for a signal."""
    return step_name(f"wait:{check_signal(signal)}", key)


def timeout_of(timeout: Duration | None) -> int:
    """Return a timeout in milliseconds; 0 for none."""
    return 0 if timeout is None else max(milliseconds(timeout, what="timeout"), 1)


async def called(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Call an async function here, any other in a thread."""
    if _is_async(function):
        return await function(*args)
    value = await asyncio.to_thread(function, *args)
    return await value if inspect.isawaitable(value) else value


def _plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function of a task or of ``functools.partial``."""
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "func", function)


def _is_async(function: Callable[..., Any]) -> bool:
    plain = _plain(function)
    if isinstance(plain, FunctionType | MethodType | BuiltinFunctionType):
        return inspect.iscoroutinefunction(plain)
    return inspect.iscoroutinefunction(getattr(plain, "__call__", None))  # noqa: B004


def _returned(function: Callable[..., Any]) -> Any:
    """Return the annotated type of the result, or ``Any``."""
    plain = _plain(function)
    code = getattr(plain, "__code__", None)
    if code is None:
        return Any
    known = _types.get(code)
    if known is None:
        if len(_types) >= _MOST_TYPES:
            _types.clear()
        known = _types[code] = _annotated(plain)
    return known


_MOST_TYPES: Final = 1024
_types: Final[dict[CodeType, Any]] = {}
"""By code, because a nested function is a new object whenever it is defined."""


def _annotated(function: Callable[..., Any]) -> Any:
    try:
        return get_type_hints(function, include_extras=True).get("return", Any)
    except Exception:
        return Any


def _digest(args: tuple[Any, ...]) -> bytes:
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
