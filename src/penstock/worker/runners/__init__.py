"""The runners of handlers: on the loop, in threads, in processes, in sandboxes, and as shell commands."""

from __future__ import annotations

__all__: list[str] = []
