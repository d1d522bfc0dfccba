# SPDX-License-Identifier: Apache-2.0
"""Fresh virtual environments with a built wheel and what it says that it requires, without a network."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from importlib.metadata import Distribution, PathDistribution, distribution
from pathlib import Path
from zipfile import Path as InZip
from zipfile import ZipFile

from packaging.requirements import Requirement

TREE = Path(__file__).resolve().parents[2]


def requirements(wheel: Path) -> list[Requirement]:
    """Return what a wheel's metadata says that it requires."""
    with ZipFile(wheel) as archive:
        (name,) = {each.split("/")[0] for each in archive.namelist() if ".dist-info/" in each}
    return [Requirement(each) for each in PathDistribution(InZip(wheel, f"{name}/")).requires or ()]  # type: ignore[arg-type]


def closure(
    wanted: list[Requirement], extras: frozenset[str] = frozenset(), ours: tuple[str, ...] = ()
) -> list[Distribution]:
    """Return the distributions of this environment that a fresh one needs, and no others.

    :param ours: what is installed there otherwise.
    """
    found: dict[str, Distribution] = {}
    asked: set[tuple[str, str]] = set()

    def add(each: Requirement, within: frozenset[str]) -> None:
        if each.marker and not any(each.marker.evaluate({"extra": extra}) for extra in within | {""}):
            return
        if each.name in ours:
            return
        known = distribution(each.name)
        if not each.specifier.contains(known.version, prereleases=True):
            raise AssertionError(f"{each} is wanted, and {known.version} is here")
        found[known.name] = known
        for extra in {"", *each.extras}:
            if (known.name, extra) not in asked:
                asked.add((known.name, extra))
                for further in map(Requirement, known.requires or ()):
                    add(further, frozenset({extra}))

    for each in wanted:
        add(each, extras)
    return list(found.values())


class Environment:
    """A virtual environment that has nothing, until something is installed."""

    def __init__(self, directory: Path) -> None:
        venv.create(directory, symlinks=True)
        self.bin = directory / "bin"
        (self._site,) = (directory / "lib").glob("python*/site-packages")

    def lend(self, distributions: list[Distribution]) -> None:
        """Show distributions of this process's environment in it, with their programs."""
        for each in distributions:
            for file in each.files or ():
                if ".." not in file.parts and "__pycache__" not in file.parts:
                    target = self._site / file
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.symlink_to(Path(str(each.locate_file(file))))
            for point in each.entry_points.select(group="console_scripts"):
                program = self.bin / point.name
                program.write_text(
                    f"#!{self.bin / 'python'}\nimport sys\nfrom {point.module} import {point.attr}\n"
                    f"sys.exit({point.attr}())\n"
                )
                program.chmod(0o755)

    def install(self, *wheels: Path) -> None:
        """Install wheels with pip, and nothing that they require."""
        pip = [
            sys.executable,
            "-m",
            "pip",
            "--disable-pip-version-check",
            "--python",
            str(self.bin / "python"),
        ]
        command = [*pip, "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
        command += map(str, wheels)
        subprocess.run(command, check=True, capture_output=True, text=True, env=clean())

    def run(self, *command: str | Path, cwd: Path, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        """Run a program of it to its end; `stdout` has output and errors together."""
        return subprocess.run(
            [str(self.bin / command[0]), *map(str, command[1:])],
            cwd=cwd,
            check=False,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout,
            env=clean(),
        )


def clean() -> dict[str, str]:
    """Return this process's environment without what would show Python other modules."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
