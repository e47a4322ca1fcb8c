"""Bridges to the wire formats of other queues. Nothing is imported until you import it."""

from __future__ import annotations

__all__: list[str] = []
