# SPDX-License-Identifier: Apache-2.0
"""Build the packages on a release of Debian, and install them there: ``python -m tests.e2e.suites SUITE``.

The packages are built in a clean root of that release, with its own Python and libraries; the build runs the
unit tests. The root is kept in `build/cleanroot`, the packages in `build/suites/SUITE`.

With ``--demo`` the demo runs there instead, with that release's QEMU and this machine's guest image; with
``--tests`` tests do, including those with real VMs. With ``--make ARGUMENTS`` make runs there, as for a user
who has only just installed that release, make and git: it installs the rest, and builds its own guest image.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from infranetes.guest.image import DEFAULT_DIR
from tests.e2e import cleanroot
from tests.e2e.cleanroot import TREE, CleanRoot
from tests.e2e.uplink import Uplink

SUITES = ("bookworm", "trixie")
# What debian/control does not name: what debian/make-deb runs, and what debhelper adds to the dependencies.
UNNAMED = ("build-essential", "debhelper", "dpkg-dev", "fakeroot", "systemd")
# What is installed with apt according to docs/tracing.md.
TRACING = (
    "python3-deprecated",
    "python3-importlib-metadata",
    "python3-pip",
    "python3-requests",
    "python3-typing-extensions",
)
# What a user has before the first `make`.
FRESH = ("ca-certificates", "git", "make")
# This machine's CA certificates and package mirrors, in the variables that pip and Go read.
AUTHORITIES = "SSL_CERT_FILE"
REGISTRIES = (AUTHORITIES, "PIP_CERT", "PIP_INDEX_URL", "PIP_TRUSTED_HOST", "GOPROXY", "GONOSUMDB")
BUILD_SECONDS = 1800
RUN_SECONDS = 3600
MAKE_SECONDS = 3 * 3600
WIRE = "infranetes_common/wire"
GENERATED = ("descriptors.binpb", "*_rpcs.py")  # in it, and ignored by git
VERSIONS = "python3 --version && qemu-system-x86_64 --version | head -n 1 && nft --version"
# These are not packages of Debian's.
OTHERS = ("${", "debhelper-compat", "infranetes", "vmserver")
# Imports all modules, including the simulated machines, and prints what it runs on.
_SHOW = """
import importlib.metadata, sys, infranetes.service, infranetes_simulation, vmserver.service
of = ("infranetes", "Twisted", "attrs", "cattrs", "protobuf", "h2", "pyOpenSSL", "cryptography")
print("Python", sys.version.split()[0], *(f"{name} {importlib.metadata.version(name)}" for name in of))
"""


def needed(*more: str) -> list[str]:
    """Return the Debian packages for the build, its tests and its result, from debian/control, and `more`."""
    names = {*UNNAMED, *TRACING, *more}
    control = (TREE / "debian/control").read_text()
    for field in re.findall(r"^(?:Build-)?Depends:\n((?: .*\n)+)", control, flags=re.M):
        for entry in field.replace("\n", "").split(","):
            name = re.split(r"[\s(:|]", entry.strip())[0]
            if name and not name.startswith(OTHERS):
                names.add(name)
    return sorted(names)


def base(suite: str, purpose: str = "build", more: Sequence[str] = ()) -> Path:
    """Return the tar of a release's root, with the packages for a purpose."""
    return cleanroot.base(needed(*more), suite, purpose)


