"""The names of keys. What each holds is told at the top of ``lua/prelude.lua``."""

from __future__ import annotations

from typing import Final

__all__ = ["DEFAULT_NAMESPACE", "Keys"]

DEFAULT_NAMESPACE: Final = "default"


class Keys:
    """The keys of one namespace. All keys of a queue carry its tag, so they share a slot."""

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self.registry = f"penstock:{namespace}:queues".encode()
        self._prefixes: dict[str, bytes] = {}

    def of(self, queue: str) -> bytes:
        """What all keys of a queue begin with; functions get it as their only key."""
        prefix = self._prefixes.get(queue)
        if prefix is None:
            # The last part of the tag is room for partitions of one queue over a cluster.
            prefix = self._prefixes[queue] = f"penstock:{{{self.namespace}/{queue}/0}}".encode()
        return prefix

    def part(self, queue: str, part: str) -> bytes:
        """One key of a queue."""
        return b"%b:%b" % (self.of(queue), part.encode())
