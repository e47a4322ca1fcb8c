"""The base class and helpers of all sync faces."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from functools import update_wrapper
from typing import Any, Concatenate, Final, Generic, ParamSpec, TypeVar

from penstock.client.loopthread import run

A = TypeVar("A")
B = TypeVar("B")
Q = ParamSpec("Q")
T_co = TypeVar("T_co", covariant=True)


_END: Final = object()


class Face(Generic[T_co]):
    """The sync face of ``_target``."""

    __slots__ = ("_target",)

    def __init__(self, target: T_co) -> None:
        self._target = target

    def __repr__(self) -> str:
        return f"{self._target!r}.sync"


def as_sync(
    method: Callable[Concatenate[A, Q], Coroutine[Any, Any, B]],
) -> Callable[Concatenate[Face[A], Q], B]:
    """Return ``method`` for the face of its object: same arguments, same result, without ``await``."""

    def call(face: Face[A], /, *args: Q.args, **kwargs: Q.kwargs) -> B:
        return run(method(face._target, *args, **kwargs))

    return update_wrapper(call, method)


def iterate(items: AsyncGenerator[A, None]) -> Generator[A, None, None]:
    """Yield from ``items``, fetching each item on the loop thread when it is needed."""

    async def fetch_next() -> A | object:
        return await anext(items, _END)

    try:
        while (item := run(fetch_next())) is not _END:
            yield item  # type: ignore[misc]  # _END is gone
    finally:
        run(_close(items))


async def _close(items: AsyncGenerator[Any, None]) -> None:
    await items.aclose()
