"""Where handlers run: on the loop (inline), in threads, in processes of their own, in sandboxes."""

from __future__ import annotations

__all__: list[str] = []
