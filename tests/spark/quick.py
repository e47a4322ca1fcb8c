"""Settings of the sessions that tests start: over a few rows, compiling code takes longer than going without."""

from __future__ import annotations

from typing import Final

__all__ = ["QUICK"]

QUICK: Final = {
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
}