class Suite:
    """A root of a release of Debian with this tree in it."""

    def __init__(self, name: str, root: CleanRoot) -> None:
        self._name = name
        self._root = root
        # Every machine has this after its first boot; networkd requests addresses with it.
        (root.path / "etc/machine-id").write_text(f"{uuid.uuid4().hex}\n")
        self._begun = time.monotonic()

    def remove(self) -> None:
        """Delete the root."""
        self._root.remove()

    def _say(self, words: str) -> None:
        print(f"{time.monotonic() - self._begun:6.1f} s  {self._name}: {words}", flush=True)

    def _run(self, *command: str, timeout: float = 300) -> str:
        done = self._root.run(*command, timeout=timeout)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed on {self._name}:\n{done.stdout[-6000:]}")
        return done.stdout

    def _copy(self, files: Iterable[str]) -> None:
        for file in files:
            target = self._root.path / "tree" / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(TREE / file, target)

    def copy_tree(self) -> None:
        """Copy what the packages are built from."""
        self._copy(_listed(str(TREE / "debian/make-deb"), "--files"))

    def copy_checkout(self) -> None:
        """Copy the whole tree, so that programs can be run from it."""
        generated = [path for pattern in GENERATED for path in (TREE / WIRE).glob(pattern)]
        self._copy([*_checkout(), *(str(path.relative_to(TREE)) for path in generated)])
        self._run("sh", "-c", "cd /tree && python3 setup.py --quiet egg_info")  # so that plug-ins are found
        pth = self._root.path / "usr/lib/python3/dist-packages/tree.pth"
        pth.write_text("/tree\n")  # the daemon's children run isolated: they ignore the current directory
        self._run("useradd", "--system", "--no-create-home", "infranetes-qemu")

    def run_there(self, *command: str) -> int:
        """Run a program of the tree with the release's Python, show its output, and return its exit code."""
        self._say(self._run("sh", "-c", VERSIONS).strip().replace("\n", "; "))
        self._say(f"running {' '.join(command)}")
        inside = ("sh", "-c", 'cd /tree && exec python3 -m "$@"', "sh", *command)
        done = self._root.run(*inside, timeout=RUN_SECONDS)
        print(done.stdout, flush=True)
        self._say(f"ended with exit code {done.returncode}")
        return done.returncode

    def make(self, arguments: str) -> int:
        """Run make in a fresh clone with this tree's changes; its output goes to standard output."""
        # With the history, from which tests make the release before.
        tree = self._root.path / "tree"
        subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", TREE, tree], check=True)
        self._copy(_checkout())
        self._say(f"make {arguments}")
        registries = [f"{name}={os.environ[name]}" for name in REGISTRIES if name in os.environ]
        code = self._root.show(
            "env", *registries, "make", "-C", "/tree", *shlex.split(arguments), timeout=MAKE_SECONDS
        )
        self._say(f"make {arguments} ended with exit code {code}")
        return code

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
        """Install the built packages, and import them."""
        self._run("sh", "-c", "dpkg --install /tree/dist/*.deb")
        self._say(f"installed: {self._run('/usr/bin/python3', '-c', _SHOW).strip()}")


def _listed(*command: str) -> list[str]:
    return subprocess.run(command, cwd=TREE, check=True, capture_output=True, text=True).stdout.splitlines()


def _checkout() -> list[str]:
    return _listed("git", "ls-files", "--cached", "--others", "--exclude-standard")


@contextlib.contextmanager
def _networked(suite: str, tar: Path, binds: Sequence[Path]) -> Iterator[Suite]:
    """Make a root in a network of its own, and remove both afterwards. :param binds: see `CleanRoot`."""
    uplink = Uplink()
    try:
        one = Suite(suite, CleanRoot(tar, uplink.path, binds))
        try:
            yield one
        finally:
            one.remove()
    finally:
        uplink.end()


def build(suite: str) -> int:
    """Build and install the packages."""
    one = Suite(suite, CleanRoot(base(suite)))
    try:
        one.copy_tree()
        one.build(TREE / "build/suites" / suite)
        one.install()
    finally:
        one.remove()
    return 0


def run(suite: str, purpose: str, packages: Sequence[str], images: Path, command: Sequence[str]) -> int:
    """Run a program of the tree there, in a network of its own, with this machine's guest images."""
    with _networked(suite, base(suite, purpose, packages), [images]) as one:
        one.copy_checkout()
        return one.run_there(*command)


def make(suite: str, arguments: str) -> int:
    """Run make on a release that has little more than `FRESH`, in a network of its own."""
    tar = cleanroot.base(list(FRESH), suite, "fresh")
    authorities = os.environ.get(AUTHORITIES)
    with _networked(suite, tar, [Path(authorities).parent] if authorities else []) as one:
        return one.make(arguments)


def main() -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.suites", description=__doc__)
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("--demo", action="store_true", help="run the demo there, and build nothing")
    parser.add_argument("--tests", default="", help="run these tests there, and build nothing")
    parser.add_argument(
        "--make", metavar="ARGUMENTS", help="run make with these there, as on a fresh machine"
    )
    parser.add_argument("--packages", default="", help="Debian's, that the demo or the tests need there")
    parser.add_argument("--image-dir", type=Path, default=DEFAULT_DIR, help="of guest images (%(default)s)")
    options = parser.parse_args()
    packages, images = options.packages.split(), options.image_dir
    if options.make:
        return make(options.suite, options.make)
    if options.demo:
        return run(options.suite, "demo", packages, images, ["demo"])
    if options.tests:
        command = ["tests", "--jobs", "1", *options.tests.split()]
        return run(options.suite, "tests", packages, images, command)
    return build(options.suite)


if __name__ == "__main__":
    sys.exit(main())
