"""Observe workers and queues from outside: probes, Prometheus, OpenTelemetry. All of it is optional."""

from __future__ import annotations

__all__: list[str] = []
