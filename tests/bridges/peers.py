"""The published clients of redis-work-queue, and ours, each in a process of its own that can be killed.

The published Python client is a dev dependency. The Node one is installed from npm at first use, into a folder of
the machine's temporary directory that is named after the versions.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import urlsplit

__all__ = ["KINDS", "NodeMissing", "Peer", "node_packages"]

KINDS: Final = ("python", "node")
"""Of published clients."""
PACKAGES: Final = {"@mevitae/redis-work-queue": "0.1.5", "ioredis": "5.11.1", "uuid": "9.0.1"}
HERE: Final = Path(__file__).parent
CACHE: Final = Path(os.environ.get("PENSTOCK_TEST_CACHE") or Path(tempfile.gettempdir()) / "penstock-tests")


class NodeMissing(Exception):
    """The Node client cannot be had on this machine; says why."""


def node_packages() -> Path:
    """The ``node_modules`` with the published Node client, installed if need be."""
    for tool in ("node", "npm"):
        if shutil.which(tool) is None:
            raise NodeMissing(f"{tool} is not installed")
    manifest = json.dumps({"private": True, "dependencies": PACKAGES})
    home = CACHE / f"redis-work-queue-{hashlib.sha256(manifest.encode()).hexdigest()[:10]}"
    if not home.exists():
        _install(manifest, home)
    return home / "node_modules"


def _install(manifest: str, home: Path) -> None:
    CACHE.mkdir(parents=True, exist_ok=True)
    # Beside it and then renamed: another session may be at it, and what is half there must not be used.
    work = Path(tempfile.mkdtemp(dir=CACHE, prefix="installing-"))
    try:
        (work / "package.json").write_text(manifest)
        command = ["npm", "install", "--no-audit", "--no-fund", "--silent", "--ignore-scripts"]
        run = subprocess.run(command, cwd=work, check=False, capture_output=True, text=True, timeout=100)
        if run.returncode:
            raise NodeMissing(f"npm could not install the client: {(run.stdout + run.stderr)[-500:].strip()}")
        with suppress(OSError):  # somebody else was first
            work.rename(home)
    finally:
        shutil.rmtree(work, ignore_errors=True)


class Peer:
    """A client of a kind (``python``, ``node``, ``ours``) on the queue ``prefix``.

    ``ask`` waits for its answer; ``tell`` does not, ``answer`` then does.
    """

    def __init__(self, kind: str, url: str, prefix: str) -> None:
        server = urlsplit(url)
        place = [str(server.hostname), str(server.port), prefix]
        if "cluster" in server.scheme:
            place.append("cluster")
        environment = dict(os.environ)
        if kind == "node":
            command = ["node", str(HERE / "published_peer.cjs")]
            environment["NODE_PATH"] = str(node_packages())
        else:
            script = "our_peer.py" if kind == "ours" else "published_peer.py"
            command = [sys.executable, str(HERE / script)]
        self._process = subprocess.Popen(
            [*command, *place],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def tell(self, verb: str, *args: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([verb, args]) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the peer ended with {self._process.wait()}"
        return json.loads(line)

    def ask(self, verb: str, *args: Any) -> Any:
        self.tell(verb, *args)
        return self.answer()

    def kill(self) -> None:
        """SIGKILL, and away with it."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()
