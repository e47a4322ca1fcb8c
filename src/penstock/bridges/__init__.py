"""Bridges: other queues' own wire formats, spoken by Penstock code. Nothing is imported until it is asked for."""

from __future__ import annotations

__all__: list[str] = []
