"""Which pyspark the tests run on, and what it cannot do yet. ``make test-spark SPARK=4.0.0`` runs them on another."""

from __future__ import annotations

from typing import Final

import pyspark
import pytest

VERSION: Final = tuple(map(int, pyspark.__version__.split(".")[:2]))
HAS_PUSHDOWN: Final = VERSION >= (4, 1)
HAS_STREAMS: Final = VERSION >= (4, 2)
needs_streams = pytest.mark.skipif(not HAS_STREAMS, reason="streams need pyspark 4.2")
