"""A real server whose clock is wrong: its time is moved under it by a library that is loaded before libc."""

from __future__ import annotations

import shutil
import struct
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator

import pytest

from penstock.core.job import DAY_MS, HOUR_MS, NewJob
from penstock.core.lifecycle import State
from penstock.core.outcome import Complete, Fail, Failure
from penstock.storage.valkey.engine import ValkeyStorage
from penstock.storage.values import Held, Settlement, Take
from tests.servers import ValkeyServer, wait_until

CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>

static long long *off_us;

__attribute__((constructor)) static void find(void) {
  int file = open(getenv("WRONG_CLOCK"), O_RDONLY);
  if (file >= 0) off_us = mmap(0, sizeof *off_us, PROT_READ, MAP_SHARED, file, 0);
}

int clock_gettime(clockid_t id, struct timespec *at) {
  static int (*real)(clockid_t, struct timespec *);
  if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
  int failed = real(id, at);
  if (!failed && off_us && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) at->tv_sec += *off_us / 1000000;
  return failed;
}

int gettimeofday(struct timeval *at, void *zone) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  at->tv_sec = now.tv_sec;
  at->tv_usec = now.tv_nsec / 1000;
  return 0;
}
"""
JUMPS = [30_000, 3 * HOUR_MS, 3650 * DAY_MS, -30_000, -3 * HOUR_MS, -3650 * DAY_MS]

SetClock = Callable[[int], None]


@pytest.fixture(scope="module")
def wrong_clock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ValkeyServer, SetClock]]:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    folder = tmp_path_factory.mktemp("clock")
    source, library, offset = folder / "clock.c", folder / "clock.so", folder / "offset"
    source.write_text(CLOCK)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    offset.write_bytes(struct.pack("q", 0))

    def set_clock(ms: int) -> None:
        """Move the clock, and wait for the server to look at it: it keeps a copy for some milliseconds."""
        with offset.open("r+b") as file:
            file.write(struct.pack("q", ms * 1000))
        with server.client() as client:
            wait_until(lambda: abs(client.time()[0] - time.time() - ms / 1000) < 10, what="the clock moved")

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LD_PRELOAD", str(library))
        patch.setenv("WRONG_CLOCK", str(offset))
        server = ValkeyServer().start()
    try:
        yield server, set_clock
    finally:
        server.close()


@pytest.mark.parametrize("ms", JUMPS)
async def test_a_server_whose_clock_was_wrong_for_a_moment_goes_on(
    wrong_clock: tuple[ValkeyServer, SetClock], ms: int
) -> None:
    server, set_clock = wrong_clock
    storage = ValkeyStorage.from_url(server.url, namespace=f"t{uuid.uuid4().hex[:12]}")
    await storage.open()
    try:
        await storage.enqueue("q", [NewJob("failed"), NewJob("running")])
        failed, running = (await storage.claim("q", Take("w", 2, 20_000))).leases
        final = Fail(Failure("Boom", "it went off"), final=True)
        await storage.settle("q", [Settlement(failed.id, failed.token, final)])
        before = (await storage.clock("q")).now_ms

        set_clock(ms)
        assert abs((await storage.clock("q")).wall_ms - before - ms) < 20_000
        swept = await storage.sweep("q")
        assert (swept.rescued, swept.pruned) == (0, 0)
        during = (await storage.clock("q")).now_ms
        set_clock(0)
        swept = await storage.sweep("q")
        assert (swept.rescued, swept.pruned) == (0, 0)

        after = await storage.clock("q")
        # Looking writes nothing: what goes on is the time of the last call that wrote.
        assert before - 1_000 <= during <= after.now_ms + 1_000
        assert abs(after.wall_ms - before) < 20_000
        await storage.enqueue("q", [NewJob("soon", delay_ms=50)])
        claimed = await storage.claim("q", Take("w", 1, 20_000), wait_ms=5_000)
        while not claimed.leases:
            claimed = await storage.claim("q", Take("w", 1, 20_000), wait_ms=50)
        assert claimed.leases[0].id == "soon"
        held = [Held(running.id, running.token)]
        assert await storage.extend("q", held, worker="w", lease_ms=20_000) == ["extended"]
        [settled] = (
            await storage.settle("q", [Settlement(running.id, running.token, Complete(b"1"))])
        ).answers
        assert settled.applied
        assert [job.id for job in (await storage.list_jobs("q", State.FAILED)).jobs] == ["failed"]
    finally:
        set_clock(0)
        await storage.close()
