"""What a command is made of, and what sends it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeAlias

__all__ = ["Again", "Arg", "Caller", "Key", "OnConnect"]

Arg: TypeAlias = str | bytes | int | float | memoryview

Key: TypeAlias = str | bytes
"""Names the server: a command goes where its key is."""

Again: TypeAlias = Callable[[], Sequence[Arg]]
"""Gives the command to send when an earlier attempt may have been carried out."""


class Caller(Protocol):
    """Whatever sends a command and gives its reply."""

    def call(self, *command: Arg) -> Awaitable[Any]: ...


OnConnect: TypeAlias = Callable[[Caller], Awaitable[object]]
"""Run on each new connection before anybody uses it; what it raises, the attempt to connect raises."""
