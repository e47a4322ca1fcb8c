"""The engines the contract suite and the model run on: ours, and one that a third party names.

``PENSTOCK_CONTRACT_URL=myengine://host pytest tests/contract tests/model`` adds an engine of one's own. Every
test uses a namespace or a queue nobody else has, so the store may be shared.
"""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Final

import pytest

__all__ = ["ENGINES", "engine_url"]

_OWN: Final = os.environ.get("PENSTOCK_CONTRACT_URL", "")

ENGINES: Final = [
    "memory",
    "sqlite",
    "valkey",
    pytest.param("cluster", marks=pytest.mark.cluster),
    *(["own"] if _OWN else []),
]


def engine_url(engine: str, *, request: pytest.FixtureRequest, directory: Path) -> str:
    """A URL of a store of this engine with a namespace that is empty."""
    namespace = f"t{uuid.uuid4().hex[:12]}"
    match engine:
        case "memory":
            return "memory://"
        case "sqlite":
            return f"sqlite:///{directory / 'penstock.db'}"
        case "valkey":
            return _with_namespace(request.getfixturevalue("valkey_url"), namespace)
        case "cluster":
            return _with_namespace(request.getfixturevalue("cluster_url"), namespace)
        case _:
            return _with_namespace(_OWN, namespace)


def _with_namespace(url: str, namespace: str) -> str:
    return f"{url}{'&' if '?' in url else '?'}namespace={namespace}"
