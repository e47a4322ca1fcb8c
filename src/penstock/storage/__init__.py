"""Storage: the contract (``contract``), its values, and the engines that implement it."""

from __future__ import annotations

from penstock.storage.contract import Storage
from penstock.storage.registry import EngineFactory, open_storage, register_engine

__all__ = ["EngineFactory", "Storage", "open_storage", "register_engine"]
