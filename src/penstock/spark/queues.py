"""Which queues a read is about."""

from __future__ import annotations

import re

from penstock.core.names import check_queue
from penstock.errors import InvalidOption
from penstock.spark.options import ReadOptions
from penstock.storage.base import Storage

__all__ = ["chosen_queues"]


async def chosen_queues(storage: Storage, options: ReadOptions) -> list[str]:
    """By ``queue``, ``subscribe`` or ``subscribePattern``, the latter among the queues that there are now.

    Raises:
        InvalidOption: a pattern that is none.
    """
    if options.queue:
        return [check_queue(options.queue)]
    if options.subscribe:
        return [check_queue(name.strip()) for name in options.subscribe.split(",")]
    try:
        pattern = re.compile(options.subscribe_pattern)
    except re.error as error:
        raise InvalidOption(
            f"subscribePattern={options.subscribe_pattern!r} is not a valid regular expression: {error}."
        ) from None
    return [name for name in await storage.queues() if pattern.fullmatch(name)]
