"""What was said on the command line itself, wherever on it."""

from __future__ import annotations

__all__ = ["Flags"]


class Flags:
    """Keys given by options, as text, not checked yet; and whether errors are to be shown in full."""

    def __init__(self) -> None:
        self.given: dict[str, str] = {}
        self.debug = False
