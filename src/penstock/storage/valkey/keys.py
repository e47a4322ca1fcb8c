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
        self.attended = f"penstock:{namespace}:attended".encode()
        self._declared: dict[str, tuple[bytes, bytes]] = {}

    def of(self, queue: str) -> bytes:
        """Return what all keys of a queue begin with."""
        return self.declared(queue)[0]

    def declared(self, queue: str) -> tuple[bytes, bytes]:
        """Return the two keys that every function call declares: the prefix, which never exists, and ``meta``.

        One key is missing, and there is more than one: so while a cluster moves the slot key by key, both
        nodes answer TRYAGAIN, and no function runs on a part of the queue. With a single key the node that
        imports the slot would run it.
        """
        keys = self._declared.get(queue)
        if keys is None:
            # The last part of the tag is room for partitions of one queue over a cluster.
            prefix = f"penstock:{{{self.namespace}/{queue}/0}}".encode()
            keys = self._declared[queue] = (prefix, prefix + b":meta")
        return keys

    def part(self, queue: str, part: str) -> bytes:
        """One key of a queue."""
        return b"%b:%b" % (self.of(queue), part.encode())
