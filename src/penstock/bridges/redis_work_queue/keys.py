"""The names of a queue's keys. What each holds is told at the top of ``lua/prelude.lua``."""

from __future__ import annotations

import re
from typing import Final

from penstock.errors import InvalidName, InvalidOption

__all__ = ["Keys"]

_TAG: Final = re.compile(r"[^{]*\{[^}]+\}")


class Keys:
    """The keys of the queue with this prefix; ``in_cluster`` demands that they share a slot.

    Raises ``InvalidName`` for an empty prefix, ``InvalidOption`` for one without a hash tag in a cluster.
    """

    __slots__ = ("data", "lists", "prefix", "processing", "queue")

    def __init__(self, prefix: str, *, in_cluster: bool) -> None:
        if not prefix:
            raise InvalidName(
                f"{prefix!r} cannot be a key prefix: it is empty. Use that of the other clients."
            )
        if in_cluster and not _TAG.match(prefix):
            raise InvalidOption(
                f"the keys of prefix {prefix!r} are spread over the nodes of a cluster, where an item cannot move from "
                f"list to list. Use a prefix with a hash tag in all clients, {'{' + prefix + '}'!r} say, or one server."
            )
        self.prefix = prefix.encode()
        self.queue = self.prefix + b":queue"
        self.processing = self.prefix + b":processing"
        self.lists = (self.queue, self.processing, self.prefix + b":cleaning")
        self.data = self.prefix + b":item:"

    @property
    def data_pattern(self) -> bytes:
        """The glob that matches the data keys and, whatever the prefix holds, no others."""
        return re.sub(rb"([*?\[\]^\\-])", rb"\\\1", self.data) + b"*"
