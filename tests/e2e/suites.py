# SPDX-License-Identifier: Apache-2.0
"""Build the packages on a release of Debian, and install them there: ``python -m tests.e2e.suites SUITE``.

The build, which runs the unit tests, happens in a clean root of that release, on its own Python and
libraries. The root is kept in `build/cleanroot`, the packages in `build/suites/SUITE`.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from tests.e2e import cleanroot
from tests.e2e.cleanroot import TREE, CleanRoot

SUITES = ("bookworm", "trixie")
# What debian/control doesn't name: what debian/make-deb runs, and what debhelper has the packages depend on.
UNNAMED = ("build-essential", "debhelper", "dpkg-dev", "fakeroot", "systemd")
BUILD_SECONDS = 1800
# No packages of Debian's.
OTHERS = ("${", "debhelper-compat", "infranetes", "vmserver")
# Imports all of it, the simulated machines too, and tells what it runs on.
_SHOW = """
import importlib.metadata, sys, infranetes.service, infranetes_simulation, vmserver.service
of = ("infranetes", "Twisted", "attrs", "cattrs", "protobuf", "h2", "pyOpenSSL", "cryptography")
print("Python", sys.version.split()[0], *(f"{name} {importlib.metadata.version(name)}" for name in of))
"""


def needed() -> list[str]:
    """The Debian packages that the build, its tests and what is built depend on, as debian/control says."""
    names = set(UNNAMED)
    control = (TREE / "debian/control").read_text()
    for field in re.findall(r"^(?:Build-)?Depends:\n((?: .*\n)+)", control, flags=re.M):
        for entry in field.replace("\n", "").split(","):
            name = re.split(r"[\s(:|]", entry.strip())[0]
            if name and not name.startswith(OTHERS):
                names.add(name)
    return sorted(names)


def base(suite: str) -> Path:
    """The tar of a release's root, with what is needed."""
    return cleanroot.base(needed(), suite, "build")


class Suite:
    """A root of a release of Debian with this tree in it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._root = CleanRoot(base(name))
        self._begun = time.monotonic()

    def remove(self) -> None:
        """Delete it."""
        self._root.remove()

    def _say(self, words: str) -> None:
        print(f"{time.monotonic() - self._begun:6.1f} s  {self._name}: {words}", flush=True)

    def _run(self, *command: str, timeout: float = 300) -> str:
        done = self._root.run(*command, timeout=timeout)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed on {self._name}:\n{done.stdout[-6000:]}")
        return done.stdout

    def copy_tree(self) -> None:
        """Copy what the packages are made of."""
        listed = subprocess.run(
            [TREE / "debian/make-deb", "--files"], check=True, capture_output=True, text=True
        ).stdout
        for file in listed.splitlines():
            target = self._root.path / "tree" / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(TREE / file, target)

    def build(self, kept: Path) -> None:
        """Build the packages, which runs the unit tests, and copy them to `kept`."""
        self._say("building the packages, whose unit tests run")
        try:
            self._run("/tree/debian/make-deb", timeout=BUILD_SECONDS)
        finally:
            log = self._root.path / "tree/build/deb/build.log"
            if log.exists():
                kept.mkdir(parents=True, exist_ok=True)
                shutil.copy(log, kept)
        counts = re.findall(r"^\d+ passed, .*", (kept / "build.log").read_text(errors="replace"), flags=re.M)
        self._say(f"unit tests: {counts[-1] if counts else 'not run'}")
        for old in kept.glob("*.deb"):
            old.unlink()
        for deb in (self._root.path / "tree/dist").glob("*.deb"):
            shutil.copy(deb, kept)

    def install(self) -> None:
        """Install what was built, and import it."""
        self._run("sh", "-c", "dpkg --install /tree/dist/*.deb")
        self._say(f"installed: {self._run('/usr/bin/python3', '-c', _SHOW).strip()}")


def main() -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.suites", description=__doc__)
    parser.add_argument("suite", choices=SUITES)
    options = parser.parse_args()
    suite = Suite(options.suite)
    try:
        suite.copy_tree()
        suite.build(TREE / "build/suites" / options.suite)
        suite.install()
    finally:
        suite.remove()
    return 0


if __name__ == "__main__":
    sys.exit(main())
