# SPDX-License-Identifier: Apache-2.0
"""What tests would have to download: ``python -m tests.e2e.roots`` makes it before, as `make vm-tools` does.

These are the roots that tests of the packages unpack, what pip installs in some of them, PostgreSQL, and the
disks of clouds. Names of tests pick what those need.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import attrs

from tests.e2e import cleanroot, cloud_disk_files, node_image, suites
from tests.e2e.cleanroot import TREE, NotMade
from tests.harness.schedule import within
from tests.support.postgresql import PostgresqlTree

PACKAGES = ("infranetes", "infranetes-common", "infranetes-simulation", "vmserver")
NODE_PACKAGES = ("infranetes", "infranetes-common")
TRACING_REQUIREMENTS = TREE / "docs" / "tracing-requirements.txt"
#: What the packages' own tests of pods need besides the packages; see debian/tests/control.
POD_NEEDS = ("busybox-static", "docker-registry")
_WHEELS = TREE / "build" / "wheels"
_POSTGRESQL = TREE / "build" / "postgresql"


@attrs.frozen
class Root:
    """A minimal Debian with some packages. :ivar packages: returns their names, once ours are built."""

    purpose: str
    release: str
    packages: Callable[[], Sequence[str]]

    def tar(self) -> Path:
        """Return its tar, which was made before."""
        tar = cleanroot.tar_of(self.packages(), self.release, self.purpose)
        if not tar.exists():
            raise NotMade(tar)
        return tar

    def make(self) -> None:
        """Make its tar, unless it is there (minutes)."""
        cleanroot.base(self.packages(), self.release, self.purpose)


def _of_node() -> Sequence[str]:
    recommended = cleanroot.depends("infranetes", field="Recommends")
    return sorted({*cleanroot.depends(*NODE_PACKAGES), *recommended, "systemd"})


# Debian 13 with systemd and nothing else: a node whose libraries are none of Debian 12's.
BARE = Root("bare", "trixie", lambda: ["systemd"])
# Debian 13 with what kubeadm asks of a node, and its own containerd.
KUBEADM = Root(
    "kubeadm",
    "trixie",
    lambda: [
        *("systemd", "dbus", "procps", "mount", "kmod", "ca-certificates"),
        *("containerd", "runc", "containernetworking-plugins"),
        *("iptables", "nftables", "conntrack", "iproute2", "ethtool"),
    ],
)
INSTALLED = Root("node", "bookworm", lambda: cleanroot.depends(*PACKAGES))
# 0.2.0 depended on what is recommended now.
UPGRADED = Root(
    "upgraded",
    "bookworm",
    lambda: sorted({*cleanroot.depends(*PACKAGES), *cleanroot.depends("infranetes", field="Recommends")}),
)
NODE = Root("qemu", "bookworm", _of_node)
REPOSITORY = {
    "bookworm": Root("repository", "bookworm", lambda: [*cleanroot.depends(*PACKAGES), *POD_NEEDS]),
    "trixie": Root("repository", "trixie", lambda: suites.needed(*POD_NEEDS)),
}
TRACING = {
    "bookworm": Root("tracing", "bookworm", lambda: sorted({*cleanroot.depends(*PACKAGES), *suites.TRACING})),
    "trixie": Root("build", "trixie", suites.needed),  # `make test-suite` has the same
}


def _wheels() -> Path:
    digest = hashlib.sha256(TRACING_REQUIREMENTS.read_bytes()).hexdigest()[:16]
    return _WHEELS / f"tracing-{digest}"


def wheels() -> Path:
    """Return the directory of what pip installs for tracing, which was made before."""
    if not _wheels().exists():
        raise NotMade(_wheels())
    return _wheels()


def _fetch_wheels() -> None:
    if _wheels().exists():
        return
    _WHEELS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=_WHEELS) as scratch:
        fetched = Path(scratch) / "wheels"
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
        options = ["--no-deps", "--require-hashes", "--dest", str(fetched)]
        subprocess.run([*pip, *options, "--requirement", str(TRACING_REQUIREMENTS)], check=True)
        fetched.rename(_wheels())


def _make_postgresql() -> None:
    PostgresqlTree.made(_POSTGRESQL)


def postgresql() -> PostgresqlTree:
    """Return PostgreSQL's tree, which was made before. Blocks."""
    if not (_POSTGRESQL / "root").exists():
        raise NotMade(_POSTGRESQL)
    return PostgresqlTree.made(_POSTGRESQL)


#: What each module of tests has to have.
NEEDED: Mapping[str, Sequence[Callable[[], object]]] = {
    "tests.chart": (KUBEADM.make, node_image.make_with_guest),
    "tests.e2e.test_cloud_disks": (cloud_disk_files.make_all,),
    "tests.e2e.test_disk_troubles": (_make_postgresql,),
    "tests.e2e.test_installer": (BARE.make, node_image.make),
    "tests.e2e.test_packages": (
        _fetch_wheels,
        *(root.make for root in (INSTALLED, *REPOSITORY.values(), *TRACING.values())),
    ),
    "tests.e2e.test_units": (INSTALLED.make,),
    "tests.e2e.test_upgrades": (UPGRADED.make, NODE.make),
}


def main(tests: Sequence[str]) -> None:
    """Make what tests with these names need and what is not there; without names, what all need."""
    for module, makers in NEEDED.items():
        if not tests or any(within(name, module) or within(module, name) for name in tests):
            for make in makers:
                make()


if __name__ == "__main__":
    main(sys.argv[1:])
