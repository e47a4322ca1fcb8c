"""The options of a task that say how its function runs: the runner, the limits of a run, and the errors to retry."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

from penstock.client.parsers import listed
from penstock.core.command import SandboxLimits, sandbox_limits
from penstock.core.retry import RetryRule, RetryRules, parse_backoff
from penstock.core.text import shown
from penstock.errors import InvalidOption

Runner: TypeAlias = Literal["async", "thread", "process", "sandbox"]


def resolve_runner(name: str, func: Callable[..., Any], requested: str) -> Runner:
    """Return the runner of a function. Raise ``InvalidOption`` if it does not suit the function."""
    is_async = inspect.iscoroutinefunction(func)
    match requested:
        case "auto":
            return "async" if is_async else "thread"
        case "async" if is_async:
            return "async"
        case "thread" if not is_async:
            return "thread"
        case "process" if not is_async:
            return "process"
        case "sandbox":
            return "sandbox"
        case "async" | "thread" | "process":
            kind = "a coroutine function" if is_async else "not a coroutine function"
            raise InvalidOption(
                f"runner={shown(requested)} does not suit task {shown(name)}, which is {kind}. Leave it at 'auto'."
            )
        case _:
            raise InvalidOption(
                f"runner must be 'auto', 'async', 'thread', 'process' or 'sandbox', got {shown(requested)}."
            )


def resolve_retries(where: str, retry_on: Any, give_up_on: Any = None) -> RetryRules | None:
    """Return which errors are retried, and when; ``None`` if all are, with the backoff of the job.

    ``where`` names the task or the step in messages.

    Raises:
        InvalidOption: an item is neither an exception class nor a function, or a backoff is not valid.
    """
    if retry_on is None and give_up_on is None:
        return None
    if isinstance(give_up_on, Mapping):
        raise InvalidOption(f"give_up_on of {where} has no backoff. Give a list.")
    return RetryRules(
        None if retry_on is None else _rules_of(f"retry_on of {where}", retry_on),
        () if give_up_on is None else _rules_of(f"give_up_on of {where}", give_up_on),
    )


def _rules_of(option: str, given: Any) -> tuple[RetryRule, ...]:
    if isinstance(given, Mapping):
        return tuple(
            RetryRule(_matcher(option, error), _backoff(option, backoff)) for error, backoff in given.items()
        )
    is_one = isinstance(given, type) or callable(given)
    errors = [given] if is_one else listed(option, given, of="exception classes or functions")
    return tuple(RetryRule(_matcher(option, error)) for error in errors)


def _matcher(option: str, error: Any) -> Callable[[BaseException], bool]:
    """Return a function that returns whether an error matches: a class, a tuple of classes, or the user's function."""
    classes = error if isinstance(error, tuple) else (error,)
    if all(isinstance(cls, type) and issubclass(cls, BaseException) for cls in classes):
        return lambda raised: isinstance(raised, classes)
    if callable(error) and not isinstance(error, type):
        if inspect.iscoroutinefunction(error):
            raise InvalidOption(f"{option} must be a plain function, got {shown(error)}.")
        return lambda raised: bool(error(raised))
    raise InvalidOption(
        f"{option} must name exception classes, or functions that take the error, got {shown(error)}."
    )


def _backoff(option: str, value: Any) -> Any:
    """Return the policy, or the function itself: the worker that has the task need not find it by name."""
    if value is None or callable(value):
        return value
    try:
        return parse_backoff(value)
    except InvalidOption as error:
        raise InvalidOption(f"{option}: {error}") from error


def resolve_limits(name: str, runner: Runner, given: Mapping[str, Any]) -> SandboxLimits:
    """Return the limits of a run. Raise ``InvalidOption`` if its runner cannot enforce them."""
    for option in ("memory", "cpu_time"):
        if given.get(option) is not None and runner != "sandbox":
            raise InvalidOption(
                f"{option}={shown(given[option])} cannot be enforced for task {shown(name)}: its runs share a process. "
                "Add runner='sandbox'."
            )
    return sandbox_limits(memory=given.get("memory"), cpu_time=given.get("cpu_time"))
