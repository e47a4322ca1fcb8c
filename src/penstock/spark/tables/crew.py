"""Workers for a run: processes of this machine, started with it and ended with it.

``python -m penstock.spark.tables.crew module:app queue processes`` is what each of them runs. It ends when its standard
input does, so that none is left behind by a run that was killed.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from importlib import import_module
from types import TracebackType

from penstock.app import App
from penstock.errors import InvalidOption
from penstock.worker.pool import locate

__all__ = ["Crew"]

_PATIENCE_S = 60.0


class Crew:
    """``count`` worker processes on one queue, within a ``with`` block; none if ``count`` is 0.

    Raises (on entering): ``InvalidOption``, if the app cannot be imported by another process.
    """

    def __init__(self, app: App, queue: str, count: int, *, concurrency: int) -> None:
        self._count = count
        self._command: list[str] = []
        if count:
            module, name = locate(app)
            if module == "__main__":
                raise InvalidOption(
                    "workers need an app that other processes can import, and this one is in the script itself. Put "
                    "the app and its tasks into a module of their own."
                )
            self._command = [
                sys.executable, "-m", __name__, f"{module}:{name}", queue, str(count), str(concurrency),
            ]  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Crew:
        if self._command:
            # What this process can import, they can.
            path = os.pathsep.join(filter(None, sys.path))
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    @property
    def has_ended(self) -> bool:
        """Whether the workers have ended by themselves, which they are not to do."""
        return self._process is not None and self._process.poll() is not None


def main() -> None:
    """Work on a queue until standard input ends."""
    target, queue, processes, concurrency = sys.argv[1:]
    module, _, name = target.partition(":")
    app: App = getattr(import_module(module), name)
    asyncio.run(_serve(app, queue, int(processes), int(concurrency)))


async def _serve(app: App, queue: str, processes: int, concurrency: int) -> None:
    worker = app.worker(queues=[queue], processes=processes, concurrency=concurrency, grace="30s")
    loop = asyncio.get_running_loop()

    def wait_for_end() -> None:
        sys.stdin.buffer.read()
        loop.call_soon_threadsafe(worker.stop)

    threading.Thread(target=wait_for_end, daemon=True).start()
    await worker.run()


if __name__ == "__main__":
    main()
