"""What a handler says of its job while it runs."""

from __future__ import annotations

import msgspec

__all__ = ["Words"]


class Words(msgspec.Struct, frozen=True, tag=True):
    """Progress as JSON, a log line, a new payload, what was used in millionths; ``None`` where nothing was said.

    ``log_skipped`` is the number of lines that were printed before the log line and are not reported.
    """

    progress: bytes | None = None
    log: str | None = None
    payload: bytes | None = None
    usage: dict[str, int] | None = None
    log_skipped: int = 0
