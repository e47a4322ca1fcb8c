"""Have the processes that Spark forks from its daemons start with their imports done.

Spark runs Python in forks of a daemon, one for each kind of work (to plan a read, to write, and so on). Forks that
idle for a minute end. What each would import takes it 0.7 s of processor time, and tests start hundreds of them.
"""

from __future__ import annotations

import gc
import os
import sys
from importlib import import_module
from pathlib import Path

_LOADED = (
    "pandas",
    "pyarrow",
    "pyspark.worker",
    "penstock.spark.source",
    "penstock.spark.sink",
    "penstock.spark.executor_task",
)


def use_preloaded_workers() -> None:
    """Have the sessions of this process, and of those that it starts, run Python this way."""
    os.environ["PYTHON_OF_TESTS"] = sys.executable
    os.environ["PYSPARK_PYTHON"] = str(Path(__file__).with_name("python"))


def _serve(worker: str) -> None:
    # As if this was `python -m pyspark.daemon`.
    sys.path[0] = os.getcwd()
    from pyspark import daemon

    # A thread that is started here, forks would not have.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    for name in (*_LOADED, worker):
        import_module(name)
    # What is here stays, so the forks need not look at it.
    gc.freeze()
    daemon.manager()


if __name__ == "__main__":
    _serve(sys.argv[1])
