"""The systems under measurement, as their adapter files describe them.

An adapter opens with a PEP 723 block (`# /// script` … `# ///`, `//` in a `.mjs`) whose `[tool.peers]`
table becomes a `System`; each of its `variants` is a row of its own.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from .place import ADAPTERS

__all__ = ["WORKLOADS", "System", "choose", "load_systems"]

WORKLOADS = ("one", "bulk", "drain", "e2e", "latency")
"""In the order they run: `bulk` also weighs the queued jobs, and its jobs are what `drain` drains."""


@dataclass(frozen=True)
class System:
    """One row of the table: an adapter file and a variant of it."""

    path: Path
    base: str
    variant: str = ""
    kind: Literal["redis", "sqlite"] = "redis"
    part: Literal["peer", "own", "anchor"] = "peer"
    dedups: bool = False
    """An id that is known already is refused or merged when a job is added."""
    acknowledges: bool = False
    """A job handed to a worker that dies is run again."""
    optional: bool = False
    """Measured only when named."""
    dependencies: tuple[str, ...] = ()
    extras: tuple[str, ...] = ()
    """Own systems: the extras of the project whose dependencies are installed."""
    version_of: str = ""
    node: str = ""
    """Node adapters: a Node inside node_modules to run on instead of the machine's."""
    pending: Sequence[Sequence[str]] | Literal["adapter"] = ()
    """How to count unfinished jobs: commands that add up, or `"adapter"`: ask the adapter's `pending()`."""
    skip: tuple[str, ...] = ()
    order: int = 50
    n: int = 20_000
    n_by: Mapping[str, int] = field(default_factory=dict)
    env: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""

    @property
    def name(self) -> str:
        return f"{self.base}:{self.variant}" if self.variant else self.base

    @property
    def language(self) -> Literal["python", "node"]:
        return "node" if self.path.suffix == ".mjs" else "python"

    def jobs(self, workload: str, scale: float) -> int:
        """How many jobs a measurement of this workload takes."""
        usual = {"one": max(self.n // 4, 50), "latency": 500}.get(workload, self.n)
        return max(int(self.n_by.get(workload, usual) * scale), 20)

    def answers_to(self, name: str) -> bool:
        return name in (self.name, self.base) or self.name.startswith(name + ":")


def load_systems(folder: Path = ADAPTERS) -> list[System]:
    """Return every system of a folder of adapters, in the order of the table."""
    found = [system for path in folder.glob("*_peer.*") for system in read_adapter(path)]
    return sorted(found, key=lambda s: (s.order, s.name))


def choose(systems: Sequence[System], names: Sequence[str]) -> list[System]:
    """The systems that the names stand for; without names, all but the optional ones.

    Raises `ValueError` for a name that no system answers to.
    """
    unknown = [n for n in names if not any(s.answers_to(n) for s in systems)]
    if unknown:
        known = ", ".join(s.name for s in systems)
        raise ValueError(f"unknown system {', '.join(unknown)}; known: {known}")
    if not names:
        return [s for s in systems if not s.optional]
    return [s for s in systems if any(s.answers_to(n) for n in names)]


def read_adapter(path: Path) -> list[System]:
    """The systems of one adapter file, a `System` per variant."""
    meta = read_block(path)
    common = dict(meta["tool"]["peers"])
    variants = common.pop("variants", None) or {"": {}}
    common["dependencies"] = tuple(meta.get("dependencies", ()))
    base = common.pop("name", path.stem.removesuffix("_peer"))
    rows = []
    for variant, special in variants.items():
        fields = common | special
        for name in ("extras", "skip"):
            fields[name] = tuple(fields.get(name, ()))
        rows.append(System(path=path, base=base, variant=variant, **fields))
    return rows


def read_block(path: Path) -> dict[str, Any]:
    mark = "//" if path.suffix == ".mjs" else "#"
    block = re.search(rf"(?ms)^{mark} /// script\n(.*?)^{mark} ///$", path.read_text())
    if block is None:
        raise ValueError(f"{path.name} has no PEP 723 block")
    return tomllib.loads(re.sub(rf"(?m)^{mark} ?", "", block[1]))
