"""The worker: claims jobs, runs their handlers and settles their outcomes.

``worker.py`` wires a running process together; every other file is one of its parts.
"""

from __future__ import annotations

__all__: list[str] = []
