"""An adapter's environment: a venv or node_modules of its own under the cache, named after its pins."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

from .place import CACHE, LIB, PROJECT
from .systems import System

__all__ = ["Installation"]


class Installation:
    """Where a system's packages live, and how its adapter is started."""

    def __init__(self, system: System) -> None:
        self.system = system
        self.requirements = list(system.dependencies)
        self.constraints = PROJECT / "constraints.txt"
        pins = ""
        if system.part == "own":
            self.requirements += project_requirements(system.extras)
            pins = self.constraints.read_text() if self.constraints.exists() else ""
        tag = hashlib.sha256((json.dumps(self.requirements) + pins).encode()).hexdigest()[:10]
        stem = system.path.stem.removesuffix("_peer")
        self.home = CACHE / ("node" if system.language == "node" else "venv") / f"{stem}-{tag}"

    def ensure(self) -> None:
        """Install what is not there yet. Raises `RuntimeError` with the installer's words."""
        done = self.home / ".ok"
        if not done.exists():
            print(f"# installing {self.system.base} ...", file=sys.stderr, flush=True)
            shutil.rmtree(self.home, ignore_errors=True)
            self.home.mkdir(parents=True)
            self._install_node() if self.system.language == "node" else self._install_python()
            done.touch()
        if self.system.language == "node":  # Node resolves imports from where the importing file is
            shutil.copy(LIB / "peer.mjs", self.home)
            shutil.copy(self.system.path, self.home)

    def _install_python(self) -> None:
        run([os.environ.get("PEERS_PYTHON", sys.executable), "-m", "venv", str(self.home)])
        pinned = self.system.part == "own" and self.constraints.exists()
        constraints = ["--constraint", str(self.constraints)] if pinned else []
        if self.requirements:
            run([*self._pip, "install", "-qq", *constraints, *self.requirements])

    def _install_node(self) -> None:
        package = {
            "private": True,
            "type": "module",
            "dependencies": dict(split_npm(r) for r in self.requirements),
        }
        (self.home / "package.json").write_text(json.dumps(package))
        run(["npm", "install", "--no-audit", "--no-fund", "--silent"], cwd=self.home)

    @property
    def _pip(self) -> list[str]:
        return [str(self.home / "bin/python"), "-m", "pip", "--disable-pip-version-check"]

    def command(self, role: str) -> list[str]:
        if self.system.language == "python":
            return [str(self.home / "bin/python"), str(self.system.path), role]
        node = str(self.home / self.system.node) if self.system.node else os.environ.get("PEERS_NODE", "node")
        return [node, str(self.home / self.system.path.name), role]

    def python_path(self) -> str:
        """Own systems run from the checkout's source, so that a change needs no installation."""
        own = [PROJECT / "src"] if self.system.part == "own" else []
        return os.pathsep.join(map(str, [LIB, self.system.path.parent, *own]))

    def packages(self) -> dict[str, str]:
        """Name and version of what is installed (Node: of the direct dependencies)."""
        if self.system.language == "python":
            listed = json.loads(run([*self._pip, "list", "--format=json"]))
            return {p["name"].lower(): p["version"] for p in listed if p["name"] not in ("pip", "setuptools")}
        names = [split_npm(r)[0] for r in self.requirements]
        files = {name: self.home / "node_modules" / name / "package.json" for name in names}
        return {name: json.loads(f.read_text())["version"] for name, f in files.items() if f.exists()}

    def version(self, packages: dict[str, str]) -> str:
        if self.system.part == "own":
            return project_version()
        return packages.get(self.system.version_of or self.system.base, "?")


def project_requirements(extras: Iterable[str]) -> list[str]:
    """The project's dependencies with those of the named extras, from its pyproject.toml.

    An extra the project does not have adds nothing; one that names the project again is followed.
    """
    project = read_pyproject()
    optional = project.get("optional-dependencies", {})
    found: dict[str, None] = {}
    todo = [*project.get("dependencies", ()), *(r for e in extras for r in optional.get(e, ()))]
    while todo:
        requirement = todo.pop(0)
        again = re.fullmatch(rf"{re.escape(project['name'])}\[(.+)\]", requirement.replace(" ", ""))
        if again:
            todo += [r for e in again[1].split(",") for r in optional.get(e, ())]
        else:
            found[requirement] = None
    return list(found)


def project_version() -> str:
    """The project's version and the commit it stands at, `+` for one with changes on top.

    A checkout named by `PEERS_PROJECT` is marked, so that its figures are not taken for this one's.
    """
    version = read_pyproject().get("version", "")
    git = ["git", "-C", str(PROJECT), "describe", "--always", "--dirty=+", "--exclude=*"]
    described = subprocess.run(git, check=False, capture_output=True, text=True)
    mark = "(PEERS_PROJECT)" if os.environ.get("PEERS_PROJECT") else ""
    return " ".join(filter(None, [version, described.stdout.strip(), mark]))


def read_pyproject() -> dict:
    path = PROJECT / "pyproject.toml"
    if not path.exists():
        raise RuntimeError(f"no pyproject.toml in {PROJECT}: set PEERS_PROJECT to a checkout that has one")
    return tomllib.loads(path.read_text())["project"]


def split_npm(requirement: str) -> tuple[str, str]:
    """`@scope/name@spec` in two; the spec may itself hold an @."""
    at = requirement.index("@", 1)
    return requirement[:at], requirement[at + 1 :]


def run(command: list[str], cwd: Path | None = None) -> str:
    pipe, both = subprocess.PIPE, subprocess.STDOUT
    done = subprocess.run(command, check=False, cwd=cwd, stdout=pipe, stderr=both, text=True)
    if done.returncode:
        raise RuntimeError(f"{Path(command[0]).name} failed: {done.stdout[-3000:].strip()}")
    return done.stdout
