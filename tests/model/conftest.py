"""The engines that are held against the model."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract.engines import ENGINES, engine_url


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def store_url(engine: str, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return engine_url(engine, request=request, directory=tmp_path)
