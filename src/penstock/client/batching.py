"""Batches, as a task says them: a function that takes the items of several jobs at once.

``@app.task(batch=50, batch_wait="200ms")`` on ``async def embed(texts: list[str]) -> list[Vector]``: a job is one
item, put in by ``embed.enqueue("one text")``; the function gets the list. Each job keeps its own id, retries, result.
With ``rows: pyarrow.Table`` (or ``RecordBatch``) items are rows, put in as dicts, and the function gets a table.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from inspect import Parameter
from types import UnionType
from typing import Any, Final, Union, get_args, get_origin

import msgspec

from penstock.client.optionvalues import whole_number
from penstock.client.signature import Signature, is_context, resolved
from penstock.core.units import Duration, milliseconds
from penstock.errors import InvalidOption

_DEFAULT_WAIT: Final = "100ms"
_MOST: Final = 10_000
_TABLES: Final = ("Table", "RecordBatch")
_LISTS: Final = (list, Sequence, Collection, Iterable)


class Batching(msgspec.Struct, frozen=True):
    """Up to ``size`` jobs in one call, which begins ``wait_ms`` after the first of them at the latest.

    ``contexts`` names the parameter that gets a ``JobContext`` for each item, if the function has one. ``table`` is
    what of Arrow the items come as: ``Table``, ``RecordBatch``, or nothing.
    """

    size: int
    wait_ms: int
    contexts: str = ""
    table: str = ""


def parse_batching(batch: int | None, batch_wait: Duration | None, *, where: str) -> Batching | None:
    """What ``batch`` and ``batch_wait`` ask for; ``None`` if they are not given. Raises ``InvalidOption``."""
    if batch is None:
        if batch_wait is not None:
            raise InvalidOption(f"batch_wait of {where} says how long a batch may fill. Give batch=..., too.")
        return None
    wait_ms = milliseconds(_DEFAULT_WAIT if batch_wait is None else batch_wait, what="batch_wait")
    return Batching(whole_number("batch", batch, least=1, most=_MOST), wait_ms)


def batch_signature(
    function: Callable[..., Any], batching: Batching, *, runner: str, takes_context: bool
) -> tuple[Signature, Batching]:
    """The signature of one job of a batch function: one parameter, of the type of an item.

    The function takes a list of items and, if it likes, one of ``JobContext``s beside it, in the same order.

    Raises:
        InvalidOption: a function that takes anything else, or runs in a process of its own.
        SerializationError: items of a type that no payload can be decoded to.
    """
    signature, hints = resolved(function)
    name = getattr(function, "__qualname__", repr(function))
    if runner in ("process", "sandbox"):
        raise InvalidOption(
            f"{name} cannot take batches in a {runner}: its jobs would share it, and none of them could be stopped "
            "alone. Use a coroutine function, or runner='thread'."
        )
    if takes_context:
        raise InvalidOption(
            f"takes_context does not suit {name}, which takes batches: there is a context for each job. "
            "Annotate a second parameter with list[JobContext]."
        )
    contexts = [key for key, hint in hints.items() if _is_list_of_contexts(hint)]
    items = [p for p in signature.parameters.values() if p.name not in contexts]
    if (
        len(items) != 1
        or len(contexts) > 1
        or items[0].kind in (Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL)
    ):
        raise InvalidOption(
            f"{name} cannot take batches: it needs one parameter for the list of items, and may have one more, "
            "annotated with list[JobContext]."
        )
    item = Parameter(
        items[0].name,
        Parameter.POSITIONAL_OR_KEYWORD,
        annotation=_item_type(name, items[0], hints[items[0].name]),
    )
    one = _OneJob(function, inspect.Signature([item], return_annotation=_result_type(hints["return"])))
    return Signature.of(one), msgspec.structs.replace(
        batching, contexts=contexts[0] if contexts else "", table=_table(hints[items[0].name])
    )


class _OneJob:
    """Stands for what a batch function does for one job, with a signature of its own."""

    def __init__(self, function: Callable[..., Any], signature: inspect.Signature) -> None:
        self.__signature__ = signature
        self.__wrapped__ = function
        self.__qualname__ = getattr(function, "__qualname__", repr(function))

    def __call__(self, item: Any) -> Any:
        raise NotImplementedError


def _item_type(name: str, parameter: Parameter, hint: Any) -> Any:
    if hint is Any or hint in _LISTS:
        return Any
    if _table(hint):
        return dict[str, Any]
    if get_origin(hint) in _LISTS:
        return get_args(hint)[0]
    raise InvalidOption(
        f"{name} cannot take batches: its parameter {parameter.name!r} is annotated with {hint!r}, and gets a list. "
        "Write list[...] of what one job is, or pyarrow.Table if it is a row."
    )


def _table(hint: Any) -> str:
    """By its name: whoever annotates with it has imported Arrow, and nobody else needs to."""
    name = getattr(hint, "__name__", "")
    return name if name in _TABLES and getattr(hint, "__module__", "").split(".")[0] == "pyarrow" else ""


def _result_type(hint: Any) -> Any:
    """Return the type of one job's result: an item of the list or a value of the mapping, without exceptions."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in _LISTS:
        return _without_exceptions(args[0])
    if origin in (dict, Mapping):
        return _without_exceptions(args[1])
    return Any


def _without_exceptions(hint: Any) -> Any:
    if get_origin(hint) not in (Union, UnionType):
        return hint
    rest = tuple(
        arm for arm in get_args(hint) if not (isinstance(arm, type) and issubclass(arm, BaseException))
    )
    return Union[rest] if rest else Any  # noqa: UP007 (the arms are values here)


def _is_list_of_contexts(hint: Any) -> bool:
    return get_origin(hint) in _LISTS and is_context(get_args(hint)[0])
